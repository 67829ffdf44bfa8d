"""The row with a shard's pointer, which Spark stores in the state of its own operator.

The row has the shard's query, its number, the number of shards and the directory. So a later call uses these values or
fails, even if a session, a task's properties or a definition has changed. The row also has the state directory, so that
tools find the state from the checkpoint location; the query itself uses its settings, as the directory may move.

Commits that are too small for a separate object are stored in the row; see `holdfast.snapshotter.commits`. A row
without a pointer means that the shard was called but has no state yet.

The row is one binary value: a line of JSON and, if the row carries a commit, the commit::

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
#: The only column, because Spark generates code for each column in every task, and binds it several times.
POINTER_COLUMN = "holdfast_pointer"
POINTER_STATE = f"{POINTER_COLUMN} binary"
#: Spark's names for the operators that store pointers.
GROUP_STATE, STATE_VARIABLES = "applyInPandasWithState", "transformWithStateInPandasExec"
#: The value state in which `STATE_VARIABLES` stores pointers.
POINTER_VARIABLE = "holdfast_pointer"
_Ms = Annotated[int, range(-(1 << 63), 1 << 63)]


def directory_of_query(operator: str, query_id: str) -> str:
    """Return the name of the operator's directory that only this query uses."""
    return f"{operator}@{query_id}"


def operator_of(directory: str) -> str | None:
    """Return the operator's name from a directory's name; None if the name has a different form."""
    name, found, query_id = directory.partition("@")
    if not OPERATOR_NAME.fullmatch(name) or (found and not QUERY_ID.fullmatch(query_id)):
        return None
    return name


@dataclass(frozen=True)
class _Line(Stored):
    """The row's line of JSON, with the fields of `PointerRow`."""

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
        """The shard's pointer, or None; raises `InvalidArgumentError` if it is invalid."""
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
    query: str  #: The query's id, as known at the shard's first call; see `holdfast.spark_integration.shard.task`
    directory: str | None  #: The operator's directory below the state directory; None without a state directory
    #: The shard's number, and the number of shards
    shard: int
    shards: int
    pointer: Pointer | None  #: None if the shard has no state yet
    carried: bytes | None  #: The version's commit, if it has no separate object
    earliest_timer_ms: int | None  #: No timer of the shard is due earlier; None if the shard has no timer
    #: When the micro-batch that stored the row was planned, even if it wrote no version: Spark's processing time in ms
    #: since 1970, equal in all evaluations of the micro-batch
    batch_ms: int
    state_dir: str | None = None  #: ``spark.holdfast.state.dir`` in the call that stored the row

    @classmethod
    def read(cls, row: tuple[Any, ...]) -> PointerRow:
        """Parse a row from Spark's state: one binary value, as bytes or a bytearray."""
        fields, carried = _parsed(row)
        try:
            line = _Line.read(fields, "the pointer")
        except CorruptionError as exc:
            raise _invalid_pointer(exc.facts.get("field")) from exc
        if carried is not None and line.pointer is None:
            raise _invalid_pointer("carried")
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
        """Check the row against the shard's current definition. Raises `SchemaMismatchError`."""
        name = operator if self.directory is None else operator_of(self.directory)
        # Check the owner first: a different operator's number of shards must not be adopted.
        if name != operator:
            raise SchemaMismatchError(
                "Spark's state has a different operator's pointer: give each operator its old name, here "
                f"name={name!r}, and check that the checkpoint location is this query's",
                stored=name,
                defined=operator,
            )
        if self.shards != shards:
            # Without a state directory, a rescale has no input.
            rescaled = "" if self.directory is None else ", or rescale the query with `holdfast rescale`"
            raise SchemaMismatchError(
                "the state was written with a different number of shards: set spark.holdfast.shards to "
                f"{self.shards}{rescaled}",
                operator=operator,
                stored=self.shards,
                defined=shards,
            )
        if self.shard != shard:
            raise SchemaMismatchError(
                "the pointer in Spark's state is of a different shard: check that the checkpoint location is this "
                "query's",
                operator=operator,
                stored=self.shard,
                called=shard,
            )

    def columns(self) -> tuple[bytes]:
        """Convert the row to its columns in Spark's state."""
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
    """Raise `NotFoundError` if pointers belong to a different query than a record; see also `PointerRow.require`."""
    for row in rows:
        if row.query != record.query_id:
            raise NotFoundError(
                "in the state directory, the operator of this name belongs to a different query: set "
                "spark.holdfast.state.dir (in commands, --state-dir) to the directory with this query's state",
                operator=record.operator,
                state_dir=state_dir,
                owner=record.query_id,
                query=row.query,
                last_used=row.state_dir,
            )
        row.require(operator_of(record.operator) or record.operator, row.shard, record.shards)


def _parsed(row: tuple[Any, ...]) -> tuple[dict[str, Any], bytes | None]:
    """Return a row's fields, and the commit that it carries or None."""
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


def _invalid_pointer(what: object) -> CorruptionError:
    return CorruptionError(
        "holdfast cannot have written the pointer in Spark's state: check that the checkpoint location belongs to the "
        "query and that nothing else writes to it",
        wrong=what,
    )
