"""A Delta table: workers write Parquet files, the driver commits one Delta transaction for each micro-batch.

::

    append    <url>/part-<attempt>-<number>.parquet                        becomes part of the table as it is
    upsert    <url>/_holdfast/<sink>/<query id>/staged/part-….parquet      the driver merges its rows by key
    both      <url>/_holdfast/…                                            notes and claims; VACUUM passes over it

    one transaction   add …                                                the files
                      txn holdfast/<sink>/<query id>            version = micro-batch
                      txn holdfast/<sink>/<query id>/attempts   version = 63 bits of the digest of its attempts

Delta refuses the second of two transactions that set the same ``txn`` from the same version of the table: the sink
reads the table, looks at ``txn``, and commits on what it has read. So a micro-batch is in the table once, whoever
commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from holdfast.errors import InvalidArgumentError, NotFoundError, StateLostError, UnavailableError
from holdfast.snapshotter.decisions import checked_sink
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.options import CREDENTIALS
from holdfast.snapshotter.storage.url import parse_url
from holdfast.spark_integration.sinks.delta.partitions import check_partitions, described
from holdfast.spark_integration.sinks.extras import needs_extra
from holdfast.spark_integration.sinks.files.attempts import Attempts, files_of
from holdfast.spark_integration.sinks.files.claims import claim
from holdfast.spark_integration.sinks.files.columns import check_columns
from holdfast.spark_integration.sinks.files.places import storage_of
from holdfast.spark_integration.sinks.files.writing import FileTransaction, check_files
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
)

if TYPE_CHECKING:
    from holdfast.spark_integration.sinks.delta.commits import TableCommits


@dataclass(frozen=True)
class DeltaSink(TwoPhaseSink):
    """A Delta table on a local disk, S3, or wherever the `deltalake` package writes; see the module.

    Parameters
    ----------
    name : str
        Letters, digits, ``_`` and ``-``.
    url : str
        The table's. Credentials are settings, ``spark.holdfast.sink.<name>.key`` and so on, named as those of
        ``spark.holdfast.storage``; what only `deltalake` knows is set below ``spark.holdfast.sink.<name>.delta.``.
    keys : sequence of str, optional
        Upsert by these columns, for update mode: a row takes the place of the one with its key. Without it rows are
        appended.
    partition_by : sequence of str
        The table's partition columns.
    create : bool
        Whether a table that is not there is made, with the columns of the rows.
    compression : {"zstd", "snappy", "gzip", "lz4", "none"}
    file_mb : int
        How many MB of rows, uncompressed, make a file; a task holds them in memory.
    """

    name: str
    url: str
    keys: Sequence[str] | None = None
    partition_by: Sequence[str] = ()
    create: bool = False
    compression: str = "zstd"
    file_mb: int = 128
    credentials: ClassVar[Sequence[str]] = (
        *CREDENTIALS,
        "delta.AWS_ACCESS_KEY_ID",
        "delta.AWS_SECRET_ACCESS_KEY",
        "delta.AWS_SESSION_TOKEN",
    )

    def __post_init__(self) -> None:
        checked_sink(self.name)
        object.__setattr__(self, "url", str(parse_url(self.url)))
        for name in ("keys", "partition_by"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise InvalidArgumentError(f"{name} must be a list of columns", given=value)
            object.__setattr__(self, name, None if value is None else tuple(value))
        if self.keys is not None and not self.keys:
            raise InvalidArgumentError("keys must name at least one column; leave it out to append")
        check_files(self.compression, self.file_mb)

    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        """Check the table, and make it if that is wanted; its log tells the newest micro-batch."""
        check_columns(schema)
        check_partitions(schema, self.partition_by)
        table = self._table(query)
        table.check(schema, create=self.create)
        claim(storage_of(self.url, query.options), query, alone=False)
        return table.newest(query)

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        """Write files of the attempt's own."""
        storage = storage_of(self.url, attempt.query.options)
        return FileTransaction(
            storage,
            self._attempts(storage, attempt.query),
            attempt,
            schema,
            split=described(self.partition_by, self.keys or ()),
            file_bytes=self.file_mb << 20,
            compression=self.compression,
        )

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        """Look whether all files are there, and whether the table is still as it was, and takes the nulls in them."""
        storage = storage_of(self.url, query.options)
        attempts = self._attempts(storage, query)
        files = files_of(handles, batch_id)
        if gone := attempts.gone(handles, files):
            raise UnavailableError(
                "files are gone that were just written", batch=batch_id, table=self.url, gone=", ".join(gone[:3])
            )
        self._table(query).check_again(files)

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        """Commit one Delta transaction, unless the table has it."""
        files = files_of(handles, batch_id)
        if not files:
            return
        storage = storage_of(self.url, query.options)
        attempts = self._attempts(storage, query)
        table = self._table(query)
        try:
            is_there = table.has(query, batch_id, files)
        except NotFoundError as exc:
            raise StateLostError("the Delta table is gone", table=self.url, batch=batch_id) from exc
        if not is_there:
            if gone := attempts.gone(handles, files):
                raise StateLostError(
                    "files of a decided micro-batch are gone: its rows cannot be shown any more",
                    batch=batch_id,
                    table=self.url,
                    gone=", ".join(gone[:3]),
                )
            if self.keys:
                table.merge(query, batch_id, files, storage, attempts)
            else:
                table.append(query, batch_id, files)
        if self.keys:
            storage.delete(attempts.key_of(file.name) for file in files)
        attempts.end(handles)

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        """Take files away."""
        self._attempts(storage_of(self.url, query.options), query).abort(handles)

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        """Return the attempts that still have notes."""
        return self._attempts(storage_of(self.url, query.options), query).left()

    def _attempts(self, storage: ObjectStorage, query: SinkQuery) -> Attempts:
        folder = f"_holdfast/{self.name}/{query.query_id}/staged/" if self.keys else ""
        return Attempts(storage, self.name, query.query_id, lambda name: folder + name)

    def _table(self, query: SinkQuery) -> TableCommits:
        with needs_extra("delta"):
            from holdfast.spark_integration.sinks.delta.commits import TableCommits
        return TableCommits(self.url, query, self.keys or (), self.partition_by)
