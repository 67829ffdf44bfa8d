"""Results in the work directory: a Delta table, or Parquet files."""

from __future__ import annotations

import pandas as pd

from holdfast import sinks
from holdfast.distribution import needs_extra
from holdfast.examples.flights.results.base import SinkResults


class DeltaResults(SinkResults):
    """A Delta table."""

    called, reader = "Delta table", "deltalake"

    def prepare(self) -> None:
        with needs_extra("delta"):
            import deltalake  # noqa: F401
        super().prepare()

    def sink(self) -> sinks.TwoPhaseSink:
        return sinks.delta(self.name, self.output, create=True)

    def rows(self) -> pd.DataFrame:
        from deltalake import DeltaTable

        return DeltaTable(str(self.output)).to_pyarrow_table().to_pandas()


class ParquetResults(SinkResults):
    """Parquet files, with manifests that list the committed files."""

    called, reader = "Parquet files", "read_parquet"

    def sink(self) -> sinks.TwoPhaseSink:
        return sinks.parquet(self.name, self.output)

    def rows(self) -> pd.DataFrame:
        return sinks.read_parquet(self.output).to_pandas()
