"""docs/reliability.md names tests that exist, and has a line for each case of the groups that it lists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from holdfast.testing.storage_contract import StorageContract

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/reliability.md").read_text()
# Each promise, rule and case, however it is wrapped.
ITEMS = [" ".join(item.split()) for item in re.findall(r"^- .*(?:\n  .*)*", TEXT, re.MULTILINE)]
# In the order of the page. T64 asks for a machine, not for a test of the storage.
CASES = [number for number in (*range(1, 70), *range(90, 96), 107, *range(96, 107)) if number != 64]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_/]+/test_\w+\.py)(?:::(\w+))?`", TEXT))))
def test_what_it_names_is_there(name: tuple[str, str]) -> None:
    file, test = name
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert not test or test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _is_for_later(file: str, test: str) -> bool:
    """Tell whether a test, or the whole file, is marked as one that ``make test`` leaves out."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    whole = [
        node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    named = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == test]
    marks = [ast.unparse(mark) for node in named for mark in node.decorator_list] + [
        ast.unparse(m.value) for m in whole
    ]
    return any(re.search(r"mark\.(all|long)\b", mark) and "parametrize" not in mark for mark in marks)


@pytest.mark.parametrize("item", [item for item in ITEMS if re.search(r"`[a-z_/]+/test_\w+\.py", item)])
def test_each_promise_has_a_test_in_make_test(item: str) -> None:
    """Others of its tests may be in ``make test-all`` alone."""
    named = re.findall(r"`([a-z_/]+/test_\w+\.py)(?:::(\w+))?`", item)
    assert not all(_is_for_later(file, test) for file, test in named)


def test_the_contract_has_the_tests_that_it_names() -> None:
    named = re.findall(r"`holdfast\.testing\.StorageContract\.(\w+)`", TEXT)
    assert named
    assert [name for name in named if not hasattr(StorageContract, name)] == []


def test_every_case_and_promise_has_a_line() -> None:
    found = [case[1] for item in ITEMS if (case := re.match(r"- \*\*T(\d\d+) [^*]+\*\*: .", item))]
    assert [int(number) for number in found] == CASES
    rules = {rule[1] for item in ITEMS if (rule := re.match(r"- \*\*([PR]\d+)\*\* .", item))}
    assert set(re.findall(r"\b[PR]\d+\b", TEXT)) == rules
