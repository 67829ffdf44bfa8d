"""What the tasks of one process share to reach durable storage."""

from __future__ import annotations

import os

import pytest

from holdfast.settings import Settings
from holdfast.spark_integration.shard import task_storage


def test_threads_for_requests_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do not survive a fork: a worker would wait for ever on those of its parent."""
    mine = task_storage.io_executor()
    assert task_storage.io_executor() is mine
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    other = task_storage.io_executor()
    assert other is not mine
    assert other.submit(lambda: 1).result(5) == 1
    other.shutdown()


def test_outside_a_task_there_is_no_credential() -> None:
    assert task_storage.storage_options(Settings(storage_names=("secret",))) == {}
    assert task_storage.state_storage(Settings()) is None
