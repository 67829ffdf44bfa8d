"""The row that Spark keeps for each shard in its own operator's state: the query's pointer.

The row names its query, its shard, the number of shards and the directory. So whatever a session, a task's properties
or a definition say later, a call continues with what Spark has pinned, or fails. It also names the state directory, by
which whoever has the checkpoint location finds the state; a query itself goes by its settings, since that may move.

Commits too small for an object of their own travel in the row; see `holdfast.snapshotter.commits`. A row without a
pointer means that the shard was called but has no state yet.

The row is one binary value, a line of JSON and the commit that it carries, if any::

    {"format": 1, "query": …, "state_dir": …, "directory": …, "shard": 3, "shards": 64, "version": 17, …}⏎commit
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, SchemaMismatchError
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.spark_integration.shard.operator_directory import QUERY_ID, operator_of

ROW_FORMAT = 1
#: The one column. Of each column Spark generates code in every task, and binds it several times in every micro-batch.
POINTER_COLUMN = "holdfast_pointer"
POINTER_STATE = f"{POINTER_COLUMN} binary"
#: Spark's names of its operators that keep pointers.
GROUP_STATE, STATE_VARIABLES = "applyInPandasWithState", "transformWithStateInPandasExec"
#: The value state in which the second one keeps them.
POINTER_VARIABLE = "holdfast_pointer"
_FIELDS = frozenset(
    {
        "format",
        "query",
        "state_dir",
        "directory",
        "shard",
        "shards",
        "version",
        "commit",
        "earliest_timer_ms",
        "batch_ms",
    }
)
_MAX_SHARDS = 1 << 31
_NUMBER_LIMIT = 1 << 63


class PointerRow(NamedTuple):
    """The row of one shard."""

    query: str  #: The query's id, as known when the shard began; see `holdfast.spark_integration.shard.streaming_task`
    directory: str | None  #: The operator's directory below the state directory; None without a state directory
    #: Which shard, of how many
    shard: int
    shards: int
    pointer: Pointer | None  #: None if the shard has no state yet
    carried: bytes | None  #: The commit of this version, if it is no object of its own
    earliest_timer_ms: int | None  #: No timer of the shard is due earlier; None if the shard has no timer
    #: When the micro-batch that put the row was planned, whether it wrote a version or not: Spark's processing time in
    #: ms since 1970, the same whenever and wherever the micro-batch is evaluated
    batch_ms: int
    state_dir: str | None = None  #: ``spark.holdfast.state.dir`` of the call that put the row

    @classmethod
    def read(cls, row: tuple[Any, ...]) -> PointerRow:
        """Return the row that Spark's state gave back: one binary value, as bytes or a bytearray.

        Raises `CorruptionError` if it is not a pointer's row, or one of a later release.
        """
        fields, carried = _parsed(row)
        query, directory, shard, shards = (fields[name] for name in ("query", "directory", "shard", "shards"))
        state_dir = fields["state_dir"]
        earliest_timer_ms, batch_ms = fields["earliest_timer_ms"], fields["batch_ms"]
        pointer = _pointer(fields["version"], fields["commit"])
        if not (isinstance(query, str) and QUERY_ID.fullmatch(query)):
            raise _no_pointer("query")
        if directory is not None and not (isinstance(directory, str) and operator_of(directory)):
            raise _no_pointer("directory")
        if state_dir is not None and not (isinstance(state_dir, str) and directory is not None):
            raise _no_pointer("state_dir")
        if not (_is_number(shard) and _is_number(shards) and 0 <= shard < shards < _MAX_SHARDS):
            raise _no_pointer("shard and shards")
        if carried is not None and pointer is None:
            raise _no_pointer("carried")
        if not (_is_number(batch_ms) and (earliest_timer_ms is None or _is_number(earliest_timer_ms))):
            raise _no_pointer("batch_ms and earliest_timer_ms")
        return cls(query, directory, shard, shards, pointer, carried, earliest_timer_ms, batch_ms, state_dir)

    def require(self, operator: str, shard: int, shards: int) -> None:
        """Check the row against the shard as it is defined now.

        Raises `SchemaMismatchError` if it belongs to another number of shards, another shard, or another operator.
        """
        name = operator if self.directory is None else operator_of(self.directory)
        # First of all whose it is: another operator's number of shards is nothing that this one should take over.
        if name != operator:
            raise SchemaMismatchError(
                "Spark's state has another operator's pointer here: give each operator its old name, here "
                f"name={name!r}, and check that the checkpoint location is this query's",
                stored=name,
                asked=operator,
            )
        if self.shards != shards:
            # Without a state directory there is nothing that a rescale could read.
            rescaled = "" if self.directory is None else ", or rescale the query (holdfast rescale)"
            raise SchemaMismatchError(
                "the state was written with a different number of shards: set spark.holdfast.shards to "
                f"{self.shards}{rescaled}",
                operator=operator,
                stored=self.shards,
                asked=shards,
            )
        if self.shard != shard:
            raise SchemaMismatchError(
                "Spark's state has another shard's pointer here: check that the checkpoint location is this query's",
                operator=operator,
                stored=self.shard,
                asked=shard,
            )

    def columns(self) -> tuple[bytes]:
        """Return the row as Spark's state takes it."""
        version, commit_id = self.pointer or (None, None)
        fields = {
            "format": ROW_FORMAT,
            "query": self.query,
            "state_dir": self.state_dir,
            "directory": self.directory,
            "shard": self.shard,
            "shards": self.shards,
            "version": version,
            "commit": commit_id,
            "earliest_timer_ms": self.earliest_timer_ms,
            "batch_ms": self.batch_ms,
        }
        line = json.dumps(fields, separators=(",", ":")).encode()
        return (line if self.carried is None else line + b"\n" + self.carried,)

    @property
    def carried_commits(self) -> Mapping[Pointer, bytes]:
        """The commit that the row carries, if any, by its pointer."""
        return {} if self.carried is None or self.pointer is None else {self.pointer: self.carried}


