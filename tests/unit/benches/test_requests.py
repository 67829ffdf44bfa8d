"""Counts of requests: what passes through the proxy is unchanged, and each request is counted once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.benches.command import bench
from holdfast.benches.instruments.request_counts import RequestCounts
from holdfast.benches.jobs.requests import ENDPOINT, files_of_spark, requests_of
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.storage.opening import open_storage
from tests.servers.s3 import BUCKET, S3Server


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


@pytest.mark.parametrize("server", [None, "https://s3.example.com"])
def test_a_server_that_cannot_be_counted_at_is_refused_before_anything_runs(
    server: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    if server is not None:
        monkeypatch.setenv(ENDPOINT, server)
    result: Any = CliRunner().invoke(bench, ["requests"])
    assert isinstance(result.exception, InvalidArgumentError)
    assert ENDPOINT in str(result.exception)
