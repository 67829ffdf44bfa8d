"""Exactly once with processors: processes are killed at random moments, and values, lists, maps and timers hold.

W2: a micro-batch that runs again has the time of its first run. L12: nothing is left of an attempt that failed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

import holdfast
from tests.faults import killed_processor
from tests.faults.killed_processor import OPERATOR, ProcessorJob, Visits
from tests.faults.killings import Killings, MicroBatch, micro_batches, rows_of
from tests.plain_states import NEVER, Plain, PlainKey
from tests.spark.parity.engines import configured
from tests.tiers import ALL, cases, kills

pytestmark = [pytest.mark.slow(60), pytest.mark.spark, pytest.mark.timeout(3000)]

Key = tuple[Any, ...]


class PlainRun:
    """All keys of an operator, each with a processor of its own: that keeps nothing but state, so nothing differs."""

    def __init__(self, processor: Callable[[], StatefulProcessor], key_columns: list[str], time_mode: str) -> None:
        self._new_processor = processor
        self._key_columns = key_columns
        self._time_mode = time_mode
        self._processors: dict[Key, StatefulProcessor] = {}
        self.keys: dict[Key, PlainKey] = {}
        self.output: list[Key] = []

    def micro_batch(self, rows: Iterable[Row], now_ms: int, watermark_ms: int) -> None:
        """Handle rows, none of which is late, and then what is due."""
        times = TimerValues(now_ms, watermark_ms)
        by_key: dict[Key, list[Row]] = {}
        for row in rows:
            by_key.setdefault(tuple(row[name] for name in self._key_columns), []).append(row)
        for key in by_key.keys() - self.keys.keys():
            self.keys[key], self._processors[key] = PlainKey(), self._new_processor()
            self._processors[key].init(self.keys[key])  # type: ignore[arg-type]
        for of_key in self.keys.values():
            of_key.now_ms = now_ms
        for key, of_rows in by_key.items():
            self._emit(self._processors[key].handleInputRows(key, iter(of_rows), times))
        clock_ms = now_ms if self._time_mode == "ProcessingTime" else watermark_ms
        due = [(due_ms, key) for key, of_key in self.keys.items() for due_ms in of_key.due if due_ms <= clock_ms]
        for due_ms, key in sorted(due, key=lambda timer: timer[0]):
            timer = ExpiredTimerInfo(due_ms)
            found = self._processors[key].handleExpiredTimer(key=key, timerValues=times, expiredTimerInfo=timer)
            self._emit(found)
            self.keys[key].deleteTimer(due_ms)

    def _emit(self, rows: Iterable[Row]) -> None:
        self.output.extend(tuple(row) for row in rows)


# At least one of each: driver, worker, server.
KILLS = kills(quick=3)
RUNS = list(zip(["memory", "filesystem", "rocksdb"] * 2, ["ProcessingTime", "EventTime"] * 3, strict=True))
KINDS = {"total": "v", "seen": "l", "kinds": "m"}


@pytest.mark.all
@pytest.mark.parametrize(("backend", "time_mode"), cases(RUNS))
def test_kills_change_nothing(backend: str, time_mode: str, spark: SparkSession, tmp_path: Path) -> None:
    job = ProcessorJob(str(tmp_path), backend, time_mode=time_mode, compiles=ALL)
    run = Killings(job, random.Random(f"{backend} {time_mode}"), program=killed_processor.__name__)
    run.run(KILLS)
    check_result(run, spark, time_mode)
    print(f"\n{backend}, {time_mode}: killed {run.done}, the query failed {run.failures} times")


def check_result(run: Killings, spark: SparkSession, time_mode: str) -> None:
    """Compare output and state with those of the same micro-batches undisturbed, at the times in Spark's log."""
    folder = run.job.path
    batches = micro_batches(folder)
    assert sum(len(batch.files) for batch in batches) == run.files
    plain = undisturbed(batches, time_mode)
    story = f"{run.job}: {run.describe()}"
    # The sink's own log says which of its files count.
    written = [tuple(row) for row in spark.read.parquet(str(folder / "output")).collect()]
    assert sorted(written, key=repr) == sorted(plain.output, key=repr), story
    told = [row[0] for row in plain.output]
    assert min(told.count("idle"), told.count("gone")) > 20, "hardly a timer has fired: this shows nothing"
    with configured(spark, {"spark.holdfast.state.dir": str(folder / "durable")}):
        check_state(spark, folder, plain, batches[-1].time_ms, story)

    run.stop_servers()
    shutil.rmtree(folder)


def check_state(spark: SparkSession, folder: Path, plain: PlainRun, now_ms: int, story: str) -> None:
    """Compare timers and variables; what has expired must be gone soon."""

    def stored(table: str) -> list[tuple[Any, ...]]:
        found = holdfast.read_state(spark, folder / "query", OPERATOR, table=table)
        return [tuple(row.values()) for row in found.to_pylist()]

    timers = [(user, due_ms) for (user,), of_user in plain.keys.items() for due_ms in of_user.due]
    assert sorted(stored("timers"), key=repr) == sorted(timers, key=repr), story
    for name, kind in KINDS.items():
        variables = {user: of_user.variables[name] for (user,), of_user in plain.keys.items()}
        rows, ttl_ms = stored(f"{kind}.{name}"), variables[None].ttl_ms
        if ttl_ms is None:
            rows = [(*row, NEVER) for row in rows]
        live = [row for row in rows if row[-1] > now_ms]
        expected = [row for user, variable in variables.items() for row in shown(user, kind, variable)]
        assert sorted(numbered(live) if kind == "l" else live, key=repr) == sorted(expected, key=repr), (name, story)
        if ttl_ms is not None:
            assert all(row[-1] > now_ms - ttl_ms for row in rows), f"{name} is not evicted: {story}"
            expired = sum(variable.expired for variable in variables.values())
            assert expired > 20 or name == "kinds", f"of {name} only {expired} have expired: this shows nothing"


def shown(user: int | None, kind: str, variable: Plain) -> list[tuple[Any, ...]]:
    """Return what is live of a variable as `read_state` has it."""
    entries = {"v": lambda at, _: (), "l": lambda at, _: (at,), "m": lambda _, entry: entry}
    return [
        (user, *entries[kind](at, entry), *row, variable.rows[entry][1])
        for at, (entry, row) in enumerate(variable.live().items())
    ]


def numbered(elements: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the elements of lists, numbered from 0 in each; in the table their numbers have gaps."""
    by_user: dict[Any, list[tuple[Any, ...]]] = {}
    for element in sorted(elements, key=lambda element: element[1]):
        by_user.setdefault(element[0], []).append(element)
    return [(user, at, *element[2:]) for user, found in by_user.items() for at, element in enumerate(found)]


def undisturbed(batches: list[MicroBatch], time_mode: str) -> PlainRun:
    plain = PlainRun(lambda: Visits(time_mode), ["user"], time_mode)
    # Rows are late by the watermark of the micro-batch before.
    late_ms = 0
    for batch in batches:
        rows = [Row(**row) for row in rows_of(batch)]
        if time_mode == "EventTime":
            rows = [row for row in rows if round(row.at.timestamp() * 1000) > late_ms]
        plain.micro_batch(rows, batch.time_ms, batch.watermark_ms)
        late_ms = batch.watermark_ms
    return plain
