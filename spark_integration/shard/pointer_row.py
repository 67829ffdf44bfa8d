"""The row that Spark keeps for each shard in its own operator's state: the query's pointer.

The row names its query, its shard, the number of shards and the directory. So a call continues with what Spark has
pinned, or fails, whatever a session, a task's properties or a definition say later. It also names the state directory,
to find the state from the checkpoint location; a query itself uses its settings, since the directory may move.

Commits too small for an object of their own travel in the row; see `holdfast.snapshotter.commits`. A row without a
pointer means that the shard was called but has no state yet.

The row is one binary value, a line of JSON and the commit that it carries, if any::

    {"format": 1, "query": …, "state_dir": …, "directory": …, "shard": 3, "shards": 64, "version": 17, …}⏎commit
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, SchemaMismatchError
from holdfast.snapshotter.fields import QUERY_ID, Fields, Stored
from holdfast.snapshotter.ownership.operator_record import OperatorRecord

OPERATOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

ROW_FORMAT = 1
#: The one column. Of each column Spark generates code in every task, and binds it several times in every micro-batch.
POINTER_COLUMN = "holdfast_pointer"
POINTER_STATE = f"{POINTER_COLUMN} binary"
#: Spark's names of its operators that keep pointers.
GROUP_STATE, STATE_VARIABLES = "applyInPandasWithState", "transformWithStateInPandasExec"
#: The value state in which the second one keeps them.
POINTER_VARIABLE = "holdfast_pointer"
_Ms = Annotated[int, range(-(1 << 63), 1 << 63)]


def directory_of_query(operator: str, query_id: str) -> str:
    """Return the directory that only this query chooses."""
    return f"{operator}@{query_id}"


def operator_of(directory: str) -> str | None:
    """Return the operator in a directory's name; None if it is not such a name."""
    name, found, query_id = directory.partition("@")
    if not OPERATOR_NAME.fullmatch(name) or (found and not QUERY_ID.fullmatch(query_id)):
        return None
    return name


@dataclass(frozen=True)
class _Line(Stored):
    """The line of JSON; see `PointerRow`."""

    format: int
    query: Annotated[str, QUERY_ID]
    state_dir: str | None
    directory: str | None
    shard: int
    shards: Annotated[int, range(1 << 31)]
    version: int | None
    commit: str | None
    earliest_timer_ms: _Ms | None
    batch_ms: _Ms

    @property
    def pointer(self) -> Pointer | None:
        """The version of the shard; raises `InvalidArgumentError` if it is not a valid one."""
        if self.version is None and self.commit is None:
            return None
        return Pointer.parse(None if self.commit is None else f"{self.version}-{self.commit}")

    def require(self, header: Fields) -> None:
        if self.directory is not None and not operator_of(self.directory):
            header.refuse_value("directory", self.directory)
        if self.state_dir is not None and self.directory is None:
            header.refuse_value("state_dir", self.state_dir)
        if self.shard >= self.shards:
            header.refuse_value("shard and shards", self.shard)
        try:
            _ = self.pointer
        except InvalidArgumentError:
            header.refuse_value("version and commit", self.commit)


class PointerRow(NamedTuple):
    """The row of one shard."""

    query: str  #: The query's id, as known when the shard began; see `holdfast.spark_integration.shard.task`
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
        """Return the row that Spark's state gave back: one binary value, as bytes or a bytearray."""
        fields, carried = _parsed(row)
        try:
            line = _Line.read(fields, "the pointer")
        except CorruptionError as exc:
            raise _no_pointer(exc.facts.get("field")) from exc
        if carried is not None and line.pointer is None:
            raise _no_pointer("carried")
        return cls(
            line.query,
            line.directory,
            line.shard,
            line.shards,
            line.pointer,
            carried,
            line.earliest_timer_ms,
            line.batch_ms,
            line.state_dir,
        )

    def require(self, operator: str, shard: int, shards: int) -> None:
        """Check the row against the shard as it is defined now. Raises `SchemaMismatchError`."""
        name = operator if self.directory is None else operator_of(self.directory)
        # Check the owner first: another operator's number of shards must not be taken over.
        if name != operator:
            raise SchemaMismatchError(
                "Spark's state has another operator's pointer here: give each operator its old name, here "
                f"name={name!r}, and check that the checkpoint location is this query's",
                stored=name,
                asked=operator,
            )
        if self.shards != shards:
            # Without a state directory a rescale has nothing to read.
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
        fields = _Line(
            ROW_FORMAT,
            self.query,
            self.state_dir,
            self.directory,
            self.shard,
            self.shards,
            version,
            commit_id,
            self.earliest_timer_ms,
            self.batch_ms,
        )
        line = json.dumps(fields.to_json(), separators=(",", ":")).encode()
        return (line if self.carried is None else line + b"\n" + self.carried,)

    @property
    def carried_commits(self) -> Mapping[Pointer, bytes]:
        """The commit that the row carries, if any, by its pointer."""
        return {} if self.carried is None or self.pointer is None else {self.pointer: self.carried}


def require_state_of(rows: Iterable[PointerRow], record: OperatorRecord, state_dir: str) -> None:
    """Raise `NotFoundError` if pointers do not fit a record's operator, or the errors of `PointerRow.require`."""
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
    """Return a row's fields and carried commits."""
    fields: Any = None
    has_carried, carried = b"", b""
    if len(row) == 1 and isinstance(row[0], (bytes, bytearray)):
        line, has_carried, carried = bytes(row[0]).partition(b"\n")
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
    found = fields.get("format") if isinstance(fields, dict) else None
    if found != ROW_FORMAT or fields.keys() != set(_Line.__annotations__):
        raise CorruptionError(
            "the pointer in Spark's state has a format that this release of holdfast cannot read: start the query "
            "with the release that wrote it",
            format=str(found)[:80],
            readable=ROW_FORMAT,
        )
    return fields, carried if has_carried else None


def _no_pointer(what: object) -> CorruptionError:
    return CorruptionError(
        "Spark's state has a pointer that holdfast cannot have written: check that the checkpoint location is the "
        "query's and that nothing else writes to it",
        wrong=what,
    )
