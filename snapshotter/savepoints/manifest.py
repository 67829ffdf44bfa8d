"""The manifest of a savepoint: a query's state and position after one micro-batch, and the objects that hold them.

::

    <target>/<name>/
        savepoint                                           the manifest, kind "savepoint"
        operators/<operator>/<table>/0003-0-<id>.arrow      rows of shard 3, kind "piece"
        sources/0/9.compact-<id>                            a copy of a log that Spark keeps for a source

Invariants
----------
* **last**: the manifest is stored after all objects that it names: without it there is no savepoint.
* **self-contained**: keys are below the savepoint's folder; nothing names a state directory, a commit or a
  pointer. So it can be copied and moved, and outlives its query.
* **independent**: pieces are runs of the state tables (FORMAT.md section 2), whatever backend held the state.

A restored query continues the sinks of the saved query::

    the saved query's    17 A decides 5    ╷                          A's next put, of number 18, fails
    sink log                               ╰── 18 B continues; 5 stands for its micro-batch 1

B is restored from a savepoint of micro-batch 4, the last that Spark had committed. B first runs 5, as Spark had planned
it, and drops its rows, because the sink shows A's. If Spark had committed 5, or the sink had not decided it, the entry
would stand for no micro-batch (-1), and the sink would show the rows of B's first micro-batch.

* **for good**: the entry ends the saved query, whatever it is doing, because the log is a fence.
* **nothing twice**: every decided micro-batch is in the savepoint, or is the one that the new query runs first.
* **again**: a restore that was interrupted after its entry does not block a later restore.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Self

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.options import did_you_mean
from holdfast.backends.schema import TableSchema
from holdfast.errors import ConflictError, CorruptionError, InvalidArgumentError, NotFoundError, StateLostError
from holdfast.snapshotter.fence import looks
from holdfast.snapshotter.fields import (
    NUMBER_LIMIT,
    Coding,
    Digest,
    Fields,
    PositiveInt,
    SignedInt,
    Stored,
    coding_of_tables,
)
from holdfast.snapshotter.ownership.queries import find_origin
from holdfast.snapshotter.sink_log import FOLDER, SINK, Entry, SinkLog, plan_of, stored_sinks
from holdfast.snapshotter.storage.object_storage import ObjectStorage, key_problem

_log = logging.getLogger(__name__)
#: The manifest's own key, below the savepoint.
KEY = "savepoint"
#: Names of savepoints, operators and hosts.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_UNNAMED = re.compile(r"unnamed-[0-9]{1,9}-*")
#: Every number of shards is below this.
SHARDS_LIMIT = 1 << 31
#: The largest piece that a reader accepts; only rows that share a few hashes make a piece so large.
PIECE_BYTES_MAX = 4 << 30
#: Stored as text, because a JSON number cannot represent all 64 bits of a hash.
_Hash = Annotated[int, Coding(Annotated[str, re.compile("[0-9a-f]{16}")], lambda text: int(text, 16), "{:016x}".format)]
_Shard = Annotated[int, range(SHARDS_LIMIT)]
#: Names of sources, or their numbers.
SOURCE = re.compile(r"[A-Za-z0-9_]{1,255}")
_Line = Annotated[str, re.compile(r"[^\n\r]+")]
_OffsetsVersion = Annotated[str, re.compile("v[0-9]{1,3}")]


def require_key(key: str, header: Fields) -> None:
    """Refuse a key outside the savepoint."""
    if key_problem(key) or key == KEY:
        header.refuse("names an object outside its folder", key=key)


@dataclass(frozen=True)
class Piece(Stored):
    """An object with rows of one table from one shard, in hash order."""

    key: str  #: Key below the savepoint
    table: str
    shard: _Shard
    rows: PositiveInt
    size_bytes: Annotated[int, range(1, PIECE_BYTES_MAX + 1)]  #: Size of the object
    plain_bytes: int  #: Uncompressed size of its rows
    digest: Digest  #: Digest of the object; see `holdfast.backends.stored_file`
    #: The first and last hash of its rows, inclusive; rows with the last hash may continue in the next piece
    first_hash: _Hash
    last_hash: _Hash

    def require(self, header: Fields) -> None:
        require_key(self.key, header)
        if self.first_hash > self.last_hash or self.plain_bytes > self.size_bytes * stored_file.EXPANSION_MAX:
            header.refuse("names an invalid piece", piece=self.key)


@dataclass(frozen=True)
class ShardTimes(Stored):
    """When a shard was last called, and when it must be called again."""

    shard: _Shard
    #: No timer of the shard is due earlier, in ms since 1970; None without timers
    earliest_timer_ms: SignedInt | None
    batch_ms: int  #: Spark's processing time at the last call


@dataclass(frozen=True)
class SavedOperator(Stored):
    name: Annotated[str, NAME]  #: The operator's name in the query; see `is_unnamed`
    number: int  #: Number of Spark's operator in the query, from 0
    host: Annotated[str, NAME]  #: Name of Spark's operator that called this operator
    has_timeout: bool  #: Whether Spark's operator keeps a timeout with each row
    shards: Annotated[int, range(1, SHARDS_LIMIT)]
    #: With all columns of any row; `TableSchema.not_null` lists the columns without nulls
    tables: Annotated[Mapping[str, TableSchema], coding_of_tables("schemas")] = field(default_factory=dict)
    #: The tables that the query's last run declared, as it declared them
    declared: Annotated[Mapping[str, TableSchema], coding_of_tables()] = field(default_factory=dict)
    is_continuous: bool = True  #: Whether, since a table's first declaration, every run has declared it
    #: Settings that a restart cannot change, according to the operator's API
    configuration: Mapping[str, str] = field(default_factory=dict)
    times: tuple[ShardTimes, ...] = ()  #: For each shard that has state
    pieces: tuple[Piece, ...] = ()  #: In order of table, shard and hash

    def require(self, header: Fields) -> None:
        shards = {times.shard for times in self.times}
        if len(shards) != len(self.times) or max(shards, default=0) >= self.shards:
            header.refuse("names a shard twice, or a shard that the operator does not have", operator=self.name)
        for piece in self.pieces:
            if piece.table not in self.tables or piece.shard not in shards:
                header.refuse("names a piece of a table or shard that the operator does not have", piece=piece.key)
        if not self.declared.keys() <= self.tables.keys():
            header.refuse("declares a table that the operator does not have", operator=self.name)
        places = {table: place for place, table in enumerate(self.tables)}
        for before, piece in pairwise(self.pieces):
            same = (before.table, before.shard) == (piece.table, piece.shard)
            ascends = (places[before.table], before.shard) < (places[piece.table], piece.shard)
            if not (before.last_hash <= piece.first_hash if same else ascends):
                header.refuse("names pieces that do not ascend", piece=piece.key)

    def with_pieces(self, pieces: Iterable[Piece]) -> Self:
        """Return the operator with `pieces`, sorted."""
        places = {table: place for place, table in enumerate(self.tables)}
        return replace(self, pieces=tuple(sorted(pieces, key=lambda piece: (places[piece.table], piece.shard))))

    @property
    def is_unnamed(self) -> bool:
        """Whether the operator had no rows yet, so that its name and its tables are unknown."""
        return not self.tables and _UNNAMED.fullmatch(self.name) is not None

    @property
    def rows(self) -> dict[str, int]:
        counts = dict.fromkeys(self.tables, 0)
        for piece in self.pieces:
            counts[piece.table] += piece.rows
        return counts

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)

    def of_table(self, table: str) -> Iterator[Piece]:
        return (piece for piece in self.pieces if piece.table == table)


def unnamed(number: int, taken: Collection[str]) -> str:
    """Return a name that is not in `taken` for an operator known only by Spark's number."""
    name = f"unnamed-{number}"
    while name in taken:
        name += "-"
    return name


