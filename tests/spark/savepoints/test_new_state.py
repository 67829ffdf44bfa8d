"""State written without Spark is what Spark writes, byte for byte; tasks that write it; and timers that are overdue."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

from holdfast import savepoints
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, UnavailableError
from holdfast.settings import Settings
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.savepoints.stub import run_stub, session_of_stub
from holdfast.spark_integration.savepoints.tasks import ShardTask, run_tasks
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE, PointerRow
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode
from holdfast.spark_integration.spark_state.pointers import NewState, PointerOperator
from holdfast.spark_integration.spark_state.row_streams import decompressed
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import restored
from tests.spark.savepoints.waiting import CASES, KEYS, Case, feed, run_once, state
from tests.tiers import cases

IN_2100_MS = 4_102_444_800_000


def an_operator(time_mode: TimeMode, shards: int) -> PointerOperator:
    """Return one with shards that have a timer, and others, and a long pointer."""
    rows = tuple(
        PointerRow(
            *("query", "totals", shard, shards, Pointer(1, f"{shard:016x}"), None),
            earliest_timer_ms=None if time_mode == "None" or shard % 2 else IN_2100_MS + shard,
            batch_ms=shard,
            state_dir="/data/" + "x" * 700 * shard,
        )
        for shard in range(shards)
    )
    return PointerOperator(GROUP_STATE, TIMEOUT_CONF[time_mode], time_mode, "update", rows)


@pytest.mark.spark
@pytest.mark.all
@pytest.mark.smoke
@pytest.mark.parametrize("codec", cases(["lz4", "zstd"]))
def test_state_is_what_spark_makes_of_the_same_pointers(lab: Lab, codec: str) -> None:
    """With and without timeouts, in partitions that have several pointers, one, or none."""
    operators = [an_operator("None", 7), an_operator("ProcessingTime", 3), an_operator("EventTime", 1)]
    conf = {"spark.sql.shuffle.partitions": "3", "spark.sql.streaming.stateStore.compression.codec": codec}
    location = lab.folder / "stub"
    with session_of_stub(lab.spark, conf) as own:
        run_stub(own, operators, str(location))
    pinned = json.loads((location / "offsets/0").read_text().split("\n")[1])["conf"]
    made = dict(NewState.of(pinned, 3, {GROUP_STATE}).files(operators))
    by_spark = files(location)
    assert made.keys() == by_spark.keys()
    for key, data in made.items():
        assert plain(key, data, codec) == plain(key, by_spark[key], codec), key
    assert json.loads((location / "commits/0").read_text().split("\n")[1]).keys() == {"nextBatchWatermarkMs"}


def files(location: Path) -> dict[str, bytes]:
    every = (path for path in (location / "state").rglob("*") if path.is_file() and path.suffix != ".crc")
    return {path.relative_to(location).as_posix(): path.read_bytes() for path in every}


def plain(key: str, data: bytes, codec: str) -> bytes:
    if key.endswith(".delta"):
        return decompressed(memoryview(data), codec, 1 << 20, key)
    if not key.endswith("/schema"):
        return data
    # Spark 4.0 says of the timeout's column that it is never null, and takes one that may be for fitting.
    at = data.index(b'{"type":"struct","fields":[{"name":"groupState"')
    return data[: at - 2] + data[at:].replace(b'"long","nullable":false', b'"long","nullable":true')


@dataclass(frozen=True)
class Told(ShardTask):
    """Yields for each row in which task it is; that of shard 7 is damaged, and of shard 8 cannot be read now."""

    GIVEN: ClassVar[str] = "operator string, shard int"
    RETURNED: ClassVar[str] = "operator string, shard int, task int, error string"

    def work(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[dict[str, Any]]:
        if row["shard"] == 7:
            raise CorruptionError("a piece is damaged", key="k")
        if row["shard"] == 8:
            raise UnavailableError("no answer")
        context = TaskContext.get()
        assert context is not None
        yield {"operator": row["operator"], "shard": row["shard"], "task": context.partitionId()}


TOLD = Told(Settings.parse({}, ["memory"]), "nowhere")


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_each_row_has_a_task_of_its_own(spark: SparkSession, shards: int) -> None:
    """Else one core copies two shards while another one is idle."""
    rows = [("totals", 0 if shard == shards - 1 else shard) for shard in range(shards)]  # also two that are the same
    found = run_tasks(spark, rows, TOLD)
    assert sorted(row["task"] for row in found) == list(range(shards))
    assert sorted((row["operator"], row["shard"]) for row in found) == sorted(rows)


def test_an_error_that_repeating_cannot_help_comes_back_as_itself(spark: SparkSession) -> None:
    with pytest.raises(CorruptionError, match="totals, shard 7: a piece is damaged, key=k"):
        run_tasks(spark, [("totals", 1), ("totals", 7)], TOLD)


def test_an_error_that_repeating_may_help_fails_the_task(spark: SparkSession) -> None:
    with pytest.raises(UnavailableError, match="no answer"):
        run_tasks(spark, [("totals", 8)], TOLD)


@pytest.mark.spark
@pytest.mark.all
@pytest.mark.parametrize("case", cases(CASES, quick=1), ids=str)
def test_what_is_overdue_in_quiet_shards_is_due_at_once(lab: Lab, case: Case) -> None:
    """Each timer fires once, in the first micro-batch, and rows live as long as they would have in the original."""
    with configured(lab.spark, case.settings):
        feed(lab, KEYS, 10)
        run_once(lab, case, "query", "durable")
        savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
        before = state(lab, case, "query", "durable")
        restored(lab, shards=3)
        feed(lab, "z", 20)
        original = run_once(lab, case, "query", "durable")
        assert run_once(lab, case, "again", "durable-again") == original
        due = [row for row in original if "'is_due': True" in row and "'key': 'z'" not in row]
        assert len(due) == len(KEYS) + case.begins
        after = state(lab, case, "again", "durable-again")
        assert after == state(lab, case, "query", "durable")
        if case.api != "by key":
            assert set(before["kept"]) < set(after["kept"])
            has_expired = len(after["lost"]) <= 1 < len(before["lost"])
            assert has_expired == (case.api == "vectorised" or case.clock == "ProcessingTime")
        feed(lab, "y", 30)
        again = run_once(lab, case, "again", "durable-again")
        assert again == run_once(lab, case, "query", "durable")
        assert not any("'key': 'b'" in row for row in again), "it has fired"
