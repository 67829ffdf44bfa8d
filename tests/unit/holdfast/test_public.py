"""Public names, errors, the clock, and mistakes that are told in words."""

from __future__ import annotations

import ast
import copy
import enum
import importlib
import inspect
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import holdfast
from holdfast import clock, errors, testing
from holdfast.errors import ConflictError, HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.testing import PandasWithStateTester, TwsTester
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


CLASSES = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, HoldfastError)]


def drawn_tree() -> dict[str, str | None]:
    """Return child: parent as the module docstring draws it."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for prefix, name in re.findall(r"^    ([│├└─ ]*)(\w+Error)\b", errors.__doc__ or "", re.MULTILINE):
        depth = len(prefix) // 4
        parents[name] = path[depth - 1] if depth else None
        path[depth:] = [name]
    return parents


def test_tree_in_docstring_is_the_tree_of_classes() -> None:
    defined = {c.__name__: None if c is HoldfastError else c.__bases__[0].__name__ for c in CLASSES}
    assert drawn_tree() == defined


def test_docstring_names_what_else_a_class_is() -> None:
    also_value_error = [c for c in CLASSES if issubclass(c, ValueError)]
    assert also_value_error == [InvalidArgumentError]
    assert [c for c in CLASSES if c.retryable] == [UnavailableError]


@pytest.mark.parametrize("error_class", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_with_all_it_carries(error_class: type[HoldfastError], protocol: int) -> None:
    error = error_class("no such version", version=7, path="a b", missing=None, message=2)
    error.add_note("seen on shard 3")
    loaded = pickle.loads(pickle.dumps(error, protocol))
    assert type(loaded) is error_class
    assert str(loaded) == str(error)
    assert loaded.facts == error.facts
    assert loaded.__notes__ == ["seen on shard 3"]
    assert loaded.retryable == error.retryable
    assert str(copy.copy(error)) == str(error)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConflictError("the version is taken", version=7, shard=3), "the version is taken, version=7 shard=3"),
        (NotFoundError("no such table"), "no such table"),
        (NotFoundError("no file", path=Path("a b"), name="", key="x=1"), "no file, path='a b' name='' key='x=1'"),
        (HoldfastError("odd", self=1, message=2, args=3), "odd, self=1 message=2 args=3"),
    ],
)
def test_facts_stand_last_in_their_order(error: HoldfastError, text: str) -> None:
    """Whatever they are called; one whose end could not be seen is quoted."""
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == text


def test_facts_are_plain_values_whatever_was_given() -> None:
    class Colour(enum.IntEnum):  # local: would not pickle
        RED = 1

    error = HoldfastError("odd", colour=Colour.RED, call=lambda: None)
    assert {type(value) for value in error.facts.values()} == {str}
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_importing_errors_loads_nothing_heavy() -> None:
    code = """
import sys
import holdfast.errors, holdfast.clock
print(sorted({name.split(".")[0] for name in sys.modules} & {
    "pyspark", "pyarrow", "numpy", "pandas", "fsspec", "s3fs", "rocksdict", "click", "rich", "asyncio"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ids_and_times() -> None:
    """Ids are 16 hexadecimal characters and differ; monotonic time never goes back; wall time is in milliseconds."""
    ids = [clock.new_id() for _ in range(1000)]
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in ids)
    assert len(set(ids)) == 1000
    readings = [clock.monotonic_ms() for _ in range(1000)]
    assert readings == sorted(readings)
    assert 1_600_000_000_000 < clock.now_ms() < 10_000_000_000_000


@pytest.mark.parametrize("name", ["BackendContract", "SinkContract", "StorageContract"])
def test_contracts_are_imported_from_the_package(name: str) -> None:
    contract = getattr(testing, name)
    assert name in testing.__all__
    assert [n for n, _ in inspect.getmembers(contract, inspect.isfunction) if n.startswith("test_")]


class Scripted(StatefulProcessor):
    """Does in `init` and for each key what a case says."""

    def __init__(self, init: Callable[[Any], object], rows: Callable[[Any], object]) -> None:
        self.begin, self.work = init, rows

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.begin(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:  # noqa: N802, N803  Spark's names
        return self.work(self.handle) or iter(())

    def close(self) -> None: ...


def nothing(handle: Any) -> None:
    """Do nothing."""


def processed(init: Callable[[Any], object], rows: Callable[[Any], object]) -> object:
    return TwsTester(Scripted(init, rows), timeMode="ProcessingTime").test("ann", [Row(v=1)])


def counted(row: Any) -> object:
    return PandasWithStateTester(
        lambda key, frames, state: (), "user", "user string, page string", "user string", "n long", "NoTimeout"
    ).test([row])


WHOLE = "is a whole number of milliseconds, such as 60_000, not"
MISSPELT = "no column 'pgae'; did you mean 'page'?"
NO_ROW = r"a processor must return Rows with names, such as Row\(user=key\[0\], n=1\): 'tuple' object has no attribute"
MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "timer": (
        lambda: processed(nothing, lambda handle: handle.registerTimer("in a minute")),
        *(TypeError, f"a timer's time {WHOLE} 'in a minute'"),
    ),
    "TTL": (
        lambda: processed(lambda handle: handle.getValueState("n", "n long", ttlDurationMs="1 hour"), nothing),
        *(TypeError, f"ttlDurationMs of 'n' {WHOLE} '1 hour'"),
    ),
    "tuple for a Row": (lambda: processed(nothing, lambda handle: iter([("ann", 1)])), AttributeError, NO_ROW),
    "misspelt key": (
        lambda: PandasWithStateTester(print, "usr", "user string", "user string", "n long", "NoTimeout"),
        *(ValueError, "no column 'usr'; did you mean 'user'?"),
    ),
    "misspelt in a dict": (lambda: counted({"user": "ann", "pgae": "/"}), ValueError, MISSPELT),
    "misspelt in a Row": (lambda: counted(Row(user="ann", pgae="/")), ValueError, MISSPELT),
    "explain a text": (
        lambda: holdfast.explain(cast("Any", "ValueError: x")),
        ValueError,
        "takes the error itself, not its text",
    ),
}


@pytest.mark.parametrize(("mistake", "error", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_said_in_words(mistake: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        mistake()


def test_a_query_that_has_not_failed_is_explained() -> None:
    """Its `exception()` is None."""
    assert holdfast.explain(None) == "what:        nothing has failed"
