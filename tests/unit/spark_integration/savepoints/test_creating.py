"""Savepoints of a running query: what fails before it is stopped, and what tasks store and refuse."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, DataType, LongType, StringType, StructField, StructType

from holdfast.backends.schema import TableSchema
from holdfast.errors import (
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    SchemaMismatchError,
    StateLostError,
    UnavailableError,
)
from holdfast.settings import Settings
from holdfast.snapshotter.savepoints.manifest import Piece
from holdfast.snapshotter.savepoints.savepoints import read_piece, savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.copies import drain
from holdfast.spark_integration.plan.grouping_keys import Grouping, Key
from holdfast.spark_integration.processor.state.timers import timer_tables
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.savepoints import creating
from holdfast.spark_integration.savepoints import write as writing
from holdfast.spark_integration.savepoints.tasks import OwnProcess, ShardTask
from holdfast.spark_integration.savepoints.write import PieceCopier, TableWriter, grouping_width, run_of
from holdfast.spark_integration.spark_state.pointers import StatefulStep
from holdfast.spark_integration.timers import KeyTimers, first_due_ms, hashes_of_keys
from holdfast.spark_integration.ttl.expiry import expiring_tables
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests import sink_logs
from tests.damage import flipped

DEDUPLICATION = StatefulStep(0, "dedupe", 0, (), is_ours=False, has_timeout=False, pointers={})
TOTALS = StatefulStep(
    1, "applyInPandasWithState", 0, (), is_ours=True, has_timeout=False, pointers={"totals": {"totals": []}}
)


class Query:
    """A query that runs until it is stopped."""

    id = "5d1f"

    def __init__(self) -> None:
        self.is_running = True

    @property
    def isActive(self) -> bool:  # noqa: N802  Spark's name
        return self.is_running

    def stop(self) -> None:
        self.is_running = False


class Ground:
    """The places of a query, and what Spark says of its state."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.spark: Any = SimpleNamespace(
            conf=SimpleNamespace(getAll={"spark.holdfast.state.dir": str(folder / "durable")})
        )
        self.query: Any = Query()
        self._monkeypatch = monkeypatch
        with open_storage(str(folder / "query")) as location:
            location.put("metadata", b'{"id":"5d1f"}')
        self.move_on(0)
        self.has_state(lambda: [TOTALS])

    def has_state(self, steps: Callable[[], list[StatefulStep]]) -> None:
        self._monkeypatch.setattr(creating, "stored_steps", lambda *_: steps())

    def refuse(self, url: Path, **fault: Any) -> None:
        def opened(of: str, options: Mapping[str, object]) -> ObjectStorage:
            storage = open_storage(of, options)
            return FaultyStorage(storage, [Fault("fail", **fault, times=None)]) if of == str(url) else storage

        self._monkeypatch.setattr(creating, "open_storage", opened)

    def move_on(self, batch_id: int) -> None:
        """Commit a micro-batch, and forget the one before."""
        with open_storage(str(self.folder / "query")) as location:
            location.delete([f"{log}/{batch_id - 1}" for log in ("offsets", "commits") if batch_id])
            location.put(f"offsets/{batch_id}", b'v1\n{"conf":{}}\n-')
            location.put(f"commits/{batch_id}", b'v1\n{"nextBatchWatermarkMs":0}')

    def stop(self, **options: Any) -> None:
        creating.stop(self.spark, self.query, self.folder / "query", self.folder / "savepoints", "one", **options)

    def create(self) -> None:
        creating.create(self.spark, self.folder / "query", self.folder / "savepoints", "one")


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(tmp_path, monkeypatch)


def denied() -> HoldfastError:
    return InvalidArgumentError("access denied")


