"""What is written can be read: everything that Spark and Arrow can hand over, through every backend and the log."""

from __future__ import annotations

import decimal
import random
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.base import View
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.opening import open_storage
from tests.fuzz.arrow_columns import exact, random_column, random_type
from tests.tiers import repetitions

BACKENDS = ("memory", "filesystem", "rocksdb")
ROWS = 40


class Written:
    """Tables of chosen types, written in two commits with a snapshot between, and what must come back."""

    def __init__(self, chance: random.Random) -> None:
        types = [random_type(chance, 2, is_key=True) for _ in range(2)]
        values = [random_type(chance, 3, is_key=False) for _ in range(3)]
        self.schema = TableSchema.of(
            "state",
            pa.schema([("id", pa.int64()), *((f"k{i}", t) for i, t in enumerate(types))]),
            pa.schema([(f"v{i}", t) for i, t in enumerate(values)]),
        )
        ids = pa.array(range(ROWS))
        columns = [random_column(t, ROWS, chance) for t in types]
        keys = pa.table([ids, *columns], names=self.schema.key.names)
        hashes = np.array([chance.choice([0, 7, 2**63]) for _ in range(ROWS)], np.uint64)  # most keys share theirs
        self.keys = Keys.of(self.schema, hashes, keys)
        self.puts = [pa.table([random_column(t, ROWS, chance) for t in values], names=["v0", "v1", "v2"]) for _ in "12"]
        expected = [exact(one_chunk(self.puts[1].column(i))) for i in range(3)]
        self.expected = dict(zip(range(ROWS), zip(*expected, strict=True), strict=True))

    def check(self, view: View) -> None:
        """Compare a scan and a look-up with what was put."""
        found = {}
        for run in view.scan("state"):
            found |= dict(zip(run.keys.column(0).to_pylist(), values_of(run.values), strict=True))
        assert found == self.expected
        answer = view.get("state", self.keys)
        assert answer.exists.all()
        assert dict(enumerate(values_of(answer.values))) == self.expected


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def values_of(batch: pa.RecordBatch) -> list[Any]:
    return list(zip(*(exact(column) for column in batch.columns), strict=True))


@pytest.mark.parametrize("seed", repetitions(2, 200))
def test_whatever_is_put_is_restored_bit_by_bit(seed: int, ram_path: Path) -> None:
    """Text that is not UTF-8, NaN of any bits, dates that Python does not know, at any depth, in keys and values."""
    written = Written(random.Random(seed))
    storage = open_storage(f"memory://conversions/{ram_path.name}")
    with ThreadPoolExecutor(2) as threads:
        for name in BACKENDS:
            tables, shard = {"state": written.schema}, f"{name}/shard-0000"

            def opened(place: str, name: str = name, tables: Any = tables, shard: str = shard) -> Any:
                folder = ram_path / f"{name}-{place}"
                backend = find_backend(name)(folder, tables, clock.new_id)
                log = ObjectCommitLog(storage, shard, tables, threads, folder, name, step_bytes=1)
                return backend, VersionedStore(backend, log), log

            backend, store, log = opened("here")
            pointer = None
            for number, values in enumerate([*written.puts[:1], *written.puts]):
                with store.begin(pointer) as attempt:
                    attempt.put("state", written.keys, values)
                    pointer = attempt.commit()
                assert pointer is not None
                if number == 0:
                    log.write_snapshot(backend, pointer)
            with store.read_at(pointer) as view:
                written.check(view)
            assert backend.verify() == []
            backend.close()
            backend, store, _ = opened("there")
            with store.read_at(pointer) as view:
                written.check(view)
            backend.close()
            rows_only = ObjectCommitLog(storage, shard, tables, threads, ram_path / f"{name}-rows")
            with rows_only.restore(pointer) as restored:
                assert restored.pointer == pointer
                run = restored.runs["state"]
                found = dict(zip(run.keys.column(0).to_pylist(), values_of(run.values), strict=True))
                assert found == written.expected


def beyond(t: pa.DataType, rows: int, bad: int) -> pa.Array:
    """Return a column of decimals of which one has more digits than its type, as Arrow's own sum can return."""
    numbers = [10**t.precision if i == bad else i for i in range(rows)]
    raw = b"".join(number.to_bytes(16, "little", signed=True) for number in numbers)
    return pa.Array.from_buffers(t, rows, [None, pa.py_buffer(raw)])


