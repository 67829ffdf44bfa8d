"""`import holdfast` gives what it promises, to Python and to type checkers alike."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.source_tree import tree


@pytest.mark.parametrize("name", sorted(holdfast.__all__))
def test_exports_resolve_to_where_they_are_defined(name: str) -> None:
    value = getattr(holdfast, name)
    assert value is getattr(importlib.import_module(holdfast._EXPORTS[name]), name)
    assert getattr(value, "__module__", holdfast._EXPORTS[name]) == holdfast._EXPORTS[name]
    assert value.__doc__


def test_type_checkers_see_the_same_exports() -> None:
    block = next(n for n in tree("holdfast/__init__.py").body if isinstance(n, ast.If))
    seen = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == holdfast._EXPORTS
    assert sorted(holdfast._EXPORTS) == list(holdfast._EXPORTS), "keep the table sorted"


def test_unknown_names_of_the_package_are_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        holdfast.no_such_name  # noqa: B018
    assert set(holdfast.__all__) <= set(dir(holdfast))


@pytest.mark.parametrize(("version", "said"), [("3.5.6", "needs Spark 4.0 or later.*has PySpark 3.5.6"), ("4.0.0", "")])
def test_an_old_spark_is_named(tmp_path: Path, version: str, said: str) -> None:
    """A cluster brings its own PySpark; of an old one Python says that a module of Spark 4 is missing."""
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    done = subprocess.run(
        [sys.executable, "-c", "import holdfast; holdfast.stream"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert re.search(said or r"No module named 'pyspark\.", last), done.stderr
    assert done.returncode == 1
