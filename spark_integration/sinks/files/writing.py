"""An attempt at a partition: rows are gathered, made into Parquet files, noted, and put.

Whole objects are what a storage takes, so a file is made in memory. One is as large as `file_bytes` of rows make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from holdfast.errors import HoldfastError
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.spark_integration.shard.task_storage import io_executor
from holdfast.spark_integration.sinks.files.attempts import Attempts, DataFile, attempt_name, handle_of
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkTransaction
from holdfast.spark_integration.spark_types import require_utf8

COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")
#: Takes gathered rows apart into those of each file, and returns what the sink keeps of each.
Split = Callable[[pa.Table], Iterable[tuple[pa.Table, Mapping[str, Any]]]]


def in_one_file(rows: pa.Table) -> Iterable[tuple[pa.Table, Mapping[str, Any]]]:
    """Leave rows together."""
    return [(rows, {})]


class FileTransaction(SinkTransaction):
    """See the module.

    Parameters
    ----------
    attempts : Attempts
    attempt : SinkAttempt
    schema : pyarrow.Schema
    split : callable
    file_bytes : int
        How many bytes of rows, in Arrow, make a file.
    compression : str
    """

    def __init__(
        self,
        attempts: Attempts,
        attempt: SinkAttempt,
        schema: pa.Schema,
        *,
        split: Split = in_one_file,
        file_bytes: int,
        compression: str,
    ) -> None:
        self._attempts, self._schema = attempts, schema
        self._split, self._file_bytes, self._compression = split, file_bytes, compression
        self._attempt = attempt_name(attempt)
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._files: list[DataFile] = []
        self._notes = 0
        # False as long as a put is under way, or has failed: what it puts may come late.
        self._is_settled = True

    def write(self, rows: pa.RecordBatch) -> None:
        """Gather rows, and put a file when there are enough."""
        # Before the decision: what cannot be merged into a table afterwards would stop the query for good.
        require_utf8(rows, "the results", "most readers of Parquet refuse")
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= self._file_bytes:
            self._put()

    def prepare(self) -> Handle:
        """Put the rest."""
        if self._held or not self._files:
            self._put()
        # Each: who ended the attempt has taken away those that there were, and this one has gone on.
        for number in range(self._notes):
            self._attempts.require_note(self._attempt, number)
        return handle_of(self._attempt, self._notes, self._files)

    def abort(self) -> None:
        """Take away what was put; what the storage does not do now, or may put late, a later start takes away."""
        self._held = []
        if self._notes:
            with suppress(HoldfastError):
                # Also where somebody has ended the attempt before its files came: no note names them any more.
                self._attempts.storage.delete([self._attempts.key_of(file.name) for file in self._files])
                if self._is_settled:
                    self._attempts.forget([(self._attempt, self._notes)])

    def _put(self) -> None:
        rows = pa.Table.from_batches(self._held, self._schema)
        made = [(encoded(part, self._compression), part.num_rows, details) for part, details in self._split(rows)]
        first = len(self._files)
        files = [
            DataFile(self._attempt, number, rows, data.size, xxhash.xxh3_128(data).hexdigest(), details)
            for number, (data, rows, details) in enumerate(made, first)
        ]
        self._notes += 1
        self._is_settled = False
        self._attempts.note(self._attempt, self._notes - 1, first, files)
        # Before they are there: a put that fails may have put some, and somebody may have taken their note away.
        self._files += files
        objects = [(self._attempts.key_of(file.name), data) for file, (data, _, _) in zip(files, made, strict=True)]
        # Where one fails, none is on its way any more: it would come after `abort` has taken its note away.
        list(ahead(io_executor(), lambda each: self._attempts.storage.put(*each), objects, window=len(objects)))
        self._held, self._held_bytes, self._is_settled = [], 0, True


def encoded(rows: pa.Table, compression: str = "zstd") -> pa.Buffer:
    """Return rows as a Parquet file."""
    # Of numbers a dictionary seldom makes less, and takes as long as all the rest.
    texts = [field.name for field in rows.schema if pa.types.is_string(field.type)]
    out = pa.BufferOutputStream()
    pq.write_table(rows, out, compression=compression, use_dictionary=texts)
    return out.getvalue()
