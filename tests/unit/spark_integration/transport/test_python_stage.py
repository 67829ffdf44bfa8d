"""Modules that a worker has loaded are left out of garbage collections, and nothing else is."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.spark_integration.transport import python_stage

_processes = itertools.count(10_000_000)


@pytest.fixture(autouse=True)
def _first_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has just been forked."""
    process = next(_processes)
    monkeypatch.setattr(os, "getpid", lambda: process)
    yield
    gc.unfreeze()


class Cyclic:
    def __init__(self) -> None:
        self.me = self


@pytest.mark.slow(1)
def test_what_is_loaded_is_left_out_of_later_collections() -> None:
    python_stage.freeze_modules()
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 1_000


@pytest.mark.slow(1)
def test_garbage_from_before_and_after_is_collected() -> None:
    before = weakref.ref(Cyclic())
    python_stage.freeze_modules()
    after = weakref.ref(Cyclic())
    gc.collect()
    assert before() is None
    assert after() is None


def test_only_old_objects_are_collected_less_often() -> None:
    """In a loop over keys young garbage goes as always."""
    before = gc.get_threshold()
    with python_stage.seldom_collecting_old():
        young, old, oldest = gc.get_threshold()
        assert (young, oldest) == (before[0], before[2])
        assert old > before[1]
        gone = weakref.ref(Cyclic())
        kept: list[list[int]] = []
        while gone() is not None:
            kept.append([])
            assert len(kept) <= 2 * young
    assert gc.get_threshold() == before


def test_what_was_set_comes_back_when_a_call_fails() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), python_stage.seldom_collecting_old():
        raise KeyError
    assert gc.get_threshold() == before


def test_whoever_collects_old_objects_even_less_often_may_go_on_so() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 100_000, 10)
        with python_stage.seldom_collecting_old():
            assert gc.get_threshold() == (700, 100_000, 10)
    finally:
        gc.set_threshold(*before)


def test_calls_that_overlap_leave_what_was_there_before_them() -> None:
    """Of two generators, the one that began first may end first."""
    before = gc.get_threshold()
    first, second = python_stage.seldom_collecting_old(), python_stage.seldom_collecting_old()
    try:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*before)


def test_what_a_function_sets_itself_stays() -> None:
    before = gc.get_threshold()
    try:
        with python_stage.seldom_collecting_old():
            gc.set_threshold(50_000, 20, 5)
        assert gc.get_threshold() == (50_000, 20, 5)
    finally:
        gc.set_threshold(*before)


@pytest.mark.slow(1)
def test_it_happens_once() -> None:
    """Freezing takes as long as the collection that it saves, and what lives for a task only must stay collectable."""
    python_stage.freeze_modules()
    later = [Cyclic()]
    frozen = gc.get_freeze_count()
    python_stage.freeze_modules()
    assert gc.get_freeze_count() <= frozen
    assert any(o is later[0] for o in gc.get_objects())


@pytest.mark.slow(1)
def test_it_happens_again_for_what_is_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of an object storage is loaded by a process that has frozen its modules, and is as large as these."""
    python_stage.freeze_modules()
    imported = [Cyclic()]
    monkeypatch.setitem(sys.modules, "imported_later", types.ModuleType("imported_later"))
    python_stage.freeze_modules()
    assert not any(o is imported[0] for o in gc.get_objects())


@pytest.mark.slow(1)
def test_modules_that_come_and_go_freeze_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen is never freed: a function that makes a module in each micro-batch must not fill the memory."""
    for i in range(10):
        monkeypatch.setitem(sys.modules, f"made_{i}", types.ModuleType(f"made_{i}"))
        python_stage.freeze_modules()
    later = [Cyclic()]
    monkeypatch.setitem(sys.modules, "made_last", types.ModuleType("made_last"))
    python_stage.freeze_modules()
    assert any(o is later[0] for o in gc.get_objects())


@pytest.mark.slow(0.5)
def test_modules_that_come_back_freeze_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    python_stage.freeze_modules()
    monkeypatch.setitem(sys.modules, "comes_and_goes", types.ModuleType("comes_and_goes"))
    python_stage.freeze_modules()
    monkeypatch.delitem(sys.modules, "comes_and_goes")
    python_stage.freeze_modules()
    kept = [Cyclic()]
    monkeypatch.setitem(sys.modules, "comes_and_goes", types.ModuleType("comes_and_goes"))
    python_stage.freeze_modules()
    assert any(o is kept[0] for o in gc.get_objects())


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux alone has it")
def test_a_descriptor_that_has_become_a_file_costs_none(tmp_path: Path) -> None:
    """A worker's connections come and go with its tasks, and their numbers go to whatever is opened next."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        python_stage.acknowledge_at_once()
    with (tmp_path / "file").open("w") as file:
        number = connection.detach()
        os.dup2(file.fileno(), number)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        python_stage.acknowledge_at_once()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    os.close(number)
