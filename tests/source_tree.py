"""Reads the package's own source: which modules there are, what each imports and what it uses."""

from __future__ import annotations

import ast
import fnmatch
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The folders of the package; the names of the layers, lowest first.
LAYERS = ("backends", "mvcc", "snapshotter", "spark_integration")
FOLDERS = ("holdfast", *LAYERS, "benches", "examples")
# The example of a plug-in, in a distribution of its own: outside the package.
PLUG_IN = "examples/parquet_backend/src/holdfast_parquet"
# The modules that Spark finds data sources by: packages of their own beside holdfast, in a folder of their own, which
# may stand on the path as it is.
FOUND_BY_SPARK = "found_by_spark"


def sources() -> list[str]:
    """Return the modules of the package, as paths from the root."""
    distribution = PLUG_IN.rpartition("/src/")[0]
    return [path for folder in FOLDERS for path in modules(folder) if not path.startswith(distribution)]


def modules(folder: str) -> list[str]:
    """Return the modules below a folder, as paths from the root."""
    found = (p.relative_to(ROOT) for p in (ROOT / folder).rglob("*.py"))
    return sorted(p.as_posix() for p in found if "__pycache__" not in p.parts)


def all_sources() -> list[str]:
    """Return the modules of the package, of what Spark finds it by, and of the example of a plug-in."""
    return [*sources(), *modules(FOUND_BY_SPARK), *modules(PLUG_IN)]


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), path)


def is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(path, place) for place in places)


def module_name(path: str) -> str:
    """Return the name under which the module is imported: ``mvcc/store.py`` is ``holdfast.mvcc.store``."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "holdfast" else ["holdfast", *parts])


def imports(path: str) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of all that a module imports, wherever in it the import stands.

    ``from a import b`` yields ``a.b``, because b may be a module.
    """
    package = module_name(path).split(".")
    if not path.endswith("/__init__.py"):
        package.pop()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{full}.{alias.name}") for alias in node.names)


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def calls(path: str) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every use of something imported, under the name that it has where it is defined."""
    known: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            heads = [alias.name.split(".")[0] for alias in node.names if not alias.asname]
            known |= {alias.asname: alias.name for alias in node.names if alias.asname} | dict(
                zip(heads, heads, strict=True)
            )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute | ast.Name):
            head, _, rest = ast.unparse(node).partition(".")
            if head in known:
                yield node.lineno, f"{known[head]}.{rest}" if rest else known[head]
