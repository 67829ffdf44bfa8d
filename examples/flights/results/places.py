"""The destinations of results by name."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.examples.flights.results.base import OutputFiles, Results
from holdfast.examples.flights.results.files import DeltaResults, ParquetResults
from holdfast.examples.flights.results.kafka import KafkaResults
from holdfast.examples.flights.results.postgres import PostgresResults

#: By the sink's name, None for plain files.
RESULTS: Mapping[str | None, type[Results]] = {
    None: OutputFiles,
    "delta": DeltaResults,
    "postgres": PostgresResults,
    "kafka": KafkaResults,
    "parquet": ParquetResults,
}
