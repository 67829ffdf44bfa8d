"""From a definition on the driver to a plan in Spark: what all stateful steps have in common.

::

    df ─▶ keys, hash ─▶ transport ═shuffle by shard═▶ applyInPandasWithState: call_shard ─▶ output ─▶ rows
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.errors import AnalysisException, PySparkTypeError
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, StructField, StructType

from holdfast import clock
from holdfast.backends.registry import backend_names, find_backend
from holdfast.errors import InvalidArgumentError
from holdfast.settings import Settings
from holdfast.settings import Transport as TransportName
from holdfast.snapshotter.storage.object_storage import open_storage, parse_storage_options
from holdfast.spark_integration.plan.grouping_keys import Key, name_folding
from holdfast.spark_integration.plan.shuffle_partitions import shuffle_partitions, warn_of_partitions
from holdfast.spark_integration.shard.call import call_batch_shard, call_shard
from holdfast.spark_integration.shard.operator import Operator, ShardFunction
from holdfast.spark_integration.shard.operator_directory import OPERATOR_NAME
from holdfast.spark_integration.shard.pointer_row import POINTER_STATE
from holdfast.spark_integration.shard.stored_shards import stored_shards
from holdfast.spark_integration.shard.timeout import TimeoutConf
from holdfast.spark_integration.spark_types import WATERMARK_METADATA, arrow_schema, parse_struct
from holdfast.spark_integration.transport.output import Output
from holdfast.spark_integration.transport.rows import RowsTransport, carries
from holdfast.spark_integration.transport.transport import (
    HASH,
    ROUTE,
    EventTime,
    PackedTransport,
    Transport,
    quoted,
)

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState


def checked_settings(df: DataFrame, stacklevel: int) -> Settings:
    """Return the settings of the data frame's session; warn where the state will not be durable.

    Parameters
    ----------
    df : DataFrame
    stacklevel : int
        For the warning: how many calls above this one the user's stands.

    Raises
    ------
    InvalidArgumentError
        A setting, or an option of the backend or of the storage, is wrong.
    """
    configuration = dict(df.sparkSession.conf.getAll)
    settings = Settings.parse(configuration, backend_names())
    find_backend(settings.backend).parse_options(settings.backend, settings.backend_options)
    _check_storage(settings, configuration, is_remote=not hasattr(df, "_jdf"))
    if settings.checkpoint_dir is None and df.isStreaming:
        warnings.warn(
            "the state of this query is not durable: it is lost with the executors, and the query then fails; set "
            "spark.holdfast.checkpoint.dir to a directory that all executors reach",
            stacklevel=stacklevel + 1,
        )
    return settings


def _check_storage(settings: Settings, configuration: Mapping[str, str], *, is_remote: bool) -> None:
    """Open the durable storage, which asks it for nothing, so that unknown schemes and options are found at once.

    A Spark Connect client may lack what the executors have, packages and credentials, so there nothing is opened.
    """
    if settings.checkpoint_dir is not None and not is_remote:
        options = parse_storage_options(settings.storage_values(configuration))
        open_storage(settings.checkpoint_dir, options).close()


def operator_name(func: object, name: str | None) -> str:
    """Return the operator's name, checked: it becomes a folder's name.

    Raises
    ------
    InvalidArgumentError
        It is not given and the function has none, or it cannot be a folder's name.
    """
    chosen = getattr(func, "__name__", "") if name is None else name
    if not isinstance(chosen, str) or not OPERATOR_NAME.fullmatch(chosen):
        raise InvalidArgumentError(
            f"{chosen!r} cannot name an operator: give one in name=, of letters, digits, '_', '.' and '-', "
            "beginning with a letter or digit, at most 100 long"
        )
    return chosen


def declared_struct(schema: StructType | str, what: str) -> StructType:
    """Return a schema that is given to one of Spark's own APIs, with Spark's errors.

    Raises
    ------
    ParseException
        No DDL string.
    PySparkTypeError
        Neither a `StructType` nor a string, or a string that is a type of another kind.
    InvalidArgumentError
        It has no columns.
    """
    parsed: object = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(parsed, StructType):
        raise _wrong_argument(what, "StructType or str", schema)
    return parse_struct(parsed, what)


def require_accepted_by_spark(
    df: DataFrame,
    func: Any,
    output: StructType | str,
    state: StructType,
    output_mode: str,
    timeout_conf: str,
) -> None:
    """Raise what Spark raises for these arguments: its own ``applyInPandasWithState`` is defined, and dropped."""
    if not isinstance(output_mode, str):
        raise _wrong_argument("outputMode", "str", output_mode)
    # By any column: Spark refuses expressions as keys here, and holdfast need not.
    grouped = df.groupBy(quoted(df.columns[0]))
    grouped.applyInPandasWithState(func, output, state, output_mode, timeout_conf)


def _wrong_argument(name: str, expected: str, given: object) -> PySparkTypeError:
    return PySparkTypeError(
        errorClass="NOT_EXPECTED_TYPE",
        messageParameters={"arg_name": name, "expected_type": expected, "arg_type": type(given).__name__},
    )


def event_time_of(df: DataFrame) -> StructField | None:
    """Return the column that carries the watermark.

    Raises
    ------
    AnalysisException
        There are several, as after a join: Spark's own operators refuse them, once the query is started.
    """
    fold = name_folding(df)
    marked: dict[str, StructField] = {}
    for field in df.schema:
        if WATERMARK_METADATA in (field.metadata or {}):
            marked.setdefault(fold(field.name), field)
    if len(marked) > 1 and df.sparkSession.conf.get("spark.sql.streaming.statefulOperator.allowMultiple") == "true":
        names = ", ".join(field.name for field in marked.values())
        raise AnalysisException(
            "More than one event time columns are available. Please ensure there is at most one event time column per "
            f"stream, as by df.drop of the others. event time columns: ({names})",
            errorClass="MULTIPLE_EVENT_TIME_COLUMNS",
            messageParameters={"eventTimeCols": f"({names})"},
        )
    return next(iter(marked.values()), None)


def with_watermark(output: StructType, df: DataFrame) -> StructType:
    """Return the output's columns, the event time under its input's name with the watermark that it has there."""
    event_time = event_time_of(df)
    return StructType(
        [
            StructField(f.name, f.dataType, f.nullable, event_time.metadata)
            if event_time is not None and (f.name, f.dataType) == (event_time.name, event_time.dataType)
            else f
            for f in output
        ]
    )


def rows_each(df: DataFrame) -> int:
    """Return how many rows an Arrow batch between Spark and Python has at most."""
    configured = int(str(df.sparkSession.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")))
    return configured if configured > 0 else 2**31 - 1


@dataclass(frozen=True)
class Definition:
    """One stateful step, as it is defined on the driver.

    Attributes
    ----------
    df : DataFrame
    keys : list of Key
    name : str
        Of the operator.
    function : ShardFunction
    output : Output
    output_mode : str
    timeout_conf : str
    transport : {"packed", "rows"} or None
        Which one to take where the settings name none; None for rows where they can carry the columns.
    settings : Settings
    """

    df: DataFrame
    keys: list[Key]
    name: str
    function: ShardFunction
    output: Output
    output_mode: str
    timeout_conf: TimeoutConf
    transport: TransportName | None
    settings: Settings

    def plan(self) -> DataFrame:
        """Return the data frame of the step's output.

        Raises
        ------
        InvalidArgumentError
            The input has a column that cannot be sent, or the state one that cannot be kept.
        """
        self.function.tables()
        session, stored = self.df.sparkSession, self._stored_shards()
        if stored is None and self.df.isStreaming:
            warn_of_partitions(session, stacklevel=3)
        operator = self._operator(self.settings.shards or stored or shuffle_partitions(session))
        output = self.output
        transport = self._transport(operator.shards)
        carried = self.df.select(
            *[key.expression.alias(key.column) for key in self._expressions()],
            *[quoted(name) for name in self._columns()],
        )
        hashed = F.xxhash64(*[quoted(key.column) for key in self.keys])

        def shard(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
            return call_shard(operator, transport, output, key, chunks, state)

        def whole_shard(key: tuple[Any, ...], rows: pd.DataFrame) -> pd.DataFrame:
            return call_batch_shard(operator, transport, output, key, rows)

        groups = transport.send(carried, hashed).groupBy(ROUTE)
        if self.df.isStreaming:
            sent = groups.applyInPandasWithState(
                shard, output.sent_schema, POINTER_STATE, self.output_mode, self.timeout_conf
            )
        else:
            # Spark refuses applyInPandasWithState here.
            sent = groups.applyInPandas(whole_shard, output.sent_schema)
        return output.receive(sent)

    def _operator(self, shards: int) -> Operator:
        return Operator(
            name=self.name,
            definition_id=clock.new_id(),
            function=self.function,
            shards=shards,
            key_columns=[key.column for key in self.keys],
            row_columns=list(self._columns()),
            key_names=[key.field.name for key in self.keys],
            has_watermark=event_time_of(self.df) is not None,
            timeout_conf=self.timeout_conf,
            settings=self.settings,
        )

    def _stored_shards(self) -> int | None:
        """Return the number of shards that stands in storage; None without one, and where it does not matter."""
        settings = self.settings
        if settings.shards is not None or settings.checkpoint_dir is None or not self.df.isStreaming:
            return None
        return stored_shards(self.df.sparkSession, settings, self.name)

    def _columns(self) -> dict[str, StructField]:
        """By name the columns of the input: one that was selected twice travels once."""
        return {field.name: field for field in self.df.schema}

    def _expressions(self) -> list[Key]:
        return [key for key in self.keys if key.is_expression]

    def _transport(self, shards: int) -> Transport:
        expressions = [StructField(key.column, key.field.dataType) for key in self._expressions()]
        schema = StructType([*expressions, *self._columns().values(), StructField(HASH, LongType(), False)])
        types = arrow_schema(schema, "the input")
        event_time = event_time_of(self.df)
        filtering = None if event_time is None else EventTime(event_time, self.timeout_conf == "EventTimeTimeout")
        name = self.settings.transport or self.transport
        if name == "rows" or (name is None and all(carries(field.dataType) for field in schema)):
            return RowsTransport(shards, schema, types, filtering)
        return PackedTransport(shards, types, filtering)