def require_state_of(rows: Iterable[PointerRow], record: OperatorRecord, state_dir: str) -> None:
    """Check that a query's pointers are to the operator that a state directory has a record of.

    Raises `NotFoundError` if it is another query's; else as `PointerRow.require`.
    """
    for row in rows:
        if row.query != record.query_id:
            raise NotFoundError(
                "the state directory has another query's operator of this name: set spark.holdfast.state.dir (in "
                "commands --state-dir) to the one that has this query's state",
                operator=record.operator,
                state_dir=state_dir,
                owner=record.query_id,
                query=row.query,
                last_used=row.state_dir,
            )
        row.require(operator_of(record.operator) or record.operator, row.shard, record.shards)


def _parsed(row: tuple[Any, ...]) -> tuple[dict[str, Any], bytes | None]:
    """Return the fields of a row, and what it carries."""
    fields: Any = None
    has_carried, carried = b"", b""
    if len(row) == 1 and isinstance(row[0], (bytes, bytearray)):
        line, has_carried, carried = bytes(row[0]).partition(b"\n")
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
    found = fields.get("format") if isinstance(fields, dict) else None
    if found != ROW_FORMAT or fields.keys() != _FIELDS:
        raise CorruptionError(
            "the pointer in Spark's state has a format that this release of holdfast cannot read: start the query "
            "with the release that wrote it",
            format=str(found)[:80],
            readable=ROW_FORMAT,
        )
    return fields, carried if has_carried else None


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
    return isinstance(value, int) and not isinstance(value, bool) and -_NUMBER_LIMIT <= value < _NUMBER_LIMIT


def _no_pointer(what: str) -> CorruptionError:
    return CorruptionError(
        "Spark's state has a pointer that holdfast cannot have written: check that the checkpoint location is the "
        "query's and that nothing else writes to it",
        wrong=what,
    )
