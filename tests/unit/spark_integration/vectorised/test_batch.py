"""What an operator function reads and writes: one shard's state, for all keys of a micro-batch at once."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.base import Pointer
from holdfast.backends.run import TableSchema
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.clock import new_id
from holdfast.errors import ClosedError, InvalidArgumentError, SchemaMismatchError
from holdfast.mvcc import VersionedStore
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.ttl.expiry import KeyRows
from holdfast.spark_integration.vectorised.arrow_with_state import ArrowWithState, StateColumns
from holdfast.spark_integration.vectorised.batch import ShardBatch, group_rows
from holdfast.spark_integration.vectorised.groups import Groups
from holdfast.spark_integration.vectorised.state import ShardState
from holdfast.testing.state_rows import TYPES, VALUE_TYPES, hash_of, plain
from tests.unit.spark_integration.embedded_shard import FunctionShard

KEYS = pa.schema([("user", pa.string())])
STATE = pa.schema([("n", pa.int64()), ("name", pa.string())])


class Shard:
    """An embedded shard whose micro-batches bring given users."""

    def __init__(self, directory: Path, keys: pa.Schema = KEYS, state: pa.Schema = STATE) -> None:
        self.keys, self.state_types = keys, state
        self.schema = TableSchema.of(STATE_TABLE, keys, state)
        self.store = VersionedStore(MemoryBackend(directory, {STATE_TABLE: self.schema}, new_id))
        self.pointer: Pointer | None = None

    def begin(self, users: list[Any]) -> None:
        """Begin a micro-batch; its state and the keys as a function sees them are attributes."""
        rows = pa.table({self.keys.names[0]: pa.array(users, self.keys.types[0])})
        hashes = np.array([hash_of(plain(user)) for user in users], np.uint64)
        found, self.shown, self.groups = group_rows(rows, self.schema.conform(rows, "key"), hashes, self.keys)
        self.transaction = self.store.begin(self.pointer)
        self.state = ShardState(KeyRows(self.transaction, STATE_TABLE, found), self.state_types)

    def commit(self) -> None:
        self.pointer = self.transaction.commit()

    def read(self) -> dict[Any, Any]:
        """Return by key its state as a tuple; keys without state are left out."""
        rows = self.state.get().to_pylist()
        exists = self.state.exists().to_pylist()
        users = self.shown.column(0).to_pylist()
        return {u: tuple(r.values()) for u, r, e in zip(users, rows, exists, strict=True) if e}


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    shard = Shard(tmp_path)
    shard.begin(["ann", "bob", "ann", None])
    return shard


def in_order(shard: Shard, values: dict[Any, Any]) -> list[Any]:
    """Return the values in the order of the batch's keys."""
    return [values[user] for user in shard.shown.column(0).to_pylist()]


def test_what_was_never_written_is_null_and_absent(shard: Shard) -> None:
    """A shard that is called for the first time has no committed state."""
    assert shard.state.get() == pa.table({"n": pa.nulls(3, pa.int64()), "name": pa.nulls(3, pa.string())})
    assert shard.state.get().schema == STATE
    assert shard.state.exists().to_pylist() == [False] * 3


def test_a_null_state_is_not_an_absent_one(shard: Shard) -> None:
    shard.state.put(n=pa.nulls(3), name=[None] * 3)
    shard.commit()
    shard.begin(["ann", "cem"])
    assert shard.read() == {"ann": (None, None)}
    assert shard.state.get().to_pylist() == [{"n": None, "name": None}] * 2


