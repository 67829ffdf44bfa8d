"""Creates a savepoint from a query that ran on Spark's stateful operators, to move it to holdfast.

::

    Spark's location ──▶ logs of micro-batch N                                     driver
    Spark's state    ──▶ a DataFrame for each state variable, and for timers       data source "statestore"
                     ──▶ pieces                                                    tasks
    manifest                                                                       driver, last

After a restore, the same function or processor, or an operator's one-line counterpart (`sparks_operators`), continues
on holdfast from the same positions and watermark.

Source: Spark 4.3's data source ``statestore``, and state written by its operators.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from holdfast import clock
from holdfast.backends.schema import TableSchema
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.savepoints.manifest import SavedOperator, Savepoint
from holdfast.snapshotter.savepoints.savepoints import begin_savepoint
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.plan.arguments import can_host_processors, operator_name
from holdfast.spark_integration.processor.state.timers import timer_tables
from holdfast.spark_integration.processor.state.variable_tables import Kind
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.savepoints.changes import require_comment, require_counts
from holdfast.spark_integration.savepoints.creating import decided_sinks, saved_query
from holdfast.spark_integration.savepoints.new_query import partitions_of
from holdfast.spark_integration.savepoints.sparks_operators import (
    AGGREGATION,
    HAVE_COUNTERPARTS,
    SESSIONS,
    Described,
    moved,
    struct_of,
)
from holdfast.spark_integration.savepoints.tasks import settings_of, versions_of
from holdfast.spark_integration.savepoints.write import TableRows, TableSetWriter
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE, STATE_VARIABLES
from holdfast.spark_integration.shard.timeout import TIME_MODES, TimeoutConf
from holdfast.spark_integration.spark_state.pointers import PROVIDER, StateOperator, StateOperators, modes_of
from holdfast.spark_integration.spark_state.query_location import LoggedBatch, QueryLocation
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.tables.entry_rows import first_number
from holdfast.spark_integration.timers import DUE, TIMERS, TIMERS_BY_DUE, KeyTimers
from holdfast.spark_integration.ttl.expiry import index_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: Spark's operators for Python processors, which declare their own state variables.
_PROCESSORS = ("transformWithStateInPandasExec", "transformWithStateInPySparkExec")
_KINDS: Mapping[str, Kind] = {"ValueState": "value", "ListState": "list", "MapState": "map"}
_NO_TIMEOUT = -1
#: ASCII characters that URLs leave unescaped: given any other, Spark's ``statestore`` reads a different location.
_UNESCAPED = frozenset(string.ascii_letters + string.digits + "/-_.!~'()*:@&=+$,;")


def from_spark(
    spark: SparkSession,
    checkpoint_location: str | Path,
    target: str | Path,
    name: str,
    operators: str | Mapping[int, str],
    *,
    timeoutConf: TimeoutConf | None = None,
    aggregates: Mapping[str, str] | Mapping[int, Mapping[str, str]] | None = None,
    window: str | Sequence[str] | Mapping[int, str | Sequence[str]] | None = None,
    batchId: int | None = None,
    shards: int | None = None,
    comment: str = "",
) -> Savepoint:
    """Save a query that runs on Spark's stateful operators, to continue it on holdfast.

    Reads the state of ``applyInPandasWithState``, ``transformWithState`` and ``transformWithStateInPandas``, with
    timeouts, timers and expiry times, and that of ``dropDuplicates``, ``dropDuplicatesWithinWatermark`` and
    aggregations by key, window and session. `restore` turns the savepoint into a location in which the same operator
    continues on holdfast. The query is not changed. List elements keep their order.

    Parameters
    ----------
    spark : SparkSession
    checkpoint_location : str or pathlib.Path
        The query's ``checkpointLocation``. Stop the query first: later micro-batches are not saved.
    target, name, batchId, comment
        As in `create`.
    operators : str, or mapping of int to str
        The operator's name in holdfast; for several operators, names by their numbers in ``state-metadata``.
    timeoutConf : {"ProcessingTimeTimeout", "EventTimeTimeout"}, optional
        The query's setting, if it has timeouts in ``applyInPandasWithState``: Spark does not record it.
    aggregates : mapping of str to str, or of int to such mappings, optional
        An aggregation's functions by column name, in the order of Spark's ``agg``, such as
        ``{"n": "count", "worst": "max"}``; for several aggregations, by operator number.
    window : str or sequence of str, or mapping of int to these, optional
        The durations passed to the aggregation's ``window``: ``"1 hour"``, ``["1 hour", "5 minutes"]``.
    shards : int, optional
        Defaults to the query's number of partitions.

    Raises
    ------
    InvalidArgumentError
        The location is not a query's, the state is holdfast's or an unsupported operator's, or an argument is wrong.
    ConflictError, NotFoundError
        As in `create`.
    """
    require_comment(comment)
    require_counts(shards=shards)
    require_readable(str(checkpoint_location))
    settings, options = settings_of(spark)
    with (
        open_storage(str(checkpoint_location), options) as logs,
        open_storage(str(target), options) as targets,
    ):
        new = begin_savepoint(targets, name)
        location = QueryLocation(logs)
        query_id, batch = location.query_id(), location.batch(batchId)
        wanted = shards if shards is not None else partitions_of(batch.conf)
        spark_versions.start_state_coordinator(spark)
        found = require_sparks_own(logs, batch.batch_id)
        steps = _named([_Step(one, str(checkpoint_location), batch, spark) for one in found], operators)
        given = _described([step for _, step in steps], aggregates, window)
        writer = TableSetWriter(spark, settings, str(target), name, new.id)
        saved = [_saved(step, of, writer, timeoutConf, given[step.number], wanted) for of, step in steps]
        sinks = decided_sinks(settings, options, query_id)
        query = saved_query(location, query_id, batch, new.folder, sinks)
        savepoint = Savepoint(name, comment, clock.now_ms(), versions_of(spark), query, tuple(saved))
        new.finish(savepoint)
    return savepoint


def require_readable(checkpoint_location: str) -> None:
    """Refuse a location with characters that Spark's ``statestore`` escapes: it would read a different path."""
    escaped = sorted(
        one
        for one in set(checkpoint_location)
        if not (one in _UNESCAPED if one.isascii() else one.isprintable() and not one.isspace())
    )
    if escaped:
        raise InvalidArgumentError(
            "Spark cannot read state in a checkpointLocation with these characters: use a symbolic link to it",
            checkpoint_location=checkpoint_location,
            characters=escaped,
        )


