"""Columns of the input that nothing keeps: their types do no harm, and a function sees what Spark's own would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.testing.objects import ExamplePoint, ExamplePointUDT

import holdfast
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.spark_versions import minor_version, version_of
from tests.spark.conftest import Lab

pytestmark = pytest.mark.spark

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
    lab.spark.conf.set("spark.sql.timeType.enabled", "true")
    here = minor_version(version_of(lab.spark))
    columns = {name: F.expr(text) for name, (since, text) in EXPRESSIONS.items() if here >= since}
    yield lab.source().withColumns({**columns, "point": POINT("v")})
    lab.spark.conf.unset("spark.sql.timeType.enabled")


def test_a_function_that_ignores_them_never_notices(lab: Lab, events: DataFrame) -> None:
    """They were refused at the definition, whoever had them in a table of a hundred columns."""

    def count(batch: holdfast.ShardBatch) -> pa.Table:
        batch.state.put(n=batch.groups.count())
        return batch.keys.append_column("n", batch.groups.count())

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
