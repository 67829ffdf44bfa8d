"""States of aggregates, and of `top` and `latest`, beside the same in plain Python."""

from __future__ import annotations

import datetime as dt
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import ROUND_HALF_UP, Decimal, localcontext
from functools import cmp_to_key, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.backends.arrow.rows import RowOrder
from holdfast.backends.base import Backend
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.operators.accumulators import (
    Accumulator,
    Collected,
    Count,
    Extreme,
    Mean,
    Moments,
    Own,
    Picked,
    PickedBy,
    Sum,
    divided,
    lifted,
    reduced,
    results,
)
from holdfast.spark_integration.operators.deduplication import DeduplicationByTime
from holdfast.spark_integration.operators.sketches import Ranked, Registers
from holdfast.spark_integration.operators.top import Emits, Latest, NewestRows, Ranking, Top
from holdfast.spark_integration.shard.operator import ShardFunction
from holdfast.spark_integration.transport.packed import BLOB, HASH, pack_rows, read_blob
from holdfast.spark_integration.transport.routes import routes_of
from holdfast.spark_integration.ttl.ends import Ttl
from tests.unit.spark_integration.embedded_shard import FunctionShard


def _valid(rows: list[Any]) -> list[Any]:
    return [row for row in rows if row is not None]


def _of_valid(function: Callable[[list[Any]], Any], least: int = 1) -> Callable[[list[Any]], Any]:
    """Return what computes a value of the rows that are not null, or null of fewer than `least`."""
    return lambda rows: function(_valid(rows)) if len(_valid(rows)) >= least else None


def _mean(rows: list[Any]) -> Any:
    return sum(rows) / len(rows)


def _by_field(row: dict[str, Any]) -> list[Any]:
    return [[] if row[name] is None else [row[name]] for name in ("x", "s")]


def _by(which: Any, rows: list[Any]) -> Any:
    ranked = [row for row in rows if row["by"] is not None]
    return which(ranked, key=lambda row: row["by"])["value"] if ranked else None


def _estimated(rows: list[Any]) -> int:
    """Return how many hashes are distinct, by 512 registers of which most are empty."""
    found: dict[int, int] = {}
    for digits in [f"{row % 2**64:064b}" for row in _valid(rows)]:
        found[int(digits[:9], 2)] = max((digits[9:] + "1").index("1") + 1, found.get(int(digits[:9], 2), 0))
    return round(512 * math.log(512 / (512 - len(found))))


def _at(percentage: float, rows: list[Any]) -> Any:
    return sorted(rows)[max(math.ceil(percentage * len(rows)), 1) - 1]


def _spread(**given: Any) -> Own:
    """Return the distance of the largest value from the smallest one, as a user would compute it."""
    functions = {
        "init": lambda values: {"high": values, "low": values},
        "merge": lambda groups, states: {"low": groups.min(states["low"]), "high": groups.max(states["high"])},
        "finish": lambda states: pc.subtract(states["high"], states["low"]),
    }
    return Own("a", "v", pa.int64(), pa.schema({"low": pa.int64(), "high": pa.int64()}), **{**functions, **given})


