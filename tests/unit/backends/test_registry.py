"""Backends by name, their options, and the seam."""

from __future__ import annotations

import sys
import tomllib
import types
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from holdfast.backends import registry
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.options import did_you_mean, nearest_name, parse_options, parse_size
from holdfast.backends.run_files.backend import RunFilesBackend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import InvalidArgumentError
from tests.source_tree import ROOT

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


def test_pyproject_registers_the_built_in_backends() -> None:
    """The registry and the entry points list the same backends, under the same names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][registry.GROUP] == registry._BUILT_IN


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("memroy", "did you mean 'memory'.*known names: .*memory"),
        ("RocksDB", "did you mean 'rocksdb'"),
        ("twice", "several distributions.*uninstall"),
        ("absent", "cannot be loaded from 'no_such_module:X'"),
        ("attribute", "cannot be loaded from 'a_plugin:Nothing'"),
        ("function", "not a subclass of Backend"),
        ("unfinished", "does not implement methods of the contract: apply, close, .*view; add"),
        ("older", "a different version of the backend contract.*built_for=1 wanted=2"),
        ("unstated", "class sets contract_version, built_for=None"),
    ],
)
def test_what_is_wrong_is_said(register: object, name: str, message: str) -> None:
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


def test_pointers_as_text() -> None:
    """Only what a pointer writes is read, and nothing that would be a path."""
    assert Pointer.parse(str(Pointer(7, "9f3c"))) == Pointer(7, "9f3c")
    for text in ("", "7", "7-", "-7-a", "07-a", "7-../a", "7-a/b", "7-é", "٣-a", "7-a\n", "x-a", "7-a-b"):
        with pytest.raises(InvalidArgumentError, match="not a pointer"):
            Pointer.parse(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("65536", 1 << 16), ("512m", 512 << 20), ("2G", 2 << 30), ("1kb", 1024), (" 3 t ", 3 << 40), ("7b", 7)],
)
def test_sizes_are_read_as_spark_reads_them(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "m", "0", "-1m", "1.5g", "2 gigs", "1x", "1mm"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """Zero too: it would mean no room at all."""
    with pytest.raises(ValueError, match="512m"):
        parse_size(text)


def test_values_are_read_and_mistakes_named() -> None:
    known = {"memory": parse_size, "maxOpenFiles": int}
    assert parse_options("rocksdb", known, {"memory": "1g"}) == {"memory": 1 << 30}
    with pytest.raises(InvalidArgumentError, match=r"did you mean spark.holdfast.rocksdb.maxOpenFiles"):
        parse_options("rocksdb", known, {"maxopenfiles": "1"})
    known_settings = r"known settings: spark.holdfast.rocksdb.memory, spark.holdfast.rocksdb"
    with pytest.raises(InvalidArgumentError, match=known_settings):
        parse_options("rocksdb", known, {"zzzzzzzz": "1"})
    with pytest.raises(
        InvalidArgumentError, match=r"spark.holdfast.rocksdb.memory cannot be 'much': it must be a size"
    ):
        parse_options("rocksdb", known, {"memory": "much"})
    with pytest.raises(InvalidArgumentError, match="backend 'mine' has no options"):
        parse_options("mine", {}, {"a": "1"})


def test_the_nearest_name_is_suggested_and_nothing_far() -> None:
    """A hint that has nothing to do with what was written would mislead."""
    assert nearest_name("memroy", ["rocksdb", "memory"]) == "memory"
    assert nearest_name("zzz", ["rocksdb", "memory"]) is None
    assert nearest_name("memory", []) is None
    assert did_you_mean("memroy", ["rocksdb", "memory"]) == "; did you mean 'memory'?"
    assert did_you_mean("zzz", ["rocksdb", "memory"]) == ""
