"""Restores to any number of shards, with other columns, and into new checkpoint locations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from holdfast.backends.arrow.rows import HashArray
from holdfast.backends.base import Pointer
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import ConflictError, CorruptionError, InvalidArgumentError, NotFoundError, SchemaMismatchError
from holdfast.settings import Settings
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.savepoints.manifest import (
    Piece,
    PlannedBatch,
    SavedOperator,
    SavedQuery,
    SavedSource,
    ShardTimes,
)
from holdfast.snapshotter.savepoints.savepoints import savepoint_folder, write_pieces
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from holdfast.snapshotter.version_reader import read_tables
from holdfast.spark_integration.savepoints import changes, creating, restoring, restoring_shards, tasks
from holdfast.spark_integration.savepoints.changes import migrated, migrations_of
from holdfast.spark_integration.savepoints.creating import ShardSaver, shard_row
from holdfast.spark_integration.savepoints.new_query import (
    begin,
    finish,
    forget,
    moved,
    partitions_of,
    pinned,
    seed,
    state_of_stub,
)
from holdfast.spark_integration.savepoints.restoring_shards import (
    FIRST_VERSION,
    HashRange,
    RestoredOperator,
    ShardRestorer,
    rows_of_shards,
)
from holdfast.spark_integration.savepoints.tasks import columns_of
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.timers import KeyTimers, is_by_time, timers_schema
from holdfast.spark_integration.transport.routes import shards_of
from holdfast.spark_integration.ttl.expiry import expiring_tables
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.model.shard_history import TimedStorage
from tests.tiers import repetitions

KEY = pa.schema([("user", pa.int64())])
STATE = TableSchema.of("state", KEY, pa.schema([("n", pa.int64())]))
TIMERS = timers_schema("timers_by_due", KEY)
TABLES = {"state": STATE, "timers_by_due": TIMERS}


def edges(shards: int) -> list[int]:
    """Return the hashes at the ends of all shards."""
    ranges = [HashRange.of_shard(shard, shards) for shard in range(shards)]
    return [end for one in ranges for end in (one.first, one.last)]


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 64, 200, 1000])
def test_a_shard_has_the_hashes_that_are_sent_to_it(shards: int) -> None:
    """At both ends of each range, as the routes compute it."""
    ranges = [HashRange.of_shard(shard, shards) for shard in range(shards)]
    assert (ranges[0].first, ranges[-1].last) == (0, 2**64 - 1)
    assert all(a.last + 1 == b.first for a, b in pairwise(ranges))
    ends = np.array(edges(shards), np.uint64)
    assert shards_of(ends, shards).tolist() == [shard for shard in range(shards) for _ in range(2)]


def some_hashes(seed: int) -> HashArray:
    """Return hashes of keys: any, those at the ends of shards, and some that several keys share."""
    chance = np.random.default_rng(seed)
    found = chance.integers(0, 2**64, 300, np.uint64, endpoint=False)
    at_edges = np.array([end for shards in (2, 3, 7) for end in edges(shards)], np.uint64)
    return np.concatenate([found, at_edges, found[:20]])


def as_stored(directory: str) -> tuple[dict[str, Any], dict[str, StoredTables]]:
    """Return which columns are saved, and how a directory has them."""
    return {"totals": TABLES}, {directory: StoredTables.of_first_run(TABLES)}


class Store:
    """State directory and savepoints of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings.parse({"spark.holdfast.state.dir": str(folder / "durable")})
        self.threads = ThreadPoolExecutor(4)
        self.places = str(folder / "durable"), str(folder / "savepoints")

    def log(self, storage: ObjectStorage, directory: str, shard: int) -> ObjectCommitLog:
        return ObjectCommitLog(storage, shard_prefix(directory, shard), TABLES, self.threads, self.folder / "home")

    def write(self, hashes: HashArray, shards: int) -> dict[int, Pointer]:
        """Write a state in as many shards, and return the pointers."""
        users = np.arange(len(hashes))
        pointers = {}
        with open_storage(str(self.folder / "durable")) as storage:
            for shard in range(shards):
                mine = shards_of(hashes, shards) == shard
                if not mine.any():
                    continue
                columns = pa.record_batch([pa.array(users[mine])], schema=KEY)
                n = pa.record_batch([pa.array(users[mine] * 10)], schema=STATE.value)
                of_keys = pa.record_batch([pa.array(hashes[mine])], schema=TIMERS.value)
                due = (users[mine] % 17).astype(np.uint64)
                runs = {
                    "state": Run.build(STATE, Keys(hashes[mine], columns), n),
                    "timers_by_due": Run.build(TIMERS, Keys(due, columns), of_keys),
                }
                pointers[shard] = Pointer(FIRST_VERSION, f"{shard:016x}")
                self.log(storage, "totals", shard).append(pointers[shard], None, runs).wait()
        return pointers

    def save(self, name: str, directory: str, shards: int, pointers: dict[int, Pointer]) -> SavedOperator:
        rows = [
            shard_row("totals", PointerRow("q", directory, shard, shards, pointer, None, None, 0))
            for shard, pointer in pointers.items()
        ]
        saver = ShardSaver(self.settings, str(self.folder / "savepoints"), name, "", *as_stored(directory))
        names = columns_of(creating.SHARD_COLUMNS).names
        found = outcomes(saver, [dict(zip(names, row, strict=True)) for row in rows])
        pieces = [Piece.read(json.loads(row["piece"]), "a piece") for row in found]
        times = tuple(ShardTimes(shard, None, 0) for shard in pointers)
        return SavedOperator("totals", 0, "host", False, shards, TABLES, TABLES, True, {}, times, ordered(pieces))

    def restored(self, name: str, saved: SavedOperator, directory: str, shards: int) -> list[dict[str, Any]]:
        """Return what the tasks of a restore tell."""
        operators = {"totals": RestoredOperator(directory, shards, TABLES, 0, wakes_to_evict=False)}
        restorer = ShardRestorer(self.settings, *self.places, name, operators)
        names = ("operator", "shard", "last", "pieces")
        return outcomes(restorer, [dict(zip(names, row, strict=True)) for row in rows_of_shards(saved, shards)])

    def restore(self, name: str, saved: SavedOperator, directory: str, shards: int) -> dict[int, Pointer]:
        found = self.restored(name, saved, directory, shards)
        assert not [row["error"] for row in found if row["error"]]
        return {row["shard"]: Pointer(FIRST_VERSION, row["commit"]) for row in found if row["commit"]}

    def state(self, directory: str, shards: int, pointers: dict[int, Pointer]) -> dict[str, list[dict[str, Any]]]:
        """Return all rows by table; each must be in the shard of its key."""
        found: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
        with open_storage(str(self.folder / "durable")) as storage:
            for shard, pointer in pointers.items():
                for table, run in read_tables(self.log(storage, directory, shard), pointer, TABLES).items():
                    of_keys = run.values.column(0).to_numpy() if is_by_time(run.schema) else run.hashes
                    assert set(shards_of(of_keys, shards).tolist()) == {shard}
                    found[table] += run.batch.to_pylist()
        return {table: sorted(rows, key=lambda row: row["key.user"]) for table, rows in found.items()}


