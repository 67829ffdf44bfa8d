"""Frames that functions make and return: Spark's checks and conversions, and templates that change nothing."""

from __future__ import annotations

import datetime as dt
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pandas.core import frame as pandas_frame
from pandas.util._exceptions import find_stack_level
from pyspark.errors import PySparkRuntimeError, PySparkTypeError, PySparkValueError
from pyspark.sql import types as T  # noqa: N812

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.keyed import frame_blocks, frame_templates
from holdfast.spark_integration.keyed.frame_blocks import CONSTRUCTORS, Template, anatomy
from holdfast.spark_integration.keyed.frame_templates import by_templates
from holdfast.spark_integration.keyed.frames import GATHERED_FRAMES, FrameFormat, OutputFrames
from tests.fuzz.test_frame_templates import filled_columns

ZONE = FrameFormat("America/New_York")


def gathered(
    columns: dict[str, T.DataType], *returned: Any, rows_each: int = 100, fmt: FrameFormat = ZONE, nullable: bool = True
) -> list[list[dict[str, Any]]]:
    schema = T.StructType()
    for name, data_type in columns.items():
        schema.add(name, data_type, nullable)
    output = OutputFrames(schema, fmt, rows_each)
    batches = [batch for i, one in enumerate(returned) for batch in output.add_all(one, (i,))]
    return [batch.to_pylist() for batch in [*batches, *output.finish()]]


XY: dict[str, T.DataType] = {"x": T.LongType(), "y": T.LongType()}


@pytest.mark.parametrize(
    ("returned", "expected", "actual"),
    [
        (pd.DataFrame({"x": [1], "y": [1]}), "iterable of pandas.DataFrame", "DataFrame"),
        (None, "iterable", "NoneType"),
        (7, "iterable", "int"),
        ([(1, 2)], "iterator of pandas.DataFrame", "iterator of tuple"),
        ([pd.Series([1])], "iterator of pandas.DataFrame", "iterator of Series"),
    ],
    ids=["R1", "R2 none", "R2 int", "R3 tuple", "R3 series"],
)
def test_what_is_no_iterable_of_frames_is_refused(returned: Any, expected: str, actual: str) -> None:
    with pytest.raises(PySparkTypeError) as caught:
        gathered(XY, returned)
    assert caught.value.getCondition() == "UDF_RETURN_TYPE"
    assert caught.value.getMessageParameters() == {"expected": expected, "actual": actual}


def test_r4_another_number_of_columns_is_refused() -> None:
    with pytest.raises(PySparkRuntimeError) as caught:
        gathered(XY, [pd.DataFrame({"x": [1]})])
    assert caught.value.getCondition() == "RESULT_COLUMN_SCHEMA_MISMATCH"
    assert caught.value.getMessageParameters() == {"expected": "2", "actual": "1"}
    with pytest.raises(PySparkRuntimeError):
        gathered(XY, [pd.DataFrame({"x": []})])  # Also without rows.


@pytest.mark.parametrize(
    ("frame", "rows"),
    [
        (pd.DataFrame(index=[1, 2]), [{"x": None, "y": None}] * 2),
        (pd.DataFrame({"y": [1], "x": [2]}, index=[9]), [{"x": 2, "y": 1}]),
        (pd.DataFrame([[1, 2]]), [{"x": 1, "y": 2}]),
    ],
    ids=["no columns: nulls", "by name", "without names: by position"],
)
def test_r5_whose_column_is_whose(frame: pd.DataFrame, rows: list[dict[str, Any]]) -> None:
    assert gathered(XY, [frame]) == [rows]


def test_r5_columns_are_taken_by_position_where_spark_is_told_so() -> None:
    by_position = FrameFormat("UTC", assign_cols_by_name=False)
    assert gathered(XY, [pd.DataFrame({"y": [1], "x": [2]})], fmt=by_position) == [[{"x": 1, "y": 2}]]


@pytest.mark.parametrize("labels", [["a", "b"], ["x", "z"], ["x", "x"], ["x", 1]])
def test_r5_other_names_are_an_error(labels: list[Any]) -> None:
    """Spark makes nulls of them without a word."""
    with pytest.raises(PySparkRuntimeError) as caught:
        gathered(XY, [pd.DataFrame([[1, 2]], columns=labels)])
    assert caught.value.getCondition() == "RESULT_COLUMN_NAMES_MISMATCH"