@pytest.mark.parametrize("depth", ["flat", "in a list", "in a struct"])
def test_a_decimal_beyond_its_precision_is_refused_when_it_is_put(depth: str, tmp_path: Path) -> None:
    """It could be written, and never read again; the error names column and key."""
    column = beyond(pa.decimal128(38, 0), 5, 3)
    if depth == "in a list":
        column = pa.ListArray.from_arrays(pa.array(range(6), pa.int32()), column)
    elif depth == "in a struct":
        column = pa.StructArray.from_arrays([column], names=["x"])
    schema = TableSchema.of("state", pa.schema([("user", pa.string())]), pa.schema([("total", column.type)]))
    users = pa.table({"user": [f"user {i}" for i in range(5)]})
    keys = Keys.of(schema, np.arange(5), users)
    backend = find_backend("memory")(tmp_path, {"state": schema}, clock.new_id)
    with (
        VersionedStore(backend).begin(None) as attempt,
        pytest.raises(SchemaMismatchError, match=r"'total' cannot be stored.*precision.*user 3"),
    ):
        attempt.put("state", keys, pa.table({"total": column}))


# Casts: nothing is lost without a word.

NUMBERS: list[pa.DataType] = [
    *(pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()),
    *(pa.decimal128(5, 2), pa.decimal128(10, 1), pa.decimal128(38, 10), pa.decimal128(20, 0)),
]
VALUES: list[Any] = [
    *(0, 1, -1, 127, 128, 300, 2**31, 2**53 + 1, 2**63 - 1, 10**18),
    *(0.5, 0.1, 0.15, 1e300, -1e-300, 1e10, 2.5, 123456.789, float("inf"), float("nan")),
    *(decimal.Decimal("0.15"), decimal.Decimal("12345678901234567890.123"), decimal.Decimal("1.5")),
]


def fraction(value: Any) -> Fraction | str:
    return Fraction(value) if np.isfinite(float(value)) else str(float(value))


def is_kept(given: Any, stored: Any, t: pa.DataType) -> bool:
    """Tell whether a stored number is the given one, or the nearest that its type has where both are floats."""
    if fraction(given) == fraction(stored):
        return True
    if not isinstance(given, float) and not isinstance(stored, float):
        return False
    if isinstance(given, float) and isinstance(stored, float):
        with np.errstate(over="ignore"):
            nearest = float(np.float32(given)) if t == pa.float32() else given
        return bool(stored == nearest and np.isfinite(stored) == np.isfinite(given) and (stored != 0) == (given != 0))
    # One of them is a decimal, and the other the float that is shown with the same digits, to its last place.
    number = given if isinstance(given, float) else stored
    digits = 7 if pa.float32() in (t, getattr(t, "given", None)) else 15
    return abs(fraction(given) - fraction(stored)) <= abs(Fraction(number)) / 10 ** (digits - 1)  # type: ignore[operator]


@pytest.mark.parametrize("target", NUMBERS, ids=str)
def test_no_cast_loses_anything_without_a_word(target: pa.DataType) -> None:
    """Every number in every numeric type that can hold it, flat, in a list and in a dictionary."""
    kept = refused = 0
    for source in NUMBERS:
        for value in VALUES:
            try:
                column = pa.array([value], source)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                continue
            given = column[0].as_py()
            lists = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), column)
            for shape, t in ((column, target), (column.dictionary_encode(), target), (lists, pa.list_(target))):
                schema = TableSchema.of("t", pa.schema([("k", pa.int64())]), pa.schema([("v", t)]))
                try:
                    stored = schema.conform(pa.table({"v": shape}), "value").column(0)[0].as_py()
                except SchemaMismatchError:
                    refused += 1
                    continue
                kept += 1
                if isinstance(stored, list):
                    stored = stored[0]
                assert is_kept(given, stored, target if source != pa.float32() else pa.float32()), (given, stored)
    assert kept > 0
    assert refused > 0


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (pa.list_(pa.field("element", pa.int64(), False)), [[1, None]]),
        (pa.map_(pa.string(), pa.field("value", pa.int64(), False)), [[("a", None)]]),
        (pa.struct([pa.field("x", pa.int64(), False)]), [{"x": None}]),
        (pa.list_(pa.list_(pa.field("element", pa.string(), False))), [[["a"], [None]]]),
        (pa.struct([pa.field("x", pa.list_(pa.field("element", pa.int64(), False)))]), [{"x": [None]}]),
    ],
    ids=str,
)
def test_not_null_holds_inside_of_columns(declared: pa.DataType, value: Any) -> None:
    """In elements, map values and fields, at any depth; what is null above them may be."""
    nullable = pa.array(value, _all_nullable(declared))
    schema = TableSchema.of("t", pa.schema([("k", pa.int64())]), pa.schema([("v", declared)]))
    with pytest.raises(SchemaMismatchError, match=r"'v' cannot be stored: .*(NOT NULL|non-nullable)"):
        schema.conform(pa.table({"v": nullable}), "value")
    schema.conform(pa.table({"v": pa.nulls(3, declared)}), "value")


