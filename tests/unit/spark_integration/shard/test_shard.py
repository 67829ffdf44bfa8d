"""A shard: its task, its input, the row in which Spark keeps its pointer, its timeout and its storage."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import StructType

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, SchemaMismatchError
from holdfast.settings import Settings
from holdfast.snapshotter.fields import QUERY_ID
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.hosts.host import POINTER_SCHEMA
from holdfast.spark_integration.shard import task, timeout
from holdfast.spark_integration.shard.operator import BatchTimes, ShardInput
from holdfast.spark_integration.shard.pointer_row import POINTER_STATE, PointerRow
from holdfast.spark_integration.shard.task import StreamingTask
from holdfast.spark_integration.shard.timeout import set_shard_timeout, timeout_of
from holdfast.spark_integration.sinks.files.location import storage_of

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


ROW = PointerRow(
    "q-1", "totals", 3, 4, Pointer(7, "00c0ffee00c0ffee"), b"commit", 1_000, 1_795_287_600_000, "s3://bucket/app"
)
FIELDS = json.loads(ROW.columns()[0].partition(b"\n")[0])


def stored(fields: object, carried: bytes | None = b"commit") -> tuple[bytes]:
    """Return a row as Spark's state has it."""
    line = json.dumps(fields).encode()
    return (line if carried is None else line + b"\n" + carried,)


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        ROW._replace(directory=None, state_dir=None, carried=None, earliest_timer_ms=None),
        ROW._replace(directory="totals@0ab9-1", earliest_timer_ms=-5),
        ROW._replace(pointer=None, carried=None),
        ROW._replace(carried=b"\n\x00{\n"),
        ROW._replace(carried=b""),
    ],
)
def test_a_row_is_read_as_it_was_written(row: PointerRow) -> None:
    """Some releases of Spark give binary values back as a bytearray."""
    columns = row.columns()
    assert PointerRow.read(columns) == row
    assert PointerRow.read((bytearray(columns[0]),)) == row
    assert row.carried_commits == ({} if row.carried is None else {row.pointer: row.carried})


def test_the_columns_are_the_same_for_ever() -> None:
    assert POINTER_STATE == "holdfast_pointer binary"
    assert POINTER_SCHEMA.simpleString() == "struct<holdfast_pointer:binary>"


WRONG: list[tuple[str, Any, str]] = [
    ("format", 2, "release that wrote it.*format=2"),
    ("format", None, "release that wrote it"),
    *(("query", value, "query") for value in (None, "../x", "a/b")),
    *(("directory", value, "directory") for value in ("..", "totals/x", "totals@../x", "totals@", 0)),
    ("directory", None, "state_dir"),
    ("state_dir", 0, "state_dir"),
    *(("shard", value, "shard") for value in (4, -1, None)),
    *(("shards", value, "shard") for value in (0, 2**31)),
    *(("version", value, "version") for value in (None, -1)),
    *(("commit", value, "version") for value in (None, "../../x")),
    *(("batch_ms", value, "batch_ms") for value in (None, 2**63, True)),
    ("earliest_timer_ms", "soon", "earliest_timer_ms"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_what_holdfast_cannot_have_written_is_refused(name: str, value: Any, expected: str) -> None:
    with pytest.raises(CorruptionError, match=expected):
        PointerRow.read(stored(FIELDS | {name: value}))


@pytest.mark.parametrize(
    "row",
    [
        (),
        (None,),
        ("text",),
        (*ROW.columns(), None),
        (b"",),
        (b"\n",),
        (b"[" * 100_000,),
        (b'{"format": ' + b"1" * 5_000 + b"}",),
        stored([1]),
        stored(FIELDS | {"more": 1}),
        stored({name: value for name, value in FIELDS.items() if name != "commit"}),
        (1, "q-1", "totals", 3, 4, 7, "00c0ffee00c0ffee", b"commit", 1_000, 5, None),
    ],
)
def test_rows_of_other_forms_are_refused(row: tuple[Any, ...]) -> None:
    with pytest.raises(CorruptionError, match="a format that this release of holdfast cannot read"):
        PointerRow.read(row)


def test_a_carried_commit_needs_its_pointer() -> None:
    with pytest.raises(CorruptionError, match="carried"):
        PointerRow.read(ROW._replace(pointer=None).columns())


VALUES = st.one_of(st.none(), st.integers(), st.text(max_size=20), st.booleans(), st.floats())


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), VALUES), st.none() | st.binary(max_size=5))
def test_any_row_is_read_or_refused(changes: dict[str, Any], carried: bytes | None) -> None:
    columns = stored(FIELDS | changes, carried)
    try:
        row = PointerRow.read(columns)
    except CorruptionError:
        return
    assert PointerRow.read(row.columns()) == row


def test_a_row_of_another_shard_operator_or_number_of_shards_names_both_and_what_to_set() -> None:
    ROW.require("totals", 3, 4)
    ROW._replace(directory="totals@q-2").require("totals", 3, 4)
    ROW._replace(directory=None).require("any", 3, 4)
    with pytest.raises(SchemaMismatchError, match=r"set spark\.holdfast\.shards to 4, or rescale.*stored=4 defined=8"):
        ROW.require("totals", 3, 8)
    with pytest.raises(SchemaMismatchError, match=r"set spark\.holdfast\.shards to 4, operator="):
        ROW._replace(directory=None).require("totals", 3, 8)
    with pytest.raises(SchemaMismatchError, match=r"of a different shard: check.*operator=totals stored=3 called=2"):
        ROW.require("totals", 2, 4)


