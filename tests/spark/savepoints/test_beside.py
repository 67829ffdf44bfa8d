"""Savepoints made while the query commits and Spark cleans up behind it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from holdfast import savepoints
from holdfast.errors import HoldfastError, NotFoundError, UnavailableError
from holdfast.spark_integration.savepoints import tasks
from holdfast.spark_integration.savepoints.creating import save
from holdfast.spark_integration.savepoints.tasks import OwnProcess, SparkTasks
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import restored, without_spark
from tests.spark.savepoints.totals import expected, feed, saved, start, totals
from tests.tiers import cases, repetitions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

# Spark keeps two micro-batches, and cleans up what it keeps of files as soon as it can.
SHORT = {
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.fileSource.log.compactInterval": "3",
    "spark.sql.streaming.fileSource.log.cleanupDelay": "0",
}


@contextmanager
def running(lab: Lab) -> Iterator[Any]:
    with configured(lab.spark, SHORT):
        query = start(lab.spark, lab.folder)
        try:
            query.processAllAvailable()
            yield query
        finally:
            query.stop()


@contextmanager
def feeding(lab: Lab) -> Iterator[None]:
    """Let a file come each second."""
    enough = threading.Event()

    def feed_on() -> None:
        while not enough.wait(1):
            feed(lab, 1)

    thread = threading.Thread(target=feed_on)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def create(lab: Lab, name: str, by: type[SparkTasks | OwnProcess] = SparkTasks, **options: Any) -> savepoints.Savepoint:
    places = lab.folder / "query", lab.folder / "savepoints", name
    if by is SparkTasks:
        return savepoints.create(lab.spark, *places, **options)
    with without_spark(lab, str(lab.folder / "durable")) as alone:
        return save(alone, *places, batch_id=options.pop("batchId", None), **options)


BY = [OwnProcess, SparkTasks]


@pytest.mark.all
@pytest.mark.parametrize("by", cases(BY))
def test_each_savepoint_is_the_state_after_one_micro_batch(lab: Lab, by: type[SparkTasks | OwnProcess]) -> None:
    """Or there is none, with an error, if Spark has cleaned up twice meanwhile."""
    feed(lab)
    with running(lab) as query, feeding(lab):
        for number in repetitions(1, 20):
            try:
                made = create(lab, f"round-{number}", by)
            except HoldfastError as exc:
                assert any(words in str(exc) for words in ("moved past two", "try again")), exc  # noqa: PT017
                assert all(
                    found.savepoint is None
                    for found in savepoints.listed(lab.folder / "savepoints")
                    if found.name == f"round-{number}"
                )
            else:
                assert saved(lab, f"round-{number}")
                assert made.query.batch_id > 0
        assert query.exception() is None
    create(lab, "last", by)
    assert saved(lab, "last")


@pytest.mark.all
@pytest.mark.parametrize("times", cases([1, 2]))
def test_a_micro_batch_is_purged_meanwhile(lab: Lab, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Once: a later one is saved. Again, or where a micro-batch was asked for: an error, and no savepoint."""
    feed(lab)
    purges = iter(range(times))
    steps = tasks.stored_steps

    def late(*arguments: Any) -> Any:
        if next(purges, None) is not None:
            feed(lab, 5)
            query.processAllAvailable()
            raise NotFoundError("the state is purged")  # as where Spark's maintenance comes at once
        return steps(*arguments)

    with running(lab) as query:
        last = query.lastProgress["batchId"]
        monkeypatch.setattr(tasks, "stored_steps", late)
        if times == 1:
            assert create(lab, "one").query.batch_id == last + 5
            assert saved(lab)
            return
        with pytest.raises(UnavailableError, match="moved past two micro-batches"):
            create(lab, "one")
        purges = iter(range(1))
        with pytest.raises(NotFoundError, match="purged"):
            create(lab, "two", batchId=query.lastProgress["batchId"])
    assert not [found for found in savepoints.listed(lab.folder / "savepoints") if found.savepoint]


@pytest.mark.all
@pytest.mark.parametrize("batch_id", cases([1, 4]))
def test_sparks_log_of_files_was_compacted_since(lab: Lab, batch_id: int) -> None:
    """Spark keeps fewer micro-batches than before, and is stopped when it has cleaned up one of its logs of two."""

    def fail(_rows: DataFrame, _batch_id: int) -> None:
        raise RuntimeError("the sink is away")

    feed(lab, 8)
    with configured(lab.spark, SHORT | {"spark.sql.streaming.minBatchesToRetain": "100"}):
        lab.run(totals(lab.spark, lab.folder))
    feed(lab, 1)
    logs = ("offsets", "commits")
    for name in logs:
        shutil.copytree(lab.folder / "query" / name, lab.folder / name)
    with configured(lab.spark, SHORT):
        writer = totals(lab.spark, lab.folder).writeStream.foreachBatch(fail).outputMode("update")
        query = writer.option("checkpointLocation", str(lab.folder / "query")).trigger(availableNow=True).start()
        with pytest.raises(StreamingQueryException, match="the sink is away"):
            query.awaitTermination()
    for name in logs:  # it cleans these up next
        shutil.copytree(lab.folder / name, lab.folder / "query" / name, dirs_exist_ok=True)
    left = {path.name for path in (lab.folder / "query/sources/0").iterdir() if path.suffix != ".crc"}
    assert left == {"5.compact", "6", "7", "8.compact"}
    made = create(lab, "one", batchId=batch_id)
    assert made.query.batch_id == batch_id
    assert saved(lab) == expected(range(batch_id + 1))
    restored(lab)
    lab.run(totals(lab.spark, lab.folder), "again")
    assert lab.state(query="again") == expected(range(lab.files))
