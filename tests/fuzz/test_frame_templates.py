"""Frames from templates beside pandas' own: whatever a function gives, does, reads or causes is the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.spark_integration.keyed.frame_blocks import Template, anatomy, consecutive
from holdfast.spark_integration.keyed.frame_templates import _exchange
from tests.fuzz.frame_shapes import COLUMN_USES, USES, calls
from tests.tiers import examples

Outcome = tuple[str, Any, list[tuple[str, str, str]]]


def outcome(act: Callable[[], Any]) -> Outcome:
    """Return what an act returns or raises, and what it warns of, where."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found: tuple[str, Any] = ("returns", act())
        except Exception as exc:  # noqa: BLE001 - whichever it is, the other must raise it too
            causes = [type(of) for of in (exc.__cause__, exc.__context__)]
            found = ("raises", (type(exc), str(exc), causes))
    return *found, [(w.category.__name__, str(w.message), w.filename) for w in warned]


def parts_of(frame: pd.DataFrame) -> tuple[Any, ...]:
    """Return all that a frame consists of; pandas' option data_manager leaves it without blocks."""
    if hasattr(frame._mgr, "blocks"):
        return anatomy(frame)
    return type(frame._mgr), frame.columns, frame.index, [array.tolist() for array in frame._mgr.arrays]


def require_same(ours: Any, theirs: Any) -> None:
    """Compare two results all the way down: types, identity of objects, NaN as equal."""
    if ours is theirs:
        return
    assert type(ours) is type(theirs), (type(ours), type(theirs))
    if isinstance(ours, pd.DataFrame):
        require_same(parts_of(ours), parts_of(theirs))
        require_same(ours.attrs, theirs.attrs)
        assert ours.flags == theirs.flags
    elif isinstance(ours, pd.Series):
        require_same(ours.to_frame(), theirs.to_frame())
        assert ours.name is theirs.name or ours.name == theirs.name or ours.name != ours.name
    elif isinstance(ours, pd.Index):
        require_same((ours.dtype, ours.names, list(ours)), (theirs.dtype, theirs.names, list(theirs)))
    elif isinstance(ours, np.ndarray):
        require_same(
            (ours.dtype, ours.shape, ours.ravel().tolist()), (theirs.dtype, theirs.shape, theirs.ravel().tolist())
        )
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            require_same(mine, other)
    elif isinstance(ours, dict):
        require_same(list(ours.items()), list(theirs.items()))
    elif type(ours) is not int or ours != theirs:
        assert repr(ours) == repr(theirs)


def require_same_outcome(ours: Callable[[], Any], theirs: Callable[[], Any]) -> Any:
    """Compare two acts, and return what ours returned, with what theirs did; None where they failed."""
    expected, found = outcome(theirs), outcome(ours)
    assert found[0] == expected[0], (found, expected)
    require_same(found[1:], expected[1:])
    return (found[1], expected[1]) if found[0] == "returns" else None


@contextmanager
def pandas_options(name: str, value: Any) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # data_manager is deprecated
        with pd.option_context(name, value):
            yield


#: Most functions leave them; one may set them at any time.
OPTIONS = st.sampled_from(
    [("mode.copy_on_write", False)] * 6
    + [("mode.copy_on_write", True)] * 3
    + [("mode.copy_on_write", "warn"), ("future.infer_string", True), ("mode.data_manager", "array")]
)


def overwrite(data: Any) -> None:
    """Change what a frame was made of, as a function may that has its arrays and lists still."""
    for column in data.values() if isinstance(data, dict) else data:
        if isinstance(column, np.ndarray) and column.flags.writeable and column.dtype.kind in "iuf" and column.ndim:
            column[:] = 1
        elif isinstance(column, list):
            column.append(None)
        elif type(column) is dict:
            column["more"] = 1