@pytest.mark.parametrize(("shard", "shards"), [(3, 4), (2, 4), (3, 8)])
def test_another_operators_row_names_the_name_first(shard: int, shards: int) -> None:
    """Who forgets a restored operator's name is not told to change the number of shards."""
    with pytest.raises(SchemaMismatchError, match=r"old name, here name='totals'.*stored=totals defined=others"):
        ROW.require("others", shard, shards)


HALF = 1_200_000_000


def test_keys_that_arrow_cannot_hold_together_are_shown() -> None:
    """Rows of one shard may have more than 2 GiB of keys, which stand in chunks then; a slab has few of them."""
    text = pa.py_buffer(mmap.mmap(-1, HALF + 3))  # takes no memory, as nobody reads it
    one, other = (
        pa.StringArray.from_buffers(len(ends) - 1, pa.py_buffer(np.array(ends, np.int32)), text)
        for ends in ([0, HALF], [0, HALF, HALF + 3])
    )
    keys = pa.table({"user": pa.chunked_array([one, other])})
    batch = ShardInput("op", 0, 0, keys, keys, pa.array(range(3)), BatchTimes(0, None, None, None))
    assert batch.keys_shown_at(np.array([2, 2])).to_pylist() == [{"user": "\0\0\0"}] * 2


def group_state(timeout_conf: str, now_ms: int) -> GroupState:
    """The state of a shard's group, as Spark's worker makes it."""
    return GroupState(
        optionalValue=None,  # type: ignore[arg-type]
        batchProcessingTimeMs=now_ms,
        eventTimeWatermarkMs=now_ms,
        timeoutConf=timeout_conf,
        hasTimedOut=False,
        watermarkPresent=True,
        defined=False,
        updated=False,
        removed=False,
        timeoutTimestamp=GroupState.NO_TIMESTAMP,
        keyAsUnsafe=b"",
        valueSchema=StructType(),
    )


def test_spark_reads_a_timeout_from_the_private_name_that_is_set() -> None:
    """`GroupState._timeout_timestamp`: were it renamed, a timer that stays would be lost, and nothing would fail."""
    state = group_state("EventTimeTimeout", 1000)
    state.setTimeoutTimestamp(1500)
    assert timeout.PRIVATE_TIMEOUT == "_timeout_timestamp"
    assert vars(state)["_timeout_timestamp"] == 1500
    state._timeout_timestamp = 400
    assert json.loads(state.json())["timeoutTimestamp"] == 400, "what the worker sends to Spark"


@pytest.mark.parametrize(
    ("timeout_conf", "earliest_ms", "expected_ms"),
    [
        ("NoTimeout", None, -1),
        ("EventTimeTimeout", None, -1),
        ("EventTimeTimeout", 1500, 1500),
        ("EventTimeTimeout", 1000, 1000),
        ("EventTimeTimeout", 400, 400),  # a timer that stays after it has fired: due in every micro-batch
        ("ProcessingTimeTimeout", None, -1),
        ("ProcessingTimeTimeout", 1500, 1500),
        ("ProcessingTimeTimeout", 400, 1001),
    ],
)
def test_it_is_called_when_a_timer_is_due(timeout_conf: Any, earliest_ms: int | None, expected_ms: int) -> None:
    state = group_state(timeout_conf, 1000)
    set_shard_timeout(state, timeout_conf, earliest_ms)
    assert state._timeout_timestamp == expected_ms


def test_a_timer_at_0_is_told_to_spark_as_1() -> None:
    """Spark refuses a timeout at 0, which would fail the query in every micro-batch; nothing happens in between."""
    state = group_state("EventTimeTimeout", 0)
    set_shard_timeout(state, "EventTimeTimeout", 0)
    assert state._timeout_timestamp == 1


@pytest.mark.parametrize(("earliest_ms", "expected_ms"), [(1500, 1500), (1000, 1000), (400, 1000)])
def test_without_private_names_all_works(monkeypatch: pytest.MonkeyPatch, earliest_ms: int, expected_ms: int) -> None:
    """A timer that stays is then due when the watermark moves on, and no timer is lost."""
    state = group_state("EventTimeTimeout", 1000)
    with monkeypatch.context() as patch:
        patch.setattr(timeout, "PRIVATE_TIMEOUT", "_gone")
        assert timeout_of(state) is None
        set_shard_timeout(state, "EventTimeTimeout", earliest_ms)
        assert timeout_of(state) == expected_ms
    assert timeout_of(state) == expected_ms


def test_threads_for_requests_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do not survive a fork: a worker would wait for ever on those of its parent."""
    mine = task.io_executor()
    assert task.io_executor() is mine
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    other = task.io_executor()
    assert other is not mine
    assert other.submit(lambda: 1).result(5) == 1
    other.shutdown()


@pytest.mark.parametrize(
    "open_it",
    [lambda url: task.storage_at(url, Settings()), lambda url: storage_of(url, {})],
    ids=["of state", "of a sink"],
)
def test_storages_that_take_turns_are_not_opened_anew(open_it: Callable[[str], ObjectStorage], tmp_path: Path) -> None:
    """Many queries, or sinks, in one process: each has a storage, whose client takes longer to make than a request."""
    urls = [str(tmp_path / str(number)) for number in range(20)]
    first = [open_it(url) for url in urls]
    assert all(open_it(url) is storage for url, storage in zip(urls, first, strict=True))


def test_outside_a_task_there_is_no_credential() -> None:
    assert task.storage_options(Settings(storage_names=("secret",))) == {}
    assert task.state_storage(Settings()) is None