def _all_nullable(t: pa.DataType) -> pa.DataType:
    if pa.types.is_list(t):
        return pa.list_(_all_nullable(t.value_type))
    if pa.types.is_map(t):
        return pa.map_(t.key_type, _all_nullable(t.item_type))
    if pa.types.is_struct(t):
        return pa.struct([(f.name, _all_nullable(f.type)) for f in t])
    return t


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (pa.list_(pa.field("element", pa.int64(), False)), [1]),
        (pa.map_(pa.string(), pa.field("value", pa.int64(), False)), [("a", 1)]),
        (pa.struct([pa.field("x", pa.int64(), False)]), {"x": 1}),
        (pa.struct([pa.field("p", pa.struct([pa.field("x", pa.int64(), False)]), False)]), {"p": {"x": 1}}),
        (pa.list_(pa.struct([pa.field("x", pa.string(), False)])), [{"x": "a"}, None]),
        (pa.map_(pa.string(), pa.struct([pa.field("x", pa.int64(), False)])), [("a", None), ("b", {"x": 1})]),
        (pa.struct([pa.field("x", pa.list_(pa.field("element", pa.int64(), False)), False)]), {"x": [1]}),
    ],
    ids=str,
)
def test_what_is_null_above_a_not_null_is_read_from_storage(declared: pa.DataType, value: Any) -> None:
    """So are deleted rows, whose values are null: Arrow has a null in each field of such a struct."""
    schema = TableSchema.of("t", pa.schema([("k", pa.int64())]), pa.schema([("v", declared)]))
    keys = Keys.of(schema, np.arange(3), pa.table({"k": [1, 2, 3]}))
    values = schema.conform(pa.table({"v": pa.array([value, value, None], _all_nullable(declared))}), "value")
    run, sink = Run.build(schema, keys, values, np.array([True, False, False])), pa.BufferOutputStream()
    run.write(sink, compression="lz4")
    read = Run.read(sink.getvalue(), schema, source="it")
    assert read.values.to_pylist() == [{"v": None}, {"v": value}, {"v": None}]
    read.batch.validate(full=True)
    assert len(Run.build(schema, keys, None)) == len(read)


@pytest.mark.parametrize("hashes", [np.array([1.5]), np.array([1], np.int32), np.array([[1]]), np.array(["a"])])
def test_hashes_are_never_reinterpreted(hashes: Any) -> None:
    """The bits of a float are no hash: look-ups would find nothing."""
    schema = TableSchema.of("t", pa.schema([("k", pa.int64())]), pa.schema([]))
    with pytest.raises(InvalidArgumentError, match="64-bit integers"):
        Keys.of(schema, hashes, pa.table({"k": [1]}))


def test_keys_of_one_hash_may_hold_anything() -> None:
    """Nested keys that share a hash are sorted: also times that Python does not know, and what is no text."""
    times = pa.array([[2**62], [-(2**62)], None, [2**62], []], pa.list_(pa.int64()))
    texts = pa.array([[b"\xff"], [b"a", None], [None], [b"\xff"], None], pa.list_(pa.binary()))
    columns = {"times": times.cast(pa.list_(pa.timestamp("us"))), "texts": texts.view(pa.list_(pa.string()))}
    schema = TableSchema.of("t", pa.schema([(n, c.type) for n, c in columns.items()]), pa.schema([]))
    keys = Keys.of(schema, np.zeros(5, np.uint64), pa.table(columns))
    run = Run.build(schema, keys, None)
    assert len(run) == 4
    assert (run.find(keys) >= 0).all()


def test_an_error_shows_any_key() -> None:
    """Also one that Python has no text or time for."""
    columns = {
        "text": pa.array([b"\xff"], pa.binary()).view(pa.string()),
        "texts": pa.array([[b"\xff"]], pa.list_(pa.binary())).view(pa.list_(pa.string())),
        "time": pa.array([2**62]).view(pa.timestamp("us")),
    }
    schema = TableSchema.of(
        "t", pa.schema([(n, c.type) for n, c in columns.items()]), pa.schema([("d", pa.decimal128(5, 0))])
    )
    keys = Keys.of(schema, np.zeros(1, np.uint64), pa.table(columns))
    with pytest.raises(SchemaMismatchError, match=r"'d' cannot be stored.*xff.*texts=.*time=") as caught:
        schema.conform(pa.table({"d": beyond(pa.decimal128(5, 0), 1, 0)}), "value", keys)
    assert str(caught.value).encode()
