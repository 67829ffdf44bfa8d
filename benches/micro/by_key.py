"""What a key costs beside the user's function: one shard, 20,000 keys, without Spark. CPU time, garbage as in a worker.

::

    whole        a micro-batch of the shard, from its rows as Arrow to its output as Arrow; without the commit
    function     the same calls of the user's function alone, with rows that are there and states that are dicts
    conversion   columns as Python's or pandas' objects and back: rows, keys, states, output
    ours         what is left: order, look-ups, slabs, the loop, checks, writes

Run ``python -m holdfast.benches.micro.by_key [ROUNDS] [WORD]``; it prints a table of the cases with this word in their
name. The parts take turns, so that what else the machine does falls on all of them. By pandas the function takes most
of the time, and what is left is a small difference of large figures: there the last case says more.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import StructType

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.benches.jobs.by_processor import ENTRIES, ByProcessor, longs
from holdfast.benches.report.tables import Sheet
from holdfast.mvcc import VersionedStore
from holdfast.spark_integration.keyed.frames import FrameFormat, key_tuples
from holdfast.spark_integration.keyed.key_order import KeyOrder
from holdfast.spark_integration.keyed.output_frames import OutputFrames
from holdfast.spark_integration.keyed.pandas_with_state import PandasFunction, PandasWithState
from holdfast.spark_integration.keyed.python_values import RowValues
from holdfast.spark_integration.processor.declaring import PickledProcessor, declaration_of
from holdfast.spark_integration.processor.exchange import Exchange, FrameExchange, RowExchange
from holdfast.spark_integration.processor.transform_with_state import TransformWithState
from holdfast.spark_integration.shard.operator import BatchTimes, ShardFunction, ShardInput
from holdfast.spark_integration.shard.timeout import TimeMode

KEYS = 20_000
_FORMAT = FrameFormat("UTC")
_FAR_MS = 10**12


_KEY, _OUTPUT, _TOTALS = longs("key"), longs("key", "n", "s"), longs("n", "s")
_KEY_TYPES = pa.schema([("key", pa.int64())])


class _Timer(StatefulProcessor):
    """A timer that is not due."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n = sum(1 for _ in rows)
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + _FAR_MS)
        yield Row(key=key[0], n=n, s=0)


def _one_key(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    n, s = state.getOption or (0, 0)
    for frame in frames:
        n, s = n + len(frame), s + int(frame["v"].sum())
    state.update((n, s))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "s": [s]})


# Frames that `_ready_key` returns: made before the clock runs, and new to it.
_READY: list[pd.DataFrame] = []


def _ready_key(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: Any) -> Iterable[pd.DataFrame]:
    """Next to nothing: what this takes in a micro-batch is not the function's."""
    n, s = state.getOption or (0, 0)
    for _ in frames:
        n += 1
    state.update((n, s))
    return (_READY.pop(),)


class _Kept:
    """A state of any kind and a handle, for a function that runs alone: what `key` has is a value, or entries."""

    def __init__(self) -> None:
        self.key = 0
        self.values: dict[Any, Any] = {}
        self.getValueState = self.getMapState = self.getListState = lambda *_: self

    def get(self) -> Any:
        return self.values.get(self.key)

    @property
    def getOption(self) -> Any:
        return self.values.get(self.key)

    def update(self, value: Any) -> None:
        self.values[self.key] = value

    def getValue(self, entry: Any) -> Any:
        return self.values.get((self.key, entry))

    def updateValue(self, entry: Any, value: Any) -> None:
        self.values[self.key, entry] = value

    def appendValue(self, value: Any) -> None:
        self.values.setdefault(self.key, []).append(value)

    def registerTimer(self, due_ms: int) -> None:
        self.values[self.key] = due_ms


@dataclass(frozen=True)
class Case:
    """A function and what is kept for a key.

    Attributes
    ----------
    name : str
    processor : callable or None
        Makes a `StatefulProcessor`, that of ``dropin-tws`` where it has one; None for ``applyInPandasWithState``.
    in_pandas : bool
        Whether rows come and go as frames.
    states : StructType or None
        The columns of state that are converted, for each key.
    read, written : int
        How many rows of these for a key.
    time_mode : {"None", "ProcessingTime"}
    function : callable
        Of ``applyInPandasWithState``.
    """

    name: str
    processor: Callable[[], StatefulProcessor] | None
    in_pandas: bool
    states: StructType | None
    read: int
    written: int
    time_mode: TimeMode = "None"
    function: PandasFunction = _one_key

    @property
    def rows_each(self) -> int:
        """How many rows a key has."""
        return 2 if self.processor is None else 1

    @cached_property
    def exchange(self) -> Exchange:
        """How rows and output look."""
        return FrameExchange(_OUTPUT, _FORMAT, 10_000) if self.in_pandas else RowExchange(_OUTPUT, "UTC", 10_000)

    def step(self) -> ShardFunction:
        """Return what the shard runs."""
        if self.processor is None:
            return PandasWithState(
                function=self.function, key_types=_KEY_TYPES, state=_TOTALS, output=_OUTPUT, timeout_conf="NoTimeout",
                timeout_rule="documented", frame_format=_FORMAT, rows_each=10_000, shown_keys=[0],
                shown_columns=["key", "v"],
            )  # fmt: skip
        pickled = PickledProcessor(self.processor())
        return TransformWithState(
            processor=pickled, declared=declaration_of(pickled, self.time_mode), key_types=_KEY_TYPES, key_schema=_KEY,
            given_keys=[0], shown_columns=["key", "v"], exchange=self.exchange, time_mode=self.time_mode,
            output_mode="update", is_streaming=True,
        )  # fmt: skip