def at(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


TIME, BERLIN = pa.timestamp("us", "UTC"), pa.timestamp("us", "Europe/Berlin")
SMALL, SUM = pa.decimal128(10, 2), pa.decimal128(20, 2)
STRUCT, WORDS = pa.struct({"x": pa.int32(), "s": pa.string()}), pa.list_(pa.string())
PAIR = pa.struct({"value": WORDS, "by": TIME})
INTS, TEXTS = st.none() | st.integers(-9, 9), st.none() | st.text(max_size=3)
FLOATS = st.none() | st.integers(-40, 40).map(lambda n: n / 4)
DECIMALS = st.none() | st.decimals(-99, 99, places=2)
TIMES = st.none() | st.integers(0, 9).map(at)
STRUCTS = st.none() | st.fixed_dictionaries({"x": st.none() | st.integers(0, 2), "s": st.none() | st.text(max_size=1)})
#: Values and what they are picked by, of which equal ones have equal values.
PAIRS = st.none().map(lambda _: {"value": ["never"], "by": None}) | st.integers(0, 9).map(
    lambda n: {"value": [str(n)] if n % 3 else None, "by": at(n)}
)
ODD = st.sampled_from([None, math.nan, -math.nan, 0.0, -0.0, 1.5])
PERCENTAGES = (0.0, 0.9, 1.0)
#: Accumulators of a column ``v``, the type of the column, its values, and the same in plain Python.
KINDS: dict[str, tuple[Accumulator, pa.DataType, st.SearchStrategy[Any], Any]] = {
    "count rows": (Count("a", None), pa.int64(), INTS, len),
    "count": (Count("a", "v"), pa.int64(), INTS, lambda rows: len(_valid(rows))),
    "sum": (Sum("a", "v", pa.int64()), pa.int32(), INTS, _of_valid(sum)),
    "sum of floats": (Sum("a", "v", pa.float64()), pa.float32(), FLOATS, _of_valid(sum)),
    "sum of decimals": (Sum("a", "v", SUM), SMALL, DECIMALS, _of_valid(sum)),
    "mean": (Mean("a", "v", pa.float64(), pa.float64()), pa.float64(), FLOATS, _of_valid(_mean)),
    "mean of decimals": (
        *(Mean("a", "v", SUM, pa.decimal128(14, 6)), SMALL, DECIMALS),
        _of_valid(lambda rows: _mean(rows).quantize(Decimal("1e-6"), ROUND_HALF_UP)),
    ),
    "min": (Extreme("a", "v", pa.string(), "min"), pa.string(), TEXTS, _of_valid(min)),
    "max": (Extreme("a", "v", pa.bool_(), "max"), pa.bool_(), st.none() | st.booleans(), _of_valid(max)),
    "max of structs": (Extreme("a", "v", STRUCT, "max"), STRUCT, STRUCTS, _of_valid(partial(max, key=_by_field))),
    "first": (Picked("a", "v", pa.string(), "first", False), pa.string(), TEXTS, lambda rows: rows[0]),
    "last": (Picked("a", "v", pa.int64(), "last", False), pa.int64(), INTS, lambda rows: rows[-1]),
    "first not null": (Picked("a", "v", pa.int64(), "first", True), pa.int64(), INTS, _of_valid(lambda rows: rows[0])),
    "last not null": (Picked("a", "v", pa.int64(), "last", True), pa.int64(), INTS, _of_valid(lambda rows: rows[-1])),
    "min by": (PickedBy("a", "v", WORDS, TIME, "min"), PAIR, PAIRS, partial(_by, min)),
    "max by": (PickedBy("a", "v", WORDS, TIME, "max"), PAIR, PAIRS, partial(_by, max)),
    "list": (Collected("a", "v", pa.list_(WORDS), "list"), WORDS, st.none() | st.lists(TEXTS, max_size=2), _valid),
    "set": (Collected("a", "v", pa.list_(BERLIN), "set"), TIME, TIMES, lambda rows: list(dict.fromkeys(_valid(rows)))),
    "count of floats": (
        *(Collected("a", "v", pa.list_(pa.float32()), "count"), pa.float32(), ODD),
        lambda rows: len({str(abs(row)) for row in _valid(rows)}),
    ),
    "estimated count": (Registers("a", "v", 9), pa.int64(), INTS | st.integers(-(2**63), 2**63 - 1), _estimated),
    "median": (Ranked("a", "v", SMALL, SMALL, (0.5,), 1000), SMALL, DECIMALS, _of_valid(partial(_at, 0.5))),
    "percentiles": (
        *(Ranked("a", "v", pa.float32(), pa.list_(pa.float32()), PERCENTAGES, 1000), pa.float32(), FLOATS),
        _of_valid(lambda rows: [_at(p, rows) for p in PERCENTAGES]),
    ),
    "own": (_spread(), pa.int32(), INTS, _of_valid(lambda rows: max(rows) - min(rows))),
    "variance": (Moments("a", "v", True, False), pa.float64(), FLOATS, _of_valid(statistics.variance, 2)),
    "deviation": (Moments("a", "v", False, True), pa.int64(), INTS, _of_valid(statistics.pstdev)),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_states_reduced_in_any_pieces_are_those_of_all_rows(kind: str, data: st.DataObject) -> None:
    """However rows are spread over micro-batches, a group's value is that of all its rows in their order."""
    accumulator, data_type, values, plain = KINDS[kind]
    rows: dict[int, list[Any]] = {}
    states = None
    groups = np.zeros(0, np.int64)
    for batch in data.draw(
        st.lists(st.lists(st.tuples(st.integers(0, 3), values), min_size=1), min_size=1, max_size=4)
    ):
        for group, value in batch:
            rows.setdefault(group, []).append(value)
        new = lifted([accumulator], pa.table({"v": pa.array([value for _, value in batch], data_type)}))
        states = new if states is None else pa.concat_tables([states, new])
        groups = np.concatenate([groups, [group for group, _ in batch]])
        order = np.argsort(groups, kind="stable")
        states = reduced([accumulator], states, RowOrder(order, np.append(True, np.diff(groups[order]) != 0)))
        groups = np.unique(groups)
    assert states is not None
    found = dict(zip(groups.tolist(), results([accumulator], states)[accumulator.name].to_pylist(), strict=True))
    for group, expected in {group: plain(of) for group, of in rows.items()}.items():
        if isinstance(expected, float):
            assert math.isclose(found[group], expected, rel_tol=1e-9, abs_tol=1e-9)
        else:
            assert found[group] == expected


def _of_one_group(accumulator: Accumulator, states: list[pa.Table]) -> pa.Table:
    rows = pa.concat_tables(states)
    return reduced([accumulator], rows, RowOrder(np.arange(len(rows)), np.arange(len(rows)) == 0))


@given(st.lists(st.lists(st.integers(-50, 50), min_size=1, max_size=60), min_size=1, max_size=8), st.data())
def test_a_percentile_is_off_by_at_most_its_fraction_of_the_ranks(
    batches: list[list[int]], data: st.DataObject
) -> None:
    """However states meet: each with the one before it, or sessions that grow together."""
    percentages = (0.0, 0.1, 0.5, 0.77, 1.0)
    accuracy = data.draw(st.sampled_from([1, 2, 5, 20]))
    one = Ranked("a", "v", pa.int64(), pa.list_(pa.int64()), percentages, accuracy)
    states = [_of_one_group(one, [lifted([one], pa.table({"v": batch}))]) for batch in batches]
    while len(states) > 1:
        number = data.draw(st.integers(2, len(states)))
        states = [_of_one_group(one, states[:number]), *states[number:]]
    rows = sorted(value for batch in batches for value in batch)
    for percentage, value in zip(percentages, results([one], states[0])["a"][0].as_py(), strict=True):
        rank, off = max(math.ceil(percentage * len(rows)), 1), len(rows) // accuracy
        assert value in rows[max(rank - off, 1) - 1 : rank + off]


@pytest.mark.parametrize("bits", [4, 9, 14])
@pytest.mark.parametrize("n", [100, 1000, 2000, 5000, 100_000])
def test_an_estimate_is_near(bits: int, n: int) -> None:
    """Within four standard deviations, from the few values that registers count to the many that leave none empty."""
    one = Registers("a", "v", bits)
    hashes = np.random.default_rng(n).integers(-(2**63), 2**63, n)
    found = results([one], _of_one_group(one, [lifted([one], pa.table({"v": hashes}))]))["a"][0].as_py()
    assert found == pytest.approx(n, rel=4 * 1.04 / 2 ** (bits / 2))


@given(
    st.lists(st.tuples(st.none() | st.integers(-(10**30), 10**30), st.none() | st.integers(1, 10**9)), max_size=20),
    st.integers(0, 5),
)
def test_decimals_are_divided_half_up(pairs: list[tuple[int | None, int | None]], offset: int) -> None:
    """As Spark rounds averages, away from zero, for negative ones, too; also of a column that is part of another."""
    with localcontext() as exact_context:
        exact_context.prec = 80
        totals = pa.array([None if n is None else Decimal(n).scaleb(-2) for n, _ in pairs], pa.decimal128(38, 2))
        counts = pa.array([n for _, n in pairs], pa.int64())
        found = divided(totals.slice(offset), counts.slice(offset), pa.decimal128(38, 6)).to_pylist()
        for value, (total, count) in zip(found, pairs[offset:], strict=True):
            if total is None or count is None:
                assert value is None
            else:
                exact = abs(total) * 10**4
                assert abs(value.scaleb(6)) == (2 * exact + count) // (2 * count)
                assert value == 0 or (value < 0) == (total < 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"init": lambda values: values}, "init of aggregate 'a' must return a dict"),
        ({"init": lambda values: {"low": values}}, "init of aggregate 'a' must return a dict.*'high'"),
        (
            {"init": lambda values: {"low": values, "high": ["x", "y"]}},
            "init of aggregate 'a' returned a column that does not fit",
        ),
        ({"merge": lambda _, states: {"low": states["low"], "high": [1]}}, "merge .* one value for each.*expected=1"),
        ({"init": lambda values: {"low": values, "high": object()}}, "does not fit its type.*column=a.high"),
        ({"init": lambda values: {"low": values, "high": [1, 2**70]}}, "does not fit its type.*column=a.high"),
        ({"finish": lambda _: []}, "finish of aggregate 'a' must return one value for each row.*returned=0"),
    ],
)
def test_what_functions_of_a_user_return_is_checked(given: dict[str, Any], said: str) -> None:
    """Each error names the aggregate and the function."""
    one, order = _spread(**given), RowOrder(np.arange(2), np.array([True, False]))
    with pytest.raises(SchemaMismatchError, match=said):
        results([one], reduced([one], lifted([one], pa.table({"v": [1, 2]})), order))


