"""Converts the state of Spark's operators to tables of holdfast's one-line operators.

::

    Spark's                              key                        value
    dropDuplicates                       id, at                     -
    dropDuplicatesWithinWatermark        id                         expiresAtMicros
    groupBy("user").agg                  user                       count, sum, sum, isEmpty, …     buffers in a row
    groupBy("user", window(…)).agg       user, window               count, …
    groupBy("user", session_window(…))   user, sessionStartTime     user, session_window, count, …

    ours                                 key                        value
    dropDuplicates…                      id, at                     until
    agg                                  user                       n, total, …
    window                               user, window_start         n, …
    session                              user, session_start        session_end, n, …

Spark names buffers after functions, not columns, so two sums are both called ``sum``. The user therefore lists an
aggregation's columns and functions in Spark's order. Spark sums short decimals as integers and does not record their
type, so the user gives the type with the function. The user also gives the durations of windows, which cannot be
derived if none is open.

Source: Spark 4.3's ``statefulOperators.scala``, ``StreamingAggregationStateManager``,
``StreamingSessionWindowStateManager`` and the ``aggBufferAttributes`` of its aggregates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.errors import AnalysisException, IllegalArgumentException, PySparkException
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from holdfast.backends.schema import KEY_SIDE, VALUE_SIDE
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.operators.accumulators import Accumulator, Count, Extreme, Mean, Moments, Picked, Sum
from holdfast.spark_integration.operators.aggregation import WINDOW_START, Aggregation, Window
from holdfast.spark_integration.operators.deduplication import Deduplication
from holdfast.spark_integration.operators.panes import WindowPlaces
from holdfast.spark_integration.operators.sessions import SESSION_END, SESSION_START, Sessions
from holdfast.spark_integration.operators.sketches import Registers
from holdfast.spark_integration.savepoints.write import RowEnds, TableRows
from holdfast.spark_integration.shard.operator import ShardFunction
from holdfast.spark_integration.spark_types import Watermark, arrow_schema, require_key_types, types_of_keys
from holdfast.spark_integration.timers import TIMERS_BY_DUE
from holdfast.spark_integration.ttl.ends import UNTIL, Ttl, microseconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Spark's operator names.
DEDUPLICATION, WITHIN_WATERMARK = "dedupe", "dedupeWithinWatermark"
AGGREGATION, SESSIONS = "stateStoreSave", "sessionWindowStateStoreSaveExec"
HAVE_COUNTERPARTS = (DEDUPLICATION, WITHIN_WATERMARK, AGGREGATION, SESSIONS)

#: Spark's buffers by function; a sum of decimals has one more.
_BUFFERS = {
    "count": ("count",),
    "sum": ("sum",),
    "mean": ("sum", "count"),
    "avg": ("sum", "count"),
    "min": ("min",),
    "max": ("max",),
    "any": ("max",),
    "all": ("min",),
    "stddev": ("n", "avg", "m2"),
    "stddev_pop": ("n", "avg", "m2"),
    "variance": ("n", "avg", "m2"),
    "var_pop": ("n", "avg", "m2"),
    "first": ("first", "valueSet"),
    "first(ignorenulls)": ("first", "valueSet"),
    "last": ("last", "valueSet"),
    "last(ignorenulls)": ("last", "valueSet"),
    "approx_count_distinct": (),  # "MS[0]", "MS[1]", …: ten registers of six bits each
}
_IS_EMPTY, _IGNORES_NULLS = "isEmpty", "(ignorenulls)"
_SERIALISED = "buf"  #: Holds a serialised object of Spark
_FUNCTION = re.compile(r"(\w+)(?:\((.+)\))?")
_EXACT = 1 << 53  #: A double represents every integer below this.
_MOST_DIGITS = 38
_NO_TYPES = pa.schema([])  # of the output: there is none


@dataclass(frozen=True)
class Described:
    """The facts about an aggregation that Spark's state does not record."""

    aggregates: Mapping[str, str] | None = None  #: Functions by column, in the order of Spark's ``agg``
    window: str | Sequence[str] | None = None  #: Length, slide and start, as given to ``window``


