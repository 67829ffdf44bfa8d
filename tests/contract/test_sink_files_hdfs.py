"""The Parquet sink keeps the contract of two-phase sinks on a real HDFS, whose daemons are killed and started again.

``make test`` has `tests/spark/sinks/test_file_sinks.py::test_parquet_on_hdfs_shows_each_micro_batch_once`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pyarrow as pa
import pytest

from holdfast.spark_integration.sinks.files.parquet import ParquetSink, read_parquet
from holdfast.spark_integration.sinks.two_phase_sink import TwoPhaseSink
from holdfast.testing.sink_contract import SinkContract
from tests.servers.hdfs import Hdfs

pytestmark = [pytest.mark.hdfs, pytest.mark.all, pytest.mark.slow(600)]
_PLACES = itertools.count()


class TestParquetSinkOnHdfs(SinkContract):
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
