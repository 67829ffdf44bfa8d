"""Observed metrics, as classic Spark and Spark Connect hand them over."""

from __future__ import annotations

from pyspark.sql import Row

from holdfast.spark_integration.progress_metrics import by_name


def test_metrics_have_the_same_names_everywhere() -> None:
    columns = [{"name": name, "type": "long", "nullable": True, "metadata": {}} for name in ("shards", "rows")]
    over_connect = Row(values=[2, None], schema={"type": "struct", "fields": columns})
    assert by_name(over_connect) == by_name(Row(shards=2, rows=None)) == {"shards": 2, "rows": None}