def test_batches_come_when_there_are_more_rows_than_asked() -> None:
    frames = [pd.DataFrame({"x": [i] * 2, "y": [0] * 2}) for i in range(5)]
    assert [len(batch) for batch in gathered(XY, frames[:1], frames[1:], rows_each=3)] == [4, 4, 2]


def test_output_is_streamed_while_the_function_runs() -> None:
    """The function's generator is not run ahead of the batches that it fills."""
    made = []

    def function() -> Iterator[pd.DataFrame]:
        for i in range(100):
            made.append(i)
            yield pd.DataFrame({"x": [i], "y": [0]})

    schema = T.StructType().add("x", T.LongType()).add("y", T.LongType())
    next(OutputFrames(schema, ZONE, 4).add_all(function(), ()))
    assert len(made) == 5


@pytest.mark.slow(0.5)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["x", "y"]),
            st.lists(st.one_of(st.none(), st.integers(2**53, 2**60)), min_size=1, max_size=2),
            st.sampled_from([None, "object", "Int64"]),
        ),
        max_size=8,
    ),
    st.integers(1, 9),
)
def test_all_dtypes_keep_their_order(made: list[tuple[str, list[int | None], str | None]], rows_each: int) -> None:
    frames, rows = [], []
    for first, values, dtype in made:
        exact = dtype if None not in values else dtype or "object"
        second = "y" if first == "x" else "x"
        frames.append(pd.DataFrame({first: pd.Series(values, dtype=exact), second: [1] * len(values)}))
        rows += [{first: v, second: 1} for v in values]
    batches = gathered(XY, *([frame] for frame in frames), rows_each=rows_each)
    assert [row for batch in batches for row in batch] == rows


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises((PySparkTypeError, PySparkValueError), match="'x'"):
        gathered(XY, [pd.DataFrame({"x": ["text"], "y": [1]})])
    fraction = [pd.DataFrame({"x": [1.5], "y": [1]})]
    assert gathered(XY, fraction, fmt=FrameFormat("UTC", safecheck=False)) == [[{"x": 1, "y": 1}]]
    with pytest.raises(PySparkValueError, match="convertToArrowArraySafely"):
        gathered(XY, fraction)
    with pytest.raises(SchemaMismatchError, match="NOT NULL"):
        gathered(XY, [pd.DataFrame({"x": [None], "y": [1]})], nullable=False)
    pair = T.StructType().add("a", T.LongType(), False)
    with pytest.raises(SchemaMismatchError, match=r"nulls inside column 'x', in 'a', .* NOT NULL"):
        gathered({"x": pair}, [pd.DataFrame({"x": [{"a": None}]})])


@pytest.mark.parametrize("bad", [{"x": ["text"], "y": [1]}, {"x": [1.5], "y": [1]}])
def test_the_key_of_a_frame_that_does_not_fit_is_told(bad: dict[str, Any]) -> None:
    """Not that of the key whose frame filled the batch, nor of one that is converted together with it."""
    good = {"x": ["5"] if bad["x"] == ["text"] else [2.0], "y": [1]}
    output = OutputFrames(T.StructType().add("x", T.LongType()).add("y", T.LongType()), ZONE, 3)
    for key, frame in enumerate([good, bad, good]):
        assert not list(output.add_all([pd.DataFrame(frame)], (key,)))
    with pytest.raises((PySparkTypeError, PySparkValueError)):
        list(output.add_all([pd.DataFrame(good)], (3,)))
    assert output.failed_key == (1,)


@pytest.mark.slow(1)
def test_many_frames_of_several_dtypes_stay_in_order() -> None:
    """Frames are joined piece by piece, strings and nullable integers too."""
    columns: dict[str, T.DataType] = {"x": T.LongType(), "s": T.StringType()}
    frames, expected = [], []
    for i in range(3 * GATHERED_FRAMES + 1):
        rows = [{"x": i if i % 7 else None, "s": f"{i} {row}"} for row in range(i % 3)]
        frame = pd.DataFrame(rows, columns=list(columns))
        frames.append(frame.astype({"x": "Int64"}) if i % 2 else frame)
        expected += rows
    assert gathered(columns, frames, rows_each=10**6) == [expected]


@pytest.mark.parametrize("at", [GATHERED_FRAMES - 1, GATHERED_FRAMES, 2 * GATHERED_FRAMES + 5])
def test_the_key_of_one_frame_of_many_is_told(at: int) -> None:
    output = OutputFrames(T.StructType().add("x", T.LongType()), ZONE, 10**6)
    for key in range(3 * GATHERED_FRAMES):
        frame = pd.DataFrame({"x": [0.5 if key == at else 1.0] * (1 + key % 2)})
        assert not list(output.add_all([frame], (key,)))
    with pytest.raises(PySparkValueError, match="convertToArrowArraySafely"):
        list(output.finish())
    assert output.failed_key == (at,)