def _of_job(variable: str, *, in_pandas: bool = False) -> Callable[[], StatefulProcessor]:
    return partial(ByProcessor(variable=variable).processor, in_pandas=in_pandas)


CASES = (
    Case("transformWithState, value", _of_job("value"), False, _TOTALS, 1, 1),
    Case(f"transformWithState, map of {ENTRIES}", _of_job("map"), False, longs("entry", "n"), ENTRIES, 1),
    Case("transformWithState, list append", _of_job("list"), False, longs("v"), 0, 1),
    Case("transformWithState, timer", _Timer, False, None, 0, 0, "ProcessingTime"),
    Case("transformWithStateInPandas, value", _of_job("value", in_pandas=True), True, _TOTALS, 1, 1),
    Case("applyInPandasWithState, two rows a key", None, True, _TOTALS, 1, 1),
    Case("the same, a function that does nothing", None, True, _TOTALS, 1, 1, "None", _ready_key),
)


class Shard:
    """One shard of a case in `folder`, micro-batch after micro-batch, and its function alone."""

    def __init__(self, case: Case, folder: Path) -> None:
        chance = np.random.default_rng(0)
        numbers = np.tile(np.arange(KEYS), case.rows_each)
        self.case, self.step = case, case.step()
        self.rows = pa.table({"key": numbers, "v": chance.integers(0, 100, len(numbers))})
        hashes = chance.integers(-(2**63), 2**63 - 1, KEYS)[numbers]
        self.batch = ShardInput("op", 0, 0, self.rows, self.rows.select(["key"]), pa.array(hashes), self._times(1))
        self._store = VersionedStore(MemoryBackend(folder, self.step.tables(), clock.new_id))
        self._pointer: Pointer | None = None
        self._earliest_ms: int | None = None
        self._batches = 0
        self._kept = _Kept()

    def _times(self, now_ms: int) -> BatchTimes:
        return BatchTimes(now_ms, now_ms, None, None)

    def _make_ready(self) -> None:
        if self.case.function is _ready_key:
            _READY[:] = [pd.DataFrame({"key": [1], "n": [2], "s": [3]}) for _ in range(KEYS)]

    def whole(self) -> float:
        """Run a micro-batch and commit it; return the CPU seconds before the commit."""
        self._make_ready()
        with self._store.begin(self._pointer) as transaction:
            used = _cpu_of(lambda: list(self.step.run(self.batch, transaction)))
            self._pointer = transaction.commit()
        return used

    def function(self) -> float:
        """Call the user's function for each key; return the CPU seconds of the calls."""
        self._make_ready()
        pieces = self._pieces()
        kept, times = self._kept, TimerValues(1, 1)
        call: Callable[..., Any] = self.case.function
        if self.case.processor is not None:
            processor = self.case.processor()
            processor.init(kept)  # type: ignore[arg-type]
            call = processor.handleInputRows

        def each() -> None:
            state = kept if self.case.processor is None else times
            for kept.key, rows in enumerate(pieces):
                for _ in call((kept.key,), rows, state):
                    pass

        return _cpu_of(each)

    def conversion(self) -> float:
        """Convert rows, keys, states and output as a micro-batch does; return the CPU seconds."""
        case, output = self.case, self._output()
        states = None if case.states is None else RowValues(case.states)
        width = 0 if case.states is None else len(case.states)
        read = None if states is None else states.to_arrow([(i,) * width for i in range(case.read * KEYS)])
        written = [(i,) * width for i in range(case.written * KEYS)]

        def each() -> None:
            self._pieces()
            shown = self.rows.slice(0, KEYS).select(["key"])
            _ = key_tuples(shown, _FORMAT) if case.processor is None else case.exchange.keys(shown)
            if states is not None:
                _ = states.to_tuples(read) if case.name.count("map") == 0 else states.to_columns(read)
                states.to_arrow(written)
            list(output.finish())

        return _cpu_of(each)

    def _pieces(self) -> list[Iterator[Any]]:
        order = KeyOrder(np.argsort(self.rows["key"].to_numpy(), kind="stable"), np.arange(KEYS) * self.case.rows_each)
        return [pieces for slab in self.case.exchange.slabs(self.rows, order).slabs() for pieces in slab]

    def _output(self) -> Any:
        if self.case.processor is None:
            output: Any = OutputFrames(_OUTPUT, _FORMAT, 2 * KEYS)
        else:
            output = self.case.exchange.output()
        one: Any = Row(key=1, n=1, s=1)
        if self.case.in_pandas:
            one = pd.DataFrame({"key": [1], "n": [1], "s": [1]})
        for key in range(10_000):  # as many as a batch has
            list(output.add_all([one], (key,)))
        return output


def _cpu_of(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    used = time.process_time() - start
    gc.collect()  # as Spark's daemon does after a task
    return used


def measured(case: Case, rounds: int) -> tuple[str, ...]:
    """Return a line of the table: median µs of CPU a key, and the least of the whole."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as home:
        shard = Shard(case, Path(home) / "shard")
        parts = (shard.whole, shard.function, shard.conversion)
        for part in parts:  # fills the state
            part()
        found = [[part() / KEYS * 1e6 for part in parts] for _ in range(rounds)]
    whole, function, conversion = map(statistics.median, zip(*found, strict=True))
    least = min(one for one, *_ in found)
    return case.name, *(f"{of:.1f}" for of in (whole, least, function, conversion, whole - function - conversion))


def main(rounds: int, word: str) -> None:
    """Print the table."""
    gc.collect()
    gc.freeze()
    columns = ("function", "whole", "least", "its function", "conversion", "ours")
    click.echo(
        Sheet(
            "µs of CPU a key, medians", columns, [measured(case, rounds) for case in CASES if word in case.name]
        ).markdown()
    )


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]) if given else 5, " ".join(given[1:]))