def require_sparks_own(location: ObjectStorage, batch_id: int) -> list[StateOperator]:
    """Return the operators of a query as of a micro-batch. Raises `InvalidArgumentError` if one is holdfast's."""
    operators = StateOperators(location)
    found = operators.every(batch_id)
    if ours := [one.number for one in found if operators.hold_pointers(one)]:
        raise InvalidArgumentError(
            "the state of this query is holdfast's already: holdfast.savepoints.create saves it", number=ours[0]
        )
    return found


@dataclass(frozen=True)
class _Step:
    operator: StateOperator
    location: str
    batch: LoggedBatch
    spark: SparkSession

    @property
    def number(self) -> int:
        return self.operator.number

    @property
    def host(self) -> str:
        return self.operator.host

    @property
    def modes(self) -> dict[str, str]:
        return modes_of(self.operator.properties, self.number)

    @property
    def hosts_processors(self) -> bool:
        """Whether the query's state store supports processors."""
        return can_host_processors(self.spark, str(self.batch.conf.get(PROVIDER)))

    def read(self, **options: str) -> DataFrame:
        from pyspark.errors import PySparkException

        source = self.spark.read.format("statestore").option("operatorId", self.number)
        try:
            return source.option("batchId", self.batch.batch_id).options(**options).load(self.location)
        except PySparkException as exc:
            raise NotFoundError(
                "Spark's state of this micro-batch cannot be read: Spark may have purged it",
                operator=self.host,
                number=self.number,
                batch_id=self.batch.batch_id,
                because=exc,
            ) from exc