@dataclass(frozen=True)
class MovedOperator:
    """A holdfast operator with the state of a Spark operator."""

    table: TableRows
    configuration: Mapping[str, str]
    is_timed: bool  #: Whether the watermark drops late rows or removes state


def moved(host: str, rows: DataFrame, described: Described, *, has_watermark: bool) -> MovedOperator:
    """Return the operator that continues the state `rows` of a host in `HAVE_COUNTERPARTS`."""
    keys = struct_of(rows.schema["key"]).fields
    if not keys or (host == AGGREGATION and len(keys) == 1 and _is_window(keys[0].dataType)):
        raise InvalidArgumentError("holdfast has no aggregation without keys: keep this query on Spark's operators")
    state = _StateFrame.of(rows)
    if host in (DEDUPLICATION, WITHIN_WATERMARK):
        if described.aggregates or described.window:
            raise InvalidArgumentError("this operator has no aggregates and no window: leave them out", operator=host)
        return _deduplication(state, within=host == WITHIN_WATERMARK, has_watermark=has_watermark)
    if not described.aggregates:
        raise InvalidArgumentError(
            "name the columns and functions of the aggregation in the order of Spark's agg, which does not record "
            "them: aggregates={'n': 'count', 'worst': 'max'} (--aggregate n=count --aggregate worst=max)",
            operator=host,
            buffers=[field.name for field in state.values],
        )
    if host == SESSIONS:
        return _sessions(state, described)
    return _aggregation(state, described)


@dataclass(frozen=True)
class _StateFrame:
    """Spark's state with numbered fields: Spark confuses buffers with the same name."""

    keys: list[T.StructField]
    values: list[T.StructField]
    frame: DataFrame

    @classmethod
    def of(cls, rows: DataFrame) -> _StateFrame:
        keys, values = (struct_of(rows.schema[side]) for side in ("key", "value"))
        sides = [
            F.col(name).cast(T.StructType([T.StructField(f"c{place}", of.dataType) for place, of in enumerate(side)]))
            for name, side in (("key", keys), ("value", values))
        ]
        return cls(keys.fields, values.fields, rows.select(sides[0].alias("key"), sides[1].alias("value")))

    def key(self, place: int) -> Column:
        return F.col("key")[f"c{place}"]

    def value(self, place: int) -> Column:
        return F.col("value")[f"c{place}"]

    def all_keys(self) -> list[Column]:
        return [self.key(place) for place in range(len(self.keys))]


def struct_of(field: T.StructField) -> T.StructType:
    assert isinstance(field.dataType, T.StructType)
    return field.dataType


def _operator(
    function: ShardFunction, frame: DataFrame, grouping: int, ends: RowEnds | None, *, is_timed: bool
) -> MovedOperator:
    tables = dict(function.tables())
    index = tables.pop(TIMERS_BY_DUE, None)
    ((_, schema),) = tables.items()
    return MovedOperator(TableRows(schema, frame, grouping, index, ends), function.configuration(), is_timed)


def _types_of_keys(keys: list[T.StructField]) -> pa.Schema:
    require_key_types(keys)
    return types_of_keys(keys)