def test_a_mask_chooses_keys_and_null_in_it_is_false(shard: Shard) -> None:
    mask = in_order(shard, {"ann": True, "bob": None, None: False})
    shard.state.put(n=[7] * 3, name=["x"] * 3, where=mask)
    assert shard.read() == {"ann": (7, "x")}
    shard.state.put(
        pa.table({"name": ["y"] * 3, "n": [8] * 3}),
        where=pa.array(in_order(shard, {"ann": False, "bob": True, None: True})),
    )
    assert shard.read() == {"ann": (7, "x"), "bob": (8, "y"), None: (8, "y")}
    shard.state.delete(where=np.array(in_order(shard, {"ann": True, "bob": False, None: True})))
    assert shard.read() == {"bob": (8, "y")}
    shard.commit()
    shard.begin(["ann", "bob", None])
    assert shard.read() == {"bob": (8, "y")}


@pytest.mark.parametrize(
    "mask", [[None, None, None], [False] * 3, pa.nulls(3), pa.chunked_array([[False], [None, False]])]
)
def test_a_mask_of_nothing_writes_nothing(shard: Shard, mask: object) -> None:
    shard.state.put(n=[7] * 3, name=["x"] * 3, where=mask)
    shard.state.delete(where=mask)
    assert shard.read() == {}
    shard.commit()
    assert shard.pointer is None, "nothing was written, so there is no version"


def test_an_empty_micro_batch_reads_and_writes_nothing(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    shard.begin([])
    assert shard.state.get().num_rows == len(shard.state.exists()) == 0
    shard.state.put(n=[], name=[])
    shard.state.put(n=pa.array([], pa.int64()), name=[], where=[])
    shard.state.delete(where=[])
    shard.state.delete()
    shard.commit()
    assert shard.pointer is None


def test_columns_may_come_as_arrow_numpy_pandas_or_lists(shard: Shard) -> None:
    for n in (
        pa.array([4] * 3),
        pa.chunked_array([[4], [4, 4]]),
        np.full(3, 4),
        pd.Series([4] * 3),
        [4] * 3,
        (4, 4, 4),
        pa.array([4] * 3, pa.int8()),
    ):
        shard.state.put(n=n, name=pa.array(["x"] * 3).dictionary_encode())
        assert set(shard.read().values()) == {(4, "x")}
        shard.state.delete()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    "put",
    [
        lambda state, n: state.put(n=n),
        lambda state, n: state.put(n=pa.array(n)),
        lambda state, n: state.put(pa.table({"n": n})),
        lambda state, n: state.put(pa.RecordBatch.from_pydict({"n": n})),
    ],
    ids=["column", "array", "table", "batch"],
)
def test_what_is_put_is_put(tmp_path: Path, put: Callable[[ShardState, Any], None], reads: bool) -> None:
    """What the function does later to its arrays of numpy does not change the state."""
    shard = Shard(tmp_path, state=pa.schema([("n", pa.int64())]))
    shard.begin(["ann", "bob"])
    n = np.array([1, 2])
    put(shard.state, n)
    if reads:
        shard.state.get()
    n *= 0
    for _ in range(2):
        assert sorted(shard.read().values()) == [(1,), (2,)]
        shard.commit()
        shard.begin(["ann", "bob"])


def test_a_column_called_where_is_given_in_a_table(tmp_path: Path) -> None:
    shard = Shard(tmp_path, state=pa.schema([("where", pa.string()), ("self", pa.int64())]))
    shard.begin(["ann"])
    shard.state.put(pa.table({"where": ["here"], "self": [1]}))
    assert shard.read() == {"ann": ("here", 1)}


