"""A probe asks a processor's state a few questions for a key of its own, and says what Spark answers.

Probes know nothing of each other, so one query carries many of them, each under its name as key. A probe yields what it
found; what it yields is compared by ``repr``, on each engine, with what the probe declares::

    @probe(False, None)
    def v1_an_absent_value(s):
        yield s.value.exists()
        yield s.value.get()
"""

from __future__ import annotations

import datetime as dt
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

if TYPE_CHECKING:
    from pyspark.sql.streaming import StatefulProcessorHandle
    from pyspark.sql.streaming.stateful_processor import ListState, MapState, TimerValues, ValueState

INPUT = "key string, v long"
OUTPUT = "key string, found string"
NOW = dt.datetime(2026, 1, 2, 3, 4, 5, 678901)  # noqa: DTZ001  state has naive ones


@dataclass
class States:
    """What a probe has to ask: variables of a processor, its handle, and what its call was given."""

    handle: StatefulProcessorHandle
    value: ValueState
    single: ValueState
    numbers: ListState
    entries: MapState
    pairs: MapState
    typed: ValueState
    fixed: ValueState
    lasting: ValueState
    nested: ListState
    places: MapState
    times: TimerValues | None = None

    @classmethod
    def declared(cls, handle: StatefulProcessorHandle) -> States:
        """Declare the variables."""
        return cls(
            handle,
            value=handle.getValueState("value", "a int, b string"),
            single=handle.getValueState("a name with blanks", "n long"),
            numbers=handle.getListState("numbers", "n int"),
            entries=handle.getMapState("entries", "k long", "v string, w int"),
            pairs=handle.getMapState("pairs", "k string, l long", "n int"),
            typed=handle.getValueState("typed", ", ".join(f"{name} {type_}" for name, type_ in TYPES.items())),
            fixed=handle.getValueState("fixed", "n int NOT NULL"),
            # Nothing expires in one micro-batch.
            lasting=handle.getValueState("lasting", "n int", 0),
            nested=handle.getListState("nested", NESTED),
            places=handle.getMapState(
                "places", "at struct<x:int,y:string>, day date, dec decimal(10,2), path array<int>", NESTED
            ),
        )

    def kept(self, **columns: Any) -> Any:
        """Store values in columns of `typed`, null in the others, and return what is read back, one or a tuple."""
        stored = written(self.typed, tuple(columns.get(name) for name in TYPES))
        row = dict(zip(TYPES, stored, strict=True))
        found = [row[name] for name in columns]
        return found[0] if len(found) == 1 else tuple(found)


# By column of `States.typed`.
TYPES = {
    "i": "int",
    "l": "long",
    "f": "float",
    "d": "double",
    "dec": "decimal(10,2)",
    "s": "string",
    "flag": "boolean",
    "raw": "binary",
    "day": "date",
    "ts": "timestamp",
    "ntz": "timestamp_ntz",
    "span": "interval day to second",
    "array": "array<int>",
    "map": "map<string,int>",
    "st": "struct<x:int,y:string>",
    "deep": "array<struct<m:map<string,array<int>>>>",
}

NESTED = "st struct<x:int,y:string>, array array<int>, map map<string,array<int>>"

Function = Callable[[States], Iterator[object]]


class Error:
    """An error as a finding: its class or one above, and words that its text contains."""

    def __init__(self, class_: str, *words: str) -> None:
        self.class_, self.words = class_, words

    def __repr__(self) -> str:
        return f"{self.class_}: {' … '.join(self.words)}"

    def matches(self, found: str) -> bool:
        classes, separator, text = found.partition(": ")
        return bool(separator) and self.class_ in classes.split(" < ") and all(word in text for word in self.words)


class Anything:
    """A finding that nobody promises."""

    def __repr__(self) -> str:
        return "anything"


