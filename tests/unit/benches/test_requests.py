"""Stores of benches: what passes through the proxy is unchanged, counted once, and as late as it should be."""

from __future__ import annotations

import http.client
import http.server
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from holdfast.benches.command import bench
from holdfast.benches.instruments.delayed_store import DelayedStore
from holdfast.benches.instruments.processes import spark_kind, store_kind
from holdfast.benches.instruments.request_counts import RequestCounts
from holdfast.benches.jobs.requests import ENDPOINT, files_of_spark, requests_of
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.storage.opening import open_storage
from tests.servers.s3 import BUCKET, S3Server

_FAR_MS = 100


class _Nothing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def _answering() -> Iterator[str]:
    """Run a server that answers all requests at once."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Nothing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _asked(address: str, requests: int) -> float:
    """Make requests over one connection; return how long they took."""
    connection = http.client.HTTPConnection(address)
    start_s = time.monotonic()
    for _ in range(requests):
        connection.request("GET", "/")
        connection.getresponse().read()
    connection.close()
    return time.monotonic() - start_s


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


def test_only_requests_of_ours_are_added_up() -> None:
    counts = {"PUT commits": 3.5, "LIST": 1.0, "bytes up": 999.0, "Spark: files": 202.0, "Spark: bytes": 9.0}
    assert requests_of(counts) == 4.5


def test_checksums_are_no_files_of_spark(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_bytes(b"1234")
    (tmp_path / "offsets" / ".0.crc").write_bytes(b"12")
    assert files_of_spark(tmp_path) == {"Spark: files": 1, "Spark: bytes": 4}
    assert files_of_spark(tmp_path / "absent") == {"Spark: files": 0, "Spark: bytes": 0}


def test_a_server_that_cannot_be_counted_at_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "https://s3.example.com")
    result: Any = CliRunner().invoke(bench, ["requests"])
    assert isinstance(result.exception, InvalidArgumentError)
    assert ENDPOINT in str(result.exception)


@pytest.fixture(scope="module")
def far() -> Iterator[DelayedStore]:
    with DelayedStore(_FAR_MS) as store:
        yield store


@pytest.mark.s3
@pytest.mark.slow
def test_a_client_finds_a_store_that_is_far_away(far: DelayedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a bench passes on is the environment, which wins; each request waits once, and is done."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")  # the user's
    for name, value in far.environment.items():
        monkeypatch.setenv(name, value)
    with open_storage(f"s3://{far.bucket}/jobs") as storage:
        storage.put("totals/shard-0001/commits/1-a", b"first")  # opens the connection
        start_s = time.monotonic()
        storage.put("totals/shard-0001/commits/2-b", b"second")
        assert bytes(storage.get("totals/shard-0001/commits/2-b")) == b"second"
        assert time.monotonic() - start_s >= 2 * _FAR_MS / 1000
    counts = far.so_far()
    assert (counts["PUT commits"], counts["GET commits"]) == (2, 1)


@pytest.mark.s3
@pytest.mark.slow
def test_the_store_of_a_bench_is_no_process_of_the_query(far: DelayedStore) -> None:
    """Its memory and CPU time are another machine's."""
    (server,) = [p for p in psutil.Process().children() if "holdfast.benches.instruments.object_store" in p.cmdline()]
    assert spark_kind(server) is None
    assert store_kind(server) is None


def test_each_connection_waits_for_its_own_requests_alone() -> None:
    """A store that is far away answers 20 clients at once as fast as one."""
    with (
        _answering() as server,
        RequestCounts(f"http://{server}", _FAR_MS) as counts,
        ThreadPoolExecutor(20) as clients,
    ):
        start_s = time.monotonic()
        proxy = counts.url.removeprefix("http://")
        took_s = list(clients.map(lambda _: _asked(proxy, requests=2), range(20)))
        assert min(took_s) >= 2 * _FAR_MS / 1000
        assert time.monotonic() - start_s < 20 * _FAR_MS / 1000, "one after another they would take twice as long"
        assert counts.so_far()["GET others"] == 40