@pytest.mark.parametrize(
    ("data_type", "good", "bad"),
    [
        (T.TimestampType(), pd.Timestamp("2024-03-10 01:30"), pd.Timestamp("2024-03-10 02:30")),
        (T.MapType(T.StringType(), T.LongType()), {"a": 1}, 7),
        (T.LongType(), 5, 2**70),
    ],
    ids=["in a gap of summer time", "no map", "too large"],
)
@pytest.mark.parametrize("at", range(3))
def test_the_key_is_told_whatever_the_conversion_raises(data_type: T.DataType, good: Any, bad: Any, at: int) -> None:
    """Also errors that are neither Spark's, nor Arrow's, nor a TypeError or a ValueError."""
    output = OutputFrames(T.StructType().add("x", data_type), ZONE, 10)
    for key in range(3):
        assert not list(output.add_all([pd.DataFrame({"x": [bad if key == at else good]})], (key,)))
    with pytest.raises(Exception, match=r"\w"):
        list(output.finish())
    assert output.failed_key == (at,)


def test_frames_that_fit_alone_fit_together() -> None:
    """Text that holds a number is one for Spark, where there is no number beside it."""
    frames = [pd.DataFrame({"x": pd.Series([value], dtype=object)}) for value in ("5", 6, "7", 8, 9)]
    assert gathered({"x": T.LongType()}, *([frame] for frame in frames)) == [[{"x": x} for x in range(5, 10)]]


def test_an_error_of_the_function_is_its_own() -> None:
    def function() -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"x": [1], "y": [1]})
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        gathered(XY, function())


def test_numpy_and_extension_columns_with_zones_and_categories() -> None:
    zoned = pd.DataFrame({"t": pd.Series([pd.Timestamp("2024-01-01", tz="Asia/Tokyo")]), "s": pd.Categorical(["a"])})
    columns: dict[str, T.DataType] = {"t": T.TimestampType(), "s": T.StringType()}
    expected = {"t": dt.datetime(2023, 12, 31, 15, tzinfo=dt.UTC), "s": "a"}
    assert gathered(columns, [zoned, zoned]) == [[expected] * 2]
    assert gathered({"x": T.LongType()}, [pd.DataFrame({"x": np.array([], np.int64)})]) == []


def test_text_of_arrow_that_is_not_utf8_is_refused_by_column() -> None:
    """Spark's worker fails too, and names nothing; Arrow's conversion would let it pass, for pandas to fail later."""
    text = pa.array([b"fine", b"\xff\xfe"]).view(pa.string())
    frame = pd.DataFrame({"s": pd.Series(text, dtype=pd.ArrowDtype(pa.string()))})
    with pytest.raises(InvalidArgumentError, match=r"column 's' of the output has text that is not UTF-8"):
        gathered({"s": T.StringType()}, [frame])


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
    frame_templates._compared.cache_clear()
    yield
    frame_templates._compared.cache_clear()


@pytest.fixture
def from_template(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The columns of each frame that was made from a template."""
    return filled_columns(monkeypatch)


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


def test_where_frames_differ_pandas_makes_them_and_warns_once(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """A version of pandas that does something else than was expected."""
    filled = Template.filled
    monkeypatch.setattr(Template, "filled", lambda self, columns, *args: filled(self, columns[::-1], *args))
    with pytest.warns(UserWarning, match=r"samples \[0, 1, 2, 3, 4, 5\] differ.*frameTemplates=false") as warned:
        assert not inside(exchanged)
    assert len(warned) == 1
    assert not inside(exchanged)


def test_where_columns_differ_pandas_makes_all_frames(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """A version of pandas whose columns have another attribute."""
    monkeypatch.setattr(frame_blocks, "_CACHER", "_renamed")
    with pytest.warns(UserWarning, match=r"samples \[4, 5\] differ"):
        assert frame_templates._exchange() is None


def test_where_pandas_lacks_a_name_pandas_makes_all_frames(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(frame_blocks, "CONSTRUCTORS", (*CONSTRUCTORS, "gone"))
    with pytest.warns(UserWarning, match="it lacks core.frame.gone"):
        assert not inside(exchanged)
