"""Queries whose sinks a restored query continues."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import holdfast
from holdfast import sinks
from holdfast.errors import UnavailableError
from holdfast.examples.sinks import csv_folder
from tests.faults.sinks.killed_at import KilledAt
from tests.spark.conftest import OUTPUT, STATE, Lab, count_and_sum

if TYPE_CHECKING:
    from holdfast.sinks import Handle, SinkQuery, TwoPhaseSink

Row = tuple[Any, ...]
FED: Sequence[list[tuple[str | None, int]]] = [
    [("a", 1), ("b", 2), ("c", 3), ("d", 4)],
    [("a", 10), ("e", 5)],
    [("a", 100), ("b", 20), ("e", 50)],
    [("b", 1000), ("f", 7)],
]

SCHEMA = pa.schema({"key": pa.string(), "n": pa.int64(), "total": pa.int64()})


def counted_at_random(batch: holdfast.ShardBatch) -> pa.Table:
    """Count each key's rows, beside a number that differs from attempt to attempt."""
    rows = count_and_sum(batch)
    noise = pa.array([secrets.randbelow(1 << 60) for _ in range(len(rows))], pa.int64())
    return rows.set_column(rows.schema.get_field_index("total"), "total", noise)


def totals(*tables: list[tuple[str | None, int]]) -> list[Row]:
    """Return what a query shows of some micro-batches, by plain Python."""
    found, state = [], dict[str, tuple[int, int]]()
    for table in tables:
        for key, value in table:
            n, total = state.get(str(key), (0, 0))
            state[str(key)] = (n + 1, total + value)
        found += [(key, *state[key]) for key in sorted({str(key) for key, _ in table})]
    return sorted(found)


def parquet_rows(url: str) -> list[Row]:
    """Return the rows of the files that a Parquet sink names."""
    return rows_of(pa.concat_tables([SCHEMA.empty_table(), *map(pq.read_table, sinks.parquet_files(url))]))


def delta_rows(url: str) -> list[Row]:
    """Return what a Delta reader sees."""
    from deltalake import DeltaTable

    return rows_of(DeltaTable(url).to_pyarrow_table())


def csv_rows(folder: str) -> list[Row]:
    """Return what the example's reader sees."""
    return rows_of(csv_folder.read(folder, SCHEMA))


def rows_of(table: pa.Table) -> list[Row]:
    return sorted(tuple(row.values()) for row in table.select(SCHEMA.names).to_pylist())


SINKS: dict[str, tuple[Callable[[str], TwoPhaseSink], Callable[[str], list[Row]]]] = {
    "parquet": (lambda url: sinks.parquet("out", url), parquet_rows),
    "delta": (lambda url: sinks.delta("out", url, create=True), delta_rows),
    "csv": (csv_folder.CsvFolder, csv_rows),
}


@dataclass(frozen=True)
class Unanswered(KilledAt):
    """A sink whose target does not answer after the decision of a micro-batch."""

    batch_id: int = 2

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        if batch_id == self.batch_id:
            raise UnavailableError("the target does not answer")
        self.inner.commit(query, batch_id, handles)


@dataclass
class Query:
    """A query of a lab's input into a sink; each start is another driver's."""

    lab: Lab
    sink: TwoPhaseSink
    function: Callable[[holdfast.ShardBatch], pa.Table] = count_and_sum
    name: str = "query"
    replaces: str | None = None

    def run(self) -> str:
        """Run the query over what it has not read yet; return its id."""
        frame = self.lab.totals(func=self.function, outputStructType=OUTPUT, stateStructType=STATE)
        write = sinks.exactly_once(self.sink, replaces=self.replaces)
        writer = frame.writeStream.foreachBatch(write).outputMode("update").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.lab.folder / self.name)).start()
        query.awaitTermination()
        return str(query.id)


def run_data_source(lab: Lab, url: str, function: Callable[[holdfast.ShardBatch], pa.Table], name: str) -> None:
    """Run a query over what it has not read yet, with a Parquet sink as its data source."""
    rows = holdfast.stream(lab.source()).groupBy("key")
    frame = rows.applyInArrowWithState(function, OUTPUT, STATE, "append", name="totals")
    options = sinks.source_options(lab.spark, sinks.parquet("out", url))
    writer = frame.writeStream.format("holdfast-parquet").options(**options)
    writer = writer.options(name="out", path=url, checkpointLocation=str(lab.folder / name))
    writer.trigger(availableNow=True).start().awaitTermination()