def test_a_sum_that_its_type_cannot_hold_is_refused() -> None:
    """It would wrap around, or lose digits; the error names the output column."""
    one = Sum("total", "v", pa.decimal128(3, 0))
    states = lifted([one], pa.table({"v": pa.array([999, 1], pa.decimal128(3, 0))}))
    with pytest.raises(InvalidArgumentError, match=r"a sum has more digits than its type.*column=total"):
        reduced([one], states, RowOrder(np.arange(2), np.array([True, False])))
    two = Sum("total", "v", pa.int64())
    states = lifted([two], pa.table({"v": [2**63 - 1, 1]}))
    with pytest.raises(InvalidArgumentError, match=r"a sum overflows its type.*column=total"):
        reduced([two], states, RowOrder(np.arange(2), np.array([True, False])))


def test_an_average_with_too_many_digits_is_refused() -> None:
    """Its type has the scale that Spark gives it, and may lack digits before the point."""
    with pytest.raises(InvalidArgumentError, match="more digits than its type holds"):
        divided(pa.array([Decimal(1000)], pa.decimal128(10, 0)), pa.array([1]), pa.decimal128(5, 2))


def test_integers_that_no_double_has_are_rounded() -> None:
    """Spark casts a bigint to the nearest double, so such a value must not end the query."""
    rows = pa.table({"v": pa.array([(1 << 53) + 1, (1 << 62) + 3, None], pa.int64())})
    order = RowOrder(np.arange(3), np.array([True, False, False]))
    for one in (Mean("a", "v", pa.float64(), pa.float64()), Moments("a", "v", is_sample=True, is_root=False)):
        (found,) = results([one], reduced([one], lifted([one], rows), order)).values()
        values = [float((1 << 53) + 1), float((1 << 62) + 3)]
        expected = _mean(values) if isinstance(one, Mean) else statistics.variance(values)
        assert found[0].as_py() == pytest.approx(expected)


