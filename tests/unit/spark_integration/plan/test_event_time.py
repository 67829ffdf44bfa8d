"""An operator that hands no watermark on must not say that a column of its output has one."""

from __future__ import annotations

from pyspark.sql.types import StructField, StructType, TimestampType

from holdfast.spark_integration.plan.event_time import without_watermark
from holdfast.spark_integration.spark_types import WATERMARK_METADATA


def test_a_copied_schema_loses_its_mark_and_nothing_else() -> None:
    """As ``outputStructType=df.schema`` has it."""
    noted = StructField("at", TimestampType(), False, {"note": "kept", WATERMARK_METADATA: 1000})
    other = StructField("until", TimestampType())
    without = StructType([StructField("at", TimestampType(), False, {"note": "kept"}), other])
    assert without_watermark(StructType([noted, other])) == without
    assert without_watermark(without) == without
