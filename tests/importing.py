"""Test modules, imported by the processes of a run side by side: each begins with a share of its own.

On a fresh clone pytest rewrites the assertions of five hundred modules, which takes as long as to import them, and
keeps what it has made for later. Processes that collect in one order would all make the same at the same time.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def share(config: pytest.Config, root: Path) -> list[str]:
    """Return the modules with which this process begins; none where it is alone, or not all tests are collected.

    `root`: the folder of all tests.
    """
    process = getattr(config, "workerinput", None)
    if process is None or [Path(one).resolve() for one in config.args] != [root]:
        return []
    ignored = [Path(one).resolve() for one in config.getoption("ignore") or ()]
    files = [path for path in sorted(root.rglob("test_*.py")) if not any(path.is_relative_to(one) for one in ignored)]
    number, of = int(process["workerid"].removeprefix("gw")), int(process["workercount"])
    return [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in files[number::of]]


def import_all(modules: list[str]) -> None:
    """Import modules; of what cannot be imported, collecting tells."""
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, pytest.skip.Exception):  # noqa: BLE001
            continue