@dataclass(frozen=True)
class Probe:
    """One probe."""

    function: Function
    #: What it finds; an `Error` for an exception.
    expected: tuple[object, ...]
    #: What it finds on Spark's operator, where we differ on purpose.
    on_spark: tuple[object, ...] | None
    #: Whether an answer of the state server ends the task on Spark (X1), so that it needs a query of its own.
    ends_spark: bool

    @property
    def name(self) -> str:
        return self.function.__name__

    def wanted(self, *, is_spark: bool) -> list[str]:
        """Return what should be found, as text."""
        return [repr(want) for want in self._expected(is_spark=is_spark)]

    def seen(self, found: list[str], *, is_spark: bool) -> list[str]:
        """Return what was found, with what is wanted in the place of an error that matches it."""
        wanted = self._expected(is_spark=is_spark)
        own = [
            repr(want) if isinstance(want, Anything) or (isinstance(want, Error) and want.matches(got)) else got
            for want, got in zip(wanted, found, strict=False)
        ]
        return own + found[len(wanted) :]

    def _expected(self, *, is_spark: bool) -> tuple[object, ...]:
        return self.on_spark if is_spark and self.on_spark is not None else self.expected


@dataclass
class Probes:
    """The probes of a module, and the decorator that adds one."""

    all: list[Probe] = field(default_factory=list)

    def __call__(
        self, *expected: object, spark: tuple[object, ...] | None = None, ends_spark: bool = False
    ) -> Callable[[Function], Function]:
        """Add a probe with what it finds, and what it finds on Spark if that differs."""

        def add(function: Function) -> Function:
            self.all.append(Probe(function, expected, spark, ends_spark))
            return function

        return add


def attempt(function: Callable[..., object], *arguments: Any) -> object:
    """Return what a call returns, or its error as a finding."""
    try:
        return function(*arguments)
    except Exception as exc:  # noqa: BLE001
        return Finding.of_error(exc)


def survived(function: Callable[..., object], *arguments: Any) -> object:
    """Return what a call returns, or that Spark's state server is gone (X1), however that shows."""
    try:
        return function(*arguments)
    except (EOFError, OSError):
        return "lost"


def written(state: ValueState, row: Any) -> Any:
    """Write a value and return what is read back.

    Where it does not fit, we say so at the read, or else at the end of the slab: so it is taken back.
    """
    state.update(row)
    try:
        return state.get()
    except Exception:
        state.clear()
        raise


class Finding(str):
    """A text that is a finding as it is."""

    __slots__ = ()

    @classmethod
    def of_error(cls, error: Exception) -> Finding:
        classes = [class_.__name__ for class_ in type(error).__mro__ if issubclass(class_, Exception)]
        return cls(f"{' < '.join(classes)}: {error}")

    def __repr__(self) -> str:
        return str(self)


class Probing(StatefulProcessor):
    """Runs the probe that a key names, and emits what it found, as JSON."""

    def __init__(self, api: str, functions: Iterable[Function], *, raises: bool = False) -> None:
        self._api, self._functions, self._raises = api, {f.__name__: f for f in functions}, raises

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._states = States.declared(handle)

    def handleInputRows(self, key: tuple[Any, ...], rows: Any, timerValues: TimerValues) -> Iterator[Any]:
        self._states.times = timerValues
        found = []
        try:
            for finding in self._functions[key[0]](self._states):
                found.append(repr(finding))  # noqa: PERF401  what came before an error counts
        except Exception as exc:  # noqa: BLE001
            found.append(Finding.of_error(exc))
        text = json.dumps(found)
        if self._raises:
            raise RuntimeError(f"<found>{text}</found>")
        yield Row(key=key[0], found=text) if self._api == "row" else pd.DataFrame({"key": [key[0]], "found": [text]})


def findings_in(error: BaseException) -> list[str]:
    """Return what a processor that raises its findings found."""
    # The last: a traceback shows the line that raised them, too.
    texts = re.findall("<found>(.*?)</found>", str(error))
    assert texts, str(error)
    found: list[str] = json.loads(texts[-1])
    return found


def probes_of(module: Any) -> list[Probe]:
    """Return the probes of a module; that each is a generator function is checked."""
    probes: Probes = module.probe
    assert all(inspect.isgeneratorfunction(probe.function) for probe in probes.all)
    return probes.all
