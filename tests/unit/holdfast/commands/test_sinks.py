"""What the commands say of decisions about sinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from tests import sink_logs
from tests.model.shard_history import ShardHistory
from tests.unit.holdfast.commands.conftest import document, files, run


@pytest.fixture(autouse=True)
def decided(storage: ObjectStorage) -> None:
    for batch_id in (7, 9):
        sink_logs.decide(storage, "totals", "query-1", batch_id, {"gid": "a"}, {"gid": "b"}, rows=1_000)


def test_inspect_shows_each_sink_with_its_newest_decision(root: Path) -> None:
    (sink,) = document("inspect", root)["sinks"]
    assert (sink["sink"], sink["query"], sink["entries"]) == ("totals", "query-1", 2)
    assert sink["newest"] == {"batch": 9, "rows": 1_000, "parts": 2}
    shown = run("inspect", root).stdout
    assert "micro-batch 9" in shown
    assert "1,000" in shown
    (root / "_sinks/totals/00000000000000000002").write_bytes(b"?")
    assert "not a whole holdfast file" in document("inspect", root)["sinks"][0]["newest"]["error"]
    assert "not a whole holdfast file" in run("inspect", root).stdout


def test_verify_reads_decisions(root: Path, shard: ShardHistory) -> None:
    assert document("verify", root)["damages"] == []
    (root / "_sinks/totals/00000000000000000001").write_bytes(b"?")
    (damage,) = document("verify", root, status=1)["damages"]
    assert damage["key"] == "_sinks/totals/00000000000000000001"


def test_gc_leaves_decisions_to_their_query(root: Path, shard: ShardHistory) -> None:
    before = {key for key in files(root) if key.startswith("_sinks/")}
    document("gc", root, "--yes", "--grace", "0")
    assert {key for key in files(root) if key.startswith("_sinks/")} == before


def test_gc_of_decisions_only_says_so(root: Path) -> None:
    refused = run("gc", root, "--yes").exception
    assert isinstance(refused, NotFoundError)
    assert "only sink decisions" in str(refused)
