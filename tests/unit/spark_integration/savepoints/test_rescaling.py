"""Tasks of savepoints without Spark: what they save and restore, to any number of shards, is the same state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.arrow.rows import HashArray
from holdfast.backends.base import Pointer
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.backends.schema import encode_schemas
from holdfast.settings import Settings
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.savepoints.manifest import Piece, SavedOperator, ShardTimes
from holdfast.snapshotter.savepoints.pieces import write_pieces
from holdfast.snapshotter.savepoints.savepoints import savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from holdfast.snapshotter.version_reader import read_tables
from holdfast.spark_integration.savepoints import creating, restoring, restoring_shards, tasks
from holdfast.spark_integration.savepoints.creating import ShardSaver, StoredNames, shard_row
from holdfast.spark_integration.savepoints.restoring_shards import (
    FIRST_VERSION,
    HashRange,
    RestoredOperator,
    ShardRestorer,
    rows_of_shards,
)
from holdfast.spark_integration.savepoints.tasks import columns_of
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.timers import is_by_time, timers_schema
from holdfast.spark_integration.transport.routes import shards_of
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


NAMES = {table: {column: column for column in schema.value.names} for table, schema in TABLES.items()}


def as_stored(directory: str) -> tuple[dict[str, Any], dict[str, StoredNames]]:
    """Return which columns are saved, and how a directory has them."""
    return {"totals": encode_schemas(TABLES)}, {directory: StoredNames(encode_schemas(TABLES), NAMES)}


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
        saver = ShardSaver(self.settings, str(self.folder / "savepoints"), name, *as_stored(directory))
        names = columns_of(creating.SHARD).names
        found = outcomes(saver, [dict(zip(names, row, strict=True)) for row in rows])
        pieces = [Piece.read(json.loads(row["piece"]), "a piece") for row in found]
        times = tuple(ShardTimes(shard, None, 0) for shard in pointers)
        return SavedOperator("totals", 0, "host", False, shards, TABLES, TABLES, True, {}, times, ordered(pieces))

    def restore(self, name: str, saved: SavedOperator, directory: str, shards: int) -> dict[int, Pointer]:
        operators = {
            "totals": RestoredOperator(directory, shards, saved.shards, encode_schemas(TABLES), 0, wakes_to_evict=False)
        }
        restorer = ShardRestorer(self.settings, *self.places, name, operators)
        names = ("operator", "shard", "last", "pieces")
        found = outcomes(restorer, [dict(zip(names, row, strict=True)) for row in rows_of_shards(saved, shards)])
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
    """1, 7, 3, 1 and many more shards than keys: the same rows, each where its key is sent to."""
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
    state: Any = SimpleNamespace(query_id="q", directory="totals", plan=SimpleNamespace(shards=new))
    restored: Any = {shard: SimpleNamespace(commit_id=f"{shard:016x}", earliest_timer_ms=None) for shard in range(new)}
    pointers = list(restoring._pointers(saved, state, restored, "/data/app"))
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
    operators = {"totals": RestoredOperator("again", 5, 2, encode_schemas(TABLES), 0, wakes_to_evict=False)}
    restorer = ShardRestorer(store.settings, *store.places, "one", operators)
    names = ("operator", "shard", "last", "pieces")
    found = outcomes(restorer, [dict(zip(names, row, strict=True)) for row in rows_of_shards(saved, 5)])
    of_shard = shards_of(hashes, 5)
    for row in found:
        users = np.flatnonzero(of_shard == row["shard"])
        assert row["earliest_timer_ms"] == int((users % 17).min()) - (1 << 63)


def test_a_damaged_piece_is_an_error_that_names_it(store: Store) -> None:
    """Returned, not raised: Spark would repeat the task for nothing."""
    pointers = store.write(some_hashes(1), 2)
    saved = store.save("one", "totals", 2, pointers)
    with open_storage(str(store.folder / "savepoints")) as savepoints:
        savepoint_folder(savepoints, "one").delete([saved.pieces[0].key])
    operators = {"totals": RestoredOperator("again", 2, 2, encode_schemas(TABLES), 0, wakes_to_evict=False)}
    restorer = ShardRestorer(store.settings, *store.places, "one", operators)
    names = ("operator", "shard", "last", "pieces")
    found = outcomes(restorer, [dict(zip(names, row, strict=True)) for row in rows_of_shards(saved, 2)])
    (error,) = [row["error"] for row in found if row["error"]]
    assert error.startswith("CorruptionError: ")
    assert saved.pieces[0].key in error


def test_lost_state_is_an_error_that_names_it(store: Store) -> None:
    pointers = store.write(some_hashes(1), 2)
    saver = ShardSaver(store.settings, str(store.folder / "savepoints"), "one", *as_stored("totals"))
    lost = PointerRow("q", "totals", 0, 2, replace_id(pointers[0]), None, None, 0)
    names = columns_of(creating.SHARD).names
    (row,) = outcomes(saver, [dict(zip(names, shard_row("totals", lost), strict=True))])
    assert row["error"].startswith("StateLostError: ")


def replace_id(pointer: Pointer) -> Pointer:
    return Pointer(pointer.version, "f" * 16)
