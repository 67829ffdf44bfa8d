"""Types of keys, input, state and output, on Spark."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.streaming import StatefulProcessor
from pyspark.testing.objects import ExamplePoint, ExamplePointUDT

import holdfast
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.spark_versions import minor_version, version_of
from holdfast.spark_integration.transport.output import MANY_SHARDS
from tests.spark.conftest import Lab, count
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.tiers import cases

pytestmark = pytest.mark.spark


# Type: values in SQL; null is added to all.
PLAIN = {
    "boolean": "true, false",
    "tinyint": "cast(-128 as tinyint), cast(0 as tinyint)",
    "smallint": "cast(32767 as smallint), cast(0 as smallint)",
    "int": "-2147483648, 0, 1",
    "bigint": "9007199254740993L, 9007199254740992L, 0L, 1L",
    "float": "cast(0.0 as float), cast(-0.0 as float), cast('NaN' as float), cast('-Infinity' as float)",
    "double": "0.0D, -0.0D, double('NaN'), -double('NaN'), 0.1D",
    "decimal(38,18)": "cast('12345678901234567890.123456789012345678' as decimal(38,18)), cast(0 as decimal(38,18))",
    "string": "'', 'a', 'ä', 'A', ' a'",
    "binary": "X'', X'00', X'0000'",
    "date": "date'0001-01-01', date'1970-01-02', date'9999-12-31'",
    "timestamp": "timestamp'0001-01-01 00:00:00Z', timestamp'9999-12-31 23:59:59.999999Z', timestamp_micros(1)",
}
_X = "nullif('x', '') as b"
NESTED = {
    "timestamp_ntz": "timestamp_ntz'2013-03-10 02:30:00', timestamp_ntz'9999-12-31 23:59:59.999999'",
    "interval day to second": "interval '1' second, interval '-100' day",
    "array<double>": "array(0.0D, -0.0D), array(0.0D, 0.0D), array(double('NaN')), array(), array(null)",
    "struct<a:double,b:string>": f"struct(-0.0D as a, {_X}), struct(0.0D as a, {_X}), struct(double(null) as a, {_X})",
    "array<array<int>>": "array(array(1), array(2)), array(array(1, 2)), array(array(), array(1, 2))",
}


def counts_by(rows: DataFrame, schema: str, *keys: Any) -> DataFrame:
    grouped = holdfast.stream(rows).groupBy(*keys)
    return grouped.applyInArrowWithState(count, f"{schema}, n long", "n long", "update", name="counts")


def canonical(value: Any) -> Any:
    """Return a value of which equal ones are equal in Python too: one NaN, one zero, nothing that cannot be hashed."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return tuple(canonical(v) for v in value.values())
    return tuple(canonical(v) for v in value) if isinstance(value, list) else value


def counted(table: pa.Table) -> Counter[Any]:
    rows = [tuple(canonical(v) for v in row.values()) for row in table.to_pylist()]
    assert len({row[:-1] for row in rows}) == len(rows), "a key occurs twice"
    return Counter(rows)


def test_groups_are_those_of_spark(lab: Lab) -> None:
    """One key column of each type, of which each row fills one: all types in one query."""
    types = PLAIN | NESTED
    columns = [f"k{i} {name}" for i, name in enumerate(types)]
    schema = f"kind int, {', '.join(columns)}"
    rows = [
        lab.spark.sql(f"select {i} as kind, explode(array({values}, null, null)) as k{i}")
        for i, values in enumerate(types.values())
    ]
    data = rows[0]
    for more in rows[1:]:
        data = data.unionByName(more, allowMissingColumns=True)
    data = data.coalesce(1)
    for _ in range(2):
        data.write.mode("append").parquet(str(lab.folder / "input"))
    keys = ["kind", *(f"k{i}" for i in range(len(types)))]
    output = lab.run(counts_by(lab.source(schema), schema, *keys))
    expected = data.union(data).groupBy(*keys).agg(F.count("*").alias("n")).toArrow()
    state = holdfast.read_state(lab.spark, lab.folder / "query", "counts")
    assert counted(state) == counted(expected)
    assert Counter(row["kind"] for row in output[1]) == Counter(expected["kind"].to_pylist())


