"""What a task finds out of its query, with the properties that Spark 4.3 was seen to give tasks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.shard import task
from holdfast.spark_integration.shard.pointer_row import QUERY_ID
from holdfast.spark_integration.shard.task import StreamingTask

QUERY = "f1659f49-483a-4a92-b0de-dfe7e81cf290"
CLONE = "089ce24a-490a-4ff0-b0fb-508d21b3f204"
OTHER = "e798f9ea-5d01-427f-b688-2964b6ed3fe5"
CLONED = {"spark.sql.streaming.internal.stateStore.partitions": "3", "spark.sql.shuffle.partitions": "7"}
IN_THREAD = {
    **CLONED,
    "spark.sql.execution.root.id": "13",
    "spark.job.tags": f"mine,spark-session-{CLONE}-execution-root-id-13,spark-session-{CLONE}",
}
OF_SPARK = {
    **IN_THREAD,
    "sql.streaming.queryId": QUERY,
    "streaming.sql.batchId": "5",
    "spark.jobGroup.id": "96b9cf36-ef86-46e5-b559-4b3c3d3e389c",
}


def found(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, str], pinned_query_id: str | None = None, batch_ms: int = 7
) -> StreamingTask:
    monkeypatch.setattr(spark_versions, "_SPARK", (4, 3))
    context = SimpleNamespace(getLocalProperty=properties.get)
    monkeypatch.setattr(task, "TaskContext", SimpleNamespace(get=lambda: context))
    return StreamingTask.current("def-1", pinned_query_id, batch_ms)


def test_a_task_of_sparks_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, OF_SPARK) == StreamingTask(QUERY, CLONE, True, 5, 3, QUERY)


@pytest.mark.parametrize("group", ["nightly", "a.b", "a:b", "a/b", "../x", ""])
def test_a_job_group_of_the_user_changes_nothing(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """Spark keeps its run id there, too, until the user overwrites it."""
    given = {**OF_SPARK, "spark.jobGroup.id": group, "spark.job.description": "runId = nonsense"}
    assert found(monkeypatch, given) == found(monkeypatch, OF_SPARK)


def test_a_thread_of_the_user_and_spark_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run began the shard, so it names the query; once there is a pointer, that does."""
    assert found(monkeypatch, IN_THREAD) == StreamingTask(CLONE, CLONE, True, None, 3)
    connect = {**IN_THREAD, "spark.job.tags": f"SparkConnect_OperationTag_User__x,{IN_THREAD['spark.job.tags']}"}
    assert found(monkeypatch, connect, QUERY) == StreamingTask(QUERY, CLONE, True, None, 3)


def test_the_pointer_knows_the_query_better_than_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It began where only the run was known, and its state lies under that name."""
    assert found(monkeypatch, OF_SPARK, OTHER).query_id == OTHER


def test_another_session_within_the_batch_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = f"spark-session-{OTHER},spark-session-{OTHER}-execution-root-id-14,{OF_SPARK['spark.job.tags']}"
    assert found(monkeypatch, {**OF_SPARK, "spark.job.tags": tags}).run_id == CLONE
    elsewhere = {
        "spark.sql.execution.root.id": "14",
        "spark.job.tags": f"spark-session-{OTHER}-execution-root-id-14",
        "streaming.sql.batchId": "4",
    }
    assert found(monkeypatch, elsewhere) == StreamingTask("def-1-7", "def-1", False, None, None)


def test_one_definition_that_two_queries_run_begins_two_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Spark 4.0, in threads and over Connect: the second one met the state of the first, and failed."""
    begun = set()
    for batch_ms in (1_700_000_000_000, 1_700_000_000_001):
        task = found(monkeypatch, {}, batch_ms=batch_ms)
        assert (task.run_id, task.is_run_known) == ("def-1", False)
        assert QUERY_ID.fullmatch(task.query_id)
        begun.add(task.query_id)
    assert len(begun) == 2


@pytest.mark.parametrize("tags", ["", "spark-session-1-execution-root-id-13", f"spark-session-{CLONE}"])
def test_where_nothing_tells_the_run_its_definition_stands_in(monkeypatch: pytest.MonkeyPatch, tags: str) -> None:
    task = found(monkeypatch, {**OF_SPARK, "spark.job.tags": tags})
    assert (task.query_id, task.run_id, task.is_run_known) == (QUERY, "def-1", False)


@pytest.mark.parametrize("query", ["", "../../etc", "a/b", "x" * 65])
def test_what_cannot_be_a_query_id_is_none(monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    """It becomes a folder's name."""
    assert found(monkeypatch, {**OF_SPARK, "sql.streaming.queryId": query}).query_id == CLONE


def test_outside_a_task_nothing_is_known() -> None:
    assert StreamingTask.current("def-1", None, 7) == StreamingTask("def-1-7", "def-1", False, None, None)
