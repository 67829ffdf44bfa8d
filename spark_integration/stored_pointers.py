"""The pointers of a query to its state, read from the files of Spark's state as of a committed micro-batch.

::

    Spark's checkpoint location              spark.holdfast.state.dir
        state/0/3/…  ──pointers──▶               <operator>/operator           schemas, number of shards
                                                 <operator>/shard-0003/…       each shard, restored at its pointer

A query may have several steps with state. Which of Spark's operators are ours, and whose directories they use, is what
their pointers say; names and settings of the session say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.backends.registry import backend_names
from holdfast.errors import CorruptionError, InvalidArgumentError
from holdfast.settings import Settings
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE, PointerRow
from holdfast.spark_integration.shard.timeout import TimeMode
from holdfast.spark_integration.spark_state.operators import StateOperators
from holdfast.spark_integration.spark_state.pointers import StateStores, read_pointers
from holdfast.spark_integration.spark_state.query_location import LoggedBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_THREADS = 16
_TIME_MODES: Mapping[str, TimeMode] = {
    "notime": "None",
    "none": "None",
    "processingtime": "ProcessingTime",
    "eventtime": "EventTime",
}


@dataclass(frozen=True)
class StatefulStep:
    """One of Spark's operators with state in a query."""

    number: int  #: From 0, in the query's plan
    host: str  #: Spark's name of it
    is_ours: bool  #: Whether its state are pointers of holdfast
    has_timeout: bool  #: Whether Spark keeps a timeout beside each
    pointers: dict[str, list[PointerRow]]  #: By the directory that they name; shards that never had rows have none
    #: What Spark keeps of ``transformWithState``: modes, and variables
    properties: Mapping[str, Any] = field(default_factory=dict)


def modes_of(properties: Mapping[str, Any], number: int) -> dict[str, str]:
    """Return ``timeMode`` and ``outputMode`` of a ``transformWithState``, as an operator's record has them.

    Raises `InvalidArgumentError` if it has another time mode.
    """
    modes = {name: str(properties.get(name, "")).lower() for name in ("timeMode", "outputMode")}
    if modes["timeMode"] not in _TIME_MODES:
        raise InvalidArgumentError("Spark's metadata has an unknown time mode", number=number, **modes)
    return modes | {"timeMode": _TIME_MODES[modes["timeMode"]]}


def configured(spark: SparkSession) -> tuple[Settings, dict[str, object]]:
    """Return the settings of a session that reads or restores state, and the options of its storage.

    Raises `InvalidArgumentError` if a setting is wrong, or no state directory is set.
    """
    configuration = dict(spark.conf.getAll)
    settings = Settings.parse(configuration, backend_names())
    if settings.state_dir is None:
        raise InvalidArgumentError(
            "no state directory is set: set spark.holdfast.state.dir to the one that has the query's state, or is to "
            "get it"
        )
    return settings, parse_storage_options(settings.storage_values(configuration))


def stored_steps(location: ObjectStorage, batch: LoggedBatch) -> list[StatefulStep]:
    """Return the operators with state of a query, with their pointers after a micro-batch.

    Raises `InvalidArgumentError` if this is not the checkpoint location of a query with state; `NotKnownError` if its
    state has a form that is not read here; `NotFoundError` if the micro-batch was purged; `CorruptionError` if
    something of Spark's state is damaged, or missing.

    `location`: its root is the checkpoint location.
    """
    with ThreadPoolExecutor(_THREADS) as executor:
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
            facts = operator.number, operator.host, rows is not None, has_timeout, by_directory(rows or [])
            steps.append(StatefulStep(*facts, operator.properties))
        return steps


def by_directory(rows: Iterable[PointerRow]) -> dict[str, list[PointerRow]]:
    """Return pointers by the directory that they name."""
    pointers: dict[str, list[PointerRow]] = {}
    for row in rows:
        pointers.setdefault(row.directory or "", []).append(row)
    return pointers


def no_query(checkpoint_location: str) -> InvalidArgumentError:
    """Return the error that a location is not one of a query with state."""
    return InvalidArgumentError(
        "this is not the checkpoint location of a query with state that has committed a micro-batch",
        checkpoint_location=checkpoint_location,
    )