def test_every_key_type_groups_alike_in_a_batch_query(lab: Lab) -> None:
    for name, values in cases(list((PLAIN | NESTED).items()), quick=6):
        data = lab.spark.sql(f"select explode(array({values}, null, null)) as k")
        expected = data.groupBy("k").agg(F.count("*").alias("n"))
        assert counted(counts_by(data, f"k {name}", "k").toArrow()) == counted(expected.toArrow()), name


@pytest.mark.all
@pytest.mark.timeout(120)
def test_planning_does_not_suffer_from_many_keys(lab: Lab) -> None:
    """Spark infers constraints from aliases, and can take time and memory that double with each key."""
    names = [f"k{i}" for i in range(24)]
    lab.feed(pa.table({name: [name, "x"] for name in names}))
    schema = ", ".join(f"{name} string" for name in names)
    keys = [*names[:12], *[F.concat(name, F.lit("!")).alias(name) for name in names[12:]]]
    output = lab.run(counts_by(lab.source(schema), schema, *keys))
    assert sorted((row["k0"], row["k23"], row["n"]) for row in output[0]) == [("k0", "k23!", 1), ("x", "x!", 1)]


#: A value of each type that Spark hands to Python.
VALUES = {
    "byte": "1Y", "short": "1S", "int": "1", "long": "9007199254740993L", "float": "1.1F", "double": "1.1D",
    "boolean": "true", "string": "'a'", "binary": "X'61'", "date": "DATE'2026-01-02'", "decimal": "1.50BD",
    "timestamp": "TIMESTAMP'2026-01-02 03:04:05.000006'", "ntz": "TIMESTAMP_NTZ'2026-01-02 03:04:05'",
    "interval": "INTERVAL '1 02' DAY TO HOUR", "array": "array(1, null)", "floats": "array(1.1F)",
    "struct": "named_struct('x', 1, 'y', 1.1F, 'at', TIMESTAMP'2026-01-02 03:04:05')", "map": "map('a', 1)",
}  # fmt: skip
KEYS = list(VALUES)[: list(VALUES).index("array")]
#: Of each key two rows, with a value or without.
PRESENT = [(True, True), (True, False), (False, True), (False, False)]
SETTINGS = NEEDED | {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2",
    "spark.sql.session.timeZone": "America/New_York",
}
SHOWN = "what string, shown string"


def of_frame(frame: pd.DataFrame) -> str:
    return "\n".join(f"{name}: {frame[name].dtype} {list(frame[name].array)}" for name in frame.columns)


def of_row(row: Row) -> str:
    return "\n".join(f"{name}: {of_key([value])}" for name, value in row.asDict().items())


def of_key(key: Iterable[Any]) -> str:
    return ", ".join(f"{type(value).__name__} {value!r}" for value in key)


class Showing(StatefulProcessor):
    """Emits what it is handed: keys, rows and initial rows, with their types; timers if it is told to set them."""

    def __init__(self, *, in_pandas: bool, timer: bool = False) -> None:
        self._in_pandas, self._timer = in_pandas, timer

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._begun = handle.getListState("begun", "shown string")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._begun.appendValue((self._of(initialState),))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield self._emit(key, "key", of_key(key))
        for given in rows:
            yield self._emit(key, "rows", self._of(given))
        for (text,) in self._begun.get():
            yield self._emit(key, "initial", text)
        self._begun.clear()
        if self._timer:
            self._handle.registerTimer(0)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield self._emit(key, "timer", of_key(key))

    def _of(self, given: Any) -> str:
        return of_frame(given) if self._in_pandas else of_row(given)

    def _emit(self, key: Any, what: str, shown: str) -> Any:
        columns = {"what": f"{what} of {key}", "shown": shown}
        return pd.DataFrame({name: [text] for name, text in columns.items()}) if self._in_pandas else Row(**columns)


