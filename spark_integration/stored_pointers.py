"""The pointers of a query to its state, read from Spark's state as of a committed micro-batch.

::

    Spark's checkpoint location              spark.holdfast.state.dir
        state store ──pointers──▶                <operator>/operator           schemas, number of shards
        (data source "statestore")               <operator>/shard-0003/…       each shard, restored at its pointer

Spark reads them, which need not run for `stored_steps`: that reads the files of the state store.

A query may have several steps with state. Which of Spark's operators are ours, and whose directories they use, is what
their pointers say; names and settings of the session say nothing.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.backends.registry import backend_names
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.settings import Settings
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.shard.pointer_row import (
    GROUP_STATE,
    POINTER_COLUMN,
    POINTER_VARIABLE,
    STATE_VARIABLES,
    PointerRow,
)
from holdfast.spark_integration.shard.timeout import TimeMode
from holdfast.spark_integration.spark_state.operators import StateOperators
from holdfast.spark_integration.spark_state.pointers import StateStores, read_pointers
from holdfast.spark_integration.spark_state.query_location import LoggedBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Where the hosts keep pointers, by the name of Spark's operator: a column, and the state variable that it is of.
_POINTERS_IN = {
    GROUP_STATE: ("value.groupState.*", None),
    STATE_VARIABLES: ("value.*", POINTER_VARIABLE),
}
#: Spark's operators that may be hosts.
HOSTS = frozenset(_POINTERS_IN)
_TIMEOUT = "timeoutTimestamp"
_TIME_MODES: Mapping[str, TimeMode] = {
    "notime": "None",
    "none": "None",
    "processingtime": "ProcessingTime",
    "eventtime": "EventTime",
}
_NOTHING_COMMITTED = "STDS_COMMITTED_BATCH_UNAVAILABLE"
#: What stands in a URL as it is, below 128: Spark's source of state takes a location with others for another one.
_AS_IT_IS = frozenset(string.ascii_letters + string.digits + "/-_.!~'()*:@&=+$,;")


@dataclass(frozen=True)
class StatefulStep:
    """One of Spark's operators with state in a query.

    Attributes
    ----------
    number : int
        From 0, in the query's plan.
    host : str
        Spark's name of it.
    is_ours : bool
        Whether its state are pointers of holdfast.
    has_timeout : bool
        Whether Spark keeps a timeout beside each.
    pointers : mapping of str to list of PointerRow
        By the directory that they name; shards that never had rows have none.
    properties : mapping
        What Spark keeps of ``transformWithState``: modes, and variables.
    """

    number: int
    host: str
    is_ours: bool
    has_timeout: bool
    pointers: dict[str, list[PointerRow]]
    properties: Mapping[str, Any] = field(default_factory=dict)


def properties_of(text: str | None, number: int) -> dict[str, Any]:
    """Return what Spark keeps of an operator in its metadata: JSON, or nothing.

    Raises
    ------
    CorruptionError
        It is something else.
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorruptionError("Spark's metadata of an operator with state is damaged", number=number)
    return found


def modes_of(properties: Mapping[str, Any], number: int) -> dict[str, str]:
    """Return ``timeMode`` and ``outputMode`` of a ``transformWithState``, as an operator's record has them.

    Raises
    ------
    InvalidArgumentError
        It has another time mode.
    """
    modes = {name: str(properties.get(name, "")).lower() for name in ("timeMode", "outputMode")}
    if modes["timeMode"] not in _TIME_MODES:
        raise InvalidArgumentError("Spark's metadata has an unknown time mode", number=number, **modes)
    return modes | {"timeMode": _TIME_MODES[modes["timeMode"]]}


def configured(spark: SparkSession) -> tuple[Settings, dict[str, object]]:
    """Return the settings of a session that reads or restores state, and the options of its storage.

    Raises
    ------
    InvalidArgumentError
        A setting is wrong, or no state directory is set.
    """
    configuration = dict(spark.conf.getAll)
    settings = Settings.parse(configuration, backend_names())
    if settings.state_dir is None:
        raise InvalidArgumentError(
            "no state directory is set: set spark.holdfast.state.dir to the one that has the query's state, or is to "
            "get it"
        )
    return settings, parse_storage_options(settings.storage_values(configuration))


def stateful_steps(spark: SparkSession, checkpoint_location: str, batch_id: int | None = None) -> list[StatefulStep]:
    """Return the operators with state of a query, with their pointers.

    Parameters
    ----------
    batch_id : int, optional
        The micro-batch after which the state is read; by default the last one that is committed.

    Raises
    ------
    InvalidArgumentError
        This is not the checkpoint location of a query with state that has committed a micro-batch, or Spark cannot
        read state there.
    NotFoundError
        The micro-batch is not committed, or was purged.
    """
    require_readable(checkpoint_location)
    spark_versions.start_state_coordinator(spark)
    return [_step(spark, checkpoint_location, batch_id, *step) for step in _hosts(spark, checkpoint_location)]