@pytest.mark.parametrize("action", ["put", "get", "list", "delete"])
def test_a_target_that_denies_an_action_stops_no_query(ground: Ground, action: str) -> None:
    ground.refuse(ground.folder / "savepoints", action=action, key="one*", error=denied)
    with pytest.raises(InvalidArgumentError, match="access denied"):
        ground.stop()
    assert ground.query.is_running


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, InvalidArgumentError, "state is Spark's own"),
        ({"without": ["dedupe", "alerts"]}, NotFoundError, "no operator with state of this name"),
        # As a command line passes on bytes that are no characters: it was an unreadable manifest, once all was saved.
        (
            {"comment": os.fsdecode(b"caf\xe9")},
            InvalidArgumentError,
            r"comment must be a string of valid characters.*caf\\udce9",
        ),
    ],
    ids=["Spark's own state", "misspelt", "comment"],
)
def test_what_cannot_be_saved_stops_no_query(
    ground: Ground, options: dict[str, Any], error: type[HoldfastError], says: str
) -> None:
    ground.has_state(lambda: [DEDUPLICATION, TOTALS])
    with pytest.raises(error, match=says):
        ground.stop(**options)
    assert ground.query.is_running


def test_other_things_than_a_query_and_its_writer_stop_no_query(ground: Ground) -> None:
    where = ground.folder / "query", ground.folder / "savepoints", "one"
    with pytest.raises(InvalidArgumentError, match=r"the query that start\(\) returned, .*given=totals"):
        creating.stop(ground.spark, "totals", *where)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"a writer that has not been started: out\.writeStream"):
        drain(ground.spark, ground.query, ground.query, *where)  # type: ignore[arg-type]
    assert ground.query.is_running


def test_a_query_without_holdfast_is_told_how_to_migrate(ground: Ground) -> None:
    """Whoever comes from Spark takes `create` for the command that saves a query."""
    ground.has_state(lambda: [DEDUPLICATION])
    with pytest.raises(InvalidArgumentError, match=r"only state of Spark's own operators.*savepoint from-spark"):
        ground.create()


def test_what_can_be_saved_is_stopped_first(ground: Ground) -> None:
    """The check leaves nothing in the target, and the save begins when the query has ended."""
    asked: list[bool] = []

    def steps() -> list[StatefulStep]:
        asked.append(ground.query.is_running)
        if len(asked) == 2:
            raise StateLostError("the save has begun")
        return [TOTALS]

    ground.has_state(steps)
    with pytest.raises(StateLostError, match="the save has begun"):
        ground.stop()
    assert asked == [True, False]
    assert not [path for path in (ground.folder / "savepoints").rglob("*") if path.is_file()]


@pytest.mark.parametrize(("owner", "is_stopped"), [("5d1f", False), ("another", True)])
def test_a_damaged_log_of_its_sink_stops_no_query(ground: Ground, owner: str, is_stopped: bool) -> None:
    """While it runs, its next decision makes the log whole. The log of another query's sink is no matter."""
    with open_storage(str(ground.folder / "durable")) as states:
        sink_logs.begin(states, "out", owner)
        sink_logs.decide(states, "out", owner, 0)
        states.put("_sinks/out/00000000000000000002", b"")
    with pytest.raises(HoldfastError) as raised:
        ground.stop()
    assert ground.query.is_running != is_stopped
    assert ("a sink whose log is damaged" in str(raised.value)) != is_stopped


@pytest.mark.parametrize(("timeout_s", "waits"), [(60, 2), (0, 0)])
def test_a_micro_batch_in_progress_ends_first(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, timeout_s: float, waits: int
) -> None:
    """So no sink has decided what Spark has not committed; but for so long only."""
    waited: list[bool] = []

    def sleep(_milliseconds: int) -> None:
        waited.append(ground.query.is_running)
        if len(waited) == 2:
            ground.move_on(1)

    def steps() -> list[StatefulStep]:
        if not ground.query.is_running:
            raise StateLostError("the save has begun")
        return [TOTALS]

    monkeypatch.setattr(creating.clock, "sleep_ms", sleep)
    ground.has_state(steps)
    with open_storage(str(ground.folder / "query")) as location:
        location.put("offsets/1", b'v1\n{"conf":{}}\n-')
    with pytest.raises(StateLostError, match="the save has begun"):
        ground.stop(timeout_s=timeout_s)
    assert waited == [True] * waits


def purging(ground: Ground, steps: list[StatefulStep], *reads_purged: int) -> list[bool]:
    """Let the running query move on while its operators are read; return whether it ran then, by read."""
    asked: list[bool] = []

    def read() -> list[StatefulStep]:
        asked.append(ground.query.is_running)
        if not ground.query.is_running:
            raise StateLostError("the save has begun")
        ground.move_on(len(asked))
        if len(asked) in reads_purged:
            raise NotFoundError("Spark's state cannot be read: it may have purged the micro-batch meanwhile")
        return steps

    ground.has_state(read)
    return asked


