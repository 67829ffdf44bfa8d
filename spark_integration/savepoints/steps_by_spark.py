"""The pointers of a query as Spark's own reader of its state finds them, for forms of it that are not read here.

Source: Spark 4.3's data sources ``state-metadata`` and ``statestore``.
"""

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING, Any

from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.shard.pointer_row import (
    GROUP_STATE,
    POINTER_COLUMN,
    POINTER_VARIABLE,
    STATE_VARIABLES,
    PointerRow,
)
from holdfast.spark_integration.stored_pointers import StatefulStep, by_directory, no_query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What stands in a URL as it is, below 128: Spark's source of state takes a location with others for another one.
_AS_IT_IS = frozenset(string.ascii_letters + string.digits + "/-_.!~'()*:@&=+$,;")


def steps_by_spark(spark: SparkSession, location: str, batch_id: int) -> list[StatefulStep]:
    """Return what `stored_steps` returns.

    Raises `InvalidArgumentError` if this is not the checkpoint location of a query with state, or Spark cannot read it
    by this name; `NotFoundError` if Spark cannot read the state of the micro-batch.
    """
    from pyspark.errors import PySparkException

    require_readable(location)
    spark_versions.start_state_coordinator(spark)
    try:
        metadata = spark.read.format("state-metadata").option("batchId", batch_id).load(location)
        found = metadata.select("operatorId", "operatorName", "operatorProperties").distinct().collect()
    except PySparkException as exc:
        raise no_query(location) from exc
    if not found:
        raise no_query(location)
    try:
        return [_step(spark, location, batch_id, *one) for one in sorted(found, key=lambda row: row[0])]
    except PySparkException as exc:
        raise NotFoundError(
            "Spark's state of this micro-batch cannot be read: it may have purged it, or lacks the class of its state "
            "store",
            location=location,
            batch_id=batch_id,
            because=exc,
        ) from exc


def _step(
    spark: SparkSession, location: str, batch_id: int, number: int, host: str, properties: str | None
) -> StatefulStep:
    known = properties_of(properties, number)
    source = spark.read.format("statestore").option("operatorId", number).option("batchId", batch_id)
    has_timeout = False
    if host == GROUP_STATE:
        state = source.load(location)
        has_timeout = "timeoutTimestamp" in state.select("value.*").columns
        rows = state.select("value.groupState.*")
    elif host == STATE_VARIABLES and POINTER_VARIABLE in [one["stateName"] for one in known.get("stateVariables", [])]:
        rows = source.option("stateVarName", POINTER_VARIABLE).load(location).select("value.*")
    else:
        return StatefulStep(number, host, False, False, {}, known)
    if rows.columns != [POINTER_COLUMN]:
        return StatefulStep(number, host, False, False, {}, known)  # the user's own
    pointers = by_directory(PointerRow.read(tuple(row)) for row in rows.collect())
    return StatefulStep(number, host, True, has_timeout, pointers, known)


def properties_of(text: str | None, number: int) -> dict[str, Any]:
    """Return what Spark keeps of an operator in its metadata: JSON, or nothing."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorruptionError("Spark's metadata of an operator with state is damaged", number=number)
    return found


def require_readable(checkpoint_location: str) -> None:
    """Check that Spark's source ``statestore`` finds a location: it escapes the path as in a URL.

    It looks for ``a%20b`` instead of ``a b``, where another query may be.
    """
    escaped = sorted({one for one in checkpoint_location if not _is_as_it_is(one)})
    if escaped:
        raise InvalidArgumentError(
            "Spark cannot read the state of a query whose checkpointLocation has such characters: name it through a "
            "symbolic link without them, or mount the directory under another name",
            checkpoint_location=checkpoint_location,
            characters=escaped,
        )


def _is_as_it_is(one: str) -> bool:
    return one in _AS_IT_IS if one.isascii() else one.isprintable() and not one.isspace()