def test_a_sum_begins_with_0() -> None:
    """So that of -0.0 alone it is 0.0, as in Spark, whose sums begin with 0.0."""
    rows = pa.table({"v": pa.array([-0.0])})
    for one in (Sum("a", "v", pa.float64()), Mean("a", "v", pa.float64(), pa.float64())):
        (found,) = results(
            [one], reduced([one], lifted([one], rows), RowOrder(np.arange(1), np.array([True])))
        ).values()
        assert math.copysign(1, found[0].as_py()) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_variance_of_one_value_that_is_no_number_is_none(value: float) -> None:
    """It is NaN as in Spark, also before a second value comes."""
    rows, one = pa.table({"v": pa.array([value])}), Moments("a", "v", is_sample=False, is_root=False)
    (found,) = results([one], reduced([one], lifted([one], rows), RowOrder(np.arange(1), np.array([True])))).values()
    assert math.isnan(found[0].as_py())


ITEM = pa.field("item", pa.string())
#: What a row carries beside its key: what it is ranked by, when it was, and a value of each kind.
VALUES = pa.schema(
    [
        pa.field("price", pa.float64()),
        pa.field("level", pa.int32()),
        pa.field("at", TIME),
        pa.field("note", pa.struct([("text", pa.string()), ("tags", pa.list_(pa.string()))])),
        pa.field("by_name", pa.map_(pa.string(), pa.decimal128(10, 2))),
        pa.field("id", pa.int64()),
    ]
)
COLUMNS = pa.schema([ITEM, *VALUES])
Row = dict[str, Any]
PRICES = st.sampled_from([None, math.nan, math.inf, -0.0, 0.0, 1.5, 2.5, -math.inf])
ROWS = st.lists(
    st.tuples(st.sampled_from([None, "tea", "rice", ""]), PRICES, st.none() | st.integers(-2, 2), st.integers(1, 60)),
    max_size=12,
)
BATCHES = st.lists(st.tuples(ROWS, st.integers(0, 60)), min_size=1, max_size=6)
BY = st.sampled_from([(("price",), (False,)), (("price",), (True,)), (("level", "price"), (True, False))])