def _deduplication(state: _StateFrame, *, within: bool, has_watermark: bool) -> MovedOperator:
    timed = [place for place, key in enumerate(state.keys) if Watermark.of(key) is not None]
    until = F.lit(None).cast("timestamp")
    if within:
        until = F.timestamp_micros(state.value(0))
    elif timed:
        if not isinstance(state.keys[timed[0]].dataType, T.TimestampType):
            raise InvalidArgumentError(
                "the event times in a key of dropDuplicates are not timestamps, so its state cannot be moved: keep "
                "this query on Spark's operators",
                column=state.keys[timed[0]].name,
                type=state.keys[timed[0]].dataType.simpleString(),
            )
        until = state.key(timed[0])
    # The query sets how long keys are kept; the savepoint records only whether they expire, and by which clock.
    ttl = Ttl(0, "") if within or timed else None
    function = Deduplication(_types_of_keys(state.keys), _NO_TYPES, ttl)
    frame = state.frame.select(*state.all_keys(), until.alias(UNTIL.name))
    ends = RowEnds(f"{VALUE_SIDE}{UNTIL.name}")
    return _operator(function, frame, len(state.keys), ends, is_timed=has_watermark or ttl is not None)


def _aggregation(state: _StateFrame, described: Described) -> MovedOperator:
    accumulators, columns = _accumulators(state, 0, described)
    windows = [place for place, key in enumerate(state.keys) if _is_window(key.dataType)]
    if described.window is None:
        if windows:
            raise InvalidArgumentError(
                "the aggregation has windows: repeat the durations passed to its window(), as window='1 hour' or "
                "['1 hour', '5 minutes'] (--window '1 hour, 5 minutes')",
                column=state.keys[windows[0]].name,
            )
        function = Aggregation(_types_of_keys(state.keys), accumulators, _NO_TYPES, "update", None)
        frame = state.frame.select(*state.all_keys(), *columns)
        return _operator(function, frame, len(state.keys), None, is_timed=False)
    if not windows:
        raise InvalidArgumentError("the aggregation has no windows: omit window", keys=_names(state.keys))
    _require_one_window(state.keys, windows)
    (at,) = windows
    window, places = state.key(at), _places(state, described.window)
    _require_windows(state.frame, window, places)
    start = T.StructField(WINDOW_START, struct_of(state.keys[at])["start"].dataType)
    others = [place for place in range(len(state.keys)) if place != at]
    key_types = _types_of_keys([*(state.keys[place] for place in others), start])
    is_watched = Watermark.of(state.keys[at]) is not None
    own = Window("window", places, is_watched)
    function = Aggregation(key_types, accumulators, _NO_TYPES, "append", own)
    frame = state.frame.select(*map(state.key, others), window["start"], *columns)
    ends = RowEnds(f"{KEY_SIDE}{WINDOW_START}", places.length_us)
    return _operator(function, frame, len(key_types), ends if is_watched else None, is_timed=is_watched)


def _sessions(state: _StateFrame, described: Described) -> MovedOperator:
    if described.window is not None:
        raise InvalidArgumentError("the aggregation is by session, not by window: omit window")
    # Spark repeats the keys and the session before the buffers, and puts the start after the keys.
    keys, repeated = state.keys[:-1], len(state.keys)
    windows = [place for place in range(repeated) if _is_window(state.values[place].dataType)]
    _require_one_window(state.values, windows)
    (at,) = windows
    accumulators, columns = _accumulators(state, repeated, described)
    session = state.value(at)
    start = T.StructField(SESSION_START, struct_of(state.values[at])["start"].dataType)
    function = Sessions(_types_of_keys([*keys, start]), accumulators, _NO_TYPES, "session_window", is_streaming=True)
    frame = state.frame.select(*map(state.key, range(len(keys))), session["start"], session["end"], *columns)
    return _operator(function, frame, len(keys), RowEnds(f"{VALUE_SIDE}{SESSION_END}"), is_timed=True)


def _is_window(t: T.DataType) -> bool:
    times = [field.dataType for field in t] if isinstance(t, T.StructType) and t.names == ["start", "end"] else []
    return bool(times) and all(isinstance(time, T.TimestampType | T.TimestampNTZType) for time in times)


def _require_one_window(fields: Sequence[T.StructField], windows: Sequence[int]) -> None:
    if len(windows) > 1:
        raise InvalidArgumentError(
            "a key is a struct of start and end, just like the window: keep this query on Spark's operators",
            columns=[fields[place].name for place in windows],
        )


