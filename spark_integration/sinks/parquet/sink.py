"""Plain Parquet files below any URL, and a manifest for each micro-batch that says which of them count.

::

    <url>/_data/part-<attempt>-<number>.parquet              rows
          _holdfast/<sink>/schema                            kind "sink-schema": the columns
          _holdfast/<sink>/<query id>/batches/…              see `manifests`
          _holdfast/<sink>/<query id>/attempts/…             see `holdfast.spark_integration.sinks.files.attempts`
          _holdfast/queries/<sink>/<query id>                see `holdfast.spark_integration.sinks.files.claims`

Spark, Hive and their like pass over names that begin with ``_``: who reads the URL without the manifests sees nothing,
rather than rows that were never decided. One put makes a micro-batch visible.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from holdfast.errors import NotFoundError, StateLostError, UnavailableError
from holdfast.snapshotter.decisions import checked_sink
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.options import CREDENTIALS
from holdfast.snapshotter.storage.url import parse_url
from holdfast.spark_integration.sinks.files.attempts import Attempts, DataFile, files_of, noted
from holdfast.spark_integration.sinks.files.claims import claim
from holdfast.spark_integration.sinks.files.columns import check_columns, compare
from holdfast.spark_integration.sinks.files.places import storage_of
from holdfast.spark_integration.sinks.files.writing import FileTransaction, check_files
from holdfast.spark_integration.sinks.parquet.manifests import MERGED, Manifest, Manifests, found, in_force, place
from holdfast.spark_integration.sinks.parquet.stored_schema import put_schema, read_schema
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
)

_log = logging.getLogger(__name__)

DATA = "_data"


@dataclass(frozen=True)
class ParquetSink(TwoPhaseSink):
    """Parquet files on a local disk, S3, HDFS or any fsspec URL; see the module. Append mode.

    Parameters
    ----------
    name : str
        Letters, digits, ``_`` and ``-``. A URL belongs to one name.
    url : str
        Without credentials: they are settings, ``spark.holdfast.sink.<name>.key`` and so on, named as those of
        ``spark.holdfast.storage``.
    compression : {"zstd", "snappy", "gzip", "lz4", "none"}
    file_mb : int
        How many MB of rows, uncompressed, make a file; a task holds them in memory.
    """

    name: str
    url: str
    compression: str = "zstd"
    file_mb: int = 128
    credentials: ClassVar[Sequence[str]] = CREDENTIALS

    def __post_init__(self) -> None:
        checked_sink(self.name)
        object.__setattr__(self, "url", str(parse_url(self.url)))
        check_files(self.compression, self.file_mb)

    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        """Check whose the URL is and its columns; the newest manifest tells the newest micro-batch."""
        check_columns(schema)
        storage = storage_of(self.url, query.options)
        there = read_schema(storage, self.name)
        if there is not None:
            # The columns of the first query stay: nothing changes them.
            compare(schema, there, "write to another URL", sink=self.name, storage=storage.url)
        claim(storage, query, alone=True)
        if there is None:
            put_schema(storage, self.name, schema)
        manifests = found(storage.list(self._attempts(storage, query).folder))
        return max((manifest.last for manifest in manifests), default=-1)

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        """Write files of the attempt's own."""
        storage = storage_of(self.url, attempt.query.options)
        attempts = self._attempts(storage, attempt.query)
        return FileTransaction(
            storage,
            attempts,
            attempt,
            schema,
            file_bytes=self.file_mb << 20,
            compression=self.compression,
        )

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        """Look whether all files are there, and as large as they were."""
        storage = storage_of(self.url, query.options)
        attempts = self._attempts(storage, query)
        if gone := attempts.gone(handles, files_of(handles, batch_id)):
            raise UnavailableError(
                "files are gone that were just written", batch=batch_id, storage=storage.url, gone=", ".join(gone[:3])
            )

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        """Put the micro-batch's manifest: the same one, if this is done again."""
        files = files_of(handles, batch_id)
        if not files:
            return
        storage = storage_of(self.url, query.options)
        attempts = self._attempts(storage, query)
        manifests = Manifests(storage, attempts.folder, self.name, query.query_id)
        listed = storage.list(attempts.folder)
        there = found(listed)
        within = next((one for one in in_force(there) if one.first <= batch_id <= one.last), None)
        if within is not None:
            self._require_same(manifests, within, batch_id, files)
        else:
            if gone := attempts.gone(handles, files, noted(info.key for info in listed)):
                raise StateLostError(
                    "files of a decided micro-batch are gone from the sink: its rows cannot be shown any more",
                    batch=batch_id,
                    storage=storage.url,
                    gone=", ".join(gone[:3]),
                )
            manifests.put(batch_id, files)
        attempts.end(handles)
        if len(there) >= MERGED:
            self._merge(manifests, [*there, *([] if within else [Manifest(0, batch_id, batch_id)])])

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        """Take files away."""
        self._attempts(storage_of(self.url, query.options), query).abort(handles)

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        """Return the attempts that still have notes."""
        return self._attempts(storage_of(self.url, query.options), query).left()

    def _attempts(self, storage: ObjectStorage, query: SinkQuery) -> Attempts:
        return Attempts(storage, self.name, query.query_id, lambda name: f"{DATA}/{name}")

    def _require_same(self, manifests: Manifests, within: Manifest, batch_id: int, files: Sequence[DataFile]) -> None:
        listed = manifests.read(within).to_pylist()
        shown = {(one["attempt"], one["number"], one["digest"]) for one in listed if one["batch"] == batch_id}
        if shown != {(file.attempt, file.number, file.digest) for file in files}:
            raise StateLostError(
                "the sink shows other files for this micro-batch, or had ended it without any",
                batch=batch_id,
                sink=self.name,
                manifest=within.name,
            )

    def _merge(self, manifests: Manifests, there: Sequence[Manifest]) -> None:
        """Merge manifests once in a while; a micro-batch does not fail by it."""
        level = [one for one in there if one.level == 0]
        if len(level) < MERGED:
            return
        try:
            manifests.merge(sorted(there, key=place))
        except (UnavailableError, NotFoundError) as exc:
            _log.warning("the manifests of sink %r are not merged for now: %s", self.name, exc)
