"""The row that Spark keeps for each shard in its own operator's state: the query's pointer.

The row names its query, its shard, the number of shards and the directory. So whatever a session, a task's properties
or a definition say later, a call continues with what Spark has pinned, or fails.

Commits too small for an object of their own travel in the row; see `holdfast.snapshotter.commits`. A row without a
pointer means that the shard was called but has no state yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.shard.operator_directory import QUERY_ID, operator_of

ROW_FORMAT = 1
POINTER_COLUMNS = {
    "format": "int",
    "query": "string",
    "directory": "string",
    "shard": "int",
    "shards": "int",
    "version": "long",
    "commit": "string",
    "carried": "binary",
    "earliest_timer_ms": "long",
    "batch_ms": "long",
    "spare": "binary",
}
"""Types by name. Spark accepts no further column in an existing operator's state, so later formats use ``spare``."""
POINTER_STATE = ", ".join(f"{name} {kind}" for name, kind in POINTER_COLUMNS.items())
_MAX_SHARDS = 1 << 31


class PointerRow(NamedTuple):
    """The row of one shard.

    Attributes
    ----------
    query : str
        The query's id, as known when the shard began; see `holdfast.spark_integration.shard.streaming_task`.
    directory : str or None
        The operator's directory below the checkpoint directory; None without a checkpoint directory.
    shard, shards : int
        Which shard, of how many.
    pointer : Pointer or None
        None if the shard has no state yet.
    carried : bytes or None
        The commit of this version, if it is no object of its own.
    earliest_timer_ms : int or None
        No timer of the shard is due earlier; None if the shard has no timer.
    batch_ms : int
        When the micro-batch that put the row was planned, whether it wrote a version or not: Spark's processing time in
        ms since 1970, the same whenever and wherever the micro-batch is evaluated.
    """

    query: str
    directory: str | None
    shard: int
    shards: int
    pointer: Pointer | None
    carried: bytes | None
    earliest_timer_ms: int | None
    batch_ms: int

    @classmethod
    def read(cls, row: tuple[Any, ...]) -> PointerRow:
        """Return the row that Spark's state gave back; its binary values are bytes or a bytearray.

        Raises
        ------
        CorruptionError
            It is not a pointer's row, or one of a later release.
        """
        if len(row) != len(POINTER_COLUMNS) or row[0] != ROW_FORMAT:
            raise CorruptionError(
                "the pointer in Spark's state has a format that this release of holdfast cannot read: start the query "
                "with the release that wrote it",
                format=row[0] if row else None,
                readable=ROW_FORMAT,
            )
        _, query, directory, shard, shards, version, commit_id, carried, earliest_timer_ms, batch_ms, _ = row
        pointer = _pointer(version, commit_id)
        if not (isinstance(query, str) and QUERY_ID.fullmatch(query)):
            raise _no_pointer("query")
        if directory is not None and not (isinstance(directory, str) and operator_of(directory)):
            raise _no_pointer("directory")
        if not (_is_number(shard) and _is_number(shards) and 0 <= shard < shards < _MAX_SHARDS):
            raise _no_pointer("shard and shards")
        if not (isinstance(carried, (bytes, bytearray)) if carried is not None and pointer else carried is None):
            raise _no_pointer("carried")
        if not (_is_number(batch_ms) and (earliest_timer_ms is None or _is_number(earliest_timer_ms))):
            raise _no_pointer("batch_ms and earliest_timer_ms")
        carried = None if carried is None else bytes(carried)
        return cls(query, directory, shard, shards, pointer, carried, earliest_timer_ms, batch_ms)

    def require(self, operator: str, shard: int, shards: int) -> None:
        """Check the row against the shard as it is defined now.

        Raises
        ------
        SchemaMismatchError
            It belongs to another number of shards, another shard, or another operator.
        """
        if self.shards != shards:
            raise SchemaMismatchError(
                f"the state was written with another number of shards: set spark.holdfast.shards to {self.shards}, or "
                "begin with a new checkpoint location and a new operator name",
                operator=operator,
                stored=self.shards,
                asked=shards,
            )
        name = operator if self.directory is None else operator_of(self.directory)
        if (self.shard, name) != (shard, operator):
            raise SchemaMismatchError(
                "Spark's state has the pointer of another operator or shard here: give each operator its old name, and "
                "check that the checkpoint location is this query's",
                stored=f"{name} shard {self.shard}",
                asked=f"{operator} shard {shard}",
            )

    def columns(self) -> tuple[Any, ...]:
        """Return the row as Spark's state takes it, in the order of `POINTER_COLUMNS`."""
        version, commit_id = self.pointer or (None, None)
        which = (ROW_FORMAT, self.query, self.directory, self.shard, self.shards)
        return (*which, version, commit_id, self.carried, self.earliest_timer_ms, self.batch_ms, None)

    @property
    def carried_commits(self) -> Mapping[Pointer, bytes]:
        """The commit that the row carries, if any, by its pointer."""
        return {} if self.carried is None or self.pointer is None else {self.pointer: self.carried}


def _pointer(version: object, commit_id: object) -> Pointer | None:
    if version is None and commit_id is None:
        return None
    if not (_is_number(version) and isinstance(commit_id, str)):
        raise _no_pointer("version and commit")
    try:
        return Pointer.parse(f"{version}-{commit_id}")
    except InvalidArgumentError as exc:
        raise _no_pointer("version and commit") from exc


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _no_pointer(what: str) -> CorruptionError:
    return CorruptionError(
        "Spark's state has a pointer that holdfast cannot have written: check that the checkpoint location is the "
        "query's and that nothing else writes to it",
        wrong=what,
    )
