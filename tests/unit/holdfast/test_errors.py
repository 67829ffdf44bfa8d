from __future__ import annotations

import copy
import enum
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.errors import ConflictError, HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError

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


def test_only_unavailable_is_retryable() -> None:
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


def test_facts_stand_last_in_their_order() -> None:
    error = ConflictError("the version is taken", version=7, shard=3)
    assert str(error) == "the version is taken, version=7 shard=3"
    assert str(NotFoundError("no such table")) == "no such table"


def test_a_fact_whose_end_could_not_be_seen_is_quoted() -> None:
    assert (
        str(NotFoundError("no file", path=Path("a b"), name="", key="x=1")) == "no file, path='a b' name='' key='x=1'"
    )


def test_facts_are_plain_values_whatever_was_given() -> None:
    class Colour(enum.IntEnum):  # local: would not pickle
        RED = 1

    error = HoldfastError("odd", colour=Colour.RED, call=lambda: None)
    assert {type(value) for value in error.facts.values()} == {str}
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_facts_may_have_any_name() -> None:
    error = HoldfastError("odd", self=1, message=2, args=3)
    assert str(pickle.loads(pickle.dumps(error))) == "odd, self=1 message=2 args=3"


def test_importing_errors_loads_nothing_heavy() -> None:
    code = """
import sys
import holdfast.errors, holdfast.clock
print(sorted({name.split(".")[0] for name in sys.modules} & {
    "pyspark", "pyarrow", "numpy", "pandas", "fsspec", "s3fs", "rocksdict", "click", "rich", "asyncio"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
