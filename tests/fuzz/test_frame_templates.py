"""Frames from templates beside pandas' own: whatever a function gives, does, reads or causes is the same."""

from __future__ import annotations

import datetime as dt
import enum
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import Row

from holdfast.spark_integration.keyed.frame_blocks import Template, anatomy, consecutive
from holdfast.spark_integration.keyed.frame_templates import _exchange
from tests.tiers import examples

if TYPE_CHECKING:
    import random


class Pair(NamedTuple):
    a: int
    b: int


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class SubFrame(pd.DataFrame):
    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return SubFrame


@dataclass
class Point:
    a: int
    b: int


#: Values by kind: a column usually has one of them, and sometimes a mix.
KINDS: list[list[Any]] = [
    [0, 1, -5, 2**31, 2**63 - 1, -(2**63)],
    [2**63, 2**64 - 1, 2**64, 2**70, -(2**63) - 1, 1],
    [0.0, -0.0, 1.5, float("nan"), float("inf"), 1e308, 5e-324],
    [True, False],
    ["", "a", "ä€", "1", "2020-01-01", "nan", "\ud800", "x" * 100],
    [None],
    [None, "a", b"b"],
    [np.int64(1), np.int64(-(2**63))],
    [np.float64(1.5), np.float64("nan")],
    [np.int8(1), np.int16(-2), np.int32(4), np.uint8(200), np.uint64(2**64 - 1)],
    [np.float32(1.5), np.float16(2)],
    [np.bool_(True), np.bool_(False)],
    [np.str_("a"), np.bytes_(b"b"), Text("t")],
    [Level.LOW, Whole(3)],
    [b"", b"x\xff", bytearray(b"y")],
    [Decimal("1.50"), Decimal("NaN"), Decimal("-0")],
    [dt.date(2020, 1, 2), dt.date(1, 1, 1)],
    [dt.datetime(2020, 1, 2, 3), dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31)],  # noqa: DTZ001 - without a zone
    [dt.datetime(2020, 1, 2, 3, tzinfo=dt.UTC), dt.datetime(2021, 7, 1, tzinfo=dt.timezone(dt.timedelta(hours=2)))],
    [pd.Timestamp("2020-01-02"), pd.Timestamp("2020-01-02 03:04:05.000000007"), pd.NaT],
    [pd.Timestamp("2020", tz="Asia/Tokyo"), pd.Timestamp("2020", tz="Asia/Tokyo").as_unit("s")],
    [np.datetime64("2020-01-01"), np.datetime64("NaT")],
    [dt.timedelta(1), dt.timedelta(-1, 5)],
    [pd.Timedelta(7, "s"), np.timedelta64(5, "s")],
    [dt.time(1, 2), UUID(int=7)],
    [pd.NA, 1, None],
    [complex(1, 2)],
    [[], [1], [1, 2], ["a", None], [[1], [2]]],
    [(), (1,), (1, 2), ("a", 1)],
    [{}, {"a": 1}, {"b": [1]}],
    [{1}, frozenset((2,))],
    [np.array([1, 2]), np.array([1.5]), np.array(3)],
    [pd.Series([1, 2]), pd.Index([1])],
    [Row(a=1), Pair(1, 2)],
    [pd.Period("2020", "D"), pd.Interval(0, 1)],
    [len, object],
]
_COMMON = [0, 0, 2, 3, 4, 4, 5, 6, 7, 8, 14, 15, 16, 27, 29]
_DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "?", "O", "U3", "S2", "c16", "q"]
_DTYPES += [">i8", ">f8", "M8[ns]", "M8[s]", "m8[ns]"]
LABELS = ["a", "b", "c", "key", "n", "", "ä", "2020-01-01"]
ODD_LABELS = [*LABELS, 0, 1, None, ("a", 1), 1.5, Text("a"), np.str_("b"), dt.date(2020, 1, 1), True]