def rows_of(batches: list[tuple[list[Any], int]]) -> list[tuple[list[Row], int]]:
    """Return the rows of micro-batches, each with a number of its own, and the watermark, which never falls."""
    found: list[tuple[list[Row], int]] = []
    number = 0
    watermark = 0
    for rows, mark in batches:
        watermark = max(watermark, mark)
        made = []
        for item, price, level, ms in rows:
            number += 1
            note = None if number % 3 == 0 else {"text": f"n{number}", "tags": ["a", None] * (number % 2)}
            prices = [("x", Decimal(number))] if number % 2 else []
            made.append(
                {"item": item, "price": price, "level": level, "at": at(ms), "note": note, "by_name": prices}
                | {"id": number, "ms": ms}
            )
        found.append((made, watermark))
    return found


def table(rows: list[Row]) -> pa.Table:
    return pa.table({f.name: pa.array([row[f.name] for row in rows], f.type) for f in COLUMNS}, schema=COLUMNS)


def compared(ranking: Ranking, one: Row, other: Row) -> int:
    """Compare two rows as Spark sorts: null below everything, NaN above all numbers."""
    for name, ascends in zip(ranking.columns, ranking.ascending, strict=True):
        a, b = (_place(row[name]) for row in (one, other))
        if a != b:
            return (1 if a > b else -1) * (1 if ascends else -1)
    return 0


def _place(value: Any) -> tuple[int, Any]:
    if value is None:
        return (0, 0)
    return (2, 0) if isinstance(value, float) and math.isnan(value) else (1, value)


def ranked(ranking: Ranking, rows: list[Row]) -> list[Row]:
    return sorted(rows, key=cmp_to_key(lambda one, other: compared(ranking, one, other)))


def top(ranking: Ranking, places: int, emits: Emits, ttl: Ttl | None = None) -> Top:
    own = pa.field("place", pa.int32()) if emits == "list" else pa.field("change_type", pa.string())
    return Top(pa.schema([ITEM]), VALUES, pa.schema([ITEM, own, *VALUES]), ranking, places, emits, ttl)


def latest(ranking: Ranking, ttl: Ttl | None = None) -> Latest:
    return Latest(pa.schema([ITEM]), VALUES, COLUMNS, ranking, ttl)


@contextmanager
def shard(function: ShardFunction, backend: type[Backend] = MemoryBackend) -> Iterator[FunctionShard]:
    with tempfile.TemporaryDirectory() as folder:
        yield FunctionShard(Path(folder), function, ["item"], backend)


def plain(rows: list[Row], *names: str) -> list[str]:
    """Return rows for comparison, whatever their order, with values as Arrow shows them; NaN equals itself."""
    shown = zip(rows, table(rows).to_pylist(), strict=True)
    return sorted(repr({name: row[name] for name in names} | values) for row, values in shown)