def typed(frame: DataFrame) -> DataFrame:
    columns = [f"if(present, {value}, null) as `{name}`" for name, value in VALUES.items()]
    return frame.selectExpr("k", *columns)


@pytest.fixture
def in_order(lab: Lab) -> Iterator[Lab]:
    """A lab with two micro-batches of the same rows, and no Arrow batch with rows of two keys."""
    table = pa.table({
        "k": pa.array([k for k, pair in enumerate(PRESENT) for _ in pair], pa.int64()),
        "present": [present for pair in PRESENT for present in pair],
    })  # fmt: skip
    lab.feed(table)
    lab.feed(table)
    with configured(lab.spark, SETTINGS):
        yield lab


Group = Callable[..., Any]
SPARK: Group = lambda frame, *keys: frame.groupBy(*keys)  # noqa: E731
OURS: Group = lambda frame, *keys: holdfast.stream(frame).groupBy(*keys)  # noqa: E731
BY_ROW = pytest.param(False, id="row", marks=[pytest.mark.since("4.1"), pytest.mark.all])


def shown_in(lab: Lab, query: Callable[[Group], DataFrame], group: Group) -> list[list[tuple[str, str]]]:
    """Return by micro-batch what a query shows, line by line."""
    batches = lab.run(query(group), "spark" if group is SPARK else "ours", "append")
    return [lines((row["what"], row["shown"]) for row in batch) for batch in batches]


def lines(shown: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(what, line) for what, text in sorted(shown) for line in text.split("\n")]


