"""Flink on a mini-cluster in this process's JVM: SQL's GROUP BY, or a KeyedProcessFunction in Python."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyflink.common import Configuration, Row, Types
from pyflink.datastream import KeyedProcessFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.state import ValueStateDescriptor
from pyflink.table import StreamTableEnvironment

# Results of sampled keys are printed, all others dropped. With this option the planner compares the digests of blocks,
# and finds that both sinks share one aggregation.
_ONE_PLAN = {"table.optimizer.reuse-optimize-block-with-digest-enabled": "true"}
# From Flink's tuning guide.
_MINI_BATCH = {
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "1 s",
    "table.exec.mini-batch.size": "5000",
    "table.optimizer.agg-phase-strategy": "TWO_PHASE",
}


def settings_of(order: dict[str, Any]) -> dict[str, str]:
    local = order["local"]
    found = {
        **_ONE_PLAN,
        "parallelism.default": str(order["parallelism"]),
        "python.executable": sys.executable,
        "python.client.executable": sys.executable,
        "state.backend.type": order["backend"],
        "taskmanager.memory.managed.size": f"{order['memory_mb']}m",
        "io.tmp.dirs": local,
        "state.backend.rocksdb.localdir": local,
    }
    if order["mini_batch"]:
        found |= _MINI_BATCH
    if order["durable"]:
        found |= {
            "execution.checkpointing.interval": f"{order['commit_ms']} ms",
            "execution.checkpointing.mode": "EXACTLY_ONCE",
            "execution.checkpointing.incremental": "true",
            "execution.checkpointing.dir": f"file://{order['durable']}",
            "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        }
        checkpoints = Path(order["durable"]).glob("*/chk-*/_metadata")
        newest = max(checkpoints, key=lambda path: path.stat().st_mtime_ns, default=None)
        if newest is not None:
            found["execution.state-recovery.path"] = f"file://{newest.parent}"
    return found


def rows_table(order: dict[str, Any]) -> str:
    return (
        "CREATE TABLE input_rows (`key` BIGINT, v BIGINT) WITH "
        f"('connector' = 'filesystem', 'path' = 'file://{order['rows']}', "
        "'format' = 'csv', 'csv.allow-comments' = 'true')"
    )


def sinks(order: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the statements that create each sink and fill it from the table ``totals``."""
    columns = "(`key` BIGINT, n BIGINT, s BIGINT)"
    every = order["every"]
    printed = (
        f"CREATE TABLE printed {columns} WITH ('connector' = 'print')",
        f"INSERT INTO printed SELECT * FROM totals WHERE MOD(`key`, {int(every)}) = 0",  # noqa: S608 - a number
    )
    dropped = (
        f"CREATE TABLE dropped {columns} WITH ('connector' = 'blackhole')",
        "INSERT INTO dropped SELECT * FROM totals",
    )
    return [printed] if every == 1 else [printed, dropped]


_LONGS = Types.ROW_NAMED(["key", "n", "s"], [Types.LONG(), Types.LONG(), Types.LONG()])


class Totals(KeyedProcessFunction):
    def open(self, runtime_context: RuntimeContext) -> None:
        total = ValueStateDescriptor("total", Types.TUPLE([Types.LONG(), Types.LONG()]))
        self._total = runtime_context.get_state(total)

    def process_element(self, value: Row, ctx: KeyedProcessFunction.Context) -> Iterator[Row]:
        n, s = self._total.value() or (0, 0)
        n, s = n + 1, s + value[1]
        self._total.update((n, s))
        yield Row(value[0], n, s)


def run(order: dict[str, Any]) -> None:
    # By default all tasks run their functions in this process; a cluster has a process per task.
    os.environ["_python_worker_execution_mode"] = "process"  # noqa: SIM112 - Flink's own name
    configuration = Configuration()
    for key, value in settings_of(order).items():
        configuration.set_string(key, value)
    environment = StreamExecutionEnvironment.get_execution_environment(configuration)
    tables = StreamTableEnvironment.create(environment)
    tables.execute_sql(rows_table(order))
    if order["api"] == "sql":
        tables.execute_sql(
            "CREATE VIEW totals AS SELECT `key`, COUNT(*) AS n, SUM(v) AS s FROM input_rows GROUP BY `key`"
        )
    else:
        rows = tables.to_data_stream(tables.from_path("input_rows"))
        totals = rows.key_by(lambda row: row[0], key_type=Types.LONG()).process(Totals(), output_type=_LONGS)
        tables.create_temporary_view("totals", totals)
    inserts = tables.create_statement_set()
    for table, insert in sinks(order):
        tables.execute_sql(table)
        inserts.add_insert_sql(insert)
    print("ready", flush=True)
    inserts.execute().wait()


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
