"""Turns the definition of a stateful step into a Spark plan, for all APIs alike.

::

    df ─▶ keys, hash ─▶ transport ═shuffle by shard═▶ applyInPandasWithState: call_shard ─▶ output ─▶ rows
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, StructField, StructType

from holdfast import clock
from holdfast.settings import Settings
from holdfast.settings import Transport as TransportName
from holdfast.spark_integration.plan.event_time import event_time_of
from holdfast.spark_integration.plan.grouping_keys import Key
from holdfast.spark_integration.plan.shuffle_partitions import shuffle_partitions, warn_of_partitions
from holdfast.spark_integration.plan.stored_shards import stored_shards
from holdfast.spark_integration.shard.call import call_batch_shard, call_shard
from holdfast.spark_integration.shard.operator import Operator, ShardFunction
from holdfast.spark_integration.shard.pointer_row import POINTER_STATE
from holdfast.spark_integration.shard.timeout import TimeoutConf
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.transport.output import Output
from holdfast.spark_integration.transport.packed import PackedTransport
from holdfast.spark_integration.transport.rows import RowsTransport, carries
from holdfast.spark_integration.transport.transport import HASH, ROUTE, EventTime, Transport, quoted

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState


@dataclass(frozen=True)
class Definition:
    """One stateful step, as defined on the driver.

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
        The default if the settings name none; None for `rows`, if it can carry the columns, else `packed`.
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
        """Return the DataFrame of the step's output.

        Raises
        ------
        InvalidArgumentError
            A column of the input cannot be sent, or one of the state cannot be stored.
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
            # Spark rejects applyInPandasWithState on a batch DataFrame.
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
        """Return the stored number of shards; None if there is none, or if it does not matter."""
        settings = self.settings
        if settings.shards is not None or settings.checkpoint_dir is None or not self.df.isStreaming:
            return None
        return stored_shards(self.df.sparkSession, settings, self.name)

    def _columns(self) -> dict[str, StructField]:
        """The input's columns by name: a column selected twice travels once."""
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