def test_a_query_that_leaves_its_micro_batches_behind_can_be_stopped(ground: Ground) -> None:
    """Stopping it is what helps: it was told to be stopped first."""
    asked = purging(ground, [TOTALS], 1, 2)
    with pytest.raises(StateLostError, match="the save has begun"):
        ground.stop()
    assert asked == [True, True, False]


@pytest.mark.parametrize("reads_purged", [(), (1,)], ids=["read at once", "read the second time"])
def test_what_was_read_of_a_fast_query_counts(ground: Ground, reads_purged: tuple[int, ...]) -> None:
    """A misspelt operator, as well where the micro-batch is gone by the time it is found."""
    purging(ground, [TOTALS], *reads_purged)
    with pytest.raises(NotFoundError, match="no operator with state of this name"):
        ground.stop(without=["alerts"])
    assert ground.query.is_running


def lost(ground: Ground, *, moves_on: bool) -> Callable[[], list[StatefulStep]]:
    """Return what finds an object gone, of a micro-batch that the query has left behind by then, or not."""
    batch_id = 0

    def steps() -> list[StatefulStep]:
        nonlocal batch_id
        batch_id += 1
        if moves_on:
            ground.move_on(batch_id)
        raise StateLostError("the commit is not in the state directory: check spark.holdfast.state.dir")

    return steps


def test_a_query_that_is_too_fast_is_named_as_the_cause(ground: Ground) -> None:
    """The second time, too: not the directory, of which the error of what is gone speaks."""
    ground.has_state(lost(ground, moves_on=True))
    with pytest.raises(UnavailableError, match=r"moved past two micro-batches.*minBatchesToRetain.*batch_id=1") as told:
        ground.create()
    assert isinstance(told.value.__cause__, StateLostError)


@pytest.mark.parametrize("how", ["create", "stop"])
def test_lost_state_is_named_and_stops_no_query(ground: Ground, how: str) -> None:
    ground.has_state(lost(ground, moves_on=False))
    with pytest.raises(StateLostError, match="is not in the state directory"):
        getattr(ground, how)()
    assert ground.query.is_running


@pytest.mark.parametrize(("place", "called"), [("query", "checkpointLocation"), ("durable", "state directory")])
def test_savepoints_do_not_lie_in_a_directory_of_the_querys(ground: Ground, place: str, called: str) -> None:
    """They would go with the query that they should outlive; it keeps running."""
    target = f"file://{ground.folder}/{place}/"
    with pytest.raises(InvalidArgumentError, match=f"this is the query's {called}: choose a separate directory"):
        creating.stop(ground.spark, ground.query, ground.folder / "query", target, "one")
    assert ground.query.is_running
    with pytest.raises(InvalidArgumentError, match=f"this is the query's {called}: choose a separate directory"):
        creating.create(ground.spark, ground.folder / "query", target, "one")
    assert not list(ground.folder.rglob("one"))


KEYS = pa.schema([("user", pa.string()), ("place", pa.int64())])
VALUES = pa.schema([("n", pa.int64())])


def sent(schema: TableSchema, shard: int, rows: list[tuple[object, ...]]) -> pa.RecordBatch:
    """Return rows as Spark sends them: hash, shard, and columns whose names say nothing."""
    columns = [pa.array(column) for column in zip(*rows, strict=True)]
    hashes = [pa.array(np.arange(len(rows), 0, -1)), pa.array([shard] * len(rows), pa.int32())]
    names = ["hash", "shard", *(f"c{i}" for i in range(len(columns)))]
    assert len(columns) == len(schema.key) + len(schema.value)
    return pa.record_batch([*hashes, *columns], names)


def written(folder: Path, tables: dict[str, TableSchema], *batches: pa.RecordBatch) -> list[dict[str, object]]:
    writer = TableWriter(Settings.parse({}, ["memory"]), str(folder), "one", "", "totals", [*tables.values()])
    return [row for batch in writer(iter(batches)) for row in batch.to_pylist()]


def pieces_of(row: dict[str, object]) -> list[Piece]:
    return [Piece.read(piece, "a piece") for piece in json.loads(str(row["pieces"]))]