ONES, XS = [1] * 3, ["x"] * 3


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"n": ONES}, SchemaMismatchError, "missing=.*name"),
        ({}, SchemaMismatchError, "missing=.*n.*name"),
        ({"n": ONES, "name": XS, "more": ONES}, SchemaMismatchError, "unexpected=.*more"),
        ({"n": ["1"] * 3, "name": XS}, SchemaMismatchError, "'n' has a different type.*given=string expected=int64"),
        ({"n": [1.5] * 3, "name": XS}, SchemaMismatchError, "'n' cannot be stored"),
        ({"n": np.full(3, 2**63, np.uint64), "name": XS}, SchemaMismatchError, "'n' cannot be stored"),
        ({"n": [2**64] * 3, "name": XS}, InvalidArgumentError, "'n' must be an array"),
        ({"n": ONES, "name": [b"x"] * 3}, SchemaMismatchError, "'name' has a different type"),
        ({"n": [1] * 2, "name": XS}, InvalidArgumentError, "'n' must have one value for each key, values=2 keys=3"),
        ({"n": [1] * 4, "name": XS}, InvalidArgumentError, "'n' must have one value for each key, values=4 keys=3"),
        ({"n": 1, "name": XS}, InvalidArgumentError, "'n' must be an array with one value for each key"),
        ({"n": [1, "a", 2], "name": XS}, InvalidArgumentError, "'n' must be an array"),
        ({"n": ONES, "name": XS, "where": [1, 0, 1]}, InvalidArgumentError, "where must be boolean, given=int64"),
        ({"n": ONES, "name": XS, "where": True}, InvalidArgumentError, "where must be an array"),
        ({"n": ONES, "name": XS, "where": [True]}, InvalidArgumentError, "where must have one value for each key"),
    ],
)
def test_columns_that_do_not_fit_are_named_and_nothing_is_written(
    shard: Shard, columns: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shard.state.put(**columns)
    assert shard.read() == {}


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (pa.table({"n": ONES}), SchemaMismatchError, "expected=.*name"),
        (pa.table({"n": ["1"] * 3, "name": XS}), SchemaMismatchError, "'n' has a different type"),
        (pa.table({"n": [1], "name": ["x"]}), InvalidArgumentError, "one row for each key, rows=1 keys=3"),
        (pd.DataFrame({"n": ONES, "name": XS}), InvalidArgumentError, "given=DataFrame"),
        ({"n": ONES, "name": XS}, InvalidArgumentError, "given=dict"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(shard: Shard, table: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        shard.state.put(table)
    assert shard.read() == {}


def test_a_table_and_columns_together_are_refused(shard: Shard) -> None:
    with pytest.raises(InvalidArgumentError, match="not both"):
        shard.state.put(pa.table({"n": [1] * 3, "name": ["x"] * 3}), n=[1] * 3)


def test_state_that_is_kept_beyond_the_call_is_closed(shard: Shard) -> None:
    """A function that keeps its batch must not write into a later version."""
    shard.state.put(n=[1] * 3, name=["x"] * 3)
    shard.commit()
    with pytest.raises(ClosedError):
        shard.state.put(n=[1] * 3, name=["x"] * 3)


@pytest.mark.parametrize(
    ("data_type", "one", "other"), TYPES, ids=lambda v: str(v) if isinstance(v, pa.DataType) else ""
)
def test_keys_of_every_type_come_back(tmp_path: Path, data_type: pa.DataType, one: Any, other: Any) -> None:
    shard = Shard(tmp_path, keys=pa.schema([("k", data_type)]), state=pa.schema([("n", pa.int64())]))
    shard.begin([one, other, None, one])
    assert shard.shown.schema.types == [data_type]
    assert {plain(v) for v in shard.shown.column(0).to_pylist()} == {plain(v) for v in (one, other, None)}
    shard.state.put(n=pa.array(range(3)))
    shard.commit()
    shard.begin([other, one])
    assert shard.state.exists().to_pylist() == [True, True]


@pytest.mark.parametrize(
    ("data_type", "one", "other"), [*TYPES, *VALUE_TYPES], ids=lambda v: str(v) if isinstance(v, pa.DataType) else ""
)
def test_state_of_every_type_comes_back(tmp_path: Path, data_type: pa.DataType, one: Any, other: Any) -> None:
    shard = Shard(tmp_path, state=pa.schema([("v", data_type)]))
    shard.begin(["a", "b", "c"])
    values = pa.array([one, other, None], data_type)
    shard.state.put(v=values)
    for _ in range(2):
        read = shard.state.get()
        assert read.schema.types == [data_type]
        assert [plain(v) for v in read.column("v").to_pylist()] == [plain(v) for v in values.to_pylist()]
        shard.commit()
        shard.begin(["a", "b", "c"])


def test_timestamps_of_another_zone_are_the_same_instants(tmp_path: Path) -> None:
    utc = pa.timestamp("us", "UTC")
    shard = Shard(tmp_path, keys=pa.schema([("at", utc)]), state=pa.schema([("seen", utc)]))
    at = dt.datetime(2024, 11, 3, 5, 30, tzinfo=dt.UTC)  # 01:30 in New York, twice that day
    shard.begin([at, at + dt.timedelta(hours=1)])
    assert len(shard.groups) == 2
    shard.state.put(seen=shard.shown.column("at").cast(pa.timestamp("us", "America/New_York")))
    assert shard.state.get().column("seen").to_pylist() == shard.shown.column("at").to_pylist()


@pytest.mark.parametrize("by_name", [dict, pa.table])
def test_keys_are_put_before_columns_that_have_a_row_for_each(tmp_path: Path, by_name: Callable[..., Any]) -> None:
    """A function may return its new columns only; with another number of rows it must return the keys, too."""

    def count(batch: ShardBatch) -> Any:
        return by_name({"n": batch.groups.count()})

    output = pa.schema([("user", pa.string()), ("n", pa.int64())])
    rows = pa.table({"user": ["ann", "bob", "ann"]})
    states = {"state": StateColumns(pa.schema([("n", pa.int64())]), None)}
    operator = ArrowWithState(count, KEYS, output, states, "None")
    found = FunctionShard(tmp_path / "one", operator, ["user"]).run(rows)
    assert sorted((row["user"], row["n"]) for row in found) == [("ann", 2), ("bob", 1)]
    few = ArrowWithState(lambda batch: by_name({"n": [1]}), KEYS, output, states, "None")
    with pytest.raises(InvalidArgumentError, match=r"return the key columns.*missing=\['user'\] rows=1 keys=2"):
        FunctionShard(tmp_path / "two", few, ["user"]).run(rows)


def test_columns_of_different_lengths_are_refused(tmp_path: Path) -> None:
    states = {"state": StateColumns(pa.schema([("n", pa.int64())]), None)}
    odd = ArrowWithState(lambda _: {"user": ["a"], "n": [1, 2]}, KEYS, KEYS, states, "None")
    with pytest.raises(InvalidArgumentError, match="different lengths"):
        FunctionShard(tmp_path, odd, ["user"]).run(pa.table({"user": ["ann"]}))


KEY = pa.schema([("k", pa.string())])
SCHEMA = TableSchema.of("state", KEY, pa.schema([("n", pa.int64())]))
GROUP_KEYS: list[str | None] = [None, "", "a", "b", "c"]

#: Values of each type that can be compared, the awkward ones among them.
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.one_of(st.floats(), st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf])),
    pa.decimal128(38, 2): st.decimals(-(10**30), 10**30, places=2),
    pa.bool_(): st.booleans(),
    pa.date32(): st.dates(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(dt.UTC)),
    pa.timestamp("us"): st.datetimes(),
    pa.duration("us"): st.timedeltas(dt.timedelta(-(10**6)), dt.timedelta(10**6)),
    pa.string(): st.text(max_size=3),
    pa.binary(): st.binary(max_size=3),
}


