"""What a function is given: keys, frames, order and repetition of calls, on Spark's operator and on ours."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812

from tests.spark.parity import program
from tests.spark.parity.engines import (
    DOCUMENTED,
    FILESYSTEM,
    MEMORY,
    ROCKSDB,
    SPARK,
    Engine,
    Open,
    Trial,
    cause_of,
    engines,
    of_any_backend,
    of_rocksdb,
    of_runs,
)

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

pytestmark = [pytest.mark.spark, pytest.mark.slow]

Notes = Callable[..., list[list[Any]]]
NOTES = "note string"
of_both = engines(MEMORY, ROCKSDB, FILESYSTEM)

# Without a zone, as pyarrow takes them for columns with and without one.
MOMENT = dt.datetime.fromisoformat("2020-03-29T01:30:00")
EPOCH = dt.datetime.fromisoformat("1969-12-31T00:00:00")

# Two rows of each type; a third is null.
COLUMNS = {
    "l": (pa.int64(), [2**60 + 1, 3]),
    "i": (pa.int32(), [-1, 3]),
    "y": (pa.int8(), [-1, 3]),
    "d": (pa.float64(), [float("nan"), -0.0]),
    "f": (pa.float32(), [0.1, 3.0]),
    "o": (pa.bool_(), [True, False]),
    "s": (pa.string(), ["", "ü"]),
    "b": (pa.binary(), [b"", b"\0"]),
    "t": (pa.timestamp("us", "UTC"), [MOMENT, EPOCH]),
    "n": (pa.timestamp("us"), [MOMENT, EPOCH]),
    "a": (pa.date32(), [dt.date(2020, 3, 29), dt.date(1, 1, 1)]),
    "c": (pa.decimal128(10, 2), [Decimal("1.50"), Decimal(0)]),
}
TYPES = (
    "l long, i int, y byte, d double, f float, o boolean, s string, b binary, t timestamp, n timestamp_ntz, a date, "
    "c decimal(10,2)"
)
NESTED = {
    "r": (pa.list_(pa.int64()), [[1, None], []]),
    "m": (pa.map_(pa.string(), pa.int64()), [[("a", 1)], []]),
    "u": (pa.struct({"x": pa.int64(), "z": pa.string()}), [{"x": 1, "z": None}, {"x": None, "z": "q"}]),
}
NESTED_TYPES = "r array<bigint>, m map<string,bigint>, u struct<x:bigint,z:string>"


def describe_frames(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Say of each frame its columns, their types and their values, and whether it may be written to."""
    for frame in chunks:
        columns = [f"{name} {frame[name].dtype} {[_typed(v) for v in frame[name]]}" for name in frame]
        frame.loc[:, frame.columns[-1]] = None
        frame["new"] = 1
        yield pd.DataFrame({"note": [f"{_typed(key[0])} {type(frame.index).__name__} {list(frame.index)} {columns}"]})