def test_rows_are_sorted_and_stored_by_shard(tmp_path: Path) -> None:
    table = TableSchema.of("state", KEYS, VALUES)
    batches = [sent(table, shard, [("b", 1, 10), ("a", 2, None)]) for shard in (3, 1)]
    rows = written(tmp_path, {"state": table}, *batches)
    assert [(row["shard"], row["error"]) for row in rows] == [(1, None), (3, None)]
    assert [row["not_null"] for row in rows] == ['["key.user", "key.place"]'] * 2
    with open_storage(str(tmp_path)) as storage:
        (piece,) = pieces_of(rows[0])
        run = read_piece(savepoint_folder(storage, "one"), "totals", piece, table)
    assert run.batch.to_pydict() == {
        "hash": [1, 2],
        "deleted": [False, False],
        "key.user": ["a", "b"],
        "key.place": [2, 1],
        "value.n": [None, 10],
    }


def test_expiring_rows_are_also_stored_by_their_time(tmp_path: Path) -> None:
    tables = dict(expiring_tables("state", KEYS, VALUES))
    never = np.iinfo(np.int64).max
    rows = [("a", 1, 1, 900), ("b", 1, 1, 500), ("c", 1, 1, never), ("d", 1, 1, None)]
    (row,) = written(tmp_path, tables, sent(tables["state"], 0, rows))
    with open_storage(str(tmp_path)) as storage:
        folder = savepoint_folder(storage, "one")
        runs = [read_piece(folder, "totals", piece, tables[piece.table]) for piece in pieces_of(row)]
    assert [len(run) for run in runs] == [4, 2]
    assert (first_due_ms(runs[1]), hashes_of_keys(runs[1]).tolist()) == (500, [3, 4])
    assert runs[1].keys.column(0).to_pylist() == ["b", "a"]
    assert row["earliest_ms"] is None


def test_timers_of_both_kinds_get_their_order(tmp_path: Path) -> None:
    one, many = dict(KeyTimers.tables(KEYS, "EventTimeTimeout")), dict(timer_tables(KEYS, "EventTime"))
    for name, tables in (("one", one), ("many", many)):
        rows = [("a", 1, 900), ("b", 1, 500)]
        (row,) = written(tmp_path / name, tables, sent(tables["timers"], 0, rows))
        assert (row["error"], row["earliest_ms"], len(pieces_of(row))) == (None, 500, 2)


def test_what_is_wrong_names_the_key(tmp_path: Path) -> None:
    table = TableSchema.of("state", KEYS, VALUES)
    hashes = np.array([7, 7, 7])
    rows = pa.table({"c0": ["a", "b", "a"], "c1": [1, 1, 1], "c2": [1, 2, 3]})
    with pytest.raises(InvalidArgumentError, match=r"occurs twice.*user='a', place=1"):
        run_of(table, hashes, rows)
    with pytest.raises(SchemaMismatchError, match="column 'n'"):
        run_of(table, hashes[:1], pa.table({"c0": ["a"], "c1": [1], "c2": ["many"]}))
    timers = dict(KeyTimers.tables(KEYS, "EventTimeTimeout"))
    (row,) = written(tmp_path, timers, sent(timers["timers"], 0, [("a", 1, 5), ("b", 1, None)]))
    assert "a timer has no due time" in str(row["error"])
    assert row["pieces"] is None


def test_how_many_columns_an_operator_groups_by() -> None:
    """Whatever the variables and the columns are called."""
    keys = pa.schema([("entry.user", pa.string()), ("seq", pa.int64())])
    number = StructType().add("n", "integer")
    entry = StructType().add("a", "string").add("b", "string")
    variables = [
        StateVariable("a.b", "value", number),
        StateVariable("l.x", "list", number, ttl_ms=5),
        StateVariable("m", "map", number, entry),
    ]
    tables = {name: table for one in variables for name, table in one.tables(keys).items()}
    with_timers = tables | dict(timer_tables(keys, "EventTime"))
    for name in ("v.a.b", "l.l.x", "m.m"):
        assert grouping_width(with_timers[name], with_timers) == 2
    for name in ("v.a.b", "l.l.x"):
        assert grouping_width(tables[name], tables) == 2
    plain = StateVariable("m", "map", number, entry).tables(KEYS)
    assert grouping_width(plain["m.m"], plain) == 2


