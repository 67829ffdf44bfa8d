"""Rows of state for tests: schemas, values of every type in Spark's state, and helpers to write and read rows."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.backends.base import MAX_HASH, Pointer, View
from holdfast.backends.run import Keys, Run, TableSchema

Row = tuple[Any, ...]

COUNTS = TableSchema.of("counts", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64())]))
PAIRS = TableSchema.of(
    "pairs",
    pa.schema([("left", pa.int64()), ("right", pa.float64()), ("name", pa.string())]),
    pa.schema([("note", pa.string()), ("at", pa.timestamp("us", "UTC"))]),
)
MEMBERS = TableSchema.of("members", pa.schema([("id", pa.binary())]), pa.schema([]))
TABLES = {table.name: table for table in (COUNTS, PAIRS, MEMBERS)}

_DAY = dt.date(1969, 12, 31)
INSTANT = dt.datetime(2024, 2, 29, 23, 59, 59, 999999, tzinfo=dt.UTC)
_LOCAL = dt.datetime(1582, 10, 4, 1, 2, 3)  # noqa: DTZ001  a time without a zone is intended
_POINT = pa.struct([("x", pa.float64()), ("tags", pa.list_(pa.string()))])

P1, P2, P3 = (Pointer(v, f"{v}{v}aa") for v in (1, 2, 3))

#: Every type a column of Spark state can have, with two different values.
TYPES: list[tuple[pa.DataType, Any, Any]] = [
    (pa.bool_(), True, False),
    (pa.int8(), -128, 127),
    (pa.int16(), -(2**15), 1),
    (pa.int32(), -(2**31), 2**31 - 1),
    (pa.int64(), -(2**63), 2**63 - 1),
    (pa.float32(), 0.5, -math.inf),
    (pa.float64(), 1e-300, math.nan),
    (pa.decimal128(38, 18), decimal.Decimal("-1.000000000000000001"), decimal.Decimal(0)),
    (pa.string(), "", "ünï\0code"),
    (pa.large_string(), "a", "b"),
    (pa.binary(), b"", b"\xff\x00"),
    (pa.date32(), _DAY, dt.date(9999, 12, 31)),
    (pa.timestamp("us", "UTC"), INSTANT, dt.datetime(1, 1, 1, tzinfo=dt.UTC)),
    (pa.timestamp("us"), _LOCAL, dt.datetime(9999, 1, 1)),  # noqa: DTZ001
    (pa.duration("us"), dt.timedelta(days=-1, microseconds=1), dt.timedelta(0)),
    (pa.time64("us"), dt.time(23, 59, 59, 999999), dt.time(0)),
    (pa.list_(pa.int64()), [], [1, None]),
    (pa.list_(pa.list_(pa.string())), [["a", None], None], [[]]),
    (_POINT, {"x": None, "tags": None}, {"x": 1.0, "tags": ["a", ""]}),
]
#: Types that only a value can have: Spark does not group by them.
VALUE_TYPES: list[tuple[pa.DataType, Any, Any]] = [
    (pa.map_(pa.string(), pa.int64()), [("a", None)], []),
    (pa.list_(pa.map_(pa.int32(), _POINT)), [[(1, {"x": 0.0, "tags": []})], None], []),
    (pa.null(), None, None),
]


def hash_of(row: object) -> int:
    """Return a 64-bit hash; equal keys have equal hashes."""
    text = repr(row).encode()
    return zlib.crc32(text) << 32 | zlib.crc32(text[::-1])


def keys_of(schema: TableSchema, rows: Sequence[Row], hashes: Sequence[int] | None = None) -> Keys:
    """Return the keys of `rows`, one tuple of column values each, hashed unless `hashes` are given."""
    columns = [pa.array([row[i] for row in rows], f.type) for i, f in enumerate(schema.key)]
    chosen = [hash_of(plain(row)) for row in rows] if hashes is None else list(hashes)
    batch = pa.RecordBatch.from_arrays(columns, schema=schema.key)
    return Keys.of(schema, np.array(chosen, np.uint64), batch)


def values_of(schema: TableSchema, rows: Sequence[Row | None]) -> pa.RecordBatch:
    """Return value columns, one tuple of column values each; None stands for a row of nulls."""
    columns = [pa.array([row and row[i] for row in rows], f.type) for i, f in enumerate(schema.value)]
    return pa.RecordBatch.from_struct_array(
        pa.StructArray.from_arrays(columns, fields=list(schema.value))
        if columns
        else pa.StructArray.from_buffers(pa.struct([]), len(rows), [None])
    )


def run_of(schema: TableSchema, rows: Sequence[tuple[Row, Row | None]], hashes: Sequence[int] | None = None) -> Run:
    """Return the run of a write; a row is (key, value), or (key, None) for a delete."""
    deleted: npt.NDArray[np.bool_] = np.array([value is None for _, value in rows], np.bool_)
    values = values_of(schema, [value for _, value in rows])
    return Run.build(schema, keys_of(schema, [key for key, _ in rows], hashes), values, deleted)


def counts(*rows: tuple[str | None, int | None]) -> dict[str, Run]:
    """Return a write of (user, n) rows to the table `COUNTS`."""
    return {"counts": run_of(COUNTS, [((user,), (n,)) for user, n in rows])}


def no_counts(*users: str | None) -> dict[str, Run]:
    """Return a delete of users from the table `COUNTS`."""
    return {"counts": run_of(COUNTS, [((user,), None) for user in users])}


def plain(value: Any) -> Any:
    """Convert a value to a hashable one: NaN equals itself, -0.0 becomes 0.0, nested values become tuples."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return tuple((name, plain(value[name])) for name in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(plain(v) for v in value)
    return value


def contents(view: View, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> dict[Row, Row]:
    """Return a scan's rows as a dictionary; fails unless they ascend without repeating a key."""
    found: dict[Row, Row] = {}
    last = first_hash
    for run in view.scan(table, first_hash, last_hash):
        assert not run.deleted.any()
        for row, key_hash in enumerate(run.hashes.tolist()):
            assert last <= key_hash <= last_hash
            last = key_hash
            key = plain([c[row].as_py() for c in run.keys.columns])
            assert key not in found
            found[key] = plain([c[row].as_py() for c in run.values.columns])
    return found


def answers(view: View, table: str, keys: Keys) -> list[Row | None]:
    """Return what a look-up finds: a tuple of values, or None if the key is absent."""
    found = view.get(table, keys)
    assert found.values.num_rows == len(found.exists) == len(keys)
    rows = [plain([c[i].as_py() for c in found.values.columns]) for i in range(len(keys))]
    for row, exists in zip(rows, found.exists, strict=True):
        assert exists or not any(v is not None for v in row), "an absent key has null values"
    return [row if exists else None for row, exists in zip(rows, found.exists, strict=True)]


def users(view: View, *names: str | None) -> list[Row | None]:
    """Return the answers for users of the table `COUNTS`."""
    return answers(view, "counts", keys_of(COUNTS, [(name,) for name in names]))
