"""Frames from templates: pandas is exchanged only while a function runs, and only where frames come out the same."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pandas.core import frame as pandas_frame
from pandas.util._exceptions import find_stack_level

from holdfast.spark_integration.keyed import frame_blocks, frame_templates
from holdfast.spark_integration.keyed.frame_blocks import CONSTRUCTORS, Template, anatomy
from holdfast.spark_integration.keyed.frame_templates import by_templates

OWN = {name: getattr(pandas_frame, name) for name in CONSTRUCTORS}


def exchanged() -> bool:
    """Whether all of pandas' functions are exchanged, or none."""
    [found] = {getattr(pandas_frame, name) is not own for name, own in OWN.items()}
    return found


def inside(act: Callable[[], Any]) -> Any:
    """Return what an act returns where frames come from templates."""

    def steps() -> Generator[None, None, Any]:
        yield
        return act()

    running = by_templates(steps())
    next(running)
    with pytest.raises(StopIteration) as end:
        next(running)
    return end.value.value


@pytest.fixture(autouse=True)
def pandas_is_left_as_it_was() -> Iterator[None]:
    """Whatever happens in a test."""
    yield
    assert not exchanged()


@pytest.fixture
def fresh() -> Iterator[None]:
    """A worker that has compared nothing yet."""
    frame_templates._compared.cache_clear()
    yield
    frame_templates._compared.cache_clear()


