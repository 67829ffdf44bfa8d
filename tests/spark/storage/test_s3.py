"""Durable state on S3, with credentials that only the workers' task properties carry."""

from __future__ import annotations

import pytest
from pyspark.errors import StreamingQueryException

from tests.servers.s3 import BUCKET, SECRET_KEY, S3Server
from tests.spark.conftest import Lab
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.s3]


# ``make test`` has each of them once.
SERVERS = ["moto", "versitygw"]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


def use(lab: Lab, server: S3Server, options: dict[str, object], folder: str = "app") -> None:
    lab.configure(
        {
            "state.dir": f"s3://{BUCKET}/{folder}",
            "storage.key": str(options["key"]),
            "storage.secret": str(options["secret"]),
            "storage.client_kwargs.endpoint_url": server.url,
            "storage.client_kwargs.region_name": "us-east-1",
        }
    )


@pytest.mark.parametrize("server", cases(SERVERS), indirect=True)
def test_state_on_s3_outlives_local_state_and_wrong_credentials_stop_the_query(lab: Lab, server: S3Server) -> None:
    use(lab, server, server.options())
    lab.feed([("a", 1), ("b", 2), (None, 3)])
    lab.run(lab.totals())
    lab.lose_local_state()
    lab.feed([("a", 10)])
    with server.wrong_credentials() as wrong:
        use(lab, server, wrong)
        with pytest.raises(StreamingQueryException, match=r"(?s)InvalidArgumentError.*s3://bucket/app") as failed:
            lab.run(lab.totals())
    use(lab, server, server.options())
    assert SECRET_KEY not in str(failed.value)
    assert lab.state() == {"a": (1, 1), "b": (1, 2), None: (1, 3)}
    lab.run(lab.totals())
    assert lab.state() == {"a": (2, 11), "b": (1, 2), None: (1, 3)}


@pytest.mark.all
@pytest.mark.parametrize("server", cases(SERVERS[::-1]), indirect=True)
def test_places_that_cannot_be_used(lab: Lab, server: S3Server) -> None:
    """Absent, or not to be written to: the first micro-batch names the action, the key and the remedy."""
    lab.feed([("a", 1)])
    use(lab, server, server.options(), "places")
    lab.configure({"state.dir": "s3://no-such-bucket/app"})
    with pytest.raises(StreamingQueryException, match=r"(?s)no such bucket: create it.*action=get key=totals/operator"):
        lab.run(lab.totals())
    with server.user_without("s3:PutObject") as limited:
        use(lab, server, limited, "places")
        with pytest.raises(StreamingQueryException, match=r"(?s)access denied.*permission=s3:PutObject") as failed:
            lab.run(lab.totals())
    assert str(limited["secret"]) not in str(failed.value)
    use(lab, server, server.options(), "places")
    lab.run(lab.totals())
    assert lab.state() == {"a": (1, 1)}
