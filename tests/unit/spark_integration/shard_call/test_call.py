"""A call of a shard: what it receives, opens, begins and measures, and the history that it may go back to."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends.arrow.rows import one_chunk
from holdfast.backends.base import Pointer
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.clock import new_id
from holdfast.errors import InvalidArgumentError, SchemaMismatchError, StateLostError, UnavailableError
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.settings import Settings
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.client.messages import ShardAddress
from holdfast.spark_integration.shard.operator import BatchTimes, Operator, ShardInput
from holdfast.spark_integration.shard.task import StreamingTask
from holdfast.spark_integration.shard_call import call
from holdfast.spark_integration.shard_call import call as shard_call
from holdfast.spark_integration.shard_call.call import gather_rows, require_number_of_shards
from holdfast.spark_integration.shard_call.claiming import require_stored_once
from holdfast.spark_integration.shard_call.store import ShardStore, require_kept_shards
from holdfast.spark_integration.spark_types import Watermark
from holdfast.testing.faulty_storage import FaultyStorage
from holdfast.testing.state_rows import COUNTS, keys_of, values_of
from tests.unit.snapshotter.conftest import PREFIX, TABLES, Shard

STREAMING = StreamingTask("query", "run", True, 0, None)


class PlugIn(FilesystemBackend):
    """A backend that holds something until it is closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def count(batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
    transaction.put("counts", keys_of(COUNTS, [("ann",)]), values_of(COUNTS, [(1,)]))
    yield pa.RecordBatch.from_pydict({"n": [1]})
    return None


def fail(batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
    yield from ()
    raise ZeroDivisionError


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlugIn:
    """Return the backend of the shard that a call opens."""
    backend = PlugIn(tmp_path, TABLES, new_id)
    address = ShardAddress.of(tmp_path, "plug-in", {}, TABLES)
    tables, store = StoredTables.of_first_run(TABLES), VersionedStore(backend)
    shard = ShardStore(address, tmp_path, "totals/shard-0000", backend, None, None, tables, store, SnapshotPolicy(), 9)
    monkeypatch.setattr(call, "open_shard", lambda *_: shard)
    return backend


def attempt(run: Any) -> call._Attempt:
    operator: Any = SimpleNamespace(
        name="totals", shards=1, first_version=1, function=SimpleNamespace(run=run), settings=Settings()
    )
    none = pa.table({})
    batch = ShardInput("totals", 0, 0, none, none, pa.array([], pa.int64()), BatchTimes(0, None, None, None))
    return call._Attempt(operator, batch, STREAMING, None)


@pytest.mark.slow(1)
def test_it_closes_what_it_opens(opened: PlugIn) -> None:
    """Also where it fails, or Spark drops it. A worker lives as long as its query: what stays open would add up."""
    calling = attempt(count)
    assert len(list(calling.run())) == 1
    assert opened.is_closed
    _, row, measures = calling.ended()
    assert row.pointer in opened.versions()
    assert measures.state_rows == 1
    with pytest.raises(ZeroDivisionError):
        list(attempt(fail).run())
    assert opened.is_closed
    output = attempt(count).run()
    next(output)
    output.close()  # type: ignore[attr-defined]
    assert opened.is_closed


@pytest.mark.parametrize(("fires_by_watermark", "earliest_ms"), [(True, 4_400), (False, 5_000)])
def test_the_clock_of_an_operator_behind_a_join_is_behind_sparks(fires_by_watermark: bool, earliest_ms: int) -> None:
    """By as much as the join shows rows late: but only a timer of event time goes by that clock."""
    watermark = Watermark(1_000).later(600)
    function: Any = SimpleNamespace()
    operator = Operator("totals", new_id(), function, 1, [], [], [], watermark, Settings(), 1, fires_by_watermark)
    remembered = SimpleNamespace(earliest_timer_ms=5_000, batch_ms=1)
    group: Any = SimpleNamespace(batch_ms=2, watermark_ms=10_000, remembered=lambda: remembered)
    assert call._own_times(operator, group) == BatchTimes(2, 9_400, earliest_ms, 1)


RECEIVED = [pa.table({"k": [f"key {i % 3}", None], "v": [i, -i]}) for i in range(7)]
RECEIVED_SCHEMA = RECEIVED[0].schema


@pytest.fixture(params=[call.MEMORY_BYTES, 100, 0], ids=["memory", "some in memory", "file"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How much is kept in memory."""
    monkeypatch.setattr(call, "MEMORY_BYTES", request.param)
    return int(request.param)


@pytest.mark.usefixtures("limit")
def test_all_rows_in_their_order_and_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    """Also while the rows are still in use: a worker that is killed leaves no file."""
    rows = gather_rows(iter(RECEIVED), RECEIVED_SCHEMA, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert rows == pa.concat_tables(RECEIVED)
    taken = rows.take(pa.array([13, 0, 6]))
    assert one_chunk(taken["v"]).to_pylist() == [-6, 0, 3]


@pytest.mark.usefixtures("limit")
def test_no_rows(tmp_path: Path) -> None:
    assert gather_rows(iter([]), RECEIVED_SCHEMA, tmp_path) == RECEIVED_SCHEMA.empty_table()


def test_a_disk_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "MEMORY_BYTES", 0)
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match=str(tmp_path)):
        gather_rows(iter(RECEIVED), RECEIVED_SCHEMA, tmp_path / "file")


_ONE_LARGE_KEY = """
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from holdfast.spark_integration.keyed.frames import FrameFormat, KeyFrames
from holdfast.spark_integration.keyed.slabs import KeyOrder
from holdfast.backends.run import Keys, TableSchema
from holdfast.spark_integration.shard_call.call import gather_rows


def anonymous_bytes():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


chunks = int(sys.argv[1])
chunk = pa.table({"key": np.zeros(50_000, np.int64), "text": ["x" * 200] * 50_000})
received = gather_rows((chunk for _ in range(chunks)), chunk.schema, Path(sys.argv[2]))
schema = TableSchema.of("state", pa.schema([("key", pa.int64())]), pa.schema([("n", pa.int64())]))
keys = Keys.of(schema, np.zeros(len(received), np.uint64), received.select(["key"]))
order = KeyOrder.of(keys)
[slab] = KeyFrames(received, order.rows, order.starts, FrameFormat("UTC"), 10_000).slabs()
[frames] = slab
before, seen, rows = anonymous_bytes(), 0, 0
for frame in frames:
    rows += len(frame)
    seen = max(seen, anonymous_bytes())
assert rows == len(received)
print(max(seen, before))
"""


@pytest.mark.slow
@pytest.mark.all
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_key_with_millions_of_rows_streams_in_bounded_memory(tmp_path: Path) -> None:
    """Four million rows more, 0.8 GB of text, cost what their keys and their order do."""

    def peak_bytes(chunks: int) -> int:
        script = [sys.executable, "-c", _ONE_LARGE_KEY, str(chunks), str(tmp_path)]
        return int(subprocess.run(script, check=True, capture_output=True, text=True).stdout)

    fewer, more = peak_bytes(20), peak_bytes(100)
    rows = 80 * 50_000
    assert more - fewer < 120 * rows, f"{(more - fewer) / rows:.0f} bytes a row"


DURABLE: Any = SimpleNamespace(log=object())


def entry(kind: str, version: int) -> ChainEntry:
    return ChainEntry(kind, Pointer(version, "aa"), 1, "0" * 64)


FIRST, SECOND = entry("commit", 50_001), entry("commit", 50_020)


@pytest.mark.parametrize(
    ("read", "behind"),
    [
        (None, 1),
        (Lineage(since=(FIRST.pointer, SECOND.pointer)), 30),
        (Lineage((FIRST, SECOND), (), SECOND), 30),
        (Lineage((FIRST,), (SECOND.pointer,), FIRST), 30),
        (Lineage((entry("snapshot", 50_010), SECOND), (), SECOND), 20),
        (Lineage((entry("snapshot", 50_020),), (SECOND.pointer,), FIRST), 10),
    ],
)
def test_a_shard_that_began_late_is_not_behind_since_the_first_micro_batch(read: Lineage | None, behind: int) -> None:
    """Else its first key raises an alarm about snapshots, in a query that has run for a month."""
    watch = shard_call._Watch(read)
    assert watch._lag_versions(DURABLE, Pointer(50_030, "bb")) == behind


Open = Callable[[str], ShardStore]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FaultyStorage]:
    with FaultyStorage(open_storage(str(tmp_path / "durable"))) as opened:
        yield opened


@pytest.fixture
def open_shard(storage: FaultyStorage, tmp_path: Path) -> Iterator[Open]:
    """Return what opens the shard on an executor of some name."""
    backends = []
    with ThreadPoolExecutor(2) as executor:

        def opened(where: str, backend_name: str = "filesystem", *, durable: bool = True) -> ShardStore:
            one = Shard(storage, executor, tmp_path / where, backend_name)
            backends.append(one.backend)
            log, store = (one.log, one.store) if durable else (None, VersionedStore(one.backend))
            address = ShardAddress.of(tmp_path / where, backend_name, {}, TABLES)
            tables = StoredTables.of_first_run(TABLES)
            return ShardStore(address, tmp_path, PREFIX, one.backend, log, None, tables, store, SnapshotPolicy(), 100)

        yield opened
        for backend in backends:
            backend.close()


def commit(shard: ShardStore, version: int, base: Pointer | None = None) -> Pointer:
    with shard.begin(base, version) as transaction:
        transaction.put("counts", keys_of(COUNTS, [("ann",)]), values_of(COUNTS, [(version,)]))
        committed = transaction.commit()
    assert committed is not None
    return committed


def test_durable_history_is_found_on_any_executor(open_shard: Open) -> None:
    commit(open_shard("one"), 7)
    other = open_shard("two")
    for micro_batch in (0, 5, 6):
        other.require_no_history(micro_batch)
    for micro_batch in (7, 100, None):
        with pytest.raises(StateLostError, match=r"no pointer to this shard.*shard=totals/shard-0003.*newest=7-"):
            other.require_no_history(micro_batch)


@pytest.mark.parametrize("backend", ["memory", "filesystem", "rocksdb"])
def test_local_history_is_found_where_nothing_is_durable(open_shard: Open, backend: str) -> None:
    shard = open_shard("one", backend, durable=False)
    shard.require_no_history(9)
    commit(shard, 7)
    shard.require_no_history(6)
    with pytest.raises(StateLostError):
        shard.require_no_history(7)


def test_attempts_at_this_micro_batch_prove_nothing(open_shard: Open) -> None:
    """Nor does what is left of later ones, where Spark was set back to before the shard began."""
    shard = open_shard("one")
    for version in (4, 4, 9):
        commit(shard, version)
    shard.require_no_history(3)


@pytest.mark.parametrize("where", ["one", "two"])
def test_the_error_names_what_keeps_the_shard_back(open_shard: Open, storage: FaultyStorage, where: str) -> None:
    """An attempt that nobody accepted, and a repetition without rows of the shard: whoever deletes both can go on."""
    commit(open_shard("one"), 4)
    with pytest.raises(StateLostError, match="repeated a failed micro-batch with different input") as raised:
        open_shard(where).require_no_history(4)
    named = raised.value.facts
    storage.delete([info.key for info in storage.list(f"{named['shard']}/")])
    shutil.rmtree(str(named["on_executors"]))
    open_shard(where).require_no_history(4)


def test_where_the_micro_batch_is_not_known_its_attempts_are_version_1(open_shard: Open) -> None:
    shard = open_shard("one")
    first = commit(shard, 1)
    commit(shard, 1)
    shard.require_no_history(None)
    commit(shard, 2, first)
    with pytest.raises(StateLostError):
        shard.require_no_history(None)


def test_it_costs_one_listing_and_in_the_first_micro_batch_none(open_shard: Open, storage: FaultyStorage) -> None:
    shard = open_shard("one")
    shard.require_no_history(0)
    assert not storage.operations
    shard.require_no_history(1)
    assert [(operation.action, operation.keys) for operation in storage.operations] == [("list", (f"{PREFIX}/",))]


def test_another_number_than_spark_keeps_is_refused_where_nothing_else_keeps_one() -> None:
    """Without a state directory a restart in another session would begin keys anew."""

    def require(shards: int | None, state_dir: str | None, partitions: int | None) -> None:
        settings = SimpleNamespace(shards=shards, state_dir=state_dir)
        operator: Any = SimpleNamespace(name="op", shards=4, settings=settings)
        require_number_of_shards(operator, StreamingTask("query", "run", True, None, partitions))

    require(4, None, 7)
    require(None, "/durable", 7)
    require(None, None, 4)
    require(None, None, None)
    with pytest.raises(SchemaMismatchError, match="to 7"):
        require(None, None, 7)


def test_a_task_that_writes_no_record_needs_one_that_keeps_the_number() -> None:
    """Else a restart in a session with other shuffle partitions begins keys anew: Spark 4.0 over Connect did."""
    stored: Any = SimpleNamespace(shards=4)
    require_kept_shards(stored, "op", 4)
    for other in (None, SimpleNamespace(shards=7)):
        with pytest.raises(InvalidArgumentError, match=r"set spark\.holdfast\.shards and never change it"):
            require_kept_shards(other, "op", 4)  # type: ignore[arg-type]


RECORD = OperatorRecord("totals", "query-1", "def-1", "run-1", 4, TABLES, 100)


class Continuing(Shard):
    """A shard of an executor, at its newest version."""

    pointer: Pointer | None = None

    def commit_one(self) -> None:
        self.pointer = self.grow(self.pointer, 1)

    def begin(self, run: str, last_directory: str | None = None) -> None:
        """Go on in a run, as far as the check."""
        assert self.pointer is not None
        record = OperatorRecord("totals", "query-1", "def-1", run, 4, TABLES, 100)
        with self.store.begin(self.pointer) as transaction:
            assert transaction.view is not None
            lineage = Lineage.of(transaction.view.properties)
            require_stored_once(self.log, record, self.pointer, lineage, last_directory)


@pytest.fixture
def shard(storage: FaultyStorage, tmp_path: Path) -> Iterator[Callable[[int], Continuing]]:
    """Return what opens a shard whose commits are carried up to some size."""
    made: list[Continuing] = []
    with ThreadPoolExecutor(2) as executor:

        def opened(carried_bytes: int) -> Continuing:
            made.append(Continuing(storage, executor, tmp_path / "local", "filesystem", carried_bytes))
            return made[-1]

        yield opened
        for one in made:
            one.backend.close()


@pytest.mark.parametrize("commits", [1, 3])
def test_an_emptied_directory_fails_the_query_while_the_executor_has_the_state(
    storage: FaultyStorage, shard: Callable[[int], Continuing], tmp_path: Path, commits: int
) -> None:
    """Without the check the shard would go on, and its state would end with the executor."""
    one = shard(0)
    declare_operator(storage, RECORD)
    for _ in range(commits):
        one.commit_one()
    one.begin("run-1")
    shutil.rmtree(tmp_path / "durable")
    with pytest.raises(
        StateLostError, match=r"emptied, or is a different directory.*shard=totals/shard-0003.*missing=commits/"
    ):
        one.begin("run-2")
    # Nor where another shard has begun there since, which has written the record again.
    declare_operator(storage, RECORD)
    with pytest.raises(StateLostError, match="emptied, or is a different directory"):
        one.begin("run-2")


def test_a_directory_without_a_part_is_left_alone(storage: FaultyStorage, shard: Callable[[int], Continuing]) -> None:
    """It goes around a commit that a snapshot holds, and an old object may be gone for a good reason."""
    one = shard(0)
    declare_operator(storage, RECORD)
    one.commit_one()
    one.commit_one()
    storage.put(f"{PREFIX}/snapshots/{one.pointer}-{'f' * 16}", b"")
    storage.delete([f"{PREFIX}/commits/{one.pointer}"])
    one.begin("run-2")


def test_a_directory_that_was_restored_from_an_older_backup_fails_the_query_too(
    storage: FaultyStorage, shard: Callable[[int], Continuing], tmp_path: Path
) -> None:
    """Its versions are older than all that the pointer names: what came since is with the executor alone."""
    one = shard(0)
    declare_operator(storage, RECORD)
    one.commit_one()
    shutil.copytree(tmp_path / "durable", tmp_path / "backup")
    for _ in range(2):
        one.commit_one()
    shutil.rmtree(tmp_path / "durable")
    shutil.move(tmp_path / "backup", tmp_path / "durable")
    with pytest.raises(StateLostError, match=r"only older versions.*older backup.*missing=commits/3.*newest_stored=1-"):
        one.begin("run-2")


def test_where_the_pointer_carries_all_a_warning_will_do(
    storage: FaultyStorage, shard: Callable[[int], Continuing], caplog: pytest.LogCaptureFixture
) -> None:
    """Once for an operator in each run and process: nothing is lost, and whoever set another directory hears of it."""
    one = shard(1 << 16)
    one.commit_one()
    one.commit_one()
    declare_operator(storage, RECORD)
    with caplog.at_level(logging.WARNING):
        one.begin("run-1")
        assert not caplog.records
        storage.delete(["totals/operator"])
        for _ in range(2):
            one.begin("run-2")
        one.begin("run-3", "/data/app")
    emptied, another = (record.getMessage() for record in caplog.records)
    assert "lacks the operator 'totals'" in emptied
    assert "if not, stop the query and set spark.holdfast.state.dir to its previous directory" in emptied
    assert another.endswith("if not, stop the query and set spark.holdfast.state.dir to /data/app")


def test_it_is_checked_once_in_a_run_and_process(
    storage: FaultyStorage, shard: Callable[[int], Continuing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for each micro-batch would cost more than the check is worth; a forked process checks anew."""
    one = shard(0)
    declare_operator(storage, RECORD)
    one.commit_one()
    storage.operations.clear()
    for _ in range(3):
        one.begin("run-7")
    assert [operation.action for operation in storage.operations] == ["get"]
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    one.begin("run-7")
    assert [operation.action for operation in storage.operations] == ["get", "get"]
