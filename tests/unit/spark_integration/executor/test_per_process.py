"""What a process keeps is gone after a fork: connections, threads and locks do not survive one."""

from __future__ import annotations

import os

import pytest

from holdfast.spark_integration.executor.processes import kept_per_process


def test_results_are_kept_by_their_arguments_in_one_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, str]] = []

    @kept_per_process()
    def opened(number: int, *, name: str) -> object:
        calls.append((number, name))
        return object()

    first = opened(1, name="a")
    assert opened(1, name="a") is first
    assert opened(2, name="a") is not first
    assert calls == [(1, "a"), (2, "a")]
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    assert opened(1, name="a") is not first


def test_no_more_results_are_kept_than_asked_for() -> None:
    @kept_per_process(1)
    def opened(number: int) -> object:
        return object()

    first = opened(1)
    opened(2)
    assert opened(1) is not first
