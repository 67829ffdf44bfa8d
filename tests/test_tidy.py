"""The house rules that a machine can check; CONTRIBUTING.md says what each is for.

A rule is a table at the top of this file and a test below. Where a rule is in the way, change the table in the same
commit and say why.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import holdfast
from tests.source_tree import (
    FOLDERS,
    FOUND_BY_SPARK,
    LAYERS,
    PLUG_IN,
    ROOT,
    all_sources,
    calls,
    imports,
    is_in,
    module_name,
    modules,
    sources,
    tree,
    within,
)

# What stands in a layer, lowest first: its folders (rooms) and its modules outside of them. Each imports what stands on
# lines above its own; what shares a line does not import one another.
# A new room or module gets a place here.
ROOMS = {
    "backends": (
        "block_io frozen_files options",
        "stored_file",
        "arrow local",
        "local_files schema",
        "column_names evolution",
        "run",
        "base stretched_run",
        "registry run_stack",
        "run_files",
        "rocksdb",
    ),
    "mvcc": ("transaction", "store"),
    "snapshotter": (
        "fields storage",
        "fence lineage",
        "ownership sink_log snapshots",
        "commits",
        "upkeep",
        "version_reader",
        "savepoints",
    ),
    "spark_integration": (
        # All differences between Spark's releases.
        "spark_versions",
        "failures java spark_types worker_python",
        "restarting",
        "executor",
        "client",
        "transport",
        "shard",
        "shard_call",
        "hosts spark_state timers",
        "ttl",
        "tables",
        "keyed vectorised",
        "processor",
        "lookup plan",
        "operators",
        # The server is a program: workers start it, and import nothing of it.
        "progress_metrics sinks",
        "savepoints server stream",
        "copies",
        "state_source",
        "sink_source",
    ),
    "holdfast": (
        "clock errors",
        "distribution",
        "settings",
        "restart savepoints sinks",
        "health",
        "commands testing",
        "ui",
        "cli",
        "__main__",
    ),
}

# What a plug-in builds on, as docs/backends.md names it; the example of one is held to it, and to the rules on style.
PLUG_INS_MAY_IMPORT = {
    "holdfast.backends.base",
    "holdfast.backends.local_files",
    "holdfast.backends.options",
    "holdfast.backends.run",
    "holdfast.backends.run_stack",
    "holdfast.backends.schema",
    "holdfast.errors",
}

# What the layers and the modules of holdfast itself may import of holdfast, besides the layers below.
EVERYONE = {"holdfast.errors", "holdfast.clock", "holdfast.distribution"}
ALSO = {
    "spark_integration": {"holdfast.settings"},
    "holdfast": {"holdfast.settings", "holdfast.backends.options", "holdfast.snapshotter.storage.options"},
}
# These stand above all layers, and may import anything.
ABOVE = (
    "benches/*",
    "examples/*",
    "holdfast/__init__.py",
    "holdfast/__main__.py",
    "holdfast/cli*.py",
    "holdfast/commands/*",
    "holdfast/health.py",
    "holdfast/restart.py",
    "holdfast/savepoints.py",
    "holdfast/sinks.py",
    "holdfast/testing/*",
    "holdfast/ui/*",
)

# A third-party library that has one place, and that place.
PLACES = {
    "aiobotocore": ("snapshotter/storage/*",),
    "botocore": ("snapshotter/storage/*",),
    # The peers of the benches are installed elsewhere: only the programs that run there may import them.
    **dict.fromkeys(("bytewax", "pathway", "pyflink", "quixstreams"), ("benches/peers/programs/*",)),
    "confluent_kafka": ("spark_integration/sinks/kafka/*", "benches/*", "examples/*"),
    "click": ("holdfast/cli*.py", "holdfast/commands/*", "holdfast/ui/command.py", "benches/*", "examples/*"),
    "deltalake": ("spark_integration/sinks/delta/*", "benches/*", "examples/*"),
    "flask": ("holdfast/ui/app.py",),
    "fsspec": ("snapshotter/storage/*",),
    "hdfs_native": ("snapshotter/storage/*",),
    "jinja2": ("benches/report/html.py", "holdfast/ui/app.py"),
    "jsonschema": ("benches/report/directory.py",),
    "mmh3": (),
    "moto": ("benches/instruments/object_store.py",),
    "prometheus_client": ("spark_integration/server/exposition.py",),
    "psutil": ("spark_integration/executor/processes.py", "benches/*"),
    "psycopg": ("spark_integration/sinks/postgres/*", "benches/*", "examples/*"),
    "pyarrow.flight": (
        "spark_integration/client/connection.py",
        "spark_integration/server/state_server.py",
    ),
    "py4j": ("spark_integration/plan/definition.py", "spark_integration/spark_state/running_query.py"),
    "pyspark": (
        *("spark_integration/*", "benches/*", "examples/*"),
        *("holdfast/cli*.py", "holdfast/commands/export.py", "holdfast/commands/own_spark.py", "holdfast/testing/*"),
        "holdfast/commands/progress.py",
    ),
    "rich": ("holdfast/cli*.py", "holdfast/commands/*", "holdfast/ui/command.py", "examples/*", "benches/*"),
    "rocksdict": ("backends/rocksdb/*", "spark_integration/spark_state/*"),
    "s3fs": ("snapshotter/storage/*",),
    "scipy": ("benches/comparing/noise.py",),
    "waitress": ("holdfast/ui/command.py",),
    "werkzeug": ("holdfast/ui/app.py",),
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
# task.py hands its threads to the parts of a shard call; contract suites test concurrency.
MAY_START_THREADS = (
    "benches/*",
    "holdfast/commands/progress.py",
    "holdfast/commands/target.py",
    "holdfast/savepoints.py",
    "holdfast/testing/*",
    "holdfast/ui/command.py",
    "snapshotter/storage/*",
    "spark_integration/lookup/places.py",
    "spark_integration/lookup/stored_query.py",
    "spark_integration/plan/noting.py",
    "spark_integration/spark_state/pointers.py",
    "spark_integration/server/state_server.py",
    "spark_integration/shard/task.py",
    "spark_integration/sinks/postgres/sink.py",
)

# Nothing durable may hold code: docs/decisions, and the files where the pickle never leaves Spark's own transport.
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
MAY_PICKLE: tuple[str, ...] = ("spark_integration/processor/handle.py", "spark_integration/shard/news.py")

# Markers of what a test starts, and no unit test does.
STARTED = ("spark", "cluster", "s3", "hdfs", "kafka", "postgres", "prometheus")

# A module is one subject, whole. The aim for functions is 50; the test leaves slack, so that nobody cuts one in two on
# a deadline.
MODULE_LINES_MAX = 700
FUNCTION_LINES_MAX = 80
# A folder is what one reads in a listing; ``__init__.py`` does not count. Benches lie side by side: each is a program.
FOLDER_MODULES_MAX = 13
FLAT = ("benches",)
# Folders that are larger, and how large they may still be: rows only go, and numbers only shrink.
LARGE_FOLDERS: dict[str, int] = {}
# Tests that are longer, and how long they may still be: rows only go, and numbers only shrink.
LONG_TESTS: dict[str, int] = {}


def for_each(subjects: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Return a decorator: a rule is one test, which says of all subjects at once where it is broken."""

    def decorate(rule: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for subject in subjects:
                try:
                    rule(subject)
                except AssertionError as exc:
                    broken.append(str(exc))
            assert not broken, "\n\n".join(broken)

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return decorate


def test_the_rules_see_the_package() -> None:
    assert len(sources()) > 10
    assert {path.split("/")[0] for path in sources()} == set(FOLDERS)
    assert modules(PLUG_IN)
    assert not set(modules(PLUG_IN)) & set(sources())


@for_each(sources())
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


def place_of(name: str) -> tuple[str, str]:
    """Return the layer of a module and its place in it, the room: ``holdfast.mvcc.store`` stands in mvcc at store."""
    top, *parts = name.split(".")
    layer = parts.pop(0) if parts and parts[0] in LAYERS else "holdfast"
    return layer if top == "holdfast" else "", parts[0] if parts else "__init__"


def heights(layer: str) -> dict[str, int]:
    """Return by place in a layer how high it stands."""
    return {name: height for height, line in enumerate(ROOMS[layer]) for name in line.split()}


@for_each(ROOMS)
def test_what_stands_in_a_layer_has_one_place_in_its_order(layer: str) -> None:
    placed = [name for line in ROOMS[layer] for name in line.split()]
    assert sorted(placed) == sorted({place_of(module_name(path))[1] for path in modules(layer)} - {"__init__"})


@for_each([path for layer in ROOMS for path in modules(layer)])
def test_imports_between_rooms_point_one_way(path: str) -> None:
    layer, room = place_of(module_name(path))
    height = heights(layer)
    if room == "__init__":
        return
    wrong = [
        f"{path}:{line} imports {name}, which does not stand above {room!r} in ROOMS"
        for line, name in imports(path)
        for in_layer, place in [place_of(name)]
        if in_layer == layer and place != room and place in height and height[place] >= height[room]
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = {module_name(path): path for path in sources()}
    graph: dict[str, set[str]] = {path: set() for path in sources()}
    for path in sources():
        for _, name in imports(path):
            imported = paths.get(name) or paths.get(name.rpartition(".")[0])
            # Importing anything of a package runs its __init__, which holds no code here but the public names.
            if imported not in (None, path, "holdfast/__init__.py", "mvcc/__init__.py"):
                graph[path].add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as exc:
        pytest.fail(f"a circle of imports: {' ← '.join(exc.args[1])}")


@for_each(modules(PLUG_IN))
def test_a_plug_in_builds_on_what_the_guide_names(path: str) -> None:
    ours = [(line, name) for line, name in imports(path) if within(name, "holdfast")]
    assert not [f"{path}:{line} {name}" for line, name in ours if not _is_for_plug_ins(name)]
    guide = (ROOT / "docs/backends.md").read_text()
    assert not [module for module in PLUG_INS_MAY_IMPORT if f"`{module}`" not in guide]


def _is_for_plug_ins(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return bool({name, module} & PLUG_INS_MAY_IMPORT) and not last.startswith("_")


@for_each(sources())
def test_top_level_folders_are_not_imported_by_their_bare_names(path: str) -> None:
    bare = {*FOLDERS, "tests"} - {"holdfast"}
    wrong = [f"{path}:{line} {name}" for line, name in imports(path) if name.split(".")[0] in bare]
    assert not wrong


@for_each(sources())
def test_third_party_libraries_stay_in_their_place(path: str) -> None:
    wrong = [
        f"{path}:{line} imports {name}; its place is {places}"
        for line, name in imports(path)
        for library, places in PLACES.items()
        if within(name, library) and not is_in(path, places)
    ]
    assert not wrong


@for_each(all_sources())
def test_time_and_chance_are_handed_in(path: str) -> None:
    if is_in(path, MAY_ASK_TIME):
        return
    wrong = [f"{path}:{line} uses {name}" for line, name in calls(path) if TIME_AND_CHANCE.fullmatch(name)]
    assert not wrong, "take it as an argument; the default comes from holdfast.clock"


@for_each(all_sources())
def test_threads_are_started_in_named_files_only(path: str) -> None:
    if is_in(path, MAY_START_THREADS):
        return
    wrong = [f"{path}:{line} uses {name}" for line, name in calls(path) if THREADS.fullmatch(name)]
    assert not wrong


@for_each(all_sources())
def test_no_pickles(path: str) -> None:
    if is_in(path, MAY_PICKLE):
        return
    assert not [f"{path}:{line} {name}" for line, name in imports(path) if name.split(".")[0] in PICKLES]


@for_each(modules("tests/unit"))
def test_unit_tests_start_no_server_and_no_jvm(path: str) -> None:
    """They are run while one works: what needs more stands in other folders of tests/."""
    assert not re.search(rf"mark\.({'|'.join(STARTED)})\b", (ROOT / path).read_text())


@for_each([*all_sources(), *modules("tests")])
def test_modules_and_functions_stay_small(path: str) -> None:
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= LONG_TESTS.get(path, MODULE_LINES_MAX), f"{path} has {lines} lines; is it one subject?"
    functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f"{path}:{f.lineno} {f.name}" for f in functions if (f.end_lineno or 0) - f.lineno >= FUNCTION_LINES_MAX]
    assert not long


@for_each(sorted({path.rpartition("/")[0] for path in all_sources()} - set(FLAT)))
def test_folders_stay_small(folder: str) -> None:
    found = [path.name for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
    assert len(found) <= LARGE_FOLDERS.get(folder, FOLDER_MODULES_MAX), (
        f"{folder} has {len(found)} modules: which of them belong together?"
    )


@for_each(all_sources())
def test_names_say_what_a_thing_is(path: str) -> None:
    assert Path(path).stem not in {"util", "utils", "helpers", "misc", "common"}
    classes = [n for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef)]
    assert not [f"{path}:{c.lineno} {c.name}" for c in classes if re.search(r"(Manager|Utils?|Helper)$", c.name)]


def test_a_class_name_means_one_thing() -> None:
    """Whoever reads it need not ask which. Benches and examples have words of their own."""
    nodes = (node for folder in ("holdfast", *LAYERS) for path in modules(folder) for node in tree(path).body)
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert not [name for name, count in names.items() if count > 1]


@for_each(all_sources())
def test_nothing_is_left_for_later_without_an_issue(path: str) -> None:
    left = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    lines = (ROOT / path).read_text().splitlines()
    assert not [f"{path}:{n} {line.strip()}" for n, line in enumerate(lines, 1) if left.search(line)]


@for_each(all_sources())
def test_every_module_says_what_it_is(path: str) -> None:
    assert ast.get_docstring(tree(path)), f"{path} has no module docstring"


def is_public(path: str) -> bool:
    """Tell whether users or plug-ins import from a module."""
    own = path.startswith("holdfast/") and (path.count("/") == 1 or is_in(path, ("holdfast/testing/*",)))
    return own or module_name(path) in {*PLUG_INS_MAY_IMPORT, *(f"holdfast.{name}" for name in holdfast._NAMES)}


def is_abstract(owner: ast.ClassDef) -> bool:
    return bool({ast.unparse(base).partition("[")[0].split(".")[-1] for base in owner.bases} & {"ABC", "Protocol"})


def to_describe(path: str) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Yield what needs a docstring: what is public, and every seam."""
    for owner in (node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)):
        if not owner.name.startswith("_") and (is_public(path) or is_abstract(owner)):
            yield owner
            if not owner.bases or is_abstract(owner):
                yield from (node for node in owner.body if isinstance(node, ast.FunctionDef))
    if is_public(path):
        yield from (node for node in tree(path).body if isinstance(node, ast.FunctionDef))


@functools.cache
def described_methods() -> frozenset[str]:
    """Return the names of the methods that some abstract class or protocol describes."""
    owners = (node for path in sources() for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))
    methods = (node for owner in owners if is_abstract(owner) for node in owner.body)
    return frozenset(f.name for f in methods if isinstance(f, ast.FunctionDef) and ast.get_docstring(f))


@for_each(all_sources())
def test_what_users_call_and_every_seam_is_described(path: str) -> None:
    """Elsewhere a name that says all needs no docstring."""
    bare = [f for f in to_describe(path) if not f.name.startswith("_") and not ast.get_docstring(f)]
    assert not [f"{path}:{f.lineno} {f.name}" for f in bare if f.name not in described_methods()]


def test_packages_are_all_declared() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {(ROOT / path).parent for path in sources()}
    found = {path.split("/")[1]: path.rpartition("/")[0] for path in modules(FOUND_BY_SPARK)}
    ours = {module_name(f"{p.relative_to(ROOT).as_posix()}/__init__.py") for p in folders}
    assert set(config["packages"]) == ours | found.keys()
    for folder in folders:
        assert (folder / "__init__.py").exists(), f"{folder.name} has no __init__.py"
    assert config["package-dir"] == {module_name(f"{folder}/__init__.py"): folder for folder in FOLDERS} | found
