"""The Parquet and Delta sinks keep the contract of two-phase sinks on a real S3, which is killed and started again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.delta.tables import storage_options
from holdfast.spark_integration.sinks.files.parquet import ParquetSink, read_parquet
from holdfast.spark_integration.sinks.two_phase_sink import TwoPhaseSink
from holdfast.testing.sink_contract import SinkContract
from tests.contract.conftest import KEYS, SeveralKeys
from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, Versitygw

pytestmark = [pytest.mark.s3, pytest.mark.all, pytest.mark.slow(600)]
_PLACES = itertools.count()


class _OnS3(SinkContract):
    # The server's own: the suite looks for it in every handle, error and pickle.
    secrets = (SECRET_KEY,)

    @pytest.fixture(autouse=True)
    def _server(self, versitygw: Versitygw) -> None:
        self.server = versitygw
        self.url = f"s3://{BUCKET}/sinks/{next(_PLACES)}"

    @pytest.fixture
    def options(self, versitygw: Versitygw) -> Mapping[str, str]:
        self.given = {
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            "endpoint_url": versitygw.url,
            "client_kwargs.region_name": "us-east-1",
        }
        return self.given

    def restart_target(self) -> None:
        self.server.kill()
        self.server.start()


class TestParquetSink(_OnS3):
    @pytest.fixture
    def sink(self, _server: None) -> TwoPhaseSink:
        return ParquetSink("out", self.url)

    def shown(self, sink: TwoPhaseSink) -> pa.Table:
        return read_parquet(self.url, options=self.given)


class TestDeltaSink(_OnS3):
    @pytest.fixture
    def sink(self, _server: None) -> TwoPhaseSink:
        return DeltaSink("out", self.url, create=True)

    def shown(self, sink: TwoPhaseSink) -> pa.Table:
        return DeltaTable(self.url, storage_options=storage_options(self.url, self.given)).to_pyarrow_table()

    def unfit_schemas(self) -> list[pa.Schema]:
        """Another type, and a column that the table has not; it may have more than the rows."""
        return [super().unfit_schemas()[0], self.schema().append(pa.field("new", pa.int64()))]


class TestUpsertingDeltaSink(SeveralKeys, TestDeltaSink):
    @pytest.fixture
    def sink(self, _server: None) -> TwoPhaseSink:
        return DeltaSink("out", self.url, create=True, keys=KEYS)
