"""An operator that hands no watermark on must not say that a column of its output has one."""

from __future__ import annotations

from pyspark.sql.types import StructField, StructType, TimestampType

from holdfast.spark_integration.plan.event_time import marked_as_delivered, without_watermark
from holdfast.spark_integration.spark_types import WATERMARK_METADATA, Watermark


def test_a_copied_schema_loses_its_mark_and_nothing_else() -> None:
    """As ``outputStructType=df.schema`` has it."""
    noted = StructField("at", TimestampType(), False, {"note": "kept", WATERMARK_METADATA: 1000})
    other = StructField("until", TimestampType())
    without = StructType([StructField("at", TimestampType(), False, {"note": "kept"}), other])
    assert without_watermark(StructType([noted, other])) == without
    assert without_watermark(without) == without


def test_a_processor_hands_a_watermark_on_but_in_processing_time() -> None:
    """Behind a mark that nobody keeps up, a window never ends, and no timer of a second processor ever fires."""
    marked = StructType([StructField("at", TimestampType(), True, {WATERMARK_METADATA: 1000})])
    assert marked_as_delivered(marked, "EventTime") == marked
    assert marked_as_delivered(marked, "ProcessingTime") == without_watermark(marked)


def test_rows_that_come_later_have_a_mark_that_spark_does_not_know() -> None:
    """Spark's operators would take them for late; ours wait so much longer, and add up what several joins wait."""
    watermark = Watermark(1000).later(600).later(1)
    late = StructField("at", TimestampType(), True, {"note": "kept", **watermark.metadata})
    assert WATERMARK_METADATA not in late.metadata
    assert Watermark.of(late) == Watermark(1000, 601)
    assert without_watermark(StructType([late]))["at"].metadata == {"note": "kept"}
    assert Watermark(1000).metadata == {WATERMARK_METADATA: 1000}
