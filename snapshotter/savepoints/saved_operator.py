"""What a savepoint holds of one operator: its tables, its shards' times, and the pieces that hold its rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from holdfast.backends import stored_file
from holdfast.backends.schema import TableSchema
from holdfast.backends.stored_schema import decode_schemas, encode_schemas
from holdfast.errors import CorruptionError
from holdfast.snapshotter.fields import DIGEST, Fields
from holdfast.snapshotter.storage.keys import key_problem

#: The manifest's own key, below the savepoint.
KEY = "savepoint"
#: Names of savepoints, operators and hosts.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_UNNAMED = re.compile(r"unnamed-[0-9]{1,9}-*")
_HASH = re.compile(r"[0-9a-f]{16}")
#: Of shards: fewer than these.
SHARDS_LIMIT = 1 << 31
#: The largest piece that a reader takes: one table's rows of a few hashes may be large, never the whole of a state.
PIECE_BYTES_MAX = 4 << 30


@dataclass(frozen=True)
class Piece:
    """An object with rows of one table from one shard: a stretch of ascending hashes.

    Attributes
    ----------
    key : str
        Below the savepoint.
    table : str
    shard : int
    rows : int
    size_bytes : int
        Of the object.
    plain_bytes : int
        Of its rows, unpacked.
    digest : str
        Of the object; see `holdfast.backends.stored_file`.
    first_hash, last_hash : int
        Of its rows, both included. The rows of one hash may go on in the next piece.
    """

    key: str
    table: str
    shard: int
    rows: int
    size_bytes: int
    plain_bytes: int
    digest: str
    first_hash: int
    last_hash: int

    FIELDS = ("key", "table", "shard", "rows", "size_bytes", "plain_bytes", "digest", "first_hash", "last_hash")

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; a hash is text, since it has more bits than a JSON number keeps."""
        values = {name: getattr(self, name) for name in self.FIELDS}
        return values | {name: f"{values[name]:016x}" for name in ("first_hash", "last_hash")}

    @classmethod
    def read(cls, fields: Fields) -> Piece:
        """Return the piece that the fields describe; raises `CorruptionError`."""
        piece = cls(
            read_key(fields, "key"),
            fields.text("table"),
            fields.number("shard", 0, SHARDS_LIMIT),
            fields.number("rows", 1),
            fields.number("size_bytes", 1, PIECE_BYTES_MAX + 1),
            fields.number("plain_bytes"),
            fields.text("digest", DIGEST),
            *(int(fields.text(name, _HASH), 16) for name in ("first_hash", "last_hash")),
        )
        if piece.first_hash > piece.last_hash or piece.plain_bytes > piece.size_bytes * stored_file.EXPANSION_MAX:
            fields.refuse("names an invalid piece", piece=piece.key)
        return piece


@dataclass(frozen=True)
class ShardTimes:
    """When a shard was called, and must be called again.

    Attributes
    ----------
    shard : int
    earliest_timer_ms : int or None
        No timer of the shard is due earlier, in ms since 1970; None if it has none.
    batch_ms : int
        Spark's processing time of its last call.
    """

    shard: int
    earliest_timer_ms: int | None
    batch_ms: int

    FIELDS = ("shard", "earliest_timer_ms", "batch_ms")

    @classmethod
    def read(cls, fields: Fields) -> ShardTimes:
        """Return the times that the fields describe; raises `CorruptionError`."""
        earliest_timer_ms = fields.integer_or_none("earliest_timer_ms")
        return cls(fields.number("shard", 0, SHARDS_LIMIT), earliest_timer_ms, fields.number("batch_ms"))


@dataclass(frozen=True)
class SavedOperator:
    """The state of one operator.

    Attributes
    ----------
    name : str
        That the query calls it; see `is_unnamed`.
    number : int
        Of Spark's operator in the query, from 0.
    host : str
        The name of Spark's operator that called it.
    has_timeout : bool
        Whether that keeps a timeout beside each row.
    shards : int
    tables : mapping of str to TableSchema
        With all columns that rows may have; `TableSchema.not_null` has those in which no row has a null.
    declared : mapping of str to TableSchema
        Those tables that the query's last run declared, as it did.
    is_continuous : bool
        Whether all runs have declared these since they were first declared.
    configuration : mapping of str to str
        What the operator's API lets nobody change at a restart.
    times : tuple of ShardTimes
        Of the shards that have state.
    pieces : tuple of Piece
        By table and shard, ascending.
    """

    name: str
    number: int
    host: str
    has_timeout: bool
    shards: int
    tables: Mapping[str, TableSchema]
    declared: Mapping[str, TableSchema]
    is_continuous: bool
    configuration: Mapping[str, str]
    times: tuple[ShardTimes, ...]
    pieces: tuple[Piece, ...]

    FIELDS = (
        *("name", "number", "host", "has_timeout", "shards", "schemas", "declared", "is_continuous"),
        *("configuration", "times", "pieces"),
    )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        plain = ("name", "number", "host", "has_timeout", "shards", "is_continuous")
        return {name: getattr(self, name) for name in plain} | {
            "schemas": encode_schemas(self.tables),
            "declared": encode_schemas(self.declared),
            "configuration": dict(self.configuration),
            "times": [asdict(times) for times in self.times],
            "pieces": [piece.to_json() for piece in self.pieces],
        }

    @classmethod
    def read(cls, fields: Fields) -> SavedOperator:
        """Return the operator that the fields describe; raises `CorruptionError`."""
        operator = cls(
            fields.text("name", NAME),
            fields.number("number"),
            fields.text("host", NAME),
            fields.flag("has_timeout"),
            fields.number("shards", 1, SHARDS_LIMIT),
            _tables(fields, "schemas"),
            _tables(fields, "declared"),
            fields.flag("is_continuous"),
            fields.mapping_of_texts("configuration"),
            tuple(ShardTimes.read(times) for times in fields.each("times", *ShardTimes.FIELDS)),
            tuple(Piece.read(piece) for piece in fields.each("pieces", *Piece.FIELDS)),
        )
        shards = {times.shard for times in operator.times}
        if len(shards) != len(operator.times) or max(shards, default=0) >= operator.shards:
            fields.refuse("names a shard twice, or one that the operator does not have", operator=operator.name)
        for piece in operator.pieces:
            if piece.table not in operator.tables or piece.shard not in shards:
                fields.refuse("names a piece of a table or shard that the operator does not have", piece=piece.key)
        if not operator.declared.keys() <= operator.tables.keys():
            fields.refuse("declares a table that the operator does not have", operator=operator.name)
        operator._require_order(fields)
        return operator

    def _require_order(self, fields: Fields) -> None:
        """Check that pieces ascend by table, shard and hash."""
        places = {table: place for place, table in enumerate(self.tables)}
        for before, piece in pairwise(self.pieces):
            same = (before.table, before.shard) == (piece.table, piece.shard)
            ascends = (places[before.table], before.shard) < (places[piece.table], piece.shard)
            if not (before.last_hash <= piece.first_hash if same else ascends):
                fields.refuse("names pieces that do not ascend", piece=piece.key)

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


def _tables(fields: Fields, name: str) -> dict[str, TableSchema]:
    encoded = fields.texts_by_name(name, 2)
    try:
        return decode_schemas(encoded)
    except CorruptionError as exc:
        raise CorruptionError(f"{fields.source}: {exc}") from exc


def read_key(fields: Fields, name: str) -> str:
    """Return the key of an object below the savepoint; raises `CorruptionError`."""
    key = fields.text(name)
    if key_problem(key) or key == KEY:
        fields.refuse("names an object outside its folder", key=key)
    return key
