"""The house rules that a machine can check; CONTRIBUTING.md says what each is for.

A rule is a table at the top of this file and a test below. Where a rule is in the way, change the table in the same
commit and say why.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parent.parent
# The folders of the package; the names of the layers, lowest first.
LAYERS = ("backends", "mvcc", "snapshotter", "spark_integration")
FOLDERS = ("holdfast", *LAYERS, "benches", "examples")

# A plug-in, as an example in a distribution of its own: outside the package, held to the rules on style, and to these
# modules, which docs/backends.md names as the ones that a plug-in builds on.
PLUG_IN = "examples/parquet_backend/src/holdfast_parquet"
PLUG_INS_MAY_IMPORT = {
    "holdfast.backends.base",
    "holdfast.backends.local_files",
    "holdfast.backends.options",
    "holdfast.backends.run",
    "holdfast.backends.run_stack",
    "holdfast.errors",
}

# What the layers and the modules of holdfast itself may import of holdfast, besides the layers below.
EVERYONE = {"holdfast.errors", "holdfast.clock"}
ALSO = {"spark_integration": {"holdfast.settings"}, "holdfast": {"holdfast.settings", "holdfast.backends.options"}}
# These stand above all layers, and may import anything.
ABOVE = (
    "benches/*",
    "examples/*",
    "holdfast/__init__.py",
    "holdfast/cli*.py",
    "holdfast/commands/*",
    "holdfast/testing/*",
)

# A third-party library that has one place, and that place.
PLACES = {
    "aiobotocore": ("snapshotter/storage/*",),
    "botocore": ("snapshotter/storage/*",),
    "click": ("holdfast/cli*.py", "holdfast/commands/*", "benches/*", "examples/*"),
    "fsspec": ("snapshotter/storage/*",),
    "hdfs_native": ("snapshotter/storage/*",),
    "mmh3": (),
    "psutil": ("spark_integration/executor/processes.py", "benches/*"),
    "pyarrow.flight": ("spark_integration/client/connection.py", "spark_integration/server/service.py"),
    "py4j": (),
    "pyspark": ("spark_integration/*", "benches/*", "holdfast/cli*.py", "holdfast/testing/*", "examples/*"),
    "rich": ("holdfast/cli*.py", "holdfast/commands/*", "examples/*", "benches/*"),
    "rocksdict": ("backends/rocksdb/*",),
    "s3fs": ("snapshotter/storage/*",),
}

# Time, chance and threads are handed in: where they may be asked of the machine, one file per layer.
TIME_AND_CHANCE = re.compile(
    r"(time\.(time|time_ns|monotonic|monotonic_ns|perf_counter|perf_counter_ns|sleep)"
    r"|datetime\.(datetime\.)?(now|utcnow|today)|(datetime\.)?date\.today"
    r"|uuid\.\w+|random\.\w+|secrets\.\w+|os\.urandom|asyncio\.sleep)"
)
THREADS = re.compile(r"(threading\.(Thread|Timer)|concurrent\.futures\.\w+PoolExecutor|multiprocessing\.\w+)")
ABOVE_TIME = ("benches/*", "holdfast/cli*.py", "examples/*")
MAY_ASK_TIME = ("holdfast/clock.py", "spark_integration/server/state_server.py", *ABOVE_TIME)
# task.py puts the parts of a shard call together, and hands its executor to them; contract suites test concurrency.
MAY_START_THREADS = (
    "benches/*",
    "holdfast/commands/target.py",
    "holdfast/testing/*",
    "snapshotter/storage/*",
    "spark_integration/read_state.py",
    "spark_integration/server/state_server.py",
    "spark_integration/shard/task.py",
)

# Nothing durable may hold code: docs/decisions, and the file where the pickle never leaves Spark's own transport.
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
MAY_PICKLE: tuple[str, ...] = ()

# The aim is 400 and 50; the test leaves slack, so that nobody cuts a function in two on a deadline.
MODULE_LINES_MAX = 450
FUNCTION_LINES_MAX = 80


def sources() -> list[str]:
    """Return the modules of the package, as paths from the root."""
    distribution = PLUG_IN.rpartition("/src/")[0]
    return [path for folder in FOLDERS for path in modules(folder) if not path.startswith(distribution)]


def modules(folder: str) -> list[str]:
    """Return the modules below a folder, as paths from the root."""
    found = (p.relative_to(ROOT) for p in (ROOT / folder).rglob("*.py"))
    return sorted(p.as_posix() for p in found if "__pycache__" not in p.parts)


def all_sources() -> list[str]:
    """Return the modules of the package and of the example of a plug-in."""
    return [*sources(), *modules(PLUG_IN)]


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


def test_the_rules_see_the_package() -> None:
    assert len(sources()) > 10
    assert {path.split("/")[0] for path in sources()} == set(FOLDERS)
    assert modules(PLUG_IN)
    assert not set(modules(PLUG_IN)) & set(sources())


@pytest.mark.parametrize("path", sources())
def test_imports_point_downwards(path: str) -> None:
    if is_in(path, ABOVE):
        return
    folder = path.split("/")[0]
    below = LAYERS[: LAYERS.index(folder) + 1] if folder in LAYERS else ()
    allowed = EVERYONE | ALSO.get(folder, set()) | {f"holdfast.{layer}" for layer in below}
    wrong = [
        f"{path}:{line} imports {name}; {folder} may import {sorted(allowed)}"
        for line, name in imports(path)
        if within(name, "holdfast")
        and not any(within(name, one) for one in allowed)
        # `from holdfast import errors`, `from . import run`
        and name != "holdfast"
    ]
    assert not wrong


@pytest.mark.parametrize("path", modules(PLUG_IN))
def test_a_plug_in_builds_on_what_the_guide_names(path: str) -> None:
    ours = [(line, name) for line, name in imports(path) if within(name, "holdfast")]
    assert not [f"{path}:{line} {name}" for line, name in ours if not _is_for_plug_ins(name)]
    guide = (ROOT / "docs/backends.md").read_text()
    assert not [module for module in PLUG_INS_MAY_IMPORT if f"`{module}`" not in guide]


def _is_for_plug_ins(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return bool({name, module} & PLUG_INS_MAY_IMPORT) and not last.startswith("_")


@pytest.mark.parametrize("path", sources())
def test_top_level_folders_are_not_imported_by_their_bare_names(path: str) -> None:
    bare = {*FOLDERS, "tests"} - {"holdfast"}
    wrong = [f"{path}:{line} {name}" for line, name in imports(path) if name.split(".")[0] in bare]
    assert not wrong


@pytest.mark.parametrize("path", sources())
def test_third_party_libraries_stay_in_their_place(path: str) -> None:
    wrong = [
        f"{path}:{line} imports {name}; its place is {places}"
        for line, name in imports(path)
        for library, places in PLACES.items()
        if within(name, library) and not is_in(path, places)
    ]
    assert not wrong


@pytest.mark.parametrize("path", all_sources())
def test_time_and_chance_are_handed_in(path: str) -> None:
    if is_in(path, MAY_ASK_TIME):
        return
    wrong = [f"{path}:{line} uses {name}" for line, name in calls(path) if TIME_AND_CHANCE.fullmatch(name)]
    assert not wrong, "take it as an argument; the default comes from holdfast.clock"


@pytest.mark.parametrize("path", all_sources())
def test_threads_are_started_in_named_files_only(path: str) -> None:
    if is_in(path, MAY_START_THREADS):
        return
    wrong = [f"{path}:{line} uses {name}" for line, name in calls(path) if THREADS.fullmatch(name)]
    assert not wrong


@pytest.mark.parametrize("path", all_sources())
def test_no_pickles(path: str) -> None:
    if is_in(path, MAY_PICKLE):
        return
    assert not [f"{path}:{line} {name}" for line, name in imports(path) if name.split(".")[0] in PICKLES]


@pytest.mark.parametrize("path", all_sources())
def test_modules_and_functions_stay_small(path: str) -> None:
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= MODULE_LINES_MAX, f"{path} has {lines} lines; aim at 400"
    functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f"{path}:{f.lineno} {f.name}" for f in functions if (f.end_lineno or 0) - f.lineno >= FUNCTION_LINES_MAX]
    assert not long


@pytest.mark.parametrize("path", all_sources())
def test_names_say_what_a_thing_is(path: str) -> None:
    assert Path(path).stem not in {"util", "utils", "helpers", "misc", "common"}
    classes = [n for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef)]
    assert not [f"{path}:{c.lineno} {c.name}" for c in classes if re.search(r"(Manager|Utils?|Helper)$", c.name)]


@pytest.mark.parametrize("path", all_sources())
def test_nothing_is_left_for_later_without_an_issue(path: str) -> None:
    left = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    lines = (ROOT / path).read_text().splitlines()
    assert not [f"{path}:{n} {line.strip()}" for n, line in enumerate(lines, 1) if left.search(line)]


@pytest.mark.parametrize("path", all_sources())
def test_every_module_says_what_it_is(path: str) -> None:
    assert ast.get_docstring(tree(path)), f"{path} has no module docstring"


def public_methods(path: str, *, abstract: bool) -> Iterator[ast.FunctionDef]:
    """Yield the public methods of a module's classes: of those that only describe (ABC, Protocol), or of the rest."""
    for owner in ast.walk(tree(path)):
        if isinstance(owner, ast.ClassDef) and not owner.name.startswith("_"):
            bases = {ast.unparse(base).partition("[")[0].split(".")[-1] for base in owner.bases}
            if abstract == bool(bases & {"ABC", "Protocol"}) and (abstract or not bases):
                yield from (f for f in owner.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_"))


@functools.cache
def described_methods() -> frozenset[str]:
    """Return the names of the methods that some abstract class or protocol describes."""
    methods = [f for path in sources() for f in public_methods(path, abstract=True)]
    return frozenset(f.name for f in methods if ast.get_docstring(f))


@pytest.mark.parametrize("path", all_sources())
def test_every_public_method_is_described_here_or_where_it_is_abstract(path: str) -> None:
    methods = [*public_methods(path, abstract=True), *public_methods(path, abstract=False)]
    bare = [f for f in methods if not ast.get_docstring(f) and f.name not in described_methods()]
    assert not [f"{path}:{f.lineno} {f.name}" for f in bare]


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


def test_packages_are_all_declared() -> None:
    import tomllib

    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {(ROOT / path).parent for path in sources()}
    assert set(config["packages"]) == {module_name(f"{p.relative_to(ROOT).as_posix()}/__init__.py") for p in folders}
    for folder in folders:
        assert (folder / "__init__.py").exists(), f"{folder.name} has no __init__.py"
    assert config["package-dir"] == {module_name(f"{folder}/__init__.py"): folder for folder in FOLDERS}


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("mvcc/store.py", "from ..backends import base", "holdfast.backends.base"),
        ("mvcc/store.py", "from . import transaction", "holdfast.mvcc.transaction"),
        ("mvcc/__init__.py", "from .store import x", "holdfast.mvcc.store.x"),
        (
            "mvcc/store.py",
            "def f():\n    import holdfast.snapshotter.storage.object_storage as s",
            "holdfast.snapshotter.storage.object_storage",
        ),
    ],
)
def test_the_reader_of_imports_reads_all_forms(
    path: str, source: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "tree", lambda _: ast.parse(source))
    assert [name for _, name in imports(path)] == [expected]


def test_the_reader_of_calls_resolves_imported_names(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last two are attributes of something else, here without an import of time.
    source = (
        "from time import sleep as nap\nimport datetime as dt\n"
        "nap(1)\ndt.datetime.now()\nself.time.sleep(2)\ntime.sleep(1)"
    )
    monkeypatch.setitem(globals(), "tree", lambda _: ast.parse(source))
    used = [name for _, name in calls("x.py") if TIME_AND_CHANCE.fullmatch(name)]
    assert sorted(used) == ["datetime.datetime.now", "time.sleep"]
