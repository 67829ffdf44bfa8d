"""The Delta sink keeps the contract of two-phase sinks, appending and upserting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.two_phase_sink import TwoPhaseSink
from holdfast.testing.sink_contract import SECRET
from tests.contract.conftest import KEYS, SampledContract, SeveralKeys

pytestmark = pytest.mark.slow(24)


class TestDeltaSink(SampledContract):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> TwoPhaseSink:
        self.url = str(tmp_path / "target")
        return DeltaSink("out", self.url, create=True)

    @pytest.fixture
    def options(self) -> Mapping[str, str]:
        """What a folder has no use for, an object store has: credentials."""
        return {"key": "somebody", "secret": f"{SECRET}-1"}

    def shown(self, sink: TwoPhaseSink) -> pa.Table:
        return DeltaTable(self.url).to_pyarrow_table()

    def unfit_schemas(self) -> list[pa.Schema]:
        """Another type, and a column that the table has not; it may have more than the rows."""
        return [super().unfit_schemas()[0], self.schema().append(pa.field("new", pa.int64()))]


@pytest.mark.all
class TestDeltaSinkOfPartitions(TestDeltaSink):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> TwoPhaseSink:
        self.url = str(tmp_path / "target")
        return DeltaSink("out", self.url, create=True, partition_by=["part"])

    def schema(self) -> pa.Schema:
        return pa.schema([("key", pa.int64()), ("part", pa.string()), ("amount", pa.float64())])

    def rows(self, n: int, seed: int, attempt: int = 0) -> pa.Table:
        keys = [seed * 1_000_000 + i for i in range(n)]
        parts = [("a/b:c%", None, "ü")[i % 3] for i in range(n)]
        return pa.table([keys, parts, [attempt + i / 4 for i in range(n)]], schema=self.schema())


class TestUpsertingDeltaSink(SeveralKeys, TestDeltaSink):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> TwoPhaseSink:
        self.url = str(tmp_path / "target")
        return DeltaSink("out", self.url, create=True, keys=KEYS)
