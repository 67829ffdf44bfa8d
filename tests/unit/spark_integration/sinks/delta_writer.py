"""What the tests of the Delta sink share: a query that writes to a table, and a reader of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from holdfast import clock
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery

SCHEMA = pa.schema([("key", pa.int64()), ("word", pa.string())])


#: Keys and words, or columns.
Rows = Mapping[int | None, str | None] | Sequence[Any]


class Writer:
    """A query that writes to a table."""

    def __init__(self, sink: DeltaSink, schema: pa.Schema = SCHEMA) -> None:
        self.sink, self.schema = sink, schema
        self.query = SinkQuery(sink.name, clock.new_uuid())

    def prepared(self, batch_id: int, rows: Rows, partition: int = 0) -> Handle:
        """Write and prepare rows."""
        columns = [list(rows), list(rows.values())] if isinstance(rows, Mapping) else list(rows)
        attempt = SinkAttempt(self.query, batch_id, partition, clock.new_id() + clock.new_id())
        transaction = self.sink.begin(attempt, self.schema)
        transaction.write(pa.record_batch(columns, schema=self.schema))
        return transaction.prepare()

    def write(self, batch_id: int, rows: Rows) -> Handle:
        """Write, prepare and commit rows."""
        handle = self.prepared(batch_id, rows)
        self.sink.confirm(self.query, batch_id, [handle])
        self.sink.commit(self.query, batch_id, [handle])
        return handle

    def shown(self) -> list[tuple[Any, ...]]:
        """What any Delta reader sees."""
        rows = DeltaTable(self.sink.url).to_pyarrow_table().select(SCHEMA.names).to_pylist()
        return sorted((tuple(row.values()) for row in rows), key=str)

    def rows(self) -> list[dict[str, Any]]:
        """What any Delta reader sees, as it comes."""
        return list(DeltaTable(self.sink.url).to_pyarrow_table().to_pylist())


def opened(sink: DeltaSink, schema: pa.Schema = SCHEMA) -> Writer:
    writer = Writer(sink, schema)
    writer.sink.open(writer.query, schema)
    return writer
