"""Durable state on S3, with credentials that only the workers' task properties carry."""

from __future__ import annotations

import pytest
from pyspark.errors import StreamingQueryException

from tests.faults.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, s3_server
from tests.spark.conftest import Lab

pytestmark = [pytest.mark.spark, pytest.mark.s3]


def use(lab: Lab, server: S3Server) -> None:
    lab.configure(
        {
            "checkpoint.dir": f"s3://{BUCKET}/app",
            "storage.key": ACCESS_KEY,
            "storage.secret": SECRET_KEY,
            "storage.client_kwargs.endpoint_url": server.url,
            "storage.client_kwargs.region_name": "us-east-1",
        }
    )


def test_state_on_s3_outlives_local_state_and_wrong_credentials_stop_the_query(lab: Lab) -> None:
    with s3_server() as server:
        use(lab, server)
        lab.feed([("a", 1), ("b", 2), (None, 3)])
        lab.run(lab.totals())
        lab.lose_local_state()
        lab.feed([("a", 10)])
        with (
            server.checking_credentials(),
            pytest.raises(StreamingQueryException, match=r"(?s)InvalidArgumentError.*s3://bucket/app") as failed,
        ):
            lab.run(lab.totals())
        assert SECRET_KEY not in str(failed.value)
        assert lab.state() == {"a": (1, 1), "b": (1, 2), None: (1, 3)}
        lab.run(lab.totals())
        assert lab.state() == {"a": (2, 11), "b": (1, 2), None: (1, 3)}
