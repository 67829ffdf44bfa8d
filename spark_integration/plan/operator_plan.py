"""Plans an operator in one line: which of Spark's operators hosts it, and whether a watermark leaves it.

::

    events ─▶ dropDuplicates ─▶ join ─▶ window       RocksDB state store: the watermark goes on, several in a query
    events ─▶ window                                 any state store: one in a query, cheaper by a small micro-batch

Spark's ``transformWithState`` hands the watermark on, but needs Spark's RocksDB state store, and takes longer for a
small micro-batch than ``applyInPandasWithState``. Spark keeps to the state store that a query began with, so this
decides once for a query.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from holdfast.spark_integration.hosts.group_state import GroupStateHost
from holdfast.spark_integration.hosts.host import Host
from holdfast.spark_integration.hosts.stateful_processor import StatefulProcessorHost
from holdfast.spark_integration.plan.arguments import Mode, can_host_processors, operator_name
from holdfast.spark_integration.plan.definition import Definition, KeyedRows
from holdfast.spark_integration.plan.event_time import without_watermark
from holdfast.spark_integration.plan.session import checked_settings, rows_each
from holdfast.spark_integration.transport.output import PackedOutput

#: How an error ends that asks for a watermark.
BEHIND_ANOTHER = (
    ". Behind another operator, keep the column of the time, and set spark.sql.streaming.stateStore.providerClass to "
    "Spark's RocksDB state store, with which operators hand the watermark on"
)


def operator_plan(rows: KeyedRows, output: StructType, mode: Mode, name: str, *, is_timed: bool) -> DataFrame:
    """Return the DataFrame of an operator's output; call it from what the user's call calls.

    `output` marks the times that are not older than the watermark; `is_timed` says if late rows are dropped, and rows
    of state go, by it. Raises `InvalidArgumentError` if the name or a setting is wrong, or a column cannot be sent or
    stored.
    """
    settings = checked_settings(rows.df, stacklevel=4)
    hands_on = can_host_processors(rows.df.sparkSession)
    # In update mode no operator in event time can stand behind it.
    shown = output if hands_on and mode == "append" else without_watermark(output)
    host: Host
    if hands_on:
        # Spark lets no restart change this mode, which changes nothing: the operator's own mode may change.
        host = StatefulProcessorHost("append", "EventTime" if is_timed else "None", "")
    else:
        host = GroupStateHost(mode, "EventTimeTimeout" if is_timed else "NoTimeout")
    return Definition(
        rows=rows,
        name=operator_name(None, name),
        output=PackedOutput(shown, rows_each(rows.df)),
        host=host,
        settings=settings,
    ).plan()