def test_what_may_be_null_inside_of_keys_may_differ_from_table_to_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One frame was computed and the other read from a file, say; other types are refused as before."""

    def keyed(data_type: DataType, is_nullable: bool) -> Any:
        return StructField("k", ArrayType(data_type, is_nullable))

    def resolved(frame: Any, _: object) -> Grouping:
        return Grouping([Key(frame, frame, "k")], [0])  # a frame is its only key

    monkeypatch.setattr(writing, "resolve_keys", resolved)
    monkeypatch.setattr(writing, "_state", lambda name, *_, **__: name)
    frames = {"a": keyed(LongType(), False), "b": keyed(LongType(), True)}
    assert writing.tables_of_frames(frames, ["k"], "None") == ["a", "b"]
    with pytest.raises(InvalidArgumentError, match="the same keys"):
        writing.tables_of_frames({**frames, "c": keyed(StringType(), True)}, ["k"], "None")


def test_a_damaged_piece_is_not_copied(tmp_path: Path) -> None:
    table = TableSchema.of("state", KEYS, VALUES)
    (row,) = written(tmp_path, {"state": table}, sent(table, 0, [("a", 1, 1)]))
    (piece,) = pieces_of(row)
    copier = PieceCopier(Settings.parse({}, ["memory"]), str(tmp_path), "one", "two")
    task = pa.table([["totals"], [0], [json.dumps(piece.to_json())]], ["operator", "shard", "piece"])
    path = tmp_path / "one" / piece.key
    good = path.read_bytes()

    def error() -> str | None:
        (found,) = [row["error"] for batch in copier(iter(task.to_batches())) for row in batch.to_pylist()]
        return found

    path.write_bytes(flipped(good, 100))
    assert "CorruptionError" in str(error())
    path.unlink()
    assert "is missing" in str(error())
    assert not (tmp_path / "two").exists()
    path.write_bytes(good)
    assert error() is None
    assert (tmp_path / "two" / piece.key).read_bytes() == good


SHARDS = [("totals", number) for number in range(6)]


@dataclass(frozen=True)
class Storing(ShardTask):
    """Stores an object for each shard; fails at one; counts how many shards are under way."""

    GIVEN: ClassVar[str] = "operator string, shard int"
    RETURNED: ClassVar[str] = "operator string, shard int, error string"

    error: HoldfastError | None = None
    under_way: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)
    meet: Any = field(default_factory=lambda: threading.Barrier(2))

    def work(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[dict[str, Any]]:
        with self.lock:
            self.under_way.append(row["shard"])
            self.most.append(len(self.under_way))
        if self.error is None:
            self.meet.wait(10)  # shards come in twos: a third one would break the rule, a single one the barrier
        elif row["shard"] == 2:
            raise self.error
        opened(self.target).put(f"{row['operator']}-{row['shard']}", b"1")
        with self.lock:
            self.under_way.remove(row["shard"])
        yield {"operator": row["operator"], "shard": row["shard"], "error": None}


@pytest.fixture
def done() -> list[int]:
    return []


@pytest.fixture
def alone(tmp_path: Path, done: list[int]) -> Iterator[OwnProcess]:
    with ThreadPoolExecutor(8) as executor:
        yield OwnProcess(str(tmp_path / "durable"), {}, executor, 2, done.append)


def test_shards_are_worked_on_side_by_side_but_no_more_than_memory_has_room_for(
    alone: OwnProcess, tmp_path: Path, done: list[int]
) -> None:
    task = Storing(alone.settings, str(tmp_path / "target"))
    found = alone.run(SHARDS, task)
    assert [(row["operator"], row["shard"]) for row in found] == SHARDS
    assert max(task.most) == 2
    assert sum(done) == 6
    assert len(list((tmp_path / "target").iterdir())) == 6


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (CorruptionError("a piece is damaged"), "totals, shard 2: a piece is damaged"),
        (UnavailableError("away"), "away"),
    ],
    ids=["damaged", "away"],
)
def test_an_error_is_raised_with_its_shard(alone: OwnProcess, tmp_path: Path, error: HoldfastError, says: str) -> None:
    with pytest.raises(type(error), match=says):
        alone.run(SHARDS, Storing(alone.settings, str(tmp_path / "target"), error))