@given(BATCHES, BY, st.integers(1, 3), st.sampled_from(["list", "changes"]))
def test_the_first_rows_of_each_key(batches: list[Any], by: Any, places: int, emits: Emits) -> None:
    ranking = Ranking(*by)
    held: dict[Any, list[Row]] = {}
    with shard(top(ranking, places, emits)) as one:
        for rows, watermark in rows_of(batches):
            before = {item: list(listed) for item, listed in held.items()}
            for item in {row["item"] for row in rows}:
                own = [row for row in rows if row["item"] == item]
                held[item] = ranked(ranking, [*held.get(item, []), *own])[:places]
            changed = [item for item, listed in held.items() if listed != before.get(item, [])]
            expected: list[Row] = []
            for item in changed:
                old = before.get(item, [])
                if emits == "list":
                    expected += [row | {"place": place} for place, row in enumerate(held[item], 1)]
                else:
                    expected += [row | {"change_type": "delete"} for row in old if row not in held[item]]
                    expected += [row | {"change_type": "insert"} for row in held[item] if row not in old]
            own_column = "place" if emits == "list" else "change_type"
            assert plain(one.run(table(rows), watermark), own_column) == plain(expected, own_column)
            stored = [row | {"place": p} for listed in held.values() for p, row in enumerate(listed, 1)]
            assert plain(one.stored("s.state"), "place") == plain(stored, "place")


@given(BATCHES, BY, st.booleans())
def test_the_newest_row_of_each_key(batches: list[Any], by: Any, is_combined: bool) -> None:
    """It is the same if a task sends no other."""
    ranking = Ranking(*by)
    function, held = latest(ranking), dict[Any, Row]()
    combiner = NewestRows(function.state, ("item",), ranking)
    with shard(function, FilesystemBackend) as one:
        for rows, watermark in rows_of(batches):
            before = dict(held)
            for item in {row["item"] for row in rows}:
                own = [row for row in rows if row["item"] == item]
                held[item] = ranked(ranking, [*([held[item]] if item in held else []), *own])[0]
            expected = [row for item, row in held.items() if before.get(item) is not row]
            sent = table(rows).append_column(HASH, pa.array([0] * len(rows), pa.int64()))
            assert plain(one.run(combiner.combined(sent) if is_combined else sent, watermark)) == plain(expected)
            assert plain(one.stored("state")) == plain([*held.values()])


def test_a_task_sends_the_newest_rows_of_keys_that_repeat() -> None:
    ranking = Ranking(("level",), (False,))
    rows = [dict.fromkeys(COLUMNS.names) | {"item": str(i % 10), "level": i, "id": i} for i in range(2000)]
    sent = table(rows).append_column(HASH, pa.array([i % 10 for i in range(2000)]))
    combiner = NewestRows(latest(ranking).state, ("item",), ranking)
    (packed,) = pack_rows(sent.to_batches(), routes_of(1), None, None, combiner)
    (blob,) = packed.column(BLOB).to_pylist()
    assert sorted(read_blob(blob).column("id").to_pylist()) == [*range(1990, 2000)]


@given(BATCHES, st.sampled_from([1, 7]), st.booleans())
@example([([("tea", 1.0, 1, 50)], 0), ([("tea", 1.0, 2, 10)] * 2, 0), ([], 30)], 7, True)  # its last end finds no rows
def test_keys_are_forgotten_by_event_time(batches: list[Any], ttl: int, is_top: bool) -> None:
    """A key goes once the watermark has passed its rows' times by the ttl: before the rows that come then."""
    ranking, remembers = Ranking(("level",), (False,)), Ttl(ttl * 1000, "at")
    held: dict[Any, list[Row]] = {}
    places = 2 if is_top else 1
    function: ShardFunction = top(ranking, 2, "list", remembers) if is_top else latest(ranking, remembers)
    with shard(function) as one:
        for rows, watermark in rows_of(batches):
            held = {i: r for i, r in held.items() if max(row["ms"] for row in r) + ttl > watermark}
            before = {item: list(listed) for item, listed in held.items()}
            for item in {row["item"] for row in rows}:
                own = [row for row in rows if row["item"] == item]
                held[item] = ranked(ranking, [*held.get(item, []), *own])[:places]
            expected = [row for i, listed in held.items() if listed != before.get(i, []) for row in listed]
            assert plain(one.run(table(rows), watermark)) == plain(expected)
            stored = one.stored("s.state" if is_top else "state")
            assert plain(stored) == plain([row for listed in held.values() for row in listed])
            ends = [max(row["ms"] for row in listed) + ttl for listed in held.values()]
            assert not ends or one.earliest_ms <= min(ends) - 1  # type: ignore[operator]
        one.run(table([]), 1000)
        assert one.stored("s.state" if is_top else "state") == one.stored("timers_by_due") == []
        assert one.earliest_ms is None


