"""What a user writes: ``holdfast.stream(df).groupBy("user").applyInArrowWithState(…)``."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, StructField, StructType

from holdfast import clock
from holdfast.backends.registry import backend_names, find_backend
from holdfast.backends.run import TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.settings import Settings
from holdfast.spark_integration.columns import (
    WATERMARK_METADATA,
    arrow_schema,
    parse_struct,
    require_key_types,
)
from holdfast.spark_integration.pointer_row import POINTER_STATE
from holdfast.spark_integration.routes import choose_routes
from holdfast.spark_integration.rows import RowsTransport
from holdfast.spark_integration.shard_call import Operator, ShardFunction, call_batch_shard, call_shard
from holdfast.spark_integration.transport import (
    HASH,
    PACKED_OUTPUT,
    ROUTE,
    PackedTransport,
    Transport,
    quoted,
    unpack_output,
)
from holdfast.spark_integration.worker_garbage import freeze_modules
from holdfast.spark_integration.worker_socket import read_promptly

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

_KEY_EXPRESSION = "__holdfast_key_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def stream(df: DataFrame) -> StatefulStream:
    """Begin a stateful step on a DataFrame.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Streaming, or batch: then every key's state is empty and nothing is kept.

    Returns
    -------
    StatefulStream

    Raises
    ------
    InvalidArgumentError
        `df` is not a DataFrame.

    Examples
    --------
    >>> totals = (
    ...     holdfast.stream(events)
    ...     .groupBy("user")
    ...     .applyInArrowWithState(add_up, "user string, n long", "n long", "update", name="totals")
    ... )
    """
    if not isinstance(df, DataFrame):
        raise InvalidArgumentError(
            "holdfast.stream takes a Spark DataFrame, as spark.readStream gives it", given=type(df).__name__
        )
    return StatefulStream(df)


@dataclass(frozen=True)
class StatefulStream:
    """A DataFrame about to be grouped; see `stream`."""

    df: DataFrame

    def groupBy(self, *keys: str | Column) -> GroupedStream:
        """Group by columns, as ``DataFrame.groupBy`` does.

        Parameters
        ----------
        *keys : str or Column
            Names of columns, or expressions; null is a key like any other.

        Raises
        ------
        InvalidArgumentError
            No key, an unknown column, or a type that cannot be grouped by.
        """
        if not keys:
            raise InvalidArgumentError("groupBy needs at least one key column")
        return GroupedStream(self.df, _resolve_keys(self.df, keys))


@dataclass(frozen=True)
class _Key:
    """A grouping key: the expression, and the column that carries it."""

    field: StructField
    expression: Column
    column: str


def _resolve_keys(df: DataFrame, keys: Iterable[str | Column]) -> list[_Key]:
    resolved = []
    for i, key in enumerate(keys):
        if isinstance(key, str):
            name = _column_named(df, key)
            resolved.append(_Key(df.schema[name], quoted(name), name))
        elif isinstance(key, Column):
            field = df.select(key).schema.fields[0]
            resolved.append(_Key(field, key, f"{_KEY_EXPRESSION}{i}"))
        else:
            raise InvalidArgumentError(
                "a key must be a column's name or a Column", given=type(key).__name__, position=i
            )
    names = [key.field.name for key in resolved]
    repeated = sorted({n for n in names if names.count(n) > 1})
    if repeated:
        raise InvalidArgumentError("groupBy names a key twice", repeated=repeated)
    require_key_types([key.field for key in resolved])
    return resolved


def _column_named(df: DataFrame, name: str) -> str:
    if name in df.columns:
        return name
    folded = [c for c in df.columns if c.lower() == name.lower()]
    if len(folded) == 1:
        return folded[0]
    near = difflib.get_close_matches(name, df.columns, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InvalidArgumentError(
        f"no column {name!r} to group by: {hint}the columns are {', '.join(df.columns)}; "
        "for a field of a struct give an expression, as F.col('a.b')"
    )


@dataclass(frozen=True)
class GroupedStream:
    """A DataFrame grouped by key; see `StatefulStream.groupBy`."""

    df: DataFrame
    keys: list[_Key]

    def applyInArrowWithState(
        self,
        func: ShardFunction,
        outputStructType: StructType | str,
        stateStructType: StructType | str,
        outputMode: str,
        name: str | None = None,
    ) -> DataFrame:
        """Call a vectorised function once for each shard and micro-batch, with state kept between them.

        Parameters
        ----------
        func : callable
            Takes a `ShardBatch`: the shard's rows grouped by key, and the state of those keys. Returns a
            `pyarrow.Table` of the output columns, in any order, or None. It may be called again for the same
            micro-batch after a failure, with the same state.
        outputStructType, stateStructType : StructType or str
            Columns that `func` returns, and columns of each key's state.
        outputMode : {"append", "update"}
            As for ``applyInPandasWithState``; the query must be started in the same mode.
        name : str, optional
            Name of the operator, which identifies its state for ever; by default the function's name. Unique
            in a checkpoint directory.

        Returns
        -------
        pyspark.sql.DataFrame
            An event-time column that `func` returns under its input's name keeps its watermark.

        Raises
        ------
        InvalidArgumentError
            A schema, the mode, the name or a setting is wrong; nothing has run.

        Notes
        -----
        Exactly once: state is kept if and only if Spark commits the micro-batch. Spark allows one such
        operator in a query unless ``spark.sql.streaming.unsupportedOperationCheck`` is false.
        """
        if not callable(func):
            raise InvalidArgumentError("func must be callable", given=type(func).__name__)
        mode = str(outputMode).lower()
        if mode not in ("append", "update"):
            raise InvalidArgumentError(f"outputMode must be 'append' or 'update', not {outputMode!r}")
        settings = Settings.parse(_configuration(self.df), backend_names())
        find_backend(settings.backend).parse_options(settings.backend, settings.backend_options)
        if settings.checkpoint_dir is None and self.df.isStreaming:
            warnings.warn(
                "the state of this query is not durable: it is lost with the executors, and the query then fails; set "
                "spark.holdfast.checkpoint.dir to a directory that all executors reach",
                stacklevel=2,
            )
        output = parse_struct(outputStructType, "outputStructType")
        operator = self._operator(func, output, parse_struct(stateStructType, "stateStructType"), name, settings)
        transport = self._transport(operator)
        return self._run(operator, transport, output, mode)

    def _operator(
        self, func: ShardFunction, output: StructType, state: StructType, name: str | None, settings: Settings
    ) -> Operator:
        partitions = int(str(self.df.sparkSession.conf.get("spark.sql.shuffle.partitions")))
        key_types = arrow_schema(StructType([key.field for key in self.keys]), "the keys")
        state_types = arrow_schema(state, "stateStructType")
        name = operator_name(func, name)
        TableSchema.of(name, key_types, state_types)
        return Operator(
            name=name,
            definition_id=clock.new_id(),
            function=func,
            routes=choose_routes(settings.shards or partitions, partitions),
            key_columns=[key.column for key in self.keys],
            row_columns=self.df.columns,
            key_types=key_types,
            state_types=state_types,
            output_types=arrow_schema(output, "outputStructType", keep_not_null=True),
            has_watermark=self._event_time() is not None,
            settings=settings,
        )

    def _event_time(self) -> StructField | None:
        return next((f for f in self.df.schema if WATERMARK_METADATA in (f.metadata or {})), None)

    def _sent_schema(self) -> StructType:
        expressions = [StructField(k.column, k.field.dataType) for k in self._expressions()]
        return StructType([*expressions, *self.df.schema.fields, StructField(HASH, LongType(), False)])

    def _expressions(self) -> list[_Key]:
        return [k for k in self.keys if k.column.startswith(_KEY_EXPRESSION)]

    def _transport(self, operator: Operator) -> Transport:
        schema = self._sent_schema()
        types = arrow_schema(schema, "the input")
        if operator.settings.transport == "rows":
            return RowsTransport(operator.routes, schema, types, self._event_time())
        return PackedTransport(operator.routes, self._event_time())

    def _run(self, operator: Operator, transport: Transport, output: StructType, mode: str) -> DataFrame:
        carried = self.df.select(
            *[key.expression.alias(key.column) for key in self._expressions()],
            *[quoted(name) for name in self.df.columns],
        )
        hashed = F.xxhash64(*[quoted(key.column) for key in self.keys])

        def shard(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
            return call_shard(operator, transport, key, chunks, state)

        def whole_shard(key: tuple[Any, ...], rows: pd.DataFrame) -> pd.DataFrame:
            return call_batch_shard(operator, transport, key, rows)

        rows_each = int(str(self.df.sparkSession.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")))

        def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            freeze_modules()
            return unpack_output(read_promptly(batches), rows_each if rows_each > 0 else 2**31 - 1)

        groups = transport.send(carried, hashed).groupBy(ROUTE)
        if self.df.isStreaming:
            packed = groups.applyInPandasWithState(shard, PACKED_OUTPUT, POINTER_STATE, mode, "NoTimeout")
        else:
            # Spark refuses applyInPandasWithState here.
            packed = groups.applyInPandas(whole_shard, PACKED_OUTPUT)
        return packed.mapInArrow(unpack, self._with_watermark(output))

    def _with_watermark(self, output: StructType) -> StructType:
        event_time = self._event_time()
        return StructType(
            [
                StructField(f.name, f.dataType, f.nullable, event_time.metadata)
                if event_time is not None and (f.name, f.dataType) == (event_time.name, event_time.dataType)
                else f
                for f in output
            ]
        )


def operator_name(func: ShardFunction, name: str | None) -> str:
    """Return the operator's name, checked: it becomes a folder's name.

    Raises
    ------
    InvalidArgumentError
        It is not given and the function has none, or it cannot be a folder's name.
    """
    chosen = getattr(func, "__name__", "") if name is None else name
    if not isinstance(chosen, str) or not _NAME.fullmatch(chosen):
        raise InvalidArgumentError(
            f"{chosen!r} cannot name an operator: give one in name=, of letters, digits, '_', '.' and '-', "
            "beginning with a letter or digit, at most 100 long"
        )
    return chosen


def _configuration(df: DataFrame) -> dict[str, str]:
    return dict(df.sparkSession.conf.getAll)
