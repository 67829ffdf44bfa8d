"""Spark's contract of ``transformWithState`` has a test for each item, and Spark's own tests have ours beside them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import ROOT, text

PROCESSORS = ROOT / "tests/spark/processors"
ITEMS, UPSTREAM = (f"tests/spark/processors/{name}.md" for name in ("ITEMS", "UPSTREAM"))
# Where tests are named after items. Other folders have items of other lists.
NAMED = [
    *PROCESSORS.rglob("*.py"),
    *ROOT.glob("tests/faults/*processor*.py"),
    *ROOT.glob("tests/spark/queries/test_processor*.py"),
    *ROOT.glob("tests/unit/holdfast/test_tws_tester*.py"),
    *ROOT.glob("tests/unit/spark_integration/processor/*.py"),
]
ITEM = re.compile(r"\b([A-Z]{1,2})(\d+)\b(?: to ([A-Z]{1,2})(\d+)\b)?")
LETTERS = {"A", "B", "D", "E", "G", "I", "K", "L", "M", "N", "O", "Q", "R", "S", "T", "TL", "TM", "TT", "V", "W", "X"}


def rows(page: str) -> list[list[str]]:
    """Return the cells of a page's tables, without their heads."""
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text(page).splitlines() if "|" in line]
    return [cells for cells in found if cells[0] not in {"item", "Spark's test"} and set(cells[0]) != {"-", "|"}]


def items_in(words: str) -> Iterator[str]:
    """Yield the items that a text names, also by ranges and in the names of functions and cases."""
    for letters, first, _, last in ITEM.findall(words):
        if letters in LETTERS:
            yield from (f"{letters}{n}" for n in range(int(first), int(last or first) + 1))


def names_and_docstrings(path: Path) -> Iterator[str]:
    """Yield what names tests in a module: docstrings, names of functions, and texts that begin with an item."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
        if isinstance(node, ast.FunctionDef):
            yield " ".join(re.findall(r"(?:^|_)([a-z]{1,2}\d+)(?=_)", node.name)).upper()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(re.findall(r"^([A-Za-z]{1,2}\d+) \w", node.value)).upper()


@functools.cache
def named() -> set[str]:
    return {item for path in NAMED for words in names_and_docstrings(path) for item in items_in(words)}


def test_items_are_listed_once() -> None:
    listed = [cells[0] for cells in rows(ITEMS)]
    assert len(listed) == len(set(listed)) > 180


@pytest.mark.parametrize(("item", "reason"), [(cells[0], cells[2]) for cells in rows(ITEMS)])
def test_each_item_has_a_test_or_a_reason(item: str, reason: str) -> None:
    assert item in named() or reason


def test_tests_name_no_other_items() -> None:
    """A slip of the pen would else be a promise that nobody can look up."""
    assert named() <= {cells[0] for cells in rows(ITEMS)}


NAMES = sorted({found for cells in rows(UPSTREAM) for found in re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", cells[1])})


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_ours_beside_sparks_tests_exist(module: str, name: str) -> None:
    """Paths are those below this folder, or below the repository's root."""
    path = PROCESSORS / module if (PROCESSORS / module).exists() else ROOT / module
    tree = ast.parse(path.read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert not name or name in defined | assigned


@pytest.mark.parametrize("cells", rows(UPSTREAM), ids=lambda cells: cells[0].strip("`"))
def test_each_of_sparks_tests_has_ours_or_a_reason(cells: list[str]) -> None:
    assert len(cells) == 2
    assert cells[1]