@pytest.fixture
def from_template(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The columns of each frame that was made from a template."""
    made: list[list[Any]] = []
    filled = Template.filled

    def noted(self: Template, columns: list[Any], *args: Any) -> Any:
        made.append(columns)
        return filled(self, columns, *args)

    monkeypatch.setattr(Template, "filled", noted)
    return made


def test_pandas_is_itself_whenever_the_generator_is_not_running() -> None:
    """Spark makes frames too, between what a shard yields."""
    seen = []

    def steps() -> Generator[int, None, str]:
        for at in range(2):
            seen.append(exchanged())
            yield at
        return "end"

    running = by_templates(steps())
    found = []
    while True:
        assert not exchanged()
        try:
            found.append(next(running))
        except StopIteration as end:
            found.append(end.value)
            break
    assert (found, seen) == ([0, 1, "end"], [True, True])


def test_a_function_that_fails_leaves_pandas_as_it_was() -> None:
    def steps() -> Generator[int, None, None]:
        assert exchanged()
        yield 1
        raise ZeroDivisionError

    running = by_templates(steps())
    assert next(running) == 1
    with pytest.raises(ZeroDivisionError):
        next(running)


def test_a_generator_that_is_dropped_is_closed() -> None:
    """A task that is killed closes what it has not read to the end."""
    closed = []

    def steps() -> Generator[int, None, None]:
        try:
            yield 1
        finally:
            closed.append(exchanged())

    running = by_templates(steps())
    next(running)
    running.close()
    assert closed == [False]


def test_calls_in_two_threads_that_overlap() -> None:
    """The first to end leaves the other one its templates."""
    first_ended, second_began = threading.Event(), threading.Event()
    seen = []

    def first() -> Generator[None, None, None]:
        second_began.wait(10)
        seen.append(exchanged())
        yield

    def second() -> Generator[None, None, None]:
        second_began.set()
        first_ended.wait(10)
        seen.append(exchanged())
        yield

    threads = [threading.Thread(target=list, args=(by_templates(steps()),)) for steps in (first, second)]
    for thread in threads:
        thread.start()
    threads[0].join()
    first_ended.set()
    threads[1].join()
    assert seen == [True, True]


def test_what_someone_else_puts_in_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: it is used. During: it is not taken away."""
    calls = []

    def other(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return OWN["dict_to_mgr"](*args, **more)

    monkeypatch.setattr(pandas_frame, "dict_to_mgr", other)
    inside(lambda: pd.DataFrame({"n": [1]}))
    assert len(calls) == 1
    monkeypatch.setattr(pandas_frame, "dict_to_mgr", OWN["dict_to_mgr"])
    inside(lambda: setattr(pandas_frame, "dict_to_mgr", other))
    assert pandas_frame.dict_to_mgr is other
    monkeypatch.undo()


def test_init_is_pandas_own_and_who_wraps_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Type checkers and profilers wrap ``DataFrame.__init__``."""
    own, calls = pd.DataFrame.__init__, []

    def wrapped(self: pd.DataFrame, *args: Any, **more: Any) -> None:
        calls.append(args)
        own(self, *args, **more)

    assert inside(lambda: pd.DataFrame.__init__) is own
    monkeypatch.setattr(pd.DataFrame, "__init__", wrapped)
    inside(lambda: pd.DataFrame({"n": [1]}))
    assert calls == [({"n": [1]},)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: pd.DataFrame({"key": ["a"], "n": [1], "x": [0.5], "none": [None]}),
        lambda: pd.DataFrame({"key": ("a",), "n": "1"}),
        lambda: pd.DataFrame({"key": np.array([1, 2], "i4"), "n": (True, False), "of": [[1], {}]}),
        lambda: pd.DataFrame([("a", 1), ("b", 2)], columns=["key", "n"]),
        lambda: pd.DataFrame([["a", 1.5]], columns=["key", "n"]),
        lambda: pd.DataFrame([{"key": "a", "n": 1}, {"key": "b", "n": 2}]),
        lambda: pd.DataFrame([("a", 1)], columns=pd.Index(["key", "n"], name="named")),
    ],
)
def test_common_forms_come_from_templates(make: Callable[[], pd.DataFrame], from_template: list[Any]) -> None:
    """What makes functions by key fast must not fall back unseen."""
    inside(make)
    before = len(from_template)
    found = inside(make)
    assert len(from_template) == before + 1
    assert anatomy(found) == anatomy(make())


def test_a_first_integer_that_is_too_large_costs_the_next_ones_nothing(from_template: list[Any]) -> None:
    """pandas makes uint64 of it; the frames of a worker's other keys are made from a template all the same."""

    def make(value: int) -> pd.DataFrame:
        return pd.DataFrame({"too large at first": [value]})

    for value in (2**63, 1, 2, 2**63):
        found = inside(lambda value=value: make(value))  # type: ignore[misc]
        assert anatomy(found) == anatomy(make(value))
    assert from_template[0] == [[2]]


@pytest.mark.parametrize("values", [[1, "a"], [1, 0.5], [1, True], [np.int64(1), 2], [1, 2**63], [], ["a"]])
def test_a_template_of_integers_makes_no_frame_of_anything_else(values: list[Any]) -> None:
    """Values decide the dtype, whatever the first frame with the same labels held."""

    def make(of: list[Any]) -> pd.DataFrame:
        return pd.DataFrame({"labels of many kinds": of})

    for of in ([1], [1, 2], values, [3]):
        assert anatomy(inside(lambda of=of: make(of))) == anatomy(make(of))  # type: ignore[misc]


def test_objects_are_kept_and_arrays_are_copied() -> None:
    """A frame has the very objects it was given, and nothing of the lists and arrays around them."""
    text, of, numbers = "a" * 50, [1], np.array([1])
    for _ in range(2):
        found = inside(lambda: pd.DataFrame({"text": [text], "of": [of], "n": numbers}))
    assert found["text"][0] is text
    assert found["of"][0] is of
    numbers[0] = 2
    assert found["n"][0] == 1


def test_frames_of_one_template_share_nothing() -> None:
    """Values, names of axes, and labels written in place, which is how some rename columns."""
    first, second, third = inside(lambda: [pd.DataFrame({"n": [1], "m": [2]}) for _ in range(3)])
    first.columns.values[0] = "written"
    first.columns.name = first.index.name = "named"
    first.iloc[0, 1] = 7
    for frame in (second, third, inside(lambda: pd.DataFrame({"n": [1], "m": [2]}))):
        assert anatomy(frame) == anatomy(pd.DataFrame({"n": [1], "m": [2]}))


def test_a_warning_names_the_line_of_the_function() -> None:
    """pandas looks for the first line outside of its own files: it must not find ours."""

    class Warns:
        def __array__(self, *_: Any, **__: Any) -> Any:
            warnings.warn("from inside of pandas", FutureWarning, stacklevel=find_stack_level())
            return np.array([1])

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[int]:
            return iter([1])

    def make() -> pd.DataFrame:
        return pd.DataFrame({"n": Warns()})

    lines = []
    for act in (make, lambda: inside(make)):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            act()
        lines.append([(w.filename, w.lineno) for w in warned])
    assert lines[0] == lines[1] != []
    assert lines[0][0][0] != frame_templates.__file__


def test_ever_new_labels_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_templates, "_SIGNATURES_MAX", 3)
    templates = frame_templates.Templates()
    for at in range(10):
        templates.labels([f"c{at}"])
        signature, _ = templates.of_dict({f"c{at}": [1]})
        assert signature is not None
        templates.learn(signature, pd.DataFrame({f"c{at}": [1]})._mgr)
    assert len(templates._labels) <= 3
    assert len(templates._of) <= 3


def test_threads_that_begin_together_leave_pandas_as_it_was(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """While one compares, the other must not take its functions for pandas'."""
    compare, differing, began = threading.Event(), frame_templates._differing, []

    def slowly(exchange: Any) -> list[int]:
        began.append(exchange)
        with exchange:
            if len(began) == 1:
                compare.wait(0.5)
        return differing(exchange)

    def run() -> None:
        list(by_templates(step for step in ()))
        compare.set()

    monkeypatch.setattr(frame_templates, "_differing", slowly)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(began) == 1
    assert not exchanged()


def test_where_frames_differ_pandas_makes_them_all_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """A version of pandas that does something else than was expected."""
    filled = Template.filled
    monkeypatch.setattr(Template, "filled", lambda self, columns, *args: filled(self, columns[::-1], *args))
    with pytest.warns(
        UserWarning, match=r"of the samples, \[0, 1, 2, 3, 4, 5\] differ.*frameTemplates=false"
    ) as warned:
        assert not inside(exchanged)
    assert len(warned) == 1
    assert not inside(exchanged)


def test_where_columns_differ_pandas_makes_all_frames(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """A version of pandas whose columns have another attribute."""
    monkeypatch.setattr(frame_blocks, "_CACHER", "_renamed")
    with pytest.warns(UserWarning, match=r"of the samples, \[4, 5\] differ"):
        assert frame_templates._exchange() is None


def test_where_pandas_lacks_a_name_pandas_makes_all_frames(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(frame_blocks, "CONSTRUCTORS", (*CONSTRUCTORS, "gone"))
    with pytest.warns(UserWarning, match="it lacks core.frame.gone"):
        assert not inside(exchanged)


@pytest.mark.parametrize(
    ("option", "value"), [("future.infer_string", True), ("mode.data_manager", "array"), ("mode.copy_on_write", True)]
)
@pytest.mark.filterwarnings("ignore:data_manager option is deprecated:FutureWarning")
def test_options_of_pandas_are_heeded_when_they_are_set(option: str, value: Any) -> None:
    """A function may set one at any time, after templates were learnt."""

    def make() -> pd.DataFrame:
        return pd.DataFrame([("a", 1)], columns=["key", "n"])

    inside(make)
    with pd.option_context(option, value):
        found, expected = inside(make), make()
        assert type(found._mgr) is type(expected._mgr)
        assert found.dtypes.tolist() == expected.dtypes.tolist()
        assert found.columns.dtype == expected.columns.dtype
