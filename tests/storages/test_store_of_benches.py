"""Requests of benches to S3: counted, and as late as they should be."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest

from holdfast.benches.instruments.object_store import BUCKET as OWN_BUCKET
from holdfast.benches.instruments.object_store import RequestCounts, delayed_store
from holdfast.benches.instruments.processes import spark_kind, store_kind
from holdfast.snapshotter.storage.opening import open_storage
from tests.servers.s3 import BUCKET, S3Server

_FAR_MS = 100


@pytest.fixture(scope="module")
def far() -> Iterator[RequestCounts]:
    with delayed_store(_FAR_MS) as store:
        yield store


@pytest.mark.s3
@pytest.mark.slow
def test_a_client_finds_a_store_that_is_far_away(far: RequestCounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a bench passes on is the environment, which wins; each request waits once, and is done."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")  # the user's
    for name, value in far.environment.items():
        monkeypatch.setenv(name, value)
    with open_storage(f"s3://{OWN_BUCKET}/jobs") as storage:
        storage.put("totals/shard-0001/commits/1-a", b"first")  # opens the connection
        start_s = time.monotonic()
        storage.put("totals/shard-0001/commits/2-b", b"second")
        assert bytes(storage.get("totals/shard-0001/commits/2-b")) == b"second"
        assert time.monotonic() - start_s >= 2 * _FAR_MS / 1000
    counts = far.so_far()
    assert (counts["PUT commits"], counts["GET commits"]) == (2, 1)


@pytest.mark.s3
@pytest.mark.slow
def test_the_store_of_a_bench_is_no_process_of_the_query(far: RequestCounts) -> None:
    """Its memory and CPU time are another machine's."""
    (server,) = [p for p in psutil.Process().children() if "holdfast.benches.instruments.object_store" in p.cmdline()]
    assert spark_kind(server) is None
    assert store_kind(server) is None


@pytest.fixture(params=["moto", "versitygw"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


@pytest.mark.s3
def test_requests_pass_unchanged_and_are_counted_by_what_they_are_for(server: S3Server) -> None:
    data = os.urandom(3 << 20)
    shard = "totals/shard-0007"
    with RequestCounts(server.url) as counts:
        with open_storage(f"s3://{BUCKET}/counted", server.options(counts.url)) as storage:
            for version in range(5):
                storage.put(f"{shard}/commits/{version}-a", data)
            storage.put(f"{shard}/files/b-0", data)
            storage.put("totals/probes/c", b"")
            assert bytes(storage.get(f"{shard}/files/b-0")) == data
            found = [info.key for info in storage.list("")]
            assert len(found) == 7
            storage.delete(found)
            assert not list(storage.list(""))
        so_far = counts.so_far()
    assert 18 << 20 <= so_far.pop("bytes up") < 19 << 20
    assert 3 << 20 <= so_far.pop("bytes down") < 4 << 20
    assert so_far == {
        "PUT commits": 5, "PUT files": 1, "PUT probes": 1, "GET files": 1, "LIST": 2, "DELETE many": 1
    }  # fmt: skip