def ordered(pieces: list[Piece]) -> tuple[Piece, ...]:
    return tuple(sorted(pieces, key=lambda piece: (list(TABLES).index(piece.table), piece.shard)))


def outcomes(task: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for batch in task(iter([pa.RecordBatch.from_pylist(rows)])) for row in batch.to_pylist()]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path)
    yield found
    found.threads.shutdown()


@pytest.mark.slow(3)
@pytest.mark.parametrize("seed", repetitions(quick=1, long=50))
def test_state_goes_through_any_numbers_of_shards(store: Store, seed: int) -> None:
    hashes = some_hashes(seed)
    pointers = store.write(hashes, 1)
    first, directory, shards = store.state("totals", 1, pointers), "totals", 1
    assert len(first["state"]) == len(hashes)
    for number, wanted in enumerate((7, 3, 100, 1)):
        saved = store.save(f"s{number}", directory, shards, pointers)
        assert saved.rows == {"state": len(hashes), "timers_by_due": len(hashes)}
        directory, shards = f"totals-{number}", wanted
        pointers = store.restore(f"s{number}", saved, directory, shards)
        assert store.state(directory, shards, pointers) == first


class Reading(WrappedStorage):
    """Counts what is read."""

    def __init__(self, inner: ObjectStorage) -> None:
        super().__init__(inner)
        self.read: list[tuple[str, int]] = []

    def get(self, key: str, limit_bytes: int = 0) -> memoryview:
        data = super().get(key, limit_bytes)
        self.read.append((key, len(data)))
        return data


