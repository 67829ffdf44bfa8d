"""Delta table sink: workers write Parquet files, the driver commits one Delta transaction per micro-batch.

    append    <url>/part-<attempt>-<number>.parquet                        added to the table unchanged
    upsert    <url>/_holdfast/<sink>/<query id>/staged/part-….parquet      merged into the table by key, on the driver
    both      <url>/_holdfast/…                                            notes and writers; VACUUM skips the folder

    one transaction   add …                                     the files
                      txn holdfast/<sink>/<query id>            version = micro-batch
                      txn holdfast/<sink>/<query id>/attempts   version = 63 bits of its attempts' digest

Of two transactions that set the same ``txn`` on the same table version, Delta rejects the second. The sink reads
``txn`` and commits on the version it has read, so a micro-batch enters the table once, whichever driver commits it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from holdfast.distribution import needs_extra
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.storage.options import CREDENTIALS, parse_url
from holdfast.spark_integration.sinks.delta.partitions import check_partitions, described
from holdfast.spark_integration.sinks.files.location import check_columns, claim
from holdfast.spark_integration.sinks.files.sink import Attempts, FileSink
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery, column_names

if TYPE_CHECKING:
    from holdfast.spark_integration.sinks.delta.commits import TableCommits


@dataclass(frozen=True)
class DeltaSink(FileSink):
    """The sink that `holdfast.sinks.delta` returns."""

    name: str
    url: str
    keys: Sequence[str] | None = None
    partition_by: Sequence[str] = ()
    create: bool = False
    compression: str = "zstd"
    file_mb: int = 128

    credentials: ClassVar[Sequence[str]] = (
        *CREDENTIALS,
        *("delta.AWS_ACCESS_KEY_ID", "delta.AWS_SECRET_ACCESS_KEY", "delta.AWS_SESSION_TOKEN"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys is not None:
            object.__setattr__(self, "keys", column_names("keys", self.keys))
        object.__setattr__(self, "partition_by", column_names("partition_by", self.partition_by))
        if self.keys == ():
            raise InvalidArgumentError("keys must name at least one column; omit keys to append")

    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        check_columns(schema)
        check_partitions(schema, self.partition_by)
        attempts = self.attempts(query)
        table = self.target(query, attempts)
        if query.was_shown is not None:  # a wrong URL fails before a table is created
            claim(attempts.storage, query)
        table.open(schema, create=self.create)
        if query.was_shown is None:
            claim(attempts.storage, query)
        return table.newest()

    @property
    def folder(self) -> str | None:
        return None if self.keys else ""

    def split(self, rows: pa.Table) -> Iterable[tuple[pa.Table, Mapping[str, Any]]]:
        return described(rows, self.partition_by, self.keys or (), parse_url(self.url))

    def target(self, query: SinkQuery, attempts: Attempts) -> TableCommits:
        with needs_extra("delta"):
            from holdfast.spark_integration.sinks.delta.commits import TableCommits
        return TableCommits(self.url, query, self.keys or (), self.partition_by, attempts)
