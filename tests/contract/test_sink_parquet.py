"""The Parquet sink keeps the contract of two-phase sinks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.spark_integration.sinks.files.parquet import ParquetSink, read_parquet
from holdfast.spark_integration.sinks.two_phase_sink import TwoPhaseSink
from holdfast.testing.sink_contract import SECRET
from tests.contract.conftest import SampledContract

pytestmark = pytest.mark.slow(8)


class TestParquetSink(SampledContract):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> TwoPhaseSink:
        self.url = str(tmp_path / "target")
        return ParquetSink("out", self.url)

    @pytest.fixture
    def options(self) -> Mapping[str, str]:
        """What a folder has no use for, an object store has: credentials."""
        return {"key": "somebody", "secret": f"{SECRET}-1"}

    def shown(self, sink: TwoPhaseSink) -> pa.Table:
        return read_parquet(self.url)