def _named(steps: list[_Step], operators: str | Mapping[int, str]) -> list[tuple[str, _Step]]:
    """Return the operators with their new names. Raises `InvalidArgumentError` if an operator cannot move."""
    for step in steps:
        if step.host not in (GROUP_STATE, *_PROCESSORS, *HAVE_COUNTERPARTS):
            raise InvalidArgumentError(
                "the query has a stateful operator whose state cannot be moved; applyInPandasWithState, "
                "transformWithState in Python, dropDuplicates and aggregations can be moved",
                operator=step.host,
                number=step.number,
            )
    names = {steps[0].number: operators} if isinstance(operators, str) and len(steps) == 1 else operators
    numbers = [step.number for step in steps]
    if isinstance(names, str) or set(names) != set(numbers):
        raise InvalidArgumentError(
            "name each operator of the query by its number: operators={0: 'totals', …}",
            numbers=numbers,
            given=operators,
        )
    found = [(operator_name(None, names[step.number]), step) for step in steps]
    if len({name for name, _ in found}) < len(found):
        raise InvalidArgumentError("each operator needs its own name", given=operators)
    return found


def _described(steps: list[_Step], aggregates: Any, window: Any) -> dict[int, Described]:
    """Return the user's description of each operator, by number. Raises `InvalidArgumentError` if it is ambiguous."""
    ours = [step for step in steps if step.host in HAVE_COUNTERPARTS]
    if ours and len(steps) > 1 and not ours[0].hosts_processors:
        raise InvalidArgumentError(
            "only Spark's RocksDB state store can chain operators, and a query cannot change its state store: keep "
            "this query on Spark's operators",
            numbers=[step.number for step in steps],
        )
    aggregations = [step.number for step in ours if step.host in (AGGREGATION, SESSIONS)]

    def by_number(name: str, given: Any) -> dict[int, Any]:
        if given is None:
            return {}
        found = {aggregations[0]: given} if len(aggregations) == 1 else {}
        if isinstance(given, Mapping) and all(type(number) is int for number in given):
            found = dict(given)
        if not found or not found.keys() <= {*aggregations}:
            raise InvalidArgumentError(
                f"{name} is for aggregations; if the query has several, pass a mapping by operator number",
                given=given,
                aggregations=aggregations,
            )
        return found

    functions, windows = by_number("aggregates", aggregates), by_number("window", window)
    return {step.number: Described(functions.get(step.number), windows.get(step.number)) for step in steps}


def _saved(
    step: _Step,
    name: str,
    writer: TableSetWriter,
    timeout_conf: TimeoutConf | None,
    described: Described,
    shards: int,
) -> SavedOperator:
    if step.host in HAVE_COUNTERPARTS:
        return _in_one_line(step, name, writer, described, shards)
    if step.host == GROUP_STATE:
        tables, has_timeout = _group_state(step, timeout_conf)
        empty = SavedOperator(name, step.number, GROUP_STATE, has_timeout, shards)
    else:
        tables = list(_processor(step))
        empty = SavedOperator(name, step.number, STATE_VARIABLES, False, shards, configuration=step.modes)
    return writer.written(empty, tables)


def _in_one_line(step: _Step, name: str, writer: TableSetWriter, described: Described, shards: int) -> SavedOperator:
    """Save a Spark operator as its holdfast counterpart, with the host that the new query will use."""
    found = moved(step.host, step.read(), described, has_watermark=step.batch.next_watermark_ms > 0)
    own, timed = dict(found.configuration), found.is_timed
    if step.hosts_processors:
        own = {"timeMode": "EventTime" if timed else "None", "outputMode": "append", **own}
        empty = SavedOperator(name, step.number, STATE_VARIABLES, False, shards, configuration=own)
    else:
        empty = SavedOperator(name, step.number, GROUP_STATE, timed, shards, configuration=own)
    return writer.written(empty, [found.table])