class Drawn:
    """Draws what is given to ``pd.DataFrame``: often plain, as most functions give it, else with anything anywhere."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._is_plain = self.below(10) < 6

    def below(self, end: int) -> int:
        return self._chance.randrange(end)

    def one_of(self, plain: list[Any], odd: list[Any]) -> Any:
        """Return one of the plain ones, or of all."""
        every = plain if self._is_plain else plain + odd
        return every[self.below(len(every))]

    def seldom(self, one_in: int) -> bool:
        return not self._is_plain and self.below(one_in) == 0

    def values(self, rows: int) -> list[Any]:
        kind = self.one_of([KINDS[at] for at in _COMMON], KINDS)
        if self.seldom(10):
            kind = kind + KINDS[self.below(len(KINDS))]
        found = [kind[self.below(len(kind))] for _ in range(min(rows, 3))]
        return (found * (rows // max(1, len(found)) + 1))[:rows]

    def array(self, rows: int) -> Any:
        """Return a numpy array: of any dtype, sometimes a view, read-only or of another shape."""
        of = np.arange(2 * rows).astype(self.one_of(_DTYPES[:12], _DTYPES))
        found = of[::2] if self.below(2) else of[:rows].copy()
        changes: list[Callable[[], Any]] = [
            lambda: found.reshape(-1, 1),
            lambda: np.ma.masked_array(found, np.arange(rows) == 0),
            lambda: np.array(1),
        ]
        return changes[self.below(3)]() if self.seldom(5) else found

    def column(self, rows: int) -> Any:
        if self.seldom(12):
            rows = max(0, rows + self.below(3) - 1)
        plain: list[Callable[[], Any]] = [
            *[lambda: self.values(rows)] * 5,
            *[lambda: tuple(self.values(rows))] * 2,
            *[lambda: self.array(rows)] * 2,
            lambda: self.one_of([1, "a", 0.5, True], self.values(1)),
        ]
        odd: list[Callable[[], Any]] = [
            lambda: pd.Series(range(rows)),
            lambda: pd.Series([0.5] * rows, index=range(1, rows + 1), name="s"),
            lambda: pd.Index(range(rows)),
            lambda: pd.date_range("2020", periods=rows),
            lambda: pd.array(list(range(rows)), "Int64"),
            lambda: pd.Categorical(["a"] * rows),
            lambda: range(rows),
            lambda: set(range(rows)),
            lambda: {at: at for at in range(rows)},
            lambda: Row(*range(rows)),
            lambda: np.int32(3),
        ]
        return self.one_of(plain, odd)()

    def rows(self, labels: list[Any], rows: int, options: dict[str, Any]) -> Any:
        """Return a list of rows, and put the labels into `options`."""
        table = list(zip(*[self.values(rows) for _ in labels], strict=True)) if labels else [()] * rows
        if table and self.seldom(10):
            table[-1] = table[-1][:-1]
        form = self.one_of(["tuple", "list", "dict"], ["row", "array", "point", "mixed", "tuples"])
        names: list[Callable[[], Any]] = [
            lambda: tuple(labels),
            lambda: None,
            lambda: labels[:-1],
            lambda: [*labels, "more"],
            lambda: labels[::-1],
            lambda: np.array(labels, object),
            lambda: pd.Index(labels, dtype=object, name="named", tupleize_cols=False),
            lambda: range(len(labels)),
            lambda: [[label] for label in labels],
        ]
        options["columns"] = self.one_of([lambda: labels], names)()
        if form == "dict":
            if self.below(2):
                del options["columns"]
            found = [dict(zip(labels, row, strict=False)) for row in table]
            if len(found) > 1 and self.seldom(3):
                found[-1] = dict(reversed(found[-1].items()))
            return found
        made: dict[str, Callable[[tuple[Any, ...]], Any]] = {
            "list": list,
            "row": lambda row: Row(*row),
            "array": lambda row: np.array(len(row) * [1]),
            "point": lambda row: Point(1, 2),
            "mixed": lambda row: list(row) if row is table[0] else row,
        }
        found = [made.get(form, tuple)(row) for row in table]
        return tuple(found) if form == "tuples" else found


def call(chance: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    drawn = Drawn(chance)
    rows = drawn.one_of([1, 1, 1, 2, 3], [0, 127, 128, 129])
    width = drawn.one_of([1, 2, 3, 3, 4], [0, 64, 65])
    labels = [drawn.one_of(LABELS, ODD_LABELS) for _ in range(min(width, 6))] + [f"c{at}" for at in range(6, width)]
    if chance.random() < 0.7:  # the same labels again and again: most frames come from a template that others have made
        labels[:3] = LABELS[: min(width, 3)]
    options: dict[str, Any] = {}
    if drawn.below(2):
        data: Any = {label: drawn.column(rows) for label in labels}
        if drawn.seldom(10):
            data = OrderedDict(data)
        if drawn.seldom(10):
            options["columns"] = labels[::-1]
    else:
        data = drawn.rows(labels, rows, options)
    if drawn.seldom(8):
        options["index"] = [list(range(rows)), [0], range(rows), pd.Index(["x"] * rows), {1}][drawn.below(5)]
    if drawn.seldom(12):
        options["dtype"] = [object, "float64", "int32", "string", str, "nonsense"][drawn.below(6)]
    if drawn.seldom(8):
        options["copy"] = bool(drawn.below(2))
    return (data,), options


#: hypothesis draws one number for each, and need not draw fifty: several times as many calls are tried.
calls = st.randoms(use_true_random=True).map(call)


def _set_value(frame: pd.DataFrame) -> Any:
    frame.iloc[0, 0] = 7
    return frame


def _set_text(frame: pd.DataFrame) -> Any:
    frame.iloc[0, -1] = "new"
    return frame


def _set_column(frame: pd.DataFrame) -> Any:
    taken = frame.iloc[:, 0]
    frame["new"] = 1
    frame[frame.columns[0]] = "all"
    return frame, taken


def _write_through(frame: pd.DataFrame) -> Any:
    taken = frame.iloc[:, 0]
    taken.iloc[0] = 1
    return frame, taken


def _write_values(frame: pd.DataFrame) -> Any:
    frame.values[0, 0] = 5
    return frame, frame.values.flags.writeable


def _write_labels(frame: pd.DataFrame) -> Any:
    frame.columns.values[0] = "written"
    return frame, "written" in frame.columns, frame.columns


def _name_axes(frame: pd.DataFrame) -> Any:
    frame.columns.name, frame.index.name = "across", "down"
    return frame, frame.copy()


def _new_labels(frame: pd.DataFrame) -> Any:
    frame.columns = list(range(frame.shape[1]))
    return frame


def _insert(frame: pd.DataFrame) -> Any:
    frame.insert(0, "first", 5)
    del frame[frame.columns[-1]]
    return frame


def _enlarge(frame: pd.DataFrame) -> Any:
    frame.loc[len(frame)] = 0
    return frame


def _chained(frame: pd.DataFrame) -> Any:
    part = frame[frame.index >= 0]
    part["new"] = 1
    return frame, part


def _shallow(frame: pd.DataFrame) -> Any:
    other = frame.copy(deep=False)
    other.iloc[0, 0] = 3
    return frame, other


def _attributes(frame: pd.DataFrame) -> Any:
    frame.attrs["source"] = "x"
    return frame.attrs, frame.flags.allows_duplicate_labels, frame.copy().attrs, frame.__dict__.keys()


def _memory(frame: pd.DataFrame) -> Any:
    array = frame.to_numpy()
    return array, array.flags.writeable, frame.memory_usage().tolist(), frame.size, frame.empty


#: What a function may do with a frame; what it returns, raises and warns of is compared, and the frame afterwards.
USES: list[Callable[[pd.DataFrame], Any]] = [
    _set_value, _set_text, _set_column, _write_through, _write_values, _write_labels, _name_axes, _new_labels, _insert,
    _enlarge, _chained, _shallow, _attributes, _memory,
    lambda f: f, repr, len, copy, deepcopy, lambda f: pickle.loads(pickle.dumps(f)), SubFrame,
    lambda f: f.iloc[:, 0], lambda f: f.iloc[:, 0].sum(), lambda f: f.iloc[:, -1].max(), lambda f: f.iloc[0],
    lambda f: f["a"], lambda f: f.a, lambda f: f[["a", "b"]], lambda f: f.to_dict("records"), lambda f: list(f.items()),
    lambda f: [tuple(row) for row in f.itertuples()], lambda f: f.dtypes, lambda f: f.index, lambda f: f.columns,
    lambda f: f.sort_values("a"), lambda f: f.groupby("a").size(), lambda f: f.T, lambda f: f.describe(),
    lambda f: f.assign(z=1), lambda f: f.rename(columns={"a": "z"}), lambda f: f.drop(columns="a"), lambda f: f.isna(),
    lambda f: pd.concat([f, f]), lambda f: f.merge(f, on="a"), lambda f: f.query("a > 0"), lambda f: f.axes,
    lambda f: f.select_dtypes("number"),
    lambda f: f.fillna(0), lambda f: f.astype(object), lambda f: f.convert_dtypes(), lambda f: f.reset_index(),
    lambda f: f.set_index("a"), lambda f: f.apply(lambda c: c.iloc[0]), lambda f: f.mean(numeric_only=True),
    lambda f: f == f, lambda f: f.reindex(columns=["a", "q"]), lambda f: f.pop("a"), hash, lambda f: f + 1,
    lambda f: f.eq(f).all().all(), lambda f: f.columns.get_loc("a"), lambda f: "a" in f, lambda f: f.to_json(),
]  # fmt: skip


def _take_and_write(frame: pd.DataFrame) -> Any:
    taken = frame["a"]
    frame.iloc[0, 0] = 7
    taken.iloc[0] = 8
    return taken, frame["a"], frame["a"] is taken


def _write_and_take(frame: pd.DataFrame) -> Any:
    frame.iloc[0, 0] = 7
    return frame["a"], frame["n"]


def _replace_taken(frame: pd.DataFrame) -> Any:
    taken = frame["n"]
    frame["n"] = 1
    return taken, frame["n"], frame["a"]


def _take_from_changed(frame: pd.DataFrame) -> Any:
    frame.insert(0, "first", 5)
    taken = frame["a"]
    del frame["first"]
    return taken, frame["a"], frame["n"]


def _take_renamed(frame: pd.DataFrame) -> Any:
    frame.columns = [*frame.columns[1:], frame.columns[0]]
    return frame["a"], frame["n"]


def _take_with_attributes(frame: pd.DataFrame) -> Any:
    before = frame["a"].attrs
    frame.attrs["source"] = "x"
    return before, frame["n"].attrs


def _take_without_duplicates(frame: pd.DataFrame) -> Any:
    frame.flags.allows_duplicate_labels = False
    return frame["a"].flags.allows_duplicate_labels


def _take_with_index(frame: pd.DataFrame) -> Any:
    frame.index = pd.Index(["x"] * len(frame))
    frame.index.name = "down"
    return frame["a"], frame["a"].index is frame.index


def _take_parts(frame: pd.DataFrame) -> Any:
    taken = frame["a"]
    return list(vars(taken)), taken.name is frame.columns[list(frame.columns).index("a")], vars(taken)["_is_copy"]


def _take_and_drop(frame: pd.DataFrame) -> Any:
    taken = frame.copy()["a"]
    taken.iloc[0] = 1
    return taken, deepcopy(frame["a"]), pickle.loads(pickle.dumps(frame["a"]))


def _take_infinite(frame: pd.DataFrame) -> Any:
    both = frame["a"] * np.inf
    return both.sum(), (both - both).sum(), pd.concat([both, -both]).sum(), (frame["a"] + 1e308).sum() + 1e308


#: What a function may do with the columns of a frame.
COLUMN_USES: list[Callable[[pd.DataFrame], Any]] = [
    _take_and_write, _write_and_take, _replace_taken, _take_from_changed, _take_renamed,
    _take_with_attributes, _take_without_duplicates, _take_with_index, _take_parts, _take_and_drop, _take_infinite,
    lambda f: f["a"], lambda f: f["n"].tolist(), lambda f: f.a, lambda f: f.key.iloc[0], lambda f: f["q"],
    lambda f: f["a"].sum(), lambda f: f.n.sum(), lambda f: f["a"].sum(min_count=2), lambda f: f["a"].sum(skipna=False),
    lambda f: type(f["n"].sum()), lambda f: f["a"].max(), lambda f: f["a"].mean(), lambda f: f["a"].to_numpy(),
    lambda f: f.sum(numeric_only=True), lambda f: f["a"].agg(["sum", "min"]), lambda f: f["a"].fillna(0, inplace=True),
    lambda f: f.loc[:, "a"], lambda f: f.at[0, "a"], lambda f: f["a"].groupby(f["n"]).sum(),
    lambda f: f["a"].rename("b", inplace=True), lambda f: f.rename(columns={"a": "n", "n": "a"}, inplace=True),
    lambda f: f["a"].to_frame(), lambda f: f.eval("a + n"), lambda f: f["a"].isna().sum(), lambda f: (f["a"] > 0).sum(),
]  # fmt: skip


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


Act = Callable[[], Any]


@pytest.fixture
def inside() -> Callable[[Act], Act]:
    """Return what makes an act one where frames come from templates."""
    exchange = _exchange()
    assert exchange is not None

    def made(act: Act) -> Act:
        def acting() -> Any:
            with exchange:
                return act()

        return acting

    return made


def test_constructed_frames(inside: Callable[[Act], Act], monkeypatch: pytest.MonkeyPatch) -> None:
    """``pd.DataFrame(...)``: the frame, what a function does with it, errors, and warnings with their places."""
    from_template = filled_columns(monkeypatch)
    drawn = 0

    @settings(max_examples=examples(500, 4_000, 100_000), suppress_health_check=list(HealthCheck))
    @given(calls, OPTIONS, st.lists(st.sampled_from(USES), max_size=2))
    def run(call: Any, option: tuple[str, Any], uses: list[Callable[[pd.DataFrame], Any]]) -> None:
        nonlocal drawn
        drawn += 1
        args, given_options = call

        def make() -> pd.DataFrame:
            return pd.DataFrame(*args, **given_options)

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


def filled_columns(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Return a list that gets the columns of each frame made from a template."""
    made: list[list[Any]] = []
    filled = Template.filled

    def noted(self: Template, columns: list[Any], *args: Any) -> Any:
        made.append(columns)
        return filled(self, columns, *args)

    monkeypatch.setattr(Template, "filled", noted)
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
    inside: Callable[[Act], Act],
    source: tuple[pd.DataFrame, list[int]],
    option: tuple[str, Any],
    uses: list[Callable[[pd.DataFrame], Any]],
    is_used_first: bool,
) -> None:
    """The frames of keys that are converted together, beside frames that have nothing in common."""
    frame, sizes = source
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
def test_each_use_of_columns(inside: Callable[[Act], Act], at: int, copies: bool) -> None:
    """What a function does with columns of its frame, for the first frame of a slab and for a later one."""
    use = COLUMN_USES[at]
    frame = pd.DataFrame({"a": [1, 2, 3], "key": ["x", "y", "z"], "n": [0.5, np.nan, 1.5]})
    with pandas_options("mode.copy_on_write", copies):
        parts = inside(lambda: list(consecutive(frame.copy(), np.array([1, 2]))))()
        for ours, theirs in zip(parts, (frame[:1].copy(), frame[1:].reset_index(drop=True).copy()), strict=True):
            require_same_outcome(inside(lambda ours=ours: use(ours)), lambda theirs=theirs: use(theirs))
            require_same(ours, theirs)