def show_frames(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    for frame in frames:
        yield pd.DataFrame({"what": [of_key(key)], "shown": [of_frame(frame)]})


@pytest.mark.slow(20)
@pytest.mark.all
@pytest.mark.parametrize("keys", [["k"], ["k", *KEYS]], ids=["rows", "keys"])
def test_functions_of_apply_in_pandas_with_state(in_order: Lab, keys: list[str]) -> None:
    """Arrow's columns in frames, numpy's scalars in keys, among them nulls."""
    rows = typed(in_order.source("k long, present boolean"))
    if len(keys) > 1:
        rows = rows.where("k in (0, 3)")  # with equal rows, which are one Arrow batch

    def query(group: Group) -> DataFrame:
        return group(rows, *keys).applyInPandasWithState(show_frames, SHOWN, "n int", "append", "NoTimeout")

    assert shown_in(in_order, query, OURS) == shown_in(in_order, query, SPARK)


@pytest.mark.slow(20)
@pytest.mark.parametrize("in_pandas", [pytest.param(True, id="pandas", marks=pytest.mark.smoke), BY_ROW])
def test_processors(in_order: Lab, in_pandas: bool) -> None:
    """Rows of two micro-batches, and initial rows before the first, where Spark 4.1 shows Arrow's columns."""
    rows = typed(in_order.source("k long, present boolean"))
    first = in_order.folder / "input" / "000.parquet"
    initial = typed(in_order.spark.read.schema("k long, present boolean").parquet(str(first)))

    def query(group: Group) -> DataFrame:
        grouped = group(rows, "k")
        call = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
        return call(Showing(in_pandas=in_pandas), SHOWN, "append", "none", initial.groupBy("k"))

    ours = shown_in(in_order, query, OURS)
    assert [{what.split()[0] for what, _ in batch} for batch in ours] == [{"key", "rows", "initial"}, {"key", "rows"}]
    assert ours == shown_in(in_order, query, SPARK)


@pytest.mark.slow(20)
@pytest.mark.all
@pytest.mark.parametrize("in_pandas", [pytest.param(True, id="pandas"), BY_ROW])
def test_keys_of_processors_and_their_timers(in_order: Lab, in_pandas: bool) -> None:
    """A batch query, because with processing time a stream does not end.

    In UTC: Spark shifts the timestamp in a timer's key by pandas, and ours does not. The keys of timers are compared
    from Spark 4.1 on. On Spark 4.1 the timer of a key with a struct fails.
    """
    timer = spark_versions.makes_frames_anew()
    keys = [*KEYS, "struct"] if spark_versions.makes_frames_anew(beside_initial_state=True) else KEYS
    spark_versions.start_state_coordinator(in_order.spark)  # which Spark 4.1 needs here and starts only for a stream
    in_order.spark.conf.set("spark.sql.session.timeZone", "UTC")
    rows = typed(in_order.spark.createDataFrame([(1, True)] * 2, "k long, present boolean"))

    def shown_by(group: Group) -> list[tuple[str, str]]:
        grouped = group(rows, *keys)
        call = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
        shown = call(Showing(in_pandas=in_pandas, timer=timer), SHOWN, "append", "processingTime")
        return lines((row.what, row.shown) for row in shown.collect())

    ours = shown_by(OURS)
    assert {what.split()[0] for what, _ in ours} == {"key", "rows", *["timer"] * timer}
    assert ours == shown_by(SPARK)


FOLD = dt.datetime(2024, 11, 3, 5, 30, tzinfo=dt.UTC)  # 01:30 in New York, and an hour later again
#: By type: values that a pandas frame would alter, and a null.
AWKWARD: dict[T.DataType, list[Any]] = {
    T.BooleanType(): [True, False, None, True],
    T.ByteType(): [-128, 127, None, 0],
    T.ShortType(): [-(2**15), 2**15 - 1, None, 0],
    T.IntegerType(): [-(2**31), 2**31 - 1, None, 0],
    T.LongType(): [2**53 + 1, -(2**63), None, 2**63 - 1],
    T.FloatType(): [math.nan, -0.0, None, math.inf],
    T.DoubleType(): [math.nan, -0.0, None, 5e-324],
    T.DecimalType(38, 18): [Decimal("12345678901234567890.123456789012345678"), Decimal("-1E-18"), None, Decimal(0)],
    T.StringType(): ["", "ünï\0code", None, "None"],
    T.BinaryType(): [b"", b"\xff\x00", None, b"x"],
    T.DateType(): [dt.date(1, 1, 1), dt.date(9999, 12, 31), None, dt.date(1969, 12, 31)],
    T.TimestampType(): [FOLD, FOLD + dt.timedelta(hours=1), None, dt.datetime(9999, 1, 1, tzinfo=dt.UTC)],
}
SCHEMA = T.StructType([T.StructField(f"v {i}`", t) for i, t in enumerate(AWKWARD)])
ARROW = arrow_schema(SCHEMA, "the input")
INPUT = pa.table([pa.array(v, t) for v, t in zip(AWKWARD.values(), ARROW.types, strict=True)], schema=ARROW)


def exact(table: pa.Table) -> list[tuple[Any, ...]]:
    """Return rows in which -0.0, 0.0, NaN and null differ, and instants are numbers."""
    columns = []
    for column in table.columns:
        plain = column.cast(pa.timestamp("us")).cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        columns.append([repr(v) for v in plain.to_pylist()])
    return sorted(zip(*columns, strict=True))


@pytest.mark.parametrize("shards", [2, MANY_SHARDS])
def test_a_streaming_query_loses_nothing(lab: Lab, shards: int) -> None:
    """In a zone whose clocks go back; chunks of two rows, so that some have nulls and others have none."""
    given = pa.concat_tables([INPUT, INPUT.slice(0, 1), INPUT.slice(3, 1)])
    seen = lab.folder / "seen"
    seen.mkdir()

    def keep(batch: holdfast.ShardBatch) -> pa.Table:
        pq.write_table(batch.rows, f"{seen}/{batch.shard}")
        return batch.rows

    lab.feed(given)
    lab.configure({"shards": str(shards)})
    settings = {
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "2",
        "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    }
    with configured(lab.spark, settings):
        grouped = holdfast.stream(lab.source(SCHEMA)).groupBy("v 4`")
        (returned,) = lab.run(grouped.applyInArrowWithState(keep, SCHEMA, "n long", "update", name="kept"))
    received = [row for path in seen.iterdir() for row in exact(pq.read_table(path))]
    assert sorted(received) == exact(pa.Table.from_pylist(returned, ARROW)) == exact(given)


POINT = F.udf(lambda v: ExamplePoint(float(v), 2.0), ExamplePointUDT())
POINT_AS_WKB = "X'0101000000000000000000F03F0000000000000040'"
#: Which no state column can have, and the release from which on each can be sent.
EXPRESSIONS = {
    "variant": ((4, 0), "parse_json(cast(v AS string))"),
    "variants": ((4, 0), "array(parse_json('1'), null)"),
    "nothing": ((4, 0), "array()"),
    "time": ((4, 3), "CAST('12:30:00' AS TIME)"),
    "geometry": ((4, 3), f"st_geomfromwkb({POINT_AS_WKB})"),
    "geography": ((4, 3), f"st_geogfromwkb({POINT_AS_WKB})"),
}


@pytest.fixture
def events(lab: Lab) -> Iterator[DataFrame]:
    """Return input with a column of each type that this Spark has."""
    lab.feed([("a", 1), ("b", 2)])
    here = minor_version(version_of(lab.spark))
    columns = {name: F.expr(text) for name, (since, text) in EXPRESSIONS.items() if here >= since}
    with configured(lab.spark, {"spark.sql.timeType.enabled": "true"}):
        yield lab.source().withColumns({**columns, "point": POINT("v")})


def test_a_function_that_ignores_them_never_notices(lab: Lab, events: DataFrame) -> None:
    """They were refused at the definition, whoever had them in a table of a hundred columns."""

    grouped = holdfast.stream(events).groupBy("key")
    frame = grouped.applyInArrowWithState(count, "key string, n long", "n long", "update", name="count")
    (rows,) = lab.run(frame)
    assert sorted(row["key"] for row in rows) == ["a", "b"]
    assert lab.state("count") == {"a": (1,), "b": (1,)}


@pytest.mark.all
def test_a_function_by_key_sees_them_as_with_spark(lab: Lab, events: DataFrame, tmp_path: Path) -> None:
    """Spark's classes for them, such as VariantVal, where Spark has them."""
    folder = str(tmp_path)

    def note(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        state.update((1,))
        for frame in frames:
            shown = [f"{name} {frame[name].dtype} {frame[name].iloc[0]!r}" for name in frame.columns]
            yield pd.DataFrame({"key": [key[0]], "shown": ["; ".join(shown)]})

    found = []
    for engine, grouped in ("ours", holdfast.stream(events).groupBy("key")), ("Spark's", events.groupBy("key")):
        frame = grouped.applyInPandasWithState(note, "key string, shown string", "n long", "update", "NoTimeout")
        (rows,) = lab.run(frame, f"{folder}/{engine}")
        found.append(sorted((row["key"], row["shown"]) for row in rows))
    assert found[0] == found[1]
    assert "VariantVal" in found[0][0][1]
    assert "array([1., 2.])" in found[0][0][1]


@pytest.mark.parametrize("column", ["variant", "point"])
def test_a_key_or_a_state_of_such_a_type_is_refused_by_name(events: DataFrame, column: str) -> None:
    if column == "point":  # Spark itself refuses to group by a variant
        with pytest.raises(InvalidArgumentError, match="'point' of the keys has a type that cannot be used"):
            holdfast.stream(events).groupBy("point").applyInArrowWithState(len, "n long", "n long", "update", name="n")  # type: ignore[arg-type]
    state = events.select(column).schema
    with pytest.raises(InvalidArgumentError, match=f"'{column}' of stateStructType has a type that cannot be used"):
        holdfast.stream(events).groupBy("key").applyInArrowWithState(len, "n long", state, "update", name="n")  # type: ignore[arg-type]
