"""The Parquet sink keeps the contract of two-phase sinks on a real HDFS, whose daemons are killed and started again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pyarrow as pa
import pytest

from holdfast.spark_integration.sinks.parquet.reading import read_parquet
from holdfast.spark_integration.sinks.parquet.sink import ParquetSink
from holdfast.spark_integration.sinks.two_phase_sink import TwoPhaseSink
from tests.contract.sampled_contract import SampledContract
from tests.servers.hdfs import Hdfs

pytestmark = [pytest.mark.hdfs, pytest.mark.slow(120)]
_PLACES = itertools.count()


class TestParquetSinkOnHdfs(SampledContract):
    @pytest.fixture
    def sink(self, hdfs: Hdfs) -> TwoPhaseSink:
        self.server, self.url = hdfs, f"{hdfs.url}/sinks/{next(_PLACES)}"
        return ParquetSink("out", self.url)

    @pytest.fixture
    def options(self) -> Mapping[str, str]:
        self.given = {"dfs.client.socket-timeout": "3000"}
        return self.given

    def shown(self, sink: TwoPhaseSink) -> pa.Table:
        return read_parquet(self.url, options=self.given)

    def restart_target(self) -> None:
        self.server.namenode.kill()
        self.server.datanode.kill()
        self.server.revive()
