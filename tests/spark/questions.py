"""The source of what is asked of Spark: a test, and whatever it names in the modules of its folders."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Scenarios are in these, but for the modules that run them; how that is done does not change what Spark answers.
_FOLDERS = ("tests.spark.operators.", "tests.spark.parity.", "tests.spark.processors.")
_MACHINERY = {"tests.spark.parity.engines", "tests.spark.processors.engines", "tests.spark.processors.ways"}


def digest(function: Callable[..., Any], *data: object) -> str:
    """Return a digest of a function's source, of the source of all that it names, and of data.

    Docstrings, lines of comment, decorators and the way a statement is wrapped do not count.
    """
    found = hashlib.sha256()
    for text in sorted(_reached(function.__module__, function.__name__)):
        found.update(text.encode() + b"\n")
    found.update(repr(data).encode())
    return found.hexdigest()[:16]


def _reached(module: str, name: str) -> set[str]:
    todo, seen, texts = [(module, name)], set(), set()
    while todo:
        place = todo.pop()
        if place in seen:
            continue
        seen.add(place)
        module, name = place
        source = _source(module)
        if name in source.imported:
            todo += source.imported[name]
        for statement in source.defined.get(name, ()):
            texts.add(statement.text)
            todo += [(module, used) for used in statement.names]
    return texts


@dataclass(frozen=True)
class _Statement:
    """The text of a statement of a module, and the names in it; parameters may be those of fixtures."""

    text: str
    names: frozenset[str]


@dataclass
class _Source:
    """By name, the statements of a module that define it, and where it is imported from."""

    defined: dict[str, list[_Statement]] = field(default_factory=dict)
    imported: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


@functools.cache
def _source(module: str) -> _Source:
    found = _Source()
    text = _path(module).read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found.imported[alias.asname or alias.name] = list(_places(node.module or "", alias.name))
            continue
        inner = list(ast.walk(node))
        names = {n.id for n in inner if isinstance(n, ast.Name)} | {n.arg for n in inner if isinstance(n, ast.arg)}
        statement = _Statement(_plain(text, node), frozenset(names))
        for name in _defined_by(node):
            found.defined.setdefault(name, []).append(statement)
    return found


def _places(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield where an imported name is defined; of a module that is imported, each name."""
    whole = f"{module}.{name}"
    if whole.startswith(_FOLDERS) and whole not in _MACHINERY and _path(whole).exists():
        yield from ((whole, each) for each in _source(whole).defined)
    elif module.startswith(_FOLDERS) and module not in _MACHINERY:
        yield module, name


def _path(module: str) -> Path:
    return Path(__file__).parents[2] / f"{module.replace('.', '/')}.py"


def _defined_by(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def _plain(text: str, node: ast.stmt) -> str:
    lines = text.splitlines()
    left_out = {
        line
        for inner in ast.walk(node)
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None
        for line in range(inner.body[0].lineno, (inner.body[0].end_lineno or 0) + 1)
    }
    kept = [lines[at - 1].strip() for at in range(node.lineno, (node.end_lineno or 0) + 1) if at not in left_out]
    return "".join("".join(line.split()) for line in kept if not line.startswith("#")).replace(",)", ")")
