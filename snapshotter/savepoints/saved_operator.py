"""What a savepoint holds of one operator: its tables, its shards' times, and the pieces that hold its rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from holdfast.backends import stored_file
from holdfast.backends.schema import TableSchema, decode_schemas, encode_schemas
from holdfast.snapshotter.fields import Coding, Digest, Fields, PositiveInt, SignedInt, Stored
from holdfast.snapshotter.storage.object_storage import key_problem

#: The manifest's own key, below the savepoint.
KEY = "savepoint"
#: Names of savepoints, operators and hosts.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_UNNAMED = re.compile(r"unnamed-[0-9]{1,9}-*")
#: Of shards: fewer than these.
SHARDS_LIMIT = 1 << 31
#: The largest piece that a reader takes: one table's rows of a few hashes may be large, never the whole of a state.
PIECE_BYTES_MAX = 4 << 30


def require_key(key: str, header: Fields) -> None:
    """Refuse a key that is not of an object below the savepoint."""
    if key_problem(key) or key == KEY:
        header.refuse("names an object outside its folder", key=key)


def _tables(key: str | None = None) -> Coding:
    """Return how tables are stored: by name their key and value schemas."""
    return Coding(Mapping[str, Annotated[list[str], 2]], decode_schemas, encode_schemas, key)


#: Text, since a hash has more bits than a JSON number keeps.
_Hash = Annotated[int, Coding(Annotated[str, re.compile("[0-9a-f]{16}")], lambda text: int(text, 16), "{:016x}".format)]
_Shard = Annotated[int, range(SHARDS_LIMIT)]


@dataclass(frozen=True)
class Piece(Stored):
    """An object with rows of one table from one shard: a stretch of ascending hashes."""

    key: str  #: Below the savepoint
    table: str
    shard: _Shard
    rows: PositiveInt
    size_bytes: Annotated[int, range(1, PIECE_BYTES_MAX + 1)]  #: Of the object
    plain_bytes: int  #: Of its rows, unpacked
    digest: Digest  #: Of the object; see `holdfast.backends.stored_file`
    #: Of its rows, both included. The rows of one hash may go on in the next piece.
    first_hash: _Hash
    last_hash: _Hash

    def require(self, header: Fields) -> None:
        """Refuse a piece that nothing can be."""
        require_key(self.key, header)
        if self.first_hash > self.last_hash or self.plain_bytes > self.size_bytes * stored_file.EXPANSION_MAX:
            header.refuse("names an invalid piece", piece=self.key)


@dataclass(frozen=True)
class ShardTimes(Stored):
    """When a shard was called, and must be called again."""

    shard: _Shard
    #: No timer of the shard is due earlier, in ms since 1970; None if it has none
    earliest_timer_ms: SignedInt | None
    batch_ms: int  #: Spark's processing time of its last call


@dataclass(frozen=True)
class SavedOperator(Stored):
    """The state of one operator."""

    name: Annotated[str, NAME]  #: That the query calls it; see `is_unnamed`
    number: int  #: Of Spark's operator in the query, from 0
    host: Annotated[str, NAME]  #: The name of Spark's operator that called it
    has_timeout: bool  #: Whether that keeps a timeout beside each row
    shards: Annotated[int, range(1, SHARDS_LIMIT)]
    #: With all columns that rows may have; `TableSchema.not_null` has those in which no row has a null
    tables: Annotated[Mapping[str, TableSchema], _tables("schemas")]
    #: Those tables that the query's last run declared, as it did
    declared: Annotated[Mapping[str, TableSchema], _tables()]
    is_continuous: bool  #: Whether all runs have declared these since they were first declared
    configuration: Mapping[str, str]  #: What the operator's API lets nobody change at a restart
    times: tuple[ShardTimes, ...]  #: Of the shards that have state
    pieces: tuple[Piece, ...]  #: By table and shard, ascending

    def require(self, header: Fields) -> None:
        """Refuse pieces of no table or shard of the operator, or that do not ascend by table, shard and hash."""
        shards = {times.shard for times in self.times}
        if len(shards) != len(self.times) or max(shards, default=0) >= self.shards:
            header.refuse("names a shard twice, or one that the operator does not have", operator=self.name)
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

    @property
    def is_unnamed(self) -> bool:
        """Whether it had had no rows, so that its name and its tables are unknown."""
        return not self.tables and _UNNAMED.fullmatch(self.name) is not None

    @property
    def rows(self) -> dict[str, int]:
        """Rows by table."""
        counts = dict.fromkeys(self.tables, 0)
        for piece in self.pieces:
            counts[piece.table] += piece.rows
        return counts

    @property
    def size_bytes(self) -> int:
        """Bytes of all its pieces."""
        return sum(piece.size_bytes for piece in self.pieces)

    def of_table(self, table: str) -> Iterator[Piece]:
        """Yield the pieces of a table, shard by shard."""
        return (piece for piece in self.pieces if piece.table == table)


def unnamed(number: int, taken: Collection[str]) -> str:
    """Return a name, distinct from these, for an operator known only by Spark's number."""
    name = f"unnamed-{number}"
    while name in taken:
        name += "-"
    return name