def _places(state: _StateFrame, window: str | Sequence[str]) -> WindowPlaces:
    durations = [window] if isinstance(window, str) else window
    if isinstance(durations, (list, tuple)) and 1 <= len(durations) <= 3 and all(isinstance(d, str) for d in durations):
        with suppress(AnalysisException, IllegalArgumentException):
            return WindowPlaces.of(state.frame.sparkSession, *durations)
    raise InvalidArgumentError(
        "window takes the durations passed to Spark's window(): the length and, if any, the slide and the start",
        given=window,
    )


def _require_windows(frame: DataFrame, window: Column, places: WindowPlaces) -> None:
    found = frame.select(window["start"].alias("start"), window["end"].alias("end")).distinct().toArrow()
    start, end = (microseconds(column) for column in found.columns)
    if (end - start != places.length_us).any() or ((start - places.start_us) % places.slide_us).any():
        raise InvalidArgumentError(
            "the stored windows do not have these durations: repeat those passed to Spark's window()",
            length_us=places.length_us,
            slide_us=places.slide_us,
            stored_start=found.column(0)[0].as_py(),
            stored_end=found.column(1)[0].as_py(),
        )


def _accumulators(state: _StateFrame, first: int, described: Described) -> tuple[tuple[Accumulator, ...], list[Column]]:
    """Return the aggregates and their state columns; their buffers start at number `first`."""
    assert described.aggregates is not None
    if _SERIALISED in _names(state.values[first:]):
        raise InvalidArgumentError(
            "the state cannot be moved: the aggregation has collect_list, collect_set, percentile_approx or another "
            "function whose state only Spark can read. Keep this query on Spark's operators",
            given=dict(described.aggregates),
        )
    accumulators: list[Accumulator] = []
    columns: list[Column] = []
    lost: list[Column] = []
    at = first
    for name, text in described.aggregates.items():
        function, of = _parsed(name, text)
        names = _BUFFERS[function] or _words(state.values[at:])
        if state.values[at : at + 1] and function == "sum" and isinstance(state.values[at].dataType, T.DecimalType):
            names = (*names, _IS_EMPTY)
        buffers = state.values[at : at + len(names)]
        if not names or _names(buffers) != [*names]:
            raise _mismatch(state, first, described)
        found = [state.value(place) for place in range(at, at + len(names))]
        of_sum = buffers[0].dataType
        if names[-1] == _IS_EMPTY:
            lost.append(found[0].isNull() & ~found[1])
            found = [F.when(~found[1], found[0])]
        elif names[0] == "n":
            n = found[0].cast("long")
            found = [n, *(F.when(n != 0, part) for part in found[1:])]
        elif names[0] == "sum" and of is not None and not isinstance(of_sum, T.DecimalType):
            of_sum = T.DecimalType(min(of.precision + 10, _MOST_DIGITS), of.scale)
            lost.append(F.abs(found[0]) >= _EXACT if function != "sum" else F.lit(False))
            found[0] = _of_unscaled(found[0], of_sum)
        if names == _BUFFERS["mean"]:
            found[0] = F.when(found[1] != 0, found[0])
        if function == "approx_count_distinct":
            bits = ((len(names) - 1) * 10).bit_length()  # of a register's number: a word holds ten registers
            registers = Registers(name, "", bits)
            accumulators.append(registers)
            found = [_registers(registers, at)]
        else:
            accumulators.append(_accumulator(name, function, of_sum))
        if function.endswith(_IGNORES_NULLS):
            found.pop()
        columns += found
        at += len(names)
    if at < len(state.values):
        raise _mismatch(state, first, described)
    _require_exact(state, lost)
    return tuple(accumulators), columns


def _words(fields: Sequence[T.StructField]) -> tuple[str, ...]:
    """Return the names of the leading buffers that belong to one approximate distinct count."""
    names = [f"MS[{i}]" for i in range(len(fields))]
    others = [i for i, field in enumerate(fields) if field.name != names[i]]
    return (*names[: others[0] if others else None],)