@dataclass(frozen=True)
class SourceLog(Stored):
    """A copy of a log that Spark keeps for a source."""

    key: str  #: Key below the savepoint
    #: The file's name below the source's folder
    name: Annotated[str, re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,299}")]
    size_bytes: int
    digest: Digest  #: XXH3-128 of its bytes

    def require(self, header: Fields) -> None:
        if key_problem(self.name):
            header.refuse("names a file of a source outside its folder")
        require_key(self.key, header)


@dataclass(frozen=True)
class SavedSource(Stored):
    name: Annotated[str, SOURCE]  #: Its number in the query's plan, or the name that the query gave it
    offset: _Line  #: JSON, as Spark logged it; ``-`` if the source had no offset yet
    logs: tuple[SourceLog, ...]


@dataclass(frozen=True)
class PlannedBatch(Stored):
    """The next micro-batch, as Spark had planned it; `sources` adds only logs that `SavedQuery.sources` lacks."""

    offsets_version: _OffsetsVersion
    batch: _Line
    sources: tuple[SavedSource, ...]

    @property
    def plan(self) -> str:
        """The plan's digest; see `plan_of`."""
        return plan_of(self.batch, ((source.name, source.offset) for source in self.sources))

    def require(self, header: Fields) -> None:
        _require_batch(self.batch, header)