def groups_of(keys: list[str | None], **columns: pa.Array) -> tuple[Groups, list[str | None]]:
    """Return the groups of these rows and their keys; half of all keys share a hash."""
    rows = pa.table({"k": pa.array(keys, pa.string()), **columns})
    hashes = np.array([GROUP_KEYS.index(k) % 2 for k in keys], np.uint64)
    found, shown, groups = group_rows(rows, SCHEMA.conform(rows.select(["k"]), "key"), hashes, KEY)
    assert len(groups) == len(found) == shown.num_rows
    return groups, shown.column("k").to_pylist()


def test_no_rows_give_no_groups_in_the_right_types() -> None:
    for data_type in VALUES:
        groups, _ = groups_of([], v=pa.array([], data_type))
        assert len(groups) == len(groups.index) == len(groups.count()) == len(groups.count("v")) == 0
        assert groups.count().type == groups.count("v").type == pa.int64()
        for found in (groups.min("v"), groups.max("v"), groups.first("v"), groups.last("v"), groups.last("v", "v")):
            assert (len(found), found.type) == (0, data_type)
    groups, _ = groups_of([], n=pa.array([], pa.int32()), x=pa.array([], pa.float32()))
    assert groups.sum("n").type == pa.int64()
    assert groups.sum("x").type == groups.mean("n").type == pa.float64()


