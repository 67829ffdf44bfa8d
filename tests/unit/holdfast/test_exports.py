"""`import holdfast` gives what it promises, to Python and to type checkers alike."""

from __future__ import annotations

import ast
import importlib

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
