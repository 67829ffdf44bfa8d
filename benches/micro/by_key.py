"""What a key costs beside the user's function: one shard, 20,000 keys, without Spark. CPU time, garbage as in a worker.

::

    whole        a micro-batch of the shard, from its rows as Arrow to its output as Arrow; without the commit
    function     the same calls of the user's function alone, with rows that are there and states that are dicts
    conversion   columns as Python's or pandas' objects and back: rows, keys, states, output

What is left of the whole is ours: order, look-ups, slabs, the loop, checks, writes. Run ``make bench-micro ARGS='-k
by_key'``: a figure in ms by 20 is µs a key. By pandas the function takes most of the time, and what is left is a small
difference of large figures: there the last case says more.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import StructType

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.benches.jobs.by_key import ENTRIES, ByProcessor, longs, one_key
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.spark_integration.keyed.frames import FrameFormat, OutputFrames, key_tuples
from holdfast.spark_integration.keyed.pandas_with_state import PandasFunction, PandasWithState
from holdfast.spark_integration.keyed.python_values import RowValues
from holdfast.spark_integration.keyed.slabs import KeyOrder
from holdfast.spark_integration.processor.exchange import Exchange, FrameExchange, RowExchange
from holdfast.spark_integration.processor.handle import PickledProcessor, declaration_of
from holdfast.spark_integration.processor.transform_with_state import TransformWithState
from holdfast.spark_integration.shard.operator import BatchTimes, ShardFunction, ShardInput
from holdfast.spark_integration.shard.timeout import TimeMode

KEYS = 20_000
_FORMAT = FrameFormat("UTC")
_FAR_MS = 10**12


_KEY, _OUTPUT, _TOTALS = longs("key"), longs("key", "n", "s"), longs("n", "s")
_KEY_TYPES = pa.schema([("key", pa.int64())])


class _SameEntry(StatefulProcessor):
    """As the job's map, but of each key the same entry."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._counts = handle.getMapState("counts", longs("entry"), longs("n"))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        v = sum(row.v for row in rows)
        before = self._counts.getValue((0,))
        if before is None:
            for i in range(ENTRIES):
                self._counts.updateValue((i,), (0,))
        n = 1 if before is None else 1 + before[0]
        self._counts.updateValue((0,), (n,))
        yield Row(key=key[0], n=n, s=v)


class _Timer(StatefulProcessor):
    """A timer that is not due."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n = sum(1 for _ in rows)
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + _FAR_MS)
        yield Row(key=key[0], n=n, s=0)


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

    `processor` makes a `StatefulProcessor`, that of ``dropin-tws`` where it has one; None: `function` runs by
    ``applyInPandasWithState``. `states` are the columns of state that are converted; of a key so many rows are read
    and written.
    """

    name: str
    processor: Callable[[], StatefulProcessor] | None
    in_pandas: bool
    states: StructType | None
    read: int
    written: int
    time_mode: TimeMode = "None"
    function: PandasFunction = one_key

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
    Case(f"transformWithState, map of {ENTRIES}, the same entry", _SameEntry, False, longs("entry", "n"), 1, 1),
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
        self._transaction: Transaction | None = None
        self._kept = _Kept()

    def _times(self, now_ms: int) -> BatchTimes:
        return BatchTimes(now_ms, now_ms, None, None)

    def _make_ready(self) -> None:
        if self.case.function is _ready_key:
            _READY[:] = [pd.DataFrame({"key": [1], "n": [2], "s": [3]}) for _ in range(KEYS)]

    def whole(self) -> Callable[[], object]:
        """Return what runs a micro-batch, at the newest version."""
        self._make_ready()
        if self._transaction is not None:
            self._pointer = self._transaction.commit()
        self._transaction = transaction = self._store.begin(self._pointer)
        return lambda: list(self.step.run(self.batch, transaction))

    def function(self) -> Callable[[], object]:
        """Return what calls the user's function for each key."""
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

        return each

    def conversion(self) -> Callable[[], object]:
        """Return what converts rows, keys, states and output as a micro-batch does."""
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

        return each

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


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def shard(request: pytest.FixtureRequest) -> Iterator[Shard]:
    """Return a shard of each case, in RAM."""
    gc.freeze()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as home:
        yield Shard(request.param, Path(home) / "shard")


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize("part", ["whole", "function", "conversion"])
def test_by_key(benchmark: Any, shard: Shard, part: str) -> None:
    """Measure a part; Spark's daemon collects garbage after each task. The first round fills the state."""
    benchmark.extra_info["operation"] = f"{shard.case.name}: {part}"

    def prepared() -> tuple[tuple[Callable[[], object]], dict[str, Any]]:
        gc.collect()
        return (getattr(shard, part)(),), {}

    benchmark.pedantic(lambda work: work(), setup=prepared, rounds=5, warmup_rounds=1)