@pytest.mark.parametrize("rows_each", [1, 2, 8, 9, 100])
def test_sums_are_exact_though_those_of_all_keys_together_are_not(rows_each: int) -> None:
    """With few rows a key, sums are differences of a running total, which passes the largest integer."""
    value = (2**63 - 1) // rows_each
    groups, _ = groups_of(["a", "b", "c"] * rows_each, v=pa.array([value] * 3 * rows_each))
    assert groups.sum("v").to_pylist() == [value * rows_each] * 3


@pytest.mark.parametrize(
    ("values", "reduce", "reduced"),
    [
        (pa.array([-(2**62)] * 2), Groups.sum, -(2**63)),
        (pa.array([2**53 + 1] * 2), Groups.mean, float(2**53)),
        (pa.array([Decimal("9.9")] * 2, pa.decimal128(2, 1)), Groups.sum, Decimal("19.8")),
    ],
    ids=["the least int64", "large integers", "short decimals"],
)
def test_what_fits_though_it_looks_too_large(
    values: pa.Array, reduce: Callable[..., pa.Array], reduced: object
) -> None:
    assert reduce(groups_of(["a", "a"], v=values)[0], "v").to_pylist() == [reduced]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([2**63 - 1, 1]),
        pa.array([2**64 - 1, 0], pa.uint64()),
        pa.array([Decimal("9" * 38), Decimal("9" * 38)], pa.decimal128(38, 0)),
    ],
)
def test_a_sum_that_does_not_fit_is_refused_and_says_what_to_do(values: pa.Array) -> None:
    """Arrow and numpy would both wrap around in silence."""
    groups, _ = groups_of(["a", "a"], v=values)
    with pytest.raises(InvalidArgumentError, match="float64"):
        groups.sum("v")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.sum("s"), "need numeric values"),
        (lambda g: g.mean("s"), "need numeric values"),
        (lambda g: g.mean("nested"), "need numeric values"),
        (lambda g: g.max("nested"), "have no max"),
        (lambda g: g.last("s", order_by="nested"), "have no order"),
        (lambda g: g.last("s", order_by=pa.nulls(2, pa.month_day_nano_interval())), "have no order"),
        (lambda g: g.sum("absent"), "no column 'absent'"),
        (lambda g: g.sum("nestde"), "no column 'nestde'; did you mean 'nested'"),
        (lambda g: g.count(pa.array([1])), "one value for each input row"),
    ],
)
def test_what_cannot_be_reduced_is_named(call: Callable[[Groups], object], message: str) -> None:
    groups, _ = groups_of(["a", "b"], s=pa.array(["1", "2"]), nested=pa.array([[1], [2]]))
    with pytest.raises(InvalidArgumentError, match=message):
        call(groups)


def test_computed_columns_may_come_in_chunks_or_from_numpy() -> None:
    groups, order = groups_of(["b", "a", "b"], v=pa.array([1, 2, 3]))
    wanted = [{"a": 2, "b": 4}[k or ""] for k in order]
    assert groups.sum(pa.chunked_array([[1], [2, 3]])).to_pylist() == wanted
    assert groups.sum(np.array([1, 2, 3])).to_pylist() == wanted


