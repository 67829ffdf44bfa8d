"""Natural mistakes: each is said in words that name what is wrong and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import holdfast
from holdfast.testing import PandasWithStateTester, TwsTester


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
    """Run a function by key on a row."""
    return PandasWithStateTester(
        lambda key, frames, state: (), "user", "user string, page string", "user string", "n long", "NoTimeout"
    ).test([row])


@pytest.mark.parametrize(
    ("mistake", "error", "said"),
    [
        (
            lambda: processed(nothing, lambda handle: handle.registerTimer("in a minute")),
            TypeError,
            "a timer's time is a whole number of milliseconds, such as 60_000, not 'in a minute'",
        ),
        (
            lambda: processed(lambda handle: handle.getValueState("n", "n long", ttlDurationMs="1 hour"), nothing),
            TypeError,
            "ttlDurationMs of 'n' is a whole number of milliseconds, such as 60_000, not '1 hour'",
        ),
        (
            lambda: processed(nothing, lambda handle: iter([("ann", 1)])),
            AttributeError,
            r"a processor returns Rows with names, such as Row\(user=key\[0\], n=1\): 'tuple' object has no attribute",
        ),
        (
            lambda: PandasWithStateTester(print, "usr", "user string", "user string", "n long", "NoTimeout"),
            ValueError,
            "no column 'usr'; did you mean 'user'?",
        ),
        (lambda: counted({"user": "ann", "pgae": "/"}), ValueError, "no column 'pgae'; did you mean 'page'?"),
        (lambda: counted(Row(user="ann", pgae="/")), ValueError, "no column 'pgae'; did you mean 'page'?"),
        (lambda: holdfast.explain(cast("Any", "ValueError: x")), ValueError, "takes the error itself, not its text"),
    ],
    ids=[
        "timer",
        "TTL",
        "tuple for a Row",
        "misspelt key",
        "misspelt in a dict",
        "misspelt in a Row",
        "explain a text",
    ],
)
def test_a_mistake_is_said_in_words(mistake: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        mistake()


def test_a_query_that_has_not_failed_is_explained() -> None:
    """Its `exception()` is None."""
    assert holdfast.explain(None) == "what:        nothing has failed"