def _registers(of: Registers, first: int) -> Column:
    """Return the nonzero registers, given the position of the first word; see `Registers`."""
    count, each = 1 << of.bits, of.fields()[0].type.value_type.bit_width
    words = ", ".join(f"value.c{first + i}" for i in range(count // 10 + 1))
    rank = f"shiftright(array({words})[i div 10], 6 * (i % 10)) & 63"
    number = f"cast(shiftleft(i, 6) | ({rank}) AS {'smallint' if each == 16 else 'int'})"
    return F.expr(f"filter(transform(sequence(0, {count - 1}), i -> {number}), register -> (register & 63) != 0)")


def _parsed(name: str, text: str) -> tuple[str, T.DecimalType | None]:
    """Return an aggregate's function and its decimal type, if given."""
    if text in _BUFFERS:
        return text, None
    match = _FUNCTION.fullmatch(str(text))
    function, of = match.groups() if match else (text, None)
    try:
        taken = None if of is None else T.DataType.fromDDL(of)
    except PySparkException as exc:
        raise InvalidArgumentError(f"{text!r} names an unknown type", column=name) from exc
    if function not in _BUFFERS or not isinstance(taken, T.DecimalType | None):
        raise InvalidArgumentError(
            f"the state of this aggregate cannot be moved; these can: {', '.join(_BUFFERS)}; for decimals, add the "
            "type, as in sum(decimal(5,2))",
            column=name,
            aggregate=text,
        )
    return function, taken


def _mismatch(state: _StateFrame, first: int, described: Described) -> InvalidArgumentError:
    return InvalidArgumentError(
        "Spark's state does not match these aggregates: name all functions of agg, in order, each once",
        given=dict(described.aggregates or {}),
        buffers=[f"{field.name} {field.dataType.simpleString()}" for field in state.values[first:]],
    )


def _accumulator(name: str, function: str, t: T.DataType) -> Accumulator:
    which = _BUFFERS[function][0]
    fits = {"min": T.AtomicType, "max": T.AtomicType, "first": T.DataType, "last": T.DataType}.get(which, T.NumericType)
    if not isinstance(t, fits):
        raise InvalidArgumentError(
            f"holdfast has no {function} of this type: keep Spark's operator", column=name, type=t.simpleString()
        )
    arrow = arrow_schema(T.StructType([T.StructField("value", t)]), "an aggregate").field(0).type
    if function == "count":
        return Count(name, None)
    if function == "sum":
        return Sum(name, "", arrow)
    if function in ("mean", "avg"):
        return Mean(name, "", arrow, arrow)
    if which in ("min", "max"):
        return Extreme(name, "", arrow, "min" if which == "min" else "max")
    if which in ("first", "last"):
        return Picked(name, "", arrow, "first" if which == "first" else "last", function.endswith(_IGNORES_NULLS))
    return Moments(name, "", is_sample=not function.endswith("_pop"), is_root=function.startswith("stddev"))


def _of_unscaled(total: Column, t: T.DecimalType) -> Column:
    """Convert a decimal sum that Spark keeps as an unscaled bigint (a double for averages) back to a decimal."""
    return (total.cast("decimal(19,0)") * F.lit(Decimal(1).scaleb(-t.scale))).cast(t)


def _require_exact(state: _StateFrame, lost: list[Column]) -> None:
    """Check that no decimal sum has overflowed or exceeds the digits that Spark keeps."""
    if lost and not state.frame.where(reduce(Column.__or__, lost)).isEmpty():
        raise InvalidArgumentError(
            "a sum of decimals has overflowed in Spark's state, or lost digits: keep this query on Spark's operators"
        )


def _names(fields: Sequence[T.StructField]) -> list[str]:
    return [field.name for field in fields]
