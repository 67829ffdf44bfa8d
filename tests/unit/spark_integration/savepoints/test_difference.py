"""What differs between two savepoints, whatever their shards and columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.snapshotter.savepoints.manifest import KEY, SavedOperator, ShardTimes
from holdfast.snapshotter.savepoints.pieces import write_pieces
from holdfast.snapshotter.savepoints.savepoints import read_savepoint, savepoint_folder
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints.difference import Side, TableDifference, difference, facts_that_differ
from holdfast.spark_integration.timers import timers_schema
from holdfast.spark_integration.transport.routes import shards_of
from holdfast.testing.faulty_storage import FaultyStorage
from tests.unit.snapshotter.savepoints.sample import a_savepoint

STATE = TableSchema.of("state", pa.schema([("user", pa.int64())]), pa.schema([("n", pa.list_(pa.float64()))]))
HASHES = np.random.default_rng(1).integers(0, 2**64, 500, np.uint64, endpoint=False)
VALUES: dict[int, list[float] | None] = {
    user: [user, float("nan")] if user % 7 else None for user in range(len(HASHES))
}


def write(folder: Path, name: str, values: dict[int, list[float] | None], shards: int, schema: TableSchema) -> Side:
    """Store a savepoint of some users' values."""
    with open_storage(str(folder)) as target:
        made = a_savepoint(target, name)
        place = savepoint_folder(target, name)
        users = np.array(sorted(values), np.int64)
        of_shard, pieces = shards_of(HASHES[users], shards), []
        for shard in range(shards):
            mine = users[of_shard == shard]
            keys = Keys(HASHES[mine], pa.record_batch([pa.array(mine)], schema=schema.key))
            column = pa.array([values[user] for user in mine.tolist()], schema.value.field(0).type)
            run = Run.build(schema, keys, pa.record_batch([column], schema=schema.value))
            pieces += list(write_pieces(place, "totals", shard, run, piece_bytes=2000))
        times = tuple(ShardTimes(shard, None, 0) for shard in range(shards))
        index = timers_schema("timers_by_due", schema.key)
        tables = {"state": schema, "timers_by_due": index}
        operator = SavedOperator("totals", 0, "host", False, shards, tables, tables, True, {}, times, tuple(pieces))
        target.delete([f"{name}/{KEY}"])
        place.put(KEY, replace(made, operators=(operator,)).encode())
    storage = open_storage(str(folder))
    return Side(read_savepoint(storage, name), savepoint_folder(storage, name))


def only(before: Side, after: Side, keys: int = 0) -> TableDifference:
    (found,) = difference(before, after, keys)
    return found


def test_the_same_state_in_other_shards_is_equal(tmp_path: Path) -> None:
    """Nulls and NaN too; what is sorted by time is no state of its own."""
    before, after = (write(tmp_path, f"of-{shards}", VALUES, shards, STATE) for shards in (2, 5))
    found = only(before, after, 5)
    assert (found.equal, found.differs, found.keys) == (500, False, {"added": [], "removed": [], "changed": []})
    assert facts_that_differ(before.savepoint, after.savepoint) == ["shards of totals: 2, 5"]


@pytest.mark.slow(1)
def test_each_piece_is_read_once_however_many_shards_share_it(tmp_path: Path) -> None:
    """Few shards have large pieces: each was read again for each of the other savepoint's many shards."""
    sides = [write(tmp_path, f"of-{shards}", VALUES, shards, STATE) for shards in (1, 60)]
    watched = [FaultyStorage(open_storage(str(tmp_path))) for _ in sides]
    before, after = (
        replace(side, folder=savepoint_folder(storage, side.savepoint.name))
        for side, storage in zip(sides, watched, strict=True)
    )
    for found in (only(before, after), only(after, before)):
        assert (found.equal, found.differs) == (500, False)
    for side, storage in zip(sides, watched, strict=True):
        read = [key for operation in storage.operations if operation.action == "get" for key in operation.keys]
        assert len(read) == 2 * len(side.savepoint.operators[0].pieces)


def test_each_kind_of_change_is_counted_and_named(tmp_path: Path) -> None:
    changed = {**VALUES, 3: [3.0], 7: [], 8: None}
    del changed[5], changed[6]
    before = write(tmp_path, "before", {user: VALUES[user] for user in range(499)}, 3, STATE)
    after = write(tmp_path, "after", changed, 2, STATE)
    found = only(before, after, 2)
    assert (found.equal, found.added, found.removed, found.changed) == (494, 1, 2, 3)
    assert found.keys["added"] == [{"user": 499}]
    assert sorted(row["user"] for row in found.keys["removed"]) == [5, 6]
    assert {row["user"] for row in found.keys["changed"]} < {3, 7, 8}
    assert len(found.keys["changed"]) == 2


@pytest.mark.parametrize(
    ("column", "said"), [(pa.field("n", pa.string()), "n"), (pa.field("n", pa.list_(pa.float32())), "")]
)
def test_other_columns(tmp_path: Path, column: pa.Field, said: str) -> None:
    """A wider number is the same value; what cannot be read as the other is said."""
    other = TableSchema.of("state", STATE.key, pa.schema([column]))
    small = dict.fromkeys(range(10))
    found = only(write(tmp_path, "before", small, 2, other), write(tmp_path, "after", small, 2, STATE))
    assert bool(found.columns) == bool(said)
    assert found.differs == bool(said)
    assert found.equal == (0 if said else 10)


def test_what_differs_besides_the_state_is_said(tmp_path: Path) -> None:
    before = write(tmp_path, "before", {}, 1, STATE).savepoint
    source = replace(before.query.sources[0], offset='{"logOffset":9}')
    query = replace(before.query, query_id="other", next_watermark_ms=5, sources=(source, before.query.sources[1]))
    after = replace(before, name="after", query=query, operators=())
    assert facts_that_differ(before, after) == [
        "operator totals is only in before",
        "they are of two queries: 5d1f, other",
        "watermark: 1000, 5 ms",
        'source 0: {"logOffset":3}, {"logOffset":9}',
    ]