@dataclass(frozen=True)
class SavedSink(Stored):
    """The newest decision of one of the query's sinks."""

    sink: Annotated[str, SINK]
    number: int  #: Number of the newest decision in the sink's log; 0 if there was none
    #: The query's newest decided micro-batch; -1 if there was none
    batch_id: Annotated[int, range(-1, NUMBER_LIMIT)]


@dataclass(frozen=True)
class SavedQuery(Stored):
    """The query after the saved micro-batch."""

    #: Spark's id of the query; empty if the state was written for a query that has not started
    query_id: Annotated[str, re.compile("[A-Za-z0-9-]{0,64}")]
    batch_id: int  #: The last micro-batch whose writes the state holds
    offsets_version: _OffsetsVersion  #: Version of Spark's offset log: ``v1``, or ``v2`` if sources have names
    batch: _Line  #: JSON: watermark, time and settings that Spark pinned for the micro-batch
    next_watermark_ms: int  #: Watermark of the next micro-batch
    sources: tuple[SavedSource, ...]  #: In the order of the query's plan
    planned: PlannedBatch | None = None  #: None if the query had planned nothing after the micro-batch
    sinks: tuple[SavedSink, ...] = ()  #: The holdfast sinks that the query writes to

    @property
    def logs(self) -> tuple[SourceLog, ...]:
        """All copies of the sources' logs."""
        sources = (*self.sources, *(self.planned.sources if self.planned else ()))
        return tuple(log for source in sources for log in source.logs)

    @property
    def uncommitted(self) -> tuple[SavedSink, ...]:
        """The sinks that show, or will show, a micro-batch that the savepoint does not hold."""
        return tuple(sink for sink in self.sinks if sink.batch_id > self.batch_id)

    def require(self, header: Fields) -> None:
        _require_batch(self.batch, header)


