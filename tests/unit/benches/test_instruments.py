"""Instruments of a run: processes, folders, and the proxy that counts and delays a store's requests."""

from __future__ import annotations

import http.client
import http.server
import os
import subprocess
import sys
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

from holdfast import __version__
from holdfast.benches.command import bench
from holdfast.benches.instruments.machine import holdfast_version
from holdfast.benches.instruments.measured import Processes, spark_kind, store_kind
from holdfast.benches.instruments.object_store import RequestCounts
from holdfast.benches.jobs.job import ENDPOINT
from holdfast.benches.report.results import requests_of
from holdfast.benches.runs.engines import files_of_spark, folder_bytes
from holdfast.errors import InvalidArgumentError

MIB = 1 << 20


def test_folder_bytes_counts_a_linked_file_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "below").mkdir()
    os.link(tmp_path / "a", tmp_path / "below" / "b")
    (tmp_path / "c").write_bytes(b"123")
    assert folder_bytes(tmp_path) == 8
    assert folder_bytes(tmp_path / "absent") == 0


@pytest.mark.slow(1)
def test_a_process_that_has_ended_still_counts(tmp_path: Path) -> None:
    work = (
        "import os, sys; held = bytearray(os.urandom(48 << 20)); file = open(sys.argv[1], 'wb'); file.write(held)\n"
        "os.fsync(file.fileno()); print('holds', flush=True)\n"
        "input(); del held; print('free', flush=True); input()"
    )
    children: set[int] = set()
    # Not all that is below: other tests of this process have left a Spark there.
    processes = Processes(lambda p: store_kind(p) if p.pid in {os.getpid(), *children} else None)
    command = [sys.executable, "-c", work, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        children.add(child.pid)
        assert child.stdout.readline() == "holds\n"
        processes.look()
        print(file=child.stdin, flush=True)
        assert child.stdout.readline() == "free\n"
        processes.look()
        child.communicate("\n")
    processes.look()
    peak = processes.peak()
    assert 48 * MIB < peak["background"]["anonymous"] <= peak["background"]["pss"] <= peak["background"]["rss"]
    assert processes.written()["background"] >= 48 * MIB
    assert 0 < processes.seconds()["background"] < 60
    assert "store" in peak


def test_results_name_the_commit_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else git knows: an installed copy inside another repository, a hook's environment, new files."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / "holdfast" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    assert holdfast_version(tmp_path) == __version__
    git("init")
    git("commit", "--allow-empty", "--message", "of somebody else")
    assert holdfast_version(tmp_path) == __version__
    git("add", "holdfast")
    git("commit", "--message", "ours")
    commit = f"{__version__}+g{git('rev-parse', 'HEAD')[:12]}"
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    (tmp_path / "results.json").write_text("{}")
    assert holdfast_version(tmp_path) == commit
    package.write_text("changed")
    assert holdfast_version(tmp_path) == f"{commit}.dirty"


def test_an_orphan_stays_below_the_run_that_started_it() -> None:
    work = """
import psutil, subprocess, sys
from holdfast.benches.instruments.measured import adopt_orphans
adopt_orphans()
orphan = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'], stdout=2).pid)"
pid = int(subprocess.run([sys.executable, "-c", orphan], stdout=-1, check=True).stdout)
assert pid in [process.pid for process in psutil.Process().children(recursive=True)]
"""
    assert subprocess.run([sys.executable, "-c", work], input="", text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("command", "kind"), [([], "python"), (["-m", "holdfast.spark_integration.server.state_server"], "server")]
)
def test_processes_of_a_query_are_told_apart(command: list[str], kind: str) -> None:
    run = [sys.executable, "-c", "print('up', flush=True); input()", *command]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert spark_kind(psutil.Process(child.pid)) == kind
        child.communicate(b"\n")
    assert spark_kind(psutil.Process()) is None


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
