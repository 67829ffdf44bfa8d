"""Backends by name: the built-in ones, plug-ins, and every way to get it wrong."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from holdfast.backends import registry
from holdfast.backends.base import Backend
from holdfast.backends.run_files.backend import RunFilesBackend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import InvalidArgumentError

BUILT_IN = ("memory", "holdfast.backends.run_files.memory:MemoryBackend")


class Unfinished(Backend):
    """A plug-in that forgot something."""


class Older(Backend):
    """A plug-in for another release, which had other methods."""

    contract_version = 1
    has_one_owner = True
    most_open = 64


class Unstated(RunFilesBackend):
    """A plug-in that does not say which contract it was built for."""


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> object:
    plugin = types.ModuleType("a_plugin")
    plugin.Good = MemoryBackend  # type: ignore[attr-defined]
    plugin.Unfinished = Unfinished  # type: ignore[attr-defined]
    plugin.Older = Older  # type: ignore[attr-defined]
    plugin.Unstated = Unstated  # type: ignore[attr-defined]
    plugin.function = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_plugin", plugin)

    def register(*points: tuple[str, str]) -> None:
        found = EntryPoints(EntryPoint(name, value, registry.GROUP) for name, value in points)
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found.select(group=group))

    return register


def test_built_in_and_plugged_in_backends_are_found(register: object) -> None:
    """A plug-in needs an entry point and nothing else; one seen twice by the importer is one."""
    register(BUILT_IN, BUILT_IN, ("mine", "a_plugin:Good"))  # type: ignore[operator]
    assert registry.backend_names() == ["filesystem", "memory", "mine", "rocksdb"]
    assert registry.find_backend("memory") is registry.find_backend("mine") is MemoryBackend


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("memroy", "did you mean 'memory'.*known are .*memory"),
        ("RocksDB", "did you mean 'rocksdb'"),
        ("twice", "several distributions.*uninstall"),
        ("absent", "cannot be loaded from 'no_such_module:X'"),
        ("attribute", "cannot be loaded from 'a_plugin:Nothing'"),
        ("function", "not a subclass of Backend"),
        ("unfinished", "lacks methods of the contract: apply, close, .*view; add"),
        ("older", "another version of the backend contract.*built_for=1 wanted=2"),
        ("unstated", "class sets contract_version, built_for=None"),
    ],
)
def test_what_is_wrong_is_said(register: object, name: str, message: str) -> None:
    """Each mistake of a configuration or a plug-in has its own remedy."""
    register(  # type: ignore[operator]
        BUILT_IN,
        ("twice", "a_plugin:Good"),
        ("twice", "b_plugin:Good"),
        ("absent", "no_such_module:X"),
        ("attribute", "a_plugin:Nothing"),
        ("function", "a_plugin:function"),
        ("unfinished", "a_plugin:Unfinished"),
        ("older", "a_plugin:Older"),
        ("unstated", "a_plugin:Unstated"),
    )
    with pytest.raises(InvalidArgumentError, match=message):
        registry.find_backend(name)
