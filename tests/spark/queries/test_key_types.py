"""Keys of every type: the same groups as Spark's own ``groupBy`` makes of the same rows."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from tests.spark.conftest import Lab
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


def count(batch: holdfast.ShardBatch) -> pa.Table:
    n = pc.add(pc.coalesce(batch.state.get()["n"], 0), batch.groups.count())
    batch.state.put(n=n)
    return batch.keys.append_column("n", n)


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
    counts = (
        holdfast.stream(lab.source(schema))
        .groupBy(*keys)
        .applyInArrowWithState(count, f"{schema}, n long", "n long", "update", name="counts")
    )
    output = lab.run(counts)
    expected = data.union(data).groupBy(*keys).agg(F.count("*").alias("n")).toArrow()
    state = holdfast.read_state(lab.spark, lab.folder / "query", "counts")
    assert counted(state) == counted(expected)
    assert Counter(row["kind"] for row in output[1]) == Counter(expected["kind"].to_pylist())


def test_every_key_type_groups_alike_in_a_batch_query(lab: Lab) -> None:
    for name, values in cases(list((PLAIN | NESTED).items()), quick=6):
        data = lab.spark.sql(f"select explode(array({values}, null, null)) as k")
        counts = (
            holdfast.stream(data).groupBy("k").applyInArrowWithState(count, f"k {name}, n long", "n long", "update")
        )
        expected = data.groupBy("k").agg(F.count("*").alias("n"))
        assert counted(counts.toArrow()) == counted(expected.toArrow()), name


@pytest.mark.all
@pytest.mark.timeout(120)
def test_planning_does_not_suffer_from_many_keys(lab: Lab) -> None:
    """Spark infers constraints from aliases, and can take time and memory that double with each key."""
    names = [f"k{i}" for i in range(24)]
    lab.feed(pa.table({name: [name, "x"] for name in names}))
    schema = ", ".join(f"{name} string" for name in names)
    keys = [*names[:12], *[F.concat(name, F.lit("!")).alias(name) for name in names[12:]]]
    counts = (
        holdfast.stream(lab.source(schema))
        .groupBy(*keys)
        .applyInArrowWithState(count, f"{schema}, n long", "n long", "update", name="counts")
    )
    output = lab.run(counts)
    assert sorted((row["k0"], row["k23"], row["n"]) for row in output[0]) == [("k0", "k23!", 1), ("x", "x!", 1)]