@pytest.mark.parametrize("is_top", [True, False])
def test_keys_are_forgotten_by_processing_time(is_top: bool) -> None:
    """Without a watermark the micro-batch's own time counts; the shard is not called for it."""
    ranking, remembers = Ranking(("level",), (False,)), Ttl(10_000, None)
    function: ShardFunction = top(ranking, 2, "list", remembers) if is_top else latest(ranking, remembers)
    [(rows, _)] = rows_of([([("tea", 1.0, 2, 1), ("rice", 1.0, 1, 1)], 0)])
    tea, rice = table(rows[:1]), table(rows[1:])
    with shard(function) as one:
        assert [len(one.run(tea, None, now)) for now in (100, 109)] == [1, 2 if is_top else 0]
        assert len(one.run(rice, None, 119 if is_top else 110)) == 1  # and tea goes
        assert [len(one.stored(name)) for name in ("s.state" if is_top else "state", "timers_by_due")] == [1, 1]
        assert one.earliest_ms is None


@given(BATCHES, st.sampled_from([1, 7, 25]))
def test_a_key_is_new_again_after_its_ttl_by_the_rows_own_times(batches: list[Any], ttl: int) -> None:
    """Whatever the watermark was when the row came: after a pause it lags behind, and duplicates would be lost."""
    held: dict[Any, int] = {}
    with shard(DeduplicationByTime(pa.schema([ITEM]), COLUMNS, Ttl(ttl * 1000, "at"))) as one:
        for rows, watermark in rows_of(batches):
            expected = []
            for row in sorted(rows, key=lambda row: row["ms"]):
                if row["ms"] >= held.get(row["item"], 0):
                    held[row["item"]] = row["ms"] + ttl
                    expected.append(row)
            assert plain(one.run(table(rows), watermark)) == plain(expected)
            held = {item: until for item, until in held.items() if until > watermark}
            assert {r["item"]: r["until"] for r in one.stored("state")} == {i: at(ms) for i, ms in held.items()}
            assert not held or one.earliest_ms <= min(held.values()) - 1  # type: ignore[operator]
        one.run(table([]), 1000)
        assert one.stored("state") == one.stored("timers_by_due") == []


def test_the_number_of_places_may_change_and_the_ranking_may_not() -> None:
    """A list that may be longer fills with the next rows; another order would be another list."""
    by_price, by_level = Ranking(("price",), (False,)), Ranking(("level",), (False,))
    for make in (lambda ranking: top(ranking, 3, "list"), latest):
        stored, configuration = StoredTables.of_first_run(make(by_price).tables()), make(by_price).configuration()
        make(by_price).require_restartable(stored, configuration)
        with pytest.raises(SchemaMismatchError, match="the ranking has changed"):
            make(by_level).require_restartable(stored, configuration)
    with tempfile.TemporaryDirectory() as folder:
        one = FunctionShard(Path(folder), top(by_price, 3, "list"), ["item"])
        [(rows, _)] = rows_of([([("tea", price, 0, 1) for price in (1.5, 2.5, 0.5)], 0)])
        one.run(table(rows))
        one.restart_with(top(by_price, 1, "changes"))
        [(more, _)] = rows_of([([("tea", 2.0, 0, 1)], 0)])
        assert [row["price"] for row in one.run(table(more))] == [1.5, 0.5]
        assert [row["price"] for row in one.stored("s.state")] == [2.5]