def stored_steps(location: ObjectStorage, batch: LoggedBatch, executor: Executor) -> list[StatefulStep]:
    """Return the same from the files of Spark's state, without Spark.

    Parameters
    ----------
    location : ObjectStorage
        Its root is the checkpoint location.
    executor : concurrent.futures.Executor
        Must not run the caller.

    Raises
    ------
    NotKnownError
        Only Spark can read this state.
    InvalidArgumentError
        This is not the checkpoint location of a query with state.
    NotFoundError
        The micro-batch was purged.
    CorruptionError
        Something of Spark's state is damaged, or missing.
    """
    operators, stores = StateOperators(location), StateStores.of(batch)
    found = operators.at(batch.batch_id)
    if location.list(f"state/{len(found)}/"):  # they are numbered without gaps, and each has metadata
        raise CorruptionError(
            "Spark's metadata of an operator with state is missing: the checkpoint location was copied in part, or "
            "files of it were deleted; bring them back",
            number=len(found),
            location=location.url,
        )
    if not found:
        raise no_query(location.url)
    steps = []
    for operator in found:
        rows = read_pointers(location, stores, operator, operators, executor)
        has_timeout = rows is not None and operator.host == GROUP_STATE and operators.has_timeout(operator)
        pointers = _by_directory(rows or [])
        steps.append(
            StatefulStep(
                operator.number, operator.host, rows is not None, has_timeout, pointers, dict(operator.properties)
            )
        )
    return steps


def _by_directory(rows: Iterable[PointerRow]) -> dict[str, list[PointerRow]]:
    pointers: dict[str, list[PointerRow]] = {}
    for row in rows:
        pointers.setdefault(row.directory or "", []).append(row)
    return pointers


def _hosts(spark: SparkSession, checkpoint_location: str) -> list[tuple[int, str, str]]:
    """Return number, name and properties of Spark's operators; the latter are JSON, or empty."""
    from pyspark.errors import PySparkException

    try:
        metadata = spark.read.format("state-metadata").load(checkpoint_location)
        known = metadata.select("operatorId", "operatorName", "operatorProperties").distinct().collect()
    except PySparkException as exc:
        raise no_query(checkpoint_location) from exc
    if not known:
        raise no_query(checkpoint_location)
    return sorted({(number, host, str(properties or "")) for number, host, properties in known})


def _may_hold_pointers(host: str, properties: str) -> bool:
    """Tell whether an operator of Spark's is a host; one with state variables names them in its properties."""
    if host not in _POINTERS_IN:
        return False
    _, variable = _POINTERS_IN[host]
    return variable is None or re.search(rf"\b{variable}\b", properties) is not None


def require_readable(checkpoint_location: str) -> None:
    """Check that Spark can read state at a location: its source ``statestore`` escapes the path as in a URL.

    It looks for ``a%20b`` instead of ``a b``, where another query may be.

    Raises
    ------
    InvalidArgumentError
        It cannot.
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


def no_query(checkpoint_location: str) -> InvalidArgumentError:
    """Return the error that a location is not one of a query with state."""
    return InvalidArgumentError(
        "this is not the checkpoint location of a query with state that has committed a micro-batch",
        checkpoint_location=checkpoint_location,
    )


def _step(
    spark: SparkSession, checkpoint_location: str, batch_id: int | None, number: int, host: str, properties: str
) -> StatefulStep:
    from pyspark.errors import PySparkException

    if not _may_hold_pointers(host, properties):
        return StatefulStep(number, host, False, False, {})
    columns, variable = _POINTERS_IN[host]
    source = spark.read.format("statestore").option("operatorId", number)
    if variable is not None:
        source = source.option("stateVarName", variable)
    if batch_id is not None:
        source = source.option("batchId", batch_id)
    try:
        state = source.load(checkpoint_location)
        has_timeout = variable is None and _TIMEOUT in state.select("value.*").columns
        rows = state.select(columns)
        if rows.columns != [POINTER_COLUMN]:
            return StatefulStep(number, host, False, has_timeout, {})  # of another library, or the user's own
        found = rows.collect()
    except PySparkException as exc:
        if batch_id is None and exc.getCondition() == _NOTHING_COMMITTED:
            raise no_query(checkpoint_location) from exc
        raise NotFoundError(
            "Spark's state cannot be read: it may have purged the micro-batch meanwhile",
            checkpoint_location=checkpoint_location,
            batch_id=batch_id,
            because=exc,
        ) from exc
    pointers = _by_directory(map(PointerRow.read, map(tuple, found)))
    return StatefulStep(number, host, True, has_timeout, pointers, properties_of(properties, number))