def test_constructed_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """``pd.DataFrame(...)``: the frame, what a function does with it, errors, and warnings with their places."""
    exchange = _exchange()
    assert exchange is not None
    from_template = count_calls(monkeypatch)
    drawn = 0

    @settings(max_examples=examples(500, 4_000, 100_000), suppress_health_check=list(HealthCheck))
    @given(calls, OPTIONS, st.lists(st.sampled_from(USES), max_size=2))
    def run(call: Any, option: tuple[str, Any], uses: list[Callable[[pd.DataFrame], Any]]) -> None:
        nonlocal drawn
        drawn += 1
        args, given_options = call

        def make() -> pd.DataFrame:
            return pd.DataFrame(*args, **given_options)

        def inside(act: Callable[[], Any]) -> Callable[[], Any]:
            def acting() -> Any:
                with exchange:
                    return act()

            return acting

        with pandas_options(*option):
            kept = require_same_outcome(inside(make), make)
            made = require_same_outcome(inside(make), make)
            if made is None or kept is None:
                return
            overwrite(args[0])
            ours, theirs = made
            for use in uses:
                require_same_outcome(inside(lambda use=use: use(ours)), lambda use=use: use(theirs))
                require_same(ours, theirs)
            require_same(*kept)  # what is done to a frame, only this one shows

    run()
    assert len(from_template) > drawn / 4


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that gets an element for each frame made from a template."""
    made: list[None] = []
    filled = Template.filled

    def counted(*args: Any) -> Any:
        found = filled(*args)
        made.append(None)
        return found

    monkeypatch.setattr(Template, "filled", counted)
    return made


@st.composite
def sources(draw: Any) -> tuple[pd.DataFrame, list[int]]:
    """Draw the rows of some keys, and how many each has."""
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=1, max_size=5))
    rows = sum(sizes)
    at = np.arange(rows)
    times = pd.Series(pd.to_datetime(at * 10**9))
    kinds: list[Any] = [
        at, -at, at / 2, at % 2 == 0, at.astype("int8"), at.astype("float32"), [str(i) for i in at], [None] * rows,
        [[i] for i in at], times, times.dt.tz_localize("Asia/Tokyo"), pd.to_timedelta(at, unit="s"),
        pd.array([None if i % 2 else i for i in at], "Int64"), pd.Categorical([str(i % 2) for i in at]),
        pd.array([str(i) for i in at], "string[pyarrow]"), times.dt.to_period("D"),
    ]  # fmt: skip
    names = draw(st.permutations(["a", "b", "c", "key", "n"]))
    columns = [pd.Series(draw(st.sampled_from(kinds)), name=name) for name in names[: draw(st.integers(1, 5))]]
    return pd.concat(columns, axis=1), sizes


@settings(max_examples=examples(150, 1_000, 30_000), suppress_health_check=list(HealthCheck))
@given(sources(), OPTIONS, st.lists(st.sampled_from([*USES, *COLUMN_USES]), max_size=3), st.booleans())
def test_input_frames(
    source: tuple[pd.DataFrame, list[int]],
    option: tuple[str, Any],
    uses: list[Callable[[pd.DataFrame], Any]],
    is_used_first: bool,
) -> None:
    """The frames of keys that are converted together, beside frames that have nothing in common."""
    frame, sizes = source
    exchange = _exchange()
    assert exchange is not None

    def inside(act: Callable[[], Any]) -> Callable[[], Any]:
        def acting() -> Any:
            with exchange:
                return act()

        return acting

    with pandas_options(*option):
        frame = frame.copy()
        # Slices, as `take` gives Arrow's text a validity bitmap; copied, as a slice counts as shared with its frame.
        ends = [0, *np.cumsum(sizes)]
        theirs = [frame[start:end].reset_index(drop=True).copy() for start, end in pairwise(ends)]
        for part in theirs:
            part.columns = frame.columns.copy(deep=True)
        ours = []
        parts = consecutive(frame, np.array(sizes))
        for other in theirs:
            mine = inside(lambda: next(parts))()
            if not is_used_first:
                require_same(mine, other)
            for use in uses:
                require_same_outcome(
                    inside(lambda use=use, mine=mine: use(mine)), lambda use=use, other=other: use(other)
                )
                require_same(mine, other)
            ours.append(mine)
        require_same(ours, theirs)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("at", range(len(COLUMN_USES)))
def test_each_use_of_columns(at: int, copies: bool) -> None:
    """What a function does with columns of its frame, for the first frame of a slab and for a later one."""
    exchange = _exchange()
    assert exchange is not None
    frame = pd.DataFrame({"a": [1, 2, 3], "key": ["x", "y", "z"], "n": [0.5, np.nan, 1.5]})
    with pandas_options("mode.copy_on_write", copies):
        with exchange:
            parts = list(consecutive(frame.copy(), np.array([1, 2])))
        for ours, theirs in zip(parts, (frame[:1].copy(), frame[1:].reset_index(drop=True).copy()), strict=True):

            def inside(ours: pd.DataFrame = ours) -> Any:
                with exchange:
                    return COLUMN_USES[at](ours)

            require_same_outcome(inside, lambda theirs=theirs: COLUMN_USES[at](theirs))
            require_same(ours, theirs)