def _group_state(step: _Step, timeout_conf: TimeoutConf | None) -> tuple[list[TableRows], bool]:
    """Return the tables of ``applyInPandasWithState``, and whether it has timeouts."""
    rows = step.read()
    keys, value = struct_of(rows.schema["key"]), struct_of(rows.schema["value"])
    state = struct_of(value["groupState"])
    has_timeout = "timeoutTimestamp" in value.names
    if timeout_conf not in (*DUE, "NoTimeout", None) or has_timeout != (timeout_conf in DUE):
        raise InvalidArgumentError(
            "the query has timeouts: pass its timeoutConf, which Spark does not record"
            if has_timeout
            else "the query has no timeouts: leave timeoutConf out",
            timeoutConf=timeout_conf,
        )
    key_types = arrow_schema(keys, "the keys")
    values = arrow_schema(state, "the state", keep_not_null=True)
    group, due = F.col("value.groupState"), F.col("value.timeoutTimestamp")
    # A key may have a timeout but no state.
    stored = rows.where(group.isNotNull()).select(*_fields("key", keys), *_fields("value.groupState", state))
    tables = [TableRows(TableSchema.of(STATE_TABLE, key_types, values), stored, len(keys))]
    if timeout_conf is not None and timeout_conf in DUE:
        timers = KeyTimers.tables(key_types, timeout_conf)
        waiting = rows.where(due.isNotNull() & (due != _NO_TIMEOUT)).select(*_fields("key", keys), due)
        tables.append(TableRows(timers[TIMERS], waiting, len(keys), timers[TIMERS_BY_DUE]))
    return tables, has_timeout


def _processor(step: _Step) -> Iterator[TableRows]:
    """Yield a processor's tables: one per variable, and the timers."""
    for declared in step.operator.properties.get("stateVariables", []):
        if kind := _KINDS.get(declared["stateVariableType"]):
            yield _variable(step, declared["stateName"], kind, has_ttl=declared["ttlEnabled"])
    time_mode = TIME_MODES[step.modes["timeMode"].lower()]
    if time_mode == "None":
        return
    rows = step.read(readRegisteredTimers="true")
    keys = struct_of(rows.schema["key"])
    timers = timer_tables(arrow_schema(keys, "the keys"), time_mode)
    frame = rows.select(*_fields("key", keys), F.col("expiration_timestamp_ms"))
    yield TableRows(timers[TIMERS], frame, len(keys), timers[TIMERS_BY_DUE])


def _variable(step: _Step, name: str, kind: Kind, *, has_ttl: bool) -> TableRows:
    rows = step.read(stateVarName=name, flattenCollectionTypes=str(kind == "map").lower())
    keys = struct_of(rows.schema["key"])
    own: list[Column] = []
    user_key, value = None, "value"
    if kind == "list":
        elements = F.posexplode("list_value").alias("place", "value")
        rows = rows.select("key", elements)
        # Elements are ordered by number, beginning with the first number of the version.
        own = [F.col("place").cast("long") + F.lit(first_number(step.batch.batch_id))]
    elif kind == "map":
        user_key, value = struct_of(rows.schema["user_map_key"]), "user_map_value"
        own = _fields("user_map_key", user_key)
    schema, expires = struct_of(rows.schema[value]), []
    if has_ttl:
        expires = [F.col(value)["ttlExpirationMs"]]
        schema, value = struct_of(schema["value"]), f"{value}.value"
    variable = StateVariable(name, kind, schema, user_key, ttl_ms=1 if has_ttl else None)
    tables = variable.tables(arrow_schema(keys, "the keys"))
    frame = rows.select(*_fields("key", keys), *own, *_fields(value, schema), *expires)
    return TableRows(tables[variable.table], frame, len(keys), tables.get(index_of(variable.table)))


def _fields(column: str, struct: StructType) -> list[Column]:
    """Return a struct's fields, renamed by position, because any name is possible."""
    return [F.col(column)[field.name].alias(f"{column}.{place}") for place, field in enumerate(struct)]
