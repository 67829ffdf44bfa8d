"""Stores of benches: what passes through the proxy is unchanged, counted once, and as late as it should be."""

from __future__ import annotations

import http.client
import http.server
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.benches.command import bench
from holdfast.benches.instruments.object_store import RequestCounts
from holdfast.benches.jobs.job import ENDPOINT
from holdfast.benches.report.results import requests_of
from holdfast.benches.runs.engines import files_of_spark
from holdfast.errors import InvalidArgumentError

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
    result: Any = CliRunner().invoke(bench, ["job-a", "--engines", "holdfast-memory-s3"])
    assert isinstance(result.exception, InvalidArgumentError)
    assert ENDPOINT in str(result.exception)


@pytest.mark.slow(1)
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