@pytest.mark.all
@pytest.mark.slow(8)
@pytest.mark.parametrize(("before", "after"), [(2, 64), (3, 8), (5, 4), (64, 2), (2, 3)])
@pytest.mark.parametrize("piece_rows", [40, 100_000])
def test_a_restore_reads_a_savepoint_about_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, before: int, after: int, piece_rows: int
) -> None:
    """However many new shards an old one becomes; timers, which are not sorted by shard, too."""
    hashes = np.random.default_rng(3).integers(0, 2**64, 20_000, np.uint64, endpoint=False)
    monkeypatch.setattr(creating, "write_pieces", partial(write_pieces, piece_bytes=30 * piece_rows))
    saved = store.save("one", "totals", before, store.write(hashes, before))
    assert len(saved.pieces) > 200 if piece_rows == 40 else len(saved.pieces) == 2 * before
    read: list[Reading] = []

    def storage_at(url: str, settings: Settings) -> ObjectStorage:
        read.append(Reading(open_storage(url)))
        return read[-1]

    monkeypatch.setattr(tasks, "storage_at", storage_at)
    pointers = store.restore("one", saved, "again", after)
    assert len(store.state("again", after, pointers)["state"]) == len(hashes)
    sizes = [size for storage in read for key, size in storage.read if "operators/" in key]
    at_borders = 2 if after % before and before % after else 1
    assert sum(sizes) <= 1.25 * at_borders * sum(piece.size_bytes for piece in saved.pieces)


def test_a_large_shard_is_shared_among_tasks() -> None:
    """As long as they read little twice: without timers by pieces, with many timers not at all."""

    def tasks(tables: dict[str, int]) -> int:
        pieces = tuple(
            Piece(f"{table}{number}", table, 0, 1, 64 << 20, 64 << 20, "", number << 48, (number << 48) + 1)
            for table, count in tables.items()
            for number in range(count)
        )
        saved = SavedOperator("totals", 0, "host", False, 1, TABLES, TABLES, True, {}, (), pieces)
        return len(list(restoring_shards._stretches(saved, 1000)))

    assert tasks({"state": 1}) == 1
    assert tasks({"state": 40}) == 11
    assert tasks({"state": 40, "timers_by_due": 1}) == 6
    assert tasks({"state": 40, "timers_by_due": 20}) == 1


def test_a_manifest_may_say_any_number_of_shards() -> None:
    """Dividing them costs what the new ones do."""
    pieces = (Piece("state", "state", 1 << 30, 1, 1, 1, "", 1 << 63, (1 << 63) + 1),)
    saved = SavedOperator("totals", 0, "host", False, (1 << 31) - 1, TABLES, TABLES, True, {}, (), pieces)
    assert [row[1:3] for row in rows_of_shards(saved, 4)] == [(2, 2)]