def _typed(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


def describe_key(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> list[pd.DataFrame]:
    """Say of each part of a key its type and value."""
    return [pd.DataFrame({"note": [f"{type(key).__name__} {[_typed(part) for part in key]}"]})]


@pytest.fixture(scope="module")
def said_by_spark() -> dict[tuple[str, str], list[list[Any]]]:
    """Return what Spark's operator has put out in a test, so that it is asked once for all engines."""
    return {}


@pytest.fixture
def notes_of(
    request: pytest.FixtureRequest, run_on: Open, said_by_spark: dict[tuple[str, str], list[list[Any]]]
) -> Callable[..., list[list[Any]]]:
    """Return a function that plays something on an engine and gives the output by micro-batch, sorted."""
    others = {name: value for name, value in request.node.callspec.params.items() if name != "engine"}
    name = (request.node.originalname, repr(others))

    def played(engine: Engine, play: Callable[[Trial], None], **conf: str) -> list[list[Any]]:
        if engine is SPARK and name in said_by_spark:
            return said_by_spark[name]
        with run_on(engine, **conf) as run:
            play(run)
            found = [sorted(rows, key=repr) for rows in run.batches]
        if engine is SPARK:
            said_by_spark[name] = found
        return found

    return played


def table_of(columns: dict[str, tuple[Any, list[Any]]]) -> pa.Table:
    """Return each value under a key of its own, then nulls alone, then all of them under one key."""
    values = {name: pa.array([*v, None, *v, None, *v], kind) for name, (kind, v) in columns.items()}
    keys = pa.array(["first", "second", "null", *["all"] * 3, *["no nulls"] * 2])
    return pa.table({"key": keys, **values})


@of_any_backend
@pytest.mark.smoke
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_frames(engine: Engine, nested: bool, notes_of: Notes) -> None:
    """C3: all columns, the grouping column among them, with the types that they have for this key's rows alone."""
    columns, types = (NESTED, NESTED_TYPES) if nested else (COLUMNS, TYPES)

    def play(run: Trial) -> None:
        run.feed_table(table_of(columns))
        frame = run.source(f"key string, {types}", delay=None)
        run.run(run.apply(frame, ["key"], describe_frames, NOTES, program.STATE, "update", "NoTimeout"))

    found = notes_of(engine, play)
    assert found == notes_of(SPARK, play) if engine is not SPARK else len(found[0]) == 5


def same_rows(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Return the rows as they are."""
    yield from chunks


@of_any_backend
@pytest.mark.smoke
@pytest.mark.parametrize("key", ["all", "no nulls"])
def test_rows_come_back(engine: Engine, key: str, notes_of: Notes) -> None:
    """R5: what a function was given it may return, of any type, also where the session's time zone is another."""
    types = f"key string, {TYPES}, {NESTED_TYPES}"
    berlin = {"spark.sql.session.timeZone": "Europe/Berlin"}

    def play(run: Trial) -> None:
        table = table_of(COLUMNS | NESTED)
        run.feed_table(table.filter(pc.equal(table["key"], key)))
        arguments = (same_rows, types, program.STATE, "append", "NoTimeout")
        run.run(run.apply(run.source(types, delay=None), ["key"], *arguments), "append")

    # As texts, where a NaN is like another.
    found = [repr(row) for row in notes_of(engine, play, **berlin)[0]]
    assert len(found) > 1
    assert found == [repr(row) for row in notes_of(SPARK, play, **berlin)[0]]


# By name: type in Spark, what may be set, and what numpy, pandas and others have for it.
VALUES: dict[str, tuple[str, Any, Any]] = {
    "l": ("long", 2**62 + 1, np.int64(5)),
    "i": ("int", -1, np.int32(1)),
    "h": ("short", 7, np.int16(2)),
    "y": ("byte", -8, np.int8(3)),
    "d": ("double", -0.0, np.float64("nan")),
    "f": ("float", 0.1, np.float32(0.1)),
    "o": ("boolean", True, np.bool_(False)),
    "s": ("string", "ü", np.str_("x")),
    "b": ("binary", b"\0", b""),
    "t": ("timestamp", MOMENT, pd.Timestamp(MOMENT)),
    "n": ("timestamp_ntz", EPOCH, pd.Timestamp(EPOCH)),
    "a": ("date", MOMENT.date(), EPOCH.date()),
    "c": ("decimal(10,2)", Decimal("1.5"), Decimal("-0.01")),
    "u": ("struct<x:bigint,z:string>", (5, None), {"x": None, "z": "y"}),
    "v": ("interval day to second", dt.timedelta(days=1, microseconds=1), pd.Timedelta(seconds=-1)),
}
STATE_TYPES = ", ".join(f"{name} {type_}" for name, (type_, _, _) in VALUES.items())
PLAIN, OF_LIBRARIES = (tuple(both) for both in zip(*(values for _, *values in VALUES.values()), strict=True))
STATES = {"plain": PLAIN, "libraries": OF_LIBRARIES, "list": list(PLAIN), "nulls": (None,) * len(PLAIN)}


def keep_values(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> list[pd.DataFrame]:
    """Say what the state holds, and set it."""
    note = f"{key[0]} {[_typed(value) for value in state.getOption or ()]}"
    state.update(STATES[key[0]])
    return [pd.DataFrame({"note": [note, str(state), repr(state.get)]})]


@engines(FILESYSTEM, ROCKSDB, MEMORY)
@pytest.mark.smoke
def test_values_of_the_state(engine: Engine, notes_of: Notes) -> None:
    """G1, G2: values come back as Spark gives them, and those of numpy and pandas may be set (SPARK-41260)."""

    def play(run: Trial) -> None:
        for _ in range(2):
            run.feed([(key, 1, "") for key in STATES])
        run.run(run.apply(run.source(), ["key"], keep_values, NOTES, STATE_TYPES, "update", "NoTimeout"))

    found = notes_of(engine, play)
    assert found == notes_of(SPARK, play) if engine is not SPARK else len(found[1]) == 12


@of_any_backend
def test_keys(engine: Engine, notes_of: Notes) -> None:
    """C1: a key is a tuple of what pandas holds of its first row; null is a key."""

    def play(run: Trial) -> None:
        run.feed_table(table_of(COLUMNS))
        frame = run.source(f"key string, {TYPES}", delay=None)
        run.run(run.apply(frame, list(COLUMNS), describe_key, NOTES, program.STATE, "update", "NoTimeout"))

    found = notes_of(engine, play)
    assert found == notes_of(SPARK, play) if engine is not SPARK else len(found[0]) == 3


@of_any_backend
def test_grouping_by_an_expression(engine: Engine, run_on: Open) -> None:
    """C1: Spark refuses what is not a column; ours computes it, and the key is its value."""
    with run_on(engine) as run:
        run.feed([("ab", 1, ""), ("cd", 1, ""), ("e", 1, "")])
        keys = [F.length("key").alias("size"), F.col("key").substr(1, 1)]

        def applied() -> Any:
            return run.apply(run.source(), keys, describe_key, NOTES, program.STATE, "update", "NoTimeout")

        if engine is SPARK:
            with pytest.raises(AnalysisException, match="UNRESOLVED_COLUMN"):
                applied()
        else:
            run.run(applied())
            expected = {
                f"tuple ['int32 {_scalar(size)}', \"str '{text}'\"]" for size, text in ((2, "a"), (2, "c"), (1, "e"))
            }
            assert {note for (note,) in run.batches[0]} == expected


def _scalar(value: int) -> str:
    return repr(np.int32(value))


def count_chunks(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Read as many chunks as the key says, and count their rows in the state."""
    wanted = {"none": 0, "one": 1}.get(key[0], 1000)
    largest = 0
    for _, chunk in zip(range(wanted), chunks, strict=False):
        largest = max(largest, len(chunk))
        state.update(((state.getOption or (0,))[0] + len(chunk),))
    shown = state.get[0] if key[0] == "all" else "some"
    note = f"{key[0]} {largest <= 3} {iter(chunks) is chunks} {shown}"
    yield pd.DataFrame({"note": [note]})


@of_runs
def test_chunks(engine: Engine, run_on: Open) -> None:
    """C2: a key's rows come in chunks through one iterator, beside one state; a function need not read them all."""
    with run_on(engine, **{"spark.sql.execution.arrow.maxRecordsPerBatch": "3"}) as run:
        run.feed([(name, 1, "") for name in ("all", "none", "one") for _ in range(10)])
        run.feed([("all", 1, "")])
        frame = run.source(delay=None)
        run.run(run.apply(frame, ["key"], count_chunks, NOTES, program.STATE, "update", "NoTimeout"))
        first = {"all True True 10", "none True True some", "one True True some"}
        assert [{note for (note,) in rows} for rows in run.batches] == [first, {"all True True 11"}]


def name_call(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Say which key is called, and set a timeout that is due in the next micro-batch."""
    timed_out = state.hasTimedOut
    if timed_out:
        state.remove()
    else:
        state.setTimeoutTimestamp(max(state.getCurrentWatermarkMs(), 1))
    yield pd.DataFrame({"note": [f"{'timeout' if timed_out else 'data'} {key[0]!r}"]})


@of_both
def test_order_of_calls(engine: Engine, run_on: Open) -> None:
    """C3, C4: in one partition the keys with data come first, in ascending order, and then those that time out."""
    with run_on(engine, **{"spark.sql.shuffle.partitions": "1"}) as run:
        run.feed([(key, 1000, "") for key in ("b", None, "ä", "", "a")])
        run.feed([(key, 2000, "") for key in ("d", "c", "a")])
        run.feed([(key, 3000, "") for key in ("z", "y")])
        run.run(run.apply(run.source(), ["key"], name_call, NOTES, program.STATE, "update", "EventTimeTimeout"))
        notes = [[note for (note,) in rows] for rows in run.batches]
    assert notes[0] == ["data None", "data ''", "data 'a'", "data 'b'", "data 'ä'"]
    assert notes[1][:3] == ["data 'a'", "data 'c'", "data 'd'"]
    assert sorted(notes[1][3:]) == ["timeout ''", "timeout 'b'", "timeout 'ä'", "timeout None"]
    assert notes[2][:2] == ["data 'y'", "data 'z'"]
    assert sorted(notes[2][2:]) == ["timeout 'a'", "timeout 'c'", "timeout 'd'"]


def describe_timeout(key: tuple[Any, ...], chunks: Any, state: GroupState) -> list[pd.DataFrame]:
    """Say what a call without rows is given."""
    if not state.hasTimedOut:
        state.update((1,))
        state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 500)
        return []
    try:
        next(chunks)
    except TypeError as exc:
        refused = str(exc)
    state.remove()
    frames = [f"{len(frame)} {frame.dtypes.to_dict()} {frame.index!r}" for frame in chunks]
    return [pd.DataFrame({"note": [f"{key} {[_typed(part) for part in key]} {refused} {frames}"]})]


@of_both
@pytest.mark.smoke
def test_a_call_for_a_timeout(engine: Engine, notes_of: Notes) -> None:
    """C5: a list of one empty frame with all columns, and the right key wherever its columns stand (SPARK-41261)."""

    def play(run: Trial) -> None:
        run.feed([("a", 1000, "x"), ("b", 1000, None), (None, 1000, "y")])
        run.feed([("z", 2000, "")])
        run.feed([("z", 3000, "")])
        arguments = (describe_timeout, NOTES, program.STATE, "append", "EventTimeTimeout")
        run.run(run.apply(run.source(), ["do", F.col("v"), "key"], *arguments), "append")

    found = notes_of(engine, play)
    assert [len(rows) for rows in found] == [0, 3, 0, 1]
    assert engine is SPARK or found == notes_of(SPARK, play)


def update_late(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Change the state while the returned frames are being read, and after the last of them."""
    for number in range(3):
        yield pd.DataFrame({"note": [f"{key[0]} {number} {state.getOption}"]})
        state.update((number + 10,))
    state.update((99,))


@of_rocksdb
def test_state_is_taken_when_the_output_has_been_read(engine: Engine, run_on: Open) -> None:
    """C6: what a generator does to its state after its last frame counts."""
    with run_on(engine, **{"spark.sql.execution.arrow.maxRecordsPerBatch": "2"}) as run:
        run.feed([("a", 1, ""), ("b", 1, "")])
        run.run(run.apply(run.source(), ["key"], update_late, NOTES, program.STATE, "append", "NoTimeout"), "append")
        notes = {note for (note,) in run.batches[0]}
        assert notes == {f"{k} {n}" for k in "ab" for n in ("0 None", "1 (10,)", "2 (11,)")}
        assert run.state() == dict.fromkeys("ab", ((99,), None))


class FailsOnce:
    """`program.interpret`, which divides by zero as long as a file exists, having changed its state before."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __call__(
        self, key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        yield from program.interpret(key, chunks, state)
        if key[0] == "broken@" and self.flag.exists():
            _ = 1 / 0


@pytest.mark.all
@engines(ROCKSDB, FILESYSTEM, DOCUMENTED, MEMORY)
def test_an_error_leaves_no_trace(engine: Engine, run_on: Open, tmp_path: Path) -> None:
    """C7: nothing of a micro-batch that failed is seen; the same micro-batch then sees the state before it."""
    flag = tmp_path / f"{engine.name} fails"
    with run_on(engine) as run:
        arguments = (FailsOnce(flag), program.OUTPUT, program.STATE, "update", "EventTimeTimeout")
        keys = [f"key {i}@remove" for i in range(9)] + ["broken@"]
        run.feed([(key, 1000, "increase;timestamp 4000") for key in keys])
        run.run(run.apply(run.source(), ["key"], *arguments))
        before = run.state()
        flag.touch()
        run.feed([(key, 2000, "increase;timestamp 5000;watermark") for key in keys])
        failure = run.failure(run.apply(run.source(), ["key"], *arguments))
        assert cause_of(failure) == ("ZeroDivisionError", "division by zero")
        assert engine is SPARK or ("broken@" in str(failure) and "parity" in str(failure))
        flag.unlink()
        assert run.state() == before == dict.fromkeys(keys, ((1,), 4000))
        run.run(run.apply(run.source(), ["key"], *arguments))
        assert run.state() == dict.fromkeys(keys, ((2,), 5000))


def tell_time(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> list[pd.DataFrame]:
    """Say which time it is."""
    return [pd.DataFrame({"note": [str(state.getCurrentProcessingTimeMs())]})]


@of_runs
@pytest.mark.live
def test_one_time_in_a_micro_batch(engine: Engine, run_on: Open) -> None:
    """C7: processing time is that of the micro-batch, for all keys."""
    with run_on(engine) as run:
        for _ in range(2):
            run.feed([(str(i), 1, "") for i in range(20)])
        run.run(run.apply(run.source(), ["key"], tell_time, NOTES, program.STATE, "update", "NoTimeout"))
        times = [{int(note) for (note,) in rows} for rows in run.batches if rows]
    assert [len(found) for found in times] == [1, 1]
    first, second = (found.pop() for found in times)
    assert 1_700_000_000_000 < first < second
