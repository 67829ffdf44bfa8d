"""Plain Parquet files below any URL, and a manifest for each micro-batch that says which of them count.

::

    <url>/_data/part-<attempt>-<number>.parquet              rows
          _holdfast/<sink>/<query id>/batches/…              see `manifests`
          _holdfast/<sink>/<query id>/attempts/…             see `holdfast.spark_integration.sinks.files.attempts`
          _holdfast/queries/…                                see `holdfast.spark_integration.sinks.files.places`

Spark, Hive and their like pass over names that begin with ``_``: who reads the URL without the manifests sees nothing,
rather than rows that were never decided. One put makes a micro-batch visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from holdfast.spark_integration.sinks.files.attempts import Attempts
from holdfast.spark_integration.sinks.files.places import check_columns, claim
from holdfast.spark_integration.sinks.files.sink import FileSink
from holdfast.spark_integration.sinks.parquet.manifests import Manifests
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery

DATA = "_data"


@dataclass(frozen=True)
class ParquetSink(FileSink):
    """Parquet files below a URL that belongs to one name; see `holdfast.sinks.parquet`. Append mode."""

    name: str
    url: str
    compression: str = "zstd"
    file_mb: int = 128

    @property
    def folder(self) -> str:
        """A folder that Spark and similar readers skip."""
        return f"{DATA}/"

    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        """Check the URL's owner and columns; return the newest manifest's micro-batch."""
        check_columns(schema)
        attempts = self.attempts(query)
        claim(attempts.storage, query, schema)
        return self.target(query, attempts).newest()

    def target(self, query: SinkQuery, attempts: Attempts) -> Manifests:
        """Return a query's manifests."""
        return Manifests(attempts.storage, query.sink, query.query_id)