@pytest.mark.parametrize(("old", "new"), [(800, 800), (800, 799), (1, 800), (800, 1), ((1 << 31) - 1, 800)])
def test_shards_are_matched_at_the_cost_of_both_numbers(monkeypatch: pytest.MonkeyPatch, old: int, new: int) -> None:
    """Not of their product: 65,536 shards took the driver hours, before it began a task."""
    there = range(0, old, -(-old // 800))
    ranges = [HashRange.of_shard(shard, old) for shard in there]
    pieces = (
        *(Piece(f"s{n}", "state", n, 1, 1, 1, "", of.first, of.last) for n, of in zip(there, ranges, strict=True)),
        *(Piece(f"t{n}", "timers_by_due", n, 1, 1, 1, "", 0, 0) for n in there),
    )
    times = tuple(ShardTimes(n, None, 5 + n) for n in reversed(there))
    saved = SavedOperator("totals", 0, "host", False, old, TABLES, TABLES, True, {}, times, pieces)
    compared: list[HashRange] = []
    of_shard = HashRange.of_shard

    def counted(shard: int, shards: int) -> HashRange:
        compared.append(of_shard(shard, shards))
        return compared[-1]

    monkeypatch.setattr(HashRange, "of_shard", counted)
    monkeypatch.setattr(HashRange, "overlaps", lambda self, _: compared.append(self))
    rows = rows_of_shards(saved, new)
    state: Any = SimpleNamespace(query_id="q", directory="totals", plan=SimpleNamespace(shards=new, saved=saved))
    restored = {shard: (f"{shard:016x}", None) for shard in range(new)}
    pointers = list(restoring._pointers(state, restored, "/data/app"))
    assert len(compared) < 5 * 800
    monkeypatch.undo()
    for _, first, last, found in rows[:: len(rows) // 7 or 1]:
        wanted = HashRange(of_shard(first, new).first, of_shard(last, new).last)
        keys = [kind + str(n) for kind in "st" for n, of in zip(there, ranges, strict=True) if of.overlaps(wanted)]
        assert [piece["key"] for piece in json.loads(found)] == keys
    for row in pointers[:: len(pointers) // 7 or 1]:
        wanted = of_shard(row.shard, new)
        assert row.batch_ms == min(
            (5 + n for n, of in zip(there, ranges, strict=True) if of.overlaps(wanted)), default=0
        )


def test_a_new_shard_knows_when_its_first_timer_is_due(store: Store) -> None:
    """Exactly: a shard that is called for nothing is called in every micro-batch."""
    hashes = some_hashes(2)
    saved = store.save("one", "totals", 2, store.write(hashes, 2))
    of_shard = shards_of(hashes, 5)
    for row in store.restored("one", saved, "again", 5):
        users = np.flatnonzero(of_shard == row["shard"])
        assert row["earliest_timer_ms"] == int((users % 17).min()) - (1 << 63)


def test_a_damaged_piece_is_an_error_that_names_it(store: Store) -> None:
    pointers = store.write(some_hashes(1), 2)
    saved = store.save("one", "totals", 2, pointers)
    with open_storage(str(store.folder / "savepoints")) as savepoints:
        savepoint_folder(savepoints, "one").delete([saved.pieces[0].key])
    (error,) = [row["error"] for row in store.restored("one", saved, "again", 2) if row["error"]]
    assert error.startswith("CorruptionError: ")
    assert saved.pieces[0].key in error


def test_lost_state_is_an_error_that_names_it(store: Store) -> None:
    pointers = store.write(some_hashes(1), 2)
    saver = ShardSaver(store.settings, str(store.folder / "savepoints"), "one", "", *as_stored("totals"))
    lost = PointerRow("q", "totals", 0, 2, replace_id(pointers[0]), None, None, 0)
    names = columns_of(creating.SHARD_COLUMNS).names
    (row,) = outcomes(saver, [dict(zip(names, shard_row("totals", lost), strict=True))])
    assert row["error"].startswith("StateLostError: ")


def replace_id(pointer: Pointer) -> Pointer:
    return Pointer(pointer.version, "f" * 16)


OLD_KEY = pa.schema([("k", pa.string())])
VALUE = pa.schema([("n", pa.int64()), ("k", pa.int64())])
OLD_STATE = TableSchema.of("state", OLD_KEY, VALUE)
Function = Callable[[pa.RecordBatch], Any]


def operator(tables: Mapping[str, TableSchema]) -> SavedOperator:
    return SavedOperator("totals", 0, "applyInPandasWithState", False, 2, tables, tables, True, {}, (), ())


def rows(schema: TableSchema, **columns: Any) -> Run:
    count = len(columns["n"])
    keys = Keys.of(schema, np.arange(count, dtype=np.uint64), pa.table({"k": [f"u{i}" for i in range(count)]}))
    return Run.build(schema, keys, schema.conform(pa.table(columns), "value"))


def as_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Give the number as text, and the column of the key's name as it is."""
    return pa.record_batch({"s": batch["n"].cast(pa.string()), "k": batch["k"], "value.k": batch["value.k"]})


def test_rows_get_other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches; types are those that are stored, and names those that users see."""
    monkeypatch.setattr(changes, "_ROWS", 3)
    seen: list[int] = []

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.num_rows)
        assert batch.schema.names == ["k", "n", "value.k"]
        return as_text(batch)

    tables = {"state": OLD_STATE, **KeyTimers.tables(OLD_KEY, "EventTimeTimeout")}
    (migration,) = migrations_of(operator(tables), function).values()
    wanted = TableSchema.of("state", OLD_KEY, pa.schema([("s", pa.string()), ("k", pa.int64())]))
    found = migration(rows(OLD_STATE, n=[*range(7)], k=[None, *range(6)]))
    assert seen == [0, 3, 3, 1]
    assert found.schema == wanted
    assert found.values.to_pylist() == [{"s": str(i), "k": i - 1 if i else None} for i in range(7)]
    assert found.keys.column(0).to_pylist() == [f"u{i}" for i in range(7)]
    after = migrated(operator(tables), {"state": migration})
    assert (after.tables, after.declared) == ({**tables, "state": wanted},) * 2


def test_a_column_may_be_called_as_a_key_in_another_case() -> None:
    """The function sees it under a name that Spark can tell apart, and may call its own columns what it likes."""
    table = TableSchema.of("state", OLD_KEY, pa.schema([("n", pa.int64()), ("K", pa.int64())]))

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert batch.schema.names == ["k", "n", "value.K"]
        return batch.rename_columns(["k", "N", "value.K"]).append_column("n", batch["n"])

    (migration,) = migrations_of(operator({"state": table}), function).values()
    found = migration(rows(table, n=[1, 2], K=[3, 4]))
    assert found.values.to_pylist() == [{"N": 1, "K": 3, "n": 1}, {"N": 2, "K": 4, "n": 2}]


def test_times_to_live_are_kept() -> None:
    """The function does not see them; its table may be left with nothing else."""
    tables = dict(expiring_tables("v.total", OLD_KEY, pa.schema([("n", pa.int64())])))
    saved = rows(tables["v.total"], n=[1, 2], expires_ms=[5, None])
    for function, own in ((lambda b: b.select(["k"]), {}), (lambda b: b, {"n": 1})):
        migration = migrations_of(operator(tables), {"total": function})["v.total"]
        assert migration(saved).values.to_pylist()[0] == {**own, "expires_ms": 5}
    with pytest.raises(InvalidArgumentError, match="holdfast keeps the column 'expires_ms' itself"):
        migrations_of(operator(tables), lambda b: b.append_column("expires_ms", b["n"]))


def only_with_rows(function: Function) -> Function:
    """Return a function that does wrong only where there are rows."""
    return lambda batch: function(batch) if batch.num_rows else batch


WRONG: dict[str, tuple[Function, str]] = {
    "fails": (lambda b: pc.divide(b["n"], 0), "it failed: ArrowInvalid: divide by zero"),
    "no batch": (lambda b: b.to_pandas(), "it did not return a pyarrow.RecordBatch"),
    "other rows": (lambda b: b.slice(1), "it changed the number of rows"),
    "columns twice": (lambda b: pa.record_batch([b["n"]] * 2, names=["k", "k"]), "two columns of the same name"),
    "other columns": (lambda b: b.select(["k", "n"]), "it returned different columns than for an empty batch"),
    "other keys": (lambda b: b.set_column(0, "k", pc.add_checked(b["k"], "x")), "it failed"),
    "another order": (lambda b: b.take(pa.array([1, 0])), "it changed the keys or the order of the rows"),
    "nulls": (
        lambda b: b.set_column(1, pa.field("n", pa.int64(), nullable=False), pa.nulls(2, pa.int64())),
        "nulls in columns that it declared without nulls",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_a_function_may_not_return(name: str) -> None:
    function, words = WRONG[name]
    if name == "nulls":
        required = OLD_STATE.value.set(0, pa.field("n", pa.int64(), nullable=False))
        fixed = {"state": TableSchema.of("state", OLD_KEY, required)}
        migration = migrations_of(
            operator(fixed), lambda b: b.set_column(1, pa.field("n", pa.int64(), nullable=False), b["n"])
        )["state"]
        migration = type(migration)(function, migration.before, migration.after, False, migration.returned)
    else:
        migration = migrations_of(operator({"state": OLD_STATE}), only_with_rows(function))["state"]
    with pytest.raises(InvalidArgumentError, match="the migration of a state table is invalid") as caught:
        migration(rows(OLD_STATE, n=[1, 2], k=[3, 4]))
    assert words in str(caught.value)


def test_values_are_of_the_types_that_it_returned_for_no_rows() -> None:
    """What does not fit names its column."""
    for function, words in (
        (lambda b: b.set_column(1, "n", b["n"].cast(pa.string())), "'n' has a different type"),
        (lambda b: b.set_column(1, "n", pc.multiply(b["n"], 0.5)), "'n' cannot be stored"),
    ):
        with pytest.raises(SchemaMismatchError, match=words):
            migrations_of(operator({"state": OLD_STATE}), only_with_rows(function))["state"](
                rows(OLD_STATE, n=[1], k=[1])
            )


def test_what_cannot_be_migrated() -> None:
    both = {"a": TableSchema.of("a", OLD_KEY, VALUE), "b": TableSchema.of("b", OLD_KEY, VALUE)}
    with pytest.raises(InvalidArgumentError, match="several state tables"):
        migrations_of(operator(both), as_text)
    with pytest.raises(NotFoundError, match="no such table to migrate"):
        migrations_of(operator(both), {"c": as_text})
    with pytest.raises(InvalidArgumentError, match="functions by table"):
        migrations_of(operator(both), {"a": "text"})
    with pytest.raises(InvalidArgumentError, match="it dropped key columns"):
        migrations_of(operator({"state": OLD_STATE}), lambda b: b.select(["n"]))


PINNED = {"spark.sql.shuffle.partitions": "2", "spark.sql.a": "1"}
BATCH = json.dumps({"batchWatermarkMs": 7, "batchTimestampMs": 9, "conf": PINNED})
QUERY = SavedQuery("query", 41, "v1", BATCH, 8, (SavedSource("0", '{"logOffset":3}', ()),))


def seeded(
    folder: Path, of_stub: Mapping[str, str], *, fresh: bool = False, planned: PlannedBatch | None = None
) -> Path:
    """Fill a location from a stub that pinned some settings, and return it."""
    stub, location = folder / "stub", folder / "location"
    for name, text in {
        "offsets/0": f"v1\n{json.dumps({'batchWatermarkMs': 0, 'conf': of_stub})}\n-",
        "commits/0": 'v1\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{"0":[["a"]]}}',
        "state/0/0/1.delta": "?",
    }.items():
        (stub / name).parent.mkdir(parents=True, exist_ok=True)
        (stub / name).write_text(text)
    with (
        open_storage(str(location)) as new,
        open_storage(str(stub)) as old,
        open_storage(str(folder / "savepoints")) as savepoints,
    ):
        first = state_of_stub(old, new, pinned(QUERY, None))
        seed(new, first, savepoint_folder(savepoints, "one"), QUERY, fresh=fresh, planned=planned)
    return location


def lines(file: Path) -> list[Any]:
    return [json.loads(line) if line.startswith("{") else line for line in file.read_text().splitlines()]


def test_what_a_later_spark_pins_holds_of_the_state_that_it_has_made(tmp_path: Path) -> None:
    """A savepoint is the way from one Spark to the next."""
    of_stub = {**PINNED, "spark.sql.since.then": "true"}
    location = seeded(tmp_path, of_stub)
    assert lines(location / "offsets/0") == [
        "v1",
        {"batchWatermarkMs": 7, "batchTimestampMs": 9, "conf": of_stub},
        {"logOffset": 3},
    ]
    assert lines(location / "commits/0") == ["v1", {"nextBatchWatermarkMs": 8, "stateUniqueIds": {"0": [["a"]]}}]


def test_what_was_planned_is_what_runs_first(tmp_path: Path) -> None:
    """With its own time and watermark, on the state that the stub has made; else Spark plans it."""
    batch = json.dumps({"batchWatermarkMs": 8, "batchTimestampMs": 11, "conf": {**PINNED, "spark.sql.a": "0"}})
    planned = PlannedBatch("v1", batch, (SavedSource("0", '{"logOffset":4}', ()),))
    location = seeded(tmp_path / "planned", PINNED, planned=planned)
    assert lines(location / "offsets/1") == [
        "v1",
        {"batchWatermarkMs": 8, "batchTimestampMs": 11, "conf": PINNED},
        {"logOffset": 4},
    ]
    assert not (location / "commits/1").exists()
    assert not (seeded(tmp_path / "not planned", PINNED) / "offsets/1").exists()


@pytest.mark.parametrize("of_stub", [{"spark.sql.shuffle.partitions": "2"}, {**PINNED, "spark.sql.a": "2"}])
def test_what_is_not_pinned_as_it_was_is_named(tmp_path: Path, of_stub: dict[str, str]) -> None:
    """By an older Spark, say: nothing has been written then."""
    with pytest.raises(InvalidArgumentError, match=r"or a later one, settings=spark\.sql\.a$"):
        seeded(tmp_path, of_stub)
    assert not (tmp_path / "location").exists() or not list((tmp_path / "location").iterdir())


def test_sources_that_begin_anew_have_no_positions_and_no_watermark(tmp_path: Path) -> None:
    """What they read again must not be late."""
    location = seeded(tmp_path, PINNED, fresh=True)
    _, batch, offset = lines(location / "offsets/0")
    assert (batch["batchWatermarkMs"], offset) == (0, "-")
    assert lines(location / "commits/0")[1]["nextBatchWatermarkMs"] == 0


HERE = "/state/3/_stateSchema/default/0_1f5d"


@pytest.mark.parametrize(
    ("before", "location", "after"),
    [
        ("file:/data/link/query", "file:///new", "file:/new"),
        ("file:///data/state/0/query", "file:///new/", "file:/new"),
        ("/data/query", "file:///new", "/new"),
        ("s3a://bucket/query", "s3://other/new", "s3a://other/new"),
        ("hdfs://service/query", "hdfs://host:8020/new", "hdfs://host:8020/new"),
        ("file:/data/query", "s3://bucket/new", "s3a://bucket/new"),
        ("s3a://bucket/query", "file:///new", "file:/new"),
    ],
)
@pytest.mark.parametrize("key", ["state/3/_metadata/v2/7", "state/3/_metadata/metadata"])
def test_paths_of_the_states_own_files_are_new(key: str, before: str, location: str, after: str) -> None:
    """However the original's place was written when Spark wrote them: one that stays would be read for good."""

    def metadata(place: str) -> str:
        stores = [{"storeName": "default", "stateSchemaFilePaths": [place + HERE]}]
        properties = json.dumps({"stateName": "/data/state/0/_x"})
        return "v2\n" + json.dumps({"stateStoreInfo": stores, "operatorPropertiesJson": properties})

    found = moved(key, memoryview(metadata(before).encode()), location)
    assert lines_of(bytes(found)) == lines_of(metadata(after).encode())


def lines_of(data: bytes) -> list[Any]:
    version, text = data.decode().split("\n")
    return [version, json.loads(text)]


def test_a_path_that_cannot_be_one_of_the_states_is_named() -> None:
    data = memoryview(b'v2\n{"stateSchemaFilePaths": ["file:/data/schemas/0_1f5d"]}')
    with pytest.raises(InvalidArgumentError, match=r"outside the checkpoint location.*path=file:/data/schemas/0_1f5d"):
        moved("state/3/_metadata/v2/7", data, "file:///new")


@pytest.mark.parametrize("key", ["state/3/0/_metadata/schema", "state/3/0/7.delta", "state/3/_stateSchema/default/0"])
def test_other_files_of_state_stay_as_they_are(key: str) -> None:
    """A user's values may look like paths."""
    data = memoryview(b'v2\n{"stateSchemaFilePaths": ["file:/data/query/state/3/_stateSchema/x"]}')
    assert bytes(moved(key, data, "file:///new")) == bytes(data)


def test_partitions_are_a_number_of_shards() -> None:
    assert [partitions_of(conf) for conf in (PINNED, {})] == [2, 1]
    for given in ("many", "0", "-1", "3000000000", None, [2], "9" * 5000):
        with pytest.raises(CorruptionError, match="an invalid number of partitions"):
            partitions_of({"spark.sql.shuffle.partitions": given})


@pytest.mark.parametrize("has_begun", [True, False], ids=["its mark is seen", "nothing is seen"])
def test_a_query_that_is_finished_while_another_begins_stays(has_begun: bool) -> None:
    """The other one has looked at the location, and is held up before it puts its mark: it must not clear it."""
    location = TimedStorage()

    def whole() -> None:
        if not has_begun:
            begin(location, "first")
        location.put("offsets/0", b"")
        finish(location, "first")

    if has_begun:
        begin(location, "first")
    with pytest.raises(ConflictError, match="must be empty"):
        begin(FaultyStorage(location, [Fault("delay", "put", wait=whole)]), "second")
    assert sorted(location.objects) == ["metadata", "offsets/0"]


def test_a_query_that_another_has_finished_first_keeps_its_metadata() -> None:
    """The first one's put of its own is held up until the second has taken the location, and finished."""
    location = TimedStorage()

    def second() -> None:
        forget(location, begin(location, "second"))
        finish(location, "second")

    begin(location, "first")
    with pytest.raises(ConflictError, match="another command fills this checkpoint location"):
        finish(FaultyStorage(location, [Fault("delay", "put", "metadata", wait=second)]), "first")
    assert location.objects["metadata"][0] == b'{"id":"second"}'


def test_a_mark_that_cannot_be_deleted_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """The query is whole: who is told of a failure would delete it."""
    location = TimedStorage()
    begin(location, "first")
    finish(FaultyStorage(location, [Fault("fail", "delete")]), "first")
    assert sorted(location.objects) == ["holdfast-restoring-first", "metadata"]
    assert "the query is complete" in caplog.text
    with pytest.raises(ConflictError, match="must be empty"):
        begin(location, "second")


@pytest.mark.parametrize("name", ["", ".", "a/b", "a b"])
def test_a_mark_that_no_restore_has_put_is_none(name: str) -> None:
    """What belongs to its id is deleted, wherever that leads: all savepoints of rescales, by an empty one."""
    location = TimedStorage()
    location.objects[f"holdfast-restoring-{name}"] = (b"", 1)
    with pytest.raises(ConflictError, match="must be empty"):
        begin(location, "first")
    assert list(location.objects) == [f"holdfast-restoring-{name}"]