def test_computed_text_may_come_in_views() -> None:
    groups, order = groups_of(["b", "a", "b"], v=pa.array([1, 2, 3]))
    text = pa.array(["x", "y", "w"], pa.string_view())
    assert groups.min(text).to_pylist() == [{"a": "y", "b": "w"}[k or ""] for k in order]
    assert groups.first("v", order_by=text).to_pylist() == [{"a": 2, "b": 3}[k or ""] for k in order]
    assert groups.last(text).to_pylist() == [{"a": "y", "b": "w"}[k or ""] for k in order]


STRUCT = pa.struct([("x", pa.float64()), ("s", pa.string()), ("n", pa.int8())])
STRUCTS = st.fixed_dictionaries(
    {
        "x": st.sampled_from([None, -math.inf, -0.0, 0.0, 1.0, math.nan]),
        "s": st.sampled_from([None, "", "a", "ä"]),
        "n": st.none() | st.integers(-128, 127),
    }
)


def place_of(struct: dict[str, Any]) -> list[Any]:
    """Return what orders structs in Python as Spark orders them."""
    return [(0, 0) if v is None else (2, 0) if v != v else (1, v) for v in map(struct.get, ("x", "s", "n"))]


@given(st.lists(st.tuples(st.sampled_from(GROUP_KEYS), st.none() | STRUCTS), max_size=30))
def test_structs_are_compared_field_by_field(rows: list[tuple[str | None, dict[str, Any] | None]]) -> None:
    """Null is the least value of a field and NaN the largest; structs that are null themselves are left out."""
    groups, keys = groups_of([key for key, _ in rows], v=pa.array([struct for _, struct in rows], STRUCT))
    for key, least, most in zip(keys, groups.min("v").to_pylist(), groups.max("v").to_pylist(), strict=True):
        places = sorted(place_of(struct) for k, struct in rows if k == key and struct is not None)
        assert [place_of(struct) for struct in (least, most) if struct is not None] == places[:1] + places[-1:]


@pytest.mark.parametrize("t", VALUES, ids=str)
def test_values_are_listed(t: pa.DataType) -> None:
    @given(
        st.lists(
            st.tuples(st.sampled_from(GROUP_KEYS), st.none() | VALUES[t], st.none() | st.integers(-2, 2)), max_size=9
        )
    )
    def check(rows: list[tuple[str | None, Any, int | None]]) -> None:
        values = pa.array([value for _, value, _ in rows], t)
        shown = values.to_pylist()
        groups, keys = groups_of(
            [key for key, _, _ in rows], v=values, by=pa.array([by for _, _, by in rows], pa.int64())
        )
        groups = groups.with_empty(1)
        collected = [
            [v for (k, _, _), v in zip(rows, shown, strict=True) if k == key and v is not None] for key in keys
        ]
        assert repr(groups.collect("v").to_pylist()) == repr([*collected, []])
        assert groups.collect("v").type == pa.list_(t)
        largest = [sorted(own, key=_above, reverse=True)[:2] for own in collected]
        assert repr(groups.top("v", 2).to_pylist()) == repr([*largest, []])
        by_other = []
        for key in keys:
            own = [(by, v) for (k, _, by), v in zip(rows, shown, strict=True) if k == key and by is not None]
            chosen = sorted(own, key=lambda pair: pair[0], reverse=True)[:2]
            by_other.append([v for _, v in chosen if v is not None])
        assert repr(groups.top("v", 2, order_by="by").to_pylist()) == repr([*by_other, []])

    check()


def _above(value: Any) -> Any:
    """Return what sorts as Spark does; -0.0 is 0.0."""
    return (math.isnan(value), 0 if math.isnan(value) else value) if isinstance(value, float) else value


def test_nothing_is_no_number_of_values() -> None:
    groups, _ = groups_of(["a"], v=pa.array([1]))
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        groups.top("v", 0)
    with pytest.raises(InvalidArgumentError, match="no order"):
        groups.top(pa.array([[1]]), 1)
