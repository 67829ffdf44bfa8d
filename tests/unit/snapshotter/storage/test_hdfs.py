"""What HDFS does rarely, without HDFS: attempts that are left behind, and whose answers come after all."""

from __future__ import annotations

import threading

import pytest

from holdfast.snapshotter.storage import hdfs as hdfs_storage
from holdfast.snapshotter.storage.connections import Connections
from holdfast.snapshotter.storage.hdfs import HdfsStorage


@pytest.mark.slow(1)
def test_a_delete_that_was_left_behind_takes_nothing_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NameNode that hung answers both attempts at one moment: both have deleted the file, and neither has failed."""
    threads: list[threading.Thread] = []
    is_second = threading.Event()

    def delete_file(_client: object, _path: str) -> None:
        threads.append(threading.current_thread())
        if len(threads) == 1:
            assert is_second.wait(60)
        else:
            is_second.set()
            threads[0].join(60)

    monkeypatch.setattr(hdfs_storage, "delete_file", delete_file)
    options = {"operation_timeout_seconds": "1"}
    storage = HdfsStorage("namenode:8020", "app", options, sleep_ms=lambda _milliseconds: None)
    monkeypatch.setattr(storage, "_clients", Connections(object))  # of which nobody asks anything
    storage.delete(["commits/1-aa"])
    assert len(threads) == 2