@dataclass(frozen=True, repr=False)
class Savepoint(Stored, kind="savepoint"):
    """A savepoint.

    Attributes
    ----------
    name, comment : str
    created_ms : int
        Time of creation, by the maker's clock, in ms since 1970.
    versions : mapping of str to str
        Versions of ``holdfast`` and ``spark``.
    query : SavedQuery
    operators : tuple of SavedOperator
    left_out : tuple of str
        Stateful operators that are not saved: Spark's own, or holdfast's that the user left out.
    """

    name: Annotated[str, NAME]
    comment: str
    created_ms: int
    versions: Mapping[str, str]
    query: SavedQuery
    operators: tuple[SavedOperator, ...]
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rows = {operator.name: dict(operator.rows) for operator in self.operators}
        return (
            f"<Savepoint {self.name!r} after micro-batch {self.query.batch_id}, {self.size_bytes} bytes, rows={rows}>"
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects that the savepoint names."""
        return sum(self.keys.values())

    @property
    def keys(self) -> dict[str, int]:
        """The objects that the savepoint names, with their sizes."""
        logs = {log.key: log.size_bytes for log in self.query.logs}
        return logs | {piece.key: piece.size_bytes for operator in self.operators for piece in operator.pieces}

    def find_operator(self, name: str | None) -> SavedOperator:
        """Return an operator by name; None means the only operator with tables. Raises `NotFoundError`."""
        names = [operator.name for operator in self.operators]
        with_tables = [operator for operator in self.operators if operator.tables] or self.operators
        if name is None and len(with_tables) == 1:
            return with_tables[0]
        if name not in names:
            what = "no such operator" if name else "the savepoint has several operators"
            raise NotFoundError(
                f"{what}: choose one with the option operator{did_you_mean(name or '', names)}",
                operator=name,
                operators=", ".join(names),
            )
        return self.operators[names.index(name)]

    def require(self, header: Fields) -> None:
        keys = [log.key for log in self.query.logs]
        keys += [piece.key for operator in self.operators for piece in operator.pieces]
        for names in (keys, [operator.name for operator in self.operators]):
            if len(set(names)) != len(names):
                header.refuse("names an object or an operator twice")


def read_manifest(data: Any, name: str, source: str) -> Savepoint:
    """Decode a manifest into a savepoint with its folder's current name. Raises `CorruptionError`."""
    return replace(Savepoint.decode(data, source), name=name)


def _require_batch(text: str, header: Fields) -> None:
    """Refuse anything but a micro-batch as Spark logs it: one JSON line with the pinned settings."""
    try:
        conf = json.loads(text)["conf"]
    except (ValueError, TypeError, KeyError, RecursionError):
        conf = None
    if not isinstance(conf, dict) or not all(isinstance(value, str) for value in conf.values()):
        header.refuse("has a micro-batch that pins no settings")


def sinks_of(storage: ObjectStorage, query_id: str) -> tuple[SavedSink, ...]:
    """Return a query's sinks with its newest decisions; ignores damaged logs of other queries."""
    found = []
    for stored in stored_sinks(storage.list(f"{FOLDER}/")):
        log = SinkLog(storage, stored.sink)
        try:
            entry, decision = log.latest()
        except (CorruptionError, NotFoundError, StateLostError) as exc:
            origin = find_origin(storage, query_id)
            if not log.names(query_id, origin.of_query if origin and not origin.is_clone else None):
                _log.warning("ignoring the damaged log of sink %r, which this query does not use: %s", stored.sink, exc)
                continue
            raise CorruptionError(
                "the query appears to write to a sink whose log is damaged, so what the sink shows is unknown: "
                f"restore the log, then save the query: {exc.message}",
                sink=stored.sink,
                query=query_id,
                storage=storage.url,
            ) from exc
        batch_id = None if entry is None else entry.newest_batch(decision, query_id)
        if entry is not None and batch_id is not None:
            found.append(SavedSink(stored.sink, entry.decided, batch_id))
    return tuple(found)


def require_sinks(storage: ObjectStorage, query: SavedQuery) -> None:
    """Check that a restored query can continue the saved query's sinks; change nothing."""
    if not query.sinks:
        raise InvalidArgumentError(
            "the savepoint names no holdfast sink that its query wrote to: leave out continue_sinks. A savepoint "
            "records no sinks for a query that exactly_once identifies by query_name, as over Spark Connect",
            query=query.query_id,
        )
    for saved in query.sinks:
        _found(SinkLog(storage, saved.sink), storage, query, saved)


def continue_sinks(storage: ObjectStorage, query: SavedQuery, query_id: str, driver: str) -> None:
    """Hand a saved query's sinks to a restored one, and end the saved one for good; raises as `require_sinks` does."""
    for saved in query.sinks:
        log = SinkLog(storage, saved.sink)
        for _ in looks(storage.url):
            found, batch_id = _found(log, storage, query, saved)
            # All of these may have left unfinished work, except a query whose successor has begun.
            ending = {found.query_id, *found.ending} - {query_id}
            planned = query.planned if batch_id > query.batch_id else None
            stands_for, plan = (batch_id - query.batch_id, planned.plan) if planned else (-1, "")
            entry = Entry(saved.sink, found.number + 1, query_id, driver, found.decided, tuple(sorted(ending)))
            entry = replace(entry, at_ms=clock.now_ms(), stands_for=stands_for, plan=plan)
            with suppress(ConflictError):  # read the log again, even if the entry counts: others may have continued
                log.append(replace(entry, ended=found.ended_before(query_id, ending)))
                break


def _found(log: SinkLog, storage: ObjectStorage, query: SavedQuery, saved: SavedSink) -> tuple[Entry, int]:
    """Return the newest entry of a sink's log, and the newest micro-batch of the saved query that it shows."""
    entry, decision = log.latest()
    facts = {"sink": saved.sink, "query": query.query_id, "storage": storage.url}
    if entry is None:
        raise InvalidArgumentError(
            "a sink to continue has no log in this state directory: restore into the saved query's state directory",
            **facts,
        )
    batch_id = entry.newest_batch(decision, query.query_id)
    if batch_id is None and query.query_id in entry.ending and entry.decided == saved.number:
        batch_id = saved.batch_id  # another restore has continued the sink, and decided nothing yet
    if batch_id is None and entry.stands_for is not None:  # perhaps another restore, whose query has begun
        origin = find_origin(storage, entry.query_id)
        if origin is not None and (origin.of_query, origin.batch_id) == (query.query_id, query.batch_id):
            batch_id = query.batch_id + max(0, entry.stands_for)
    if batch_id is None:
        raise ConflictError(
            "another query has continued this sink since the savepoint was made: save that query instead",
            **facts,
            other_query=entry.query_id,
        )
    if batch_id > query.batch_id + (query.planned is not None):
        raise ConflictError(
            "the sink shows more than the savepoint holds, because the query kept running: stop it, save it again, and "
            "restore that savepoint",
            **facts,
            saved=query.batch_id,
            shown=batch_id,
        )
    planned = query.planned if batch_id > query.batch_id else None
    if planned and decision and not decision.is_of_plan(planned.plan):
        raise ConflictError(
            "the savepoint holds a different plan for the micro-batch that the sink shows last: the saved checkpoint "
            "location is older than the sink. Save the location with which the query ran, or restore without "
            "continue_sinks and give the sink a different name",
            **facts,
            batch=batch_id,
        )
    return entry, batch_id
