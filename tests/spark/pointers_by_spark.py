"""The pointers of a query as Spark's own reader of its state finds them: what ours is compared with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.shard.pointer_row import (
    GROUP_STATE,
    POINTER_COLUMN,
    POINTER_VARIABLE,
    STATE_VARIABLES,
    PointerRow,
)
from holdfast.spark_integration.stored_pointers import StatefulStep

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def steps_by_spark(spark: SparkSession, location: str, batch_id: int | None = None) -> list[StatefulStep]:
    """Return what `stored_steps` should, by the sources ``state-metadata`` and ``statestore``."""
    spark_versions.start_state_coordinator(spark)
    metadata = spark.read.format("state-metadata").load(location)
    found = metadata.select("operatorId", "operatorName", "operatorProperties").distinct().collect()
    known = {(number, host, str(properties or "")) for number, host, properties in found}
    return [_step(spark, location, batch_id, *one) for one in sorted(known)]


def _step(
    spark: SparkSession, location: str, batch_id: int | None, number: int, host: str, properties: str
) -> StatefulStep:
    source = spark.read.format("statestore").option("operatorId", number)
    if batch_id is not None:
        source = source.option("batchId", batch_id)
    has_timeout = False
    if host == GROUP_STATE:
        state = source.load(location)
        has_timeout = "timeoutTimestamp" in state.select("value.*").columns
        rows = state.select("value.groupState.*")
    elif host == STATE_VARIABLES and POINTER_VARIABLE in properties:
        rows = source.option("stateVarName", POINTER_VARIABLE).load(location).select("value.*")
    else:
        return StatefulStep(number, host, False, False, {})
    if rows.columns != [POINTER_COLUMN]:
        return StatefulStep(number, host, False, has_timeout, {})
    pointers: dict[str, list[PointerRow]] = {}
    for row in rows.collect():
        pointer = PointerRow.read(tuple(row))
        pointers.setdefault(pointer.directory or "", []).append(pointer)
    return StatefulStep(number, host, True, has_timeout, pointers, json.loads(properties or "{}"))
