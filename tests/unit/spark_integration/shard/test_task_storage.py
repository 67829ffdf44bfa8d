"""What the tasks of one process share to reach durable storage."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.settings import Settings
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.shard import task
from holdfast.spark_integration.sinks.files.location import storage_of


def test_threads_for_requests_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do not survive a fork: a worker would wait for ever on those of its parent."""
    mine = task.io_executor()
    assert task.io_executor() is mine
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    other = task.io_executor()
    assert other is not mine
    assert other.submit(lambda: 1).result(5) == 1
    other.shutdown()


@pytest.mark.parametrize(
    "open_it",
    [lambda url: task.storage_at(url, Settings()), lambda url: storage_of(url, {})],
    ids=["of state", "of a sink"],
)
def test_storages_that_take_turns_are_not_opened_anew(open_it: Callable[[str], ObjectStorage], tmp_path: Path) -> None:
    """Many queries, or sinks, in one process: each has a storage, whose client takes longer to make than a request."""
    urls = [str(tmp_path / str(number)) for number in range(20)]
    first = [open_it(url) for url in urls]
    assert all(open_it(url) is storage for url, storage in zip(urls, first, strict=True))


def test_outside_a_task_there_is_no_credential() -> None:
    assert task.storage_options(Settings(storage_names=("secret",))) == {}
    assert task.state_storage(Settings()) is None
