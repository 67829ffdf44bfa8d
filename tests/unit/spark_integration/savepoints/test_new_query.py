"""New queries and restores without Spark: a whole query or none, and what a stopped attempt left is deleted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from holdfast.settings import Settings
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.queries import QueryOrigin, declare_origin
from holdfast.snapshotter.savepoints.manifest import KEY, SavedOperator, Savepoint, ShardTimes, read_manifest, unnamed
from holdfast.snapshotter.savepoints.savepoints import read_savepoint, savepoint_folder, write_pieces
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration import copies
from holdfast.spark_integration.processor.state.variable_tables import find_shown
from holdfast.spark_integration.savepoints import new_query as module
from holdfast.spark_integration.savepoints import restoring, stub, tasks
from holdfast.spark_integration.savepoints.changes import Changes, plans_of
from holdfast.spark_integration.savepoints.difference import Side, TableDifference, difference, facts_that_differ
from holdfast.spark_integration.savepoints.new_query import NewQuery, new_query
from holdfast.spark_integration.savepoints.restoring import Restorable, restore_with
from holdfast.spark_integration.savepoints.tasks import OwnProcess
from holdfast.spark_integration.spark_state.pointers import NeedsSparkError, stored_steps
from holdfast.spark_integration.spark_state.query_location import QueryLocation
from holdfast.spark_integration.timers import timers_schema
from holdfast.spark_integration.transport.routes import shards_of
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.power import NEVER, Killed, Power
from tests.unit.snapshotter.savepoints.conftest import a_savepoint
from tests.unit.spark_integration.spark_state.test_query_location import PINNED

TABLE = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))
RECORD = OperatorRecord("totals", "original", "def-1", "run-1", 2, {"state": TABLE}, 100)


def new_at(folder: Path, location: str = "location", state_dir: str = "green") -> AbstractContextManager[NewQuery]:
    """Begin a query in a location, whose state is in a directory beside it."""
    return new_query(Settings.parse({"spark.holdfast.state.dir": str(folder / state_dir)}), {}, folder / location)


def fill(new: NewQuery) -> None:
    """Write the origin, an operator and its state, and the positions: all but what ends the query."""
    new.fill(QueryOrigin(new.query_id, new.query_id, "original", 7, {"totals": new.query_id}))
    declare_operator(new.storage, replace(RECORD, query_id=new.query_id))
    new.storage.put("totals/shard-0000/commits/1-aa", b"state")
    new.location.put("offsets/0", b"")


@pytest.mark.parametrize("whole", ["s3://bucket", "s3a://bucket/", "hdfs://namenode:8020", "file:///", "/"])
def test_a_whole_bucket_is_no_location(whole: str, tmp_path: Path) -> None:
    """A stub beside it would be in another bucket."""
    refused = pytest.raises(InvalidArgumentError, match="whole bucket")
    with refused, new_query(Settings.parse({"spark.holdfast.state.dir": str(tmp_path)}), {}, whole):
        pass


def stopped(folder: Path, query_id: str) -> None:
    """Leave what a clone leaves that is killed once it has declared itself."""
    with open_storage(str(folder / query_id)) as location, open_storage(str(folder / "green")) as storage:
        module.begin(location, query_id)
        declare_origin(storage, QueryOrigin(query_id, "original", "original", 7, {"totals": "original"}))


def filled(storage: ObjectStorage) -> None:
    declare_operator(storage, RECORD)
    storage.put("totals/shard-0000/commits/1-aa", b"state")


def repeat(folder: Path, query_id: str) -> set[str]:
    """Begin again in the location of a stopped clone; return what the state directory holds then."""
    with new_at(folder, query_id), open_storage(str(folder / "green")) as storage:
        return {info.key for info in storage.list("")}


def test_a_killed_clone_that_is_repeated_leaves_what_another_one_filled(tmp_path: Path) -> None:
    """Both records name the original: only the clone that had taken the state directory may clear it."""
    stopped(tmp_path, "b")
    with pytest.raises(ConflictError, match="was interrupted"):
        stopped(tmp_path, "a")
    with open_storage(str(tmp_path / "green")) as storage:
        filled(storage)
    theirs = {"_queries/b", "_queries/original.fills", "totals/operator", "totals/shard-0000/commits/1-aa"}
    assert repeat(tmp_path, "a") == theirs


def test_a_killed_clone_that_is_repeated_clears_what_it_filled(tmp_path: Path) -> None:
    stopped(tmp_path, "a")
    with open_storage(str(tmp_path / "green")) as storage:
        filled(storage)
        storage.put("other/operator", b"of another query")
    assert repeat(tmp_path, "a") == {"other/operator"}


def test_a_state_directory_is_no_place_for_a_query(tmp_path: Path) -> None:
    """Swapped, and one directory for both."""
    with open_storage(str(tmp_path / "green")) as storage:
        filled(storage)
    for location, said in (("green", "this is a state directory"), ("other", "must not be its checkpointLocation")):
        with pytest.raises(InvalidArgumentError, match=said), new_at(tmp_path, location, "other"):
            pass


def begun(folder: Path, error: BaseException, *faults: Fault) -> list[str]:
    """Make a query up to its last step, and fail; return what was deleted, in order."""
    deleted: list[str] = []

    class Watched(FaultyStorage):
        def delete(self, keys: Iterable[str]) -> None:
            wanted = list(keys)
            super().delete(wanted)
            deleted.extend(wanted)

    def opened(url: str, options: Mapping[str, object]) -> ObjectStorage:
        return Watched(open_storage(url, options), faults)

    def make() -> None:
        with new_at(folder) as new:
            fill(new)
            new.location.put("metadata", b"")
            with open_storage(new.stub_url) as stub:
                stub.put("offsets/0", b"")
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open_storage", opened)
        with pytest.raises(type(error)):
            make()
    return deleted


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def failed_job() -> UnavailableError:
    """Return what becomes of a job of Spark's that has failed."""
    error = UnavailableError("tasks of the savepoint failed")
    error.__cause__ = PySparkException("Job aborted due to stage failure")
    return error


@pytest.mark.parametrize("error", [UnavailableError("the storage"), CorruptionError("a piece")], ids=repr)
def test_what_fails_leaves_nothing(tmp_path: Path, error: HoldfastError) -> None:
    deleted = begun(tmp_path, error)
    assert left(tmp_path) == []
    assert deleted.index("metadata") < deleted.index("totals/shard-0000/commits/1-aa")


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(1), PySparkException("a job failed"), failed_job()],
    ids=["Ctrl-C", "exit", "Spark's own", "a failed job"],
)
def test_what_leaves_tasks_keeps_what_lets_the_next_attempt_clean_up(
    tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark waits for no task then: what one writes later belongs to a record, and goes with it. No query starts."""
    deleted = begun(tmp_path, error)
    assert deleted == ["metadata"]
    told = "the tasks have ended, run the same command again with the checkpoint location"
    assert f"{told} {tmp_path / 'location'}" in caplog.text
    with open_storage(str(tmp_path / "green")) as storage:
        storage.put("totals/shard-0001/commits/1-bb", b"state of a task that went on")
    with new_at(tmp_path) as new:
        assert left(tmp_path) == [f"location/holdfast-restoring-{new.query_id}"]


def test_ctrl_c_after_all_is_done_keeps_the_query(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> None:
        with new_at(tmp_path) as new:
            new.finish()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make()
    assert left(tmp_path) == ["location/metadata"]
    assert not caplog.text


@pytest.mark.parametrize(
    ("error", "key"),
    [(CorruptionError("a piece"), key) for key in ("metadata", "totals/*", "offsets/*")]
    + [(KeyboardInterrupt(), "metadata")],
    ids=repr,
)
def test_a_clean_up_that_fails_says_what_deletes_the_rest(
    tmp_path: Path, error: BaseException, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The location can be started only while all of it is there; else the next attempt deletes it."""
    begun(tmp_path, error, Fault("fail", "delete", key, times=None))
    assert f"run the same command again with the checkpoint location {tmp_path / 'location'}" in caplog.text
    there = left(tmp_path)
    again = new_at(tmp_path)
    if "location/metadata" in there:
        assert {"green/totals/operator", "green/totals/shard-0000/commits/1-aa", "location/offsets/0"} <= {*there}
        with pytest.raises(ConflictError, match="must be empty"):
            again.__enter__()
    else:
        with again as new:
            assert left(tmp_path) == [f"location/holdfast-restoring-{new.query_id}"]


def finished(folder: Path, *faults: Fault) -> None:
    """Make a query whole, with faults of its location."""

    def opened(url: str, options: Mapping[str, object]) -> ObjectStorage:
        storage = open_storage(url, options)
        return FaultyStorage(storage, faults) if url == str(folder / "location") else storage

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open_storage", opened)
        with new_at(folder) as new:
            fill(new)
            new.finish()


WHOLE = {"green/totals/operator", "green/totals/shard-0000/commits/1-aa", "location/metadata", "location/offsets/0"}


@pytest.mark.parametrize("lands", [True, False])
def test_an_unknown_last_step_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, lands: bool) -> None:
    """Its put may land later: then Spark starts the query, whose positions and state must be there."""
    with pytest.raises(UnavailableError):
        finished(tmp_path, Fault("fail", "put", "metadata"))
    if lands:
        (tmp_path / "location/metadata").write_bytes(b"{}")
        assert {*left(tmp_path)} >= WHOLE
    else:
        finished(tmp_path)
        assert len({*left(tmp_path)} - WHOLE) == 2, "what the query began with, and where it is"
    assert "if there is a file metadata, the query is complete and can be started; else run the same" in caplog.text
    assert f"the checkpoint location {tmp_path / 'location'}" in caplog.text


def test_of_two_that_fill_one_directory_the_record_decides(tmp_path: Path) -> None:
    """Each has found it free: the second one is told, and clears what is its own."""
    with open_storage(str(tmp_path / "green")) as storage:
        filled(storage)

    def fill_both() -> None:
        with new_at(tmp_path) as new:
            new.fill(QueryOrigin(new.query_id, "other", "other", 7, {"pairs": "other", "totals": "other"}))
            for name in ("pairs", "totals"):
                declare_operator(new.storage, replace(RECORD, operator=name, query_id="other"))

    with pytest.raises(ConflictError, match="holds the state of another query"):
        fill_both()
    assert left(tmp_path) == ["green/totals/operator", "green/totals/shard-0000/commits/1-aa"]


STATE = TableSchema.of("state", pa.schema([("user", pa.int64())]), pa.schema([("n", pa.list_(pa.float64()))]))
HASHES = np.random.default_rng(1).integers(0, 2**64, 500, np.uint64, endpoint=False)
VALUES: dict[int, list[float] | None] = {
    user: [user, float("nan")] if user % 7 else None for user in range(len(HASHES))
}


def write(folder: Path, name: str, values: dict[int, list[float] | None], shards: int, schema: TableSchema) -> Side:
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
        "different queries: 5d1f, other",
        "watermark: 1000, 5 ms",
        'source 0: {"logOffset":3}, {"logOffset":9}',
    ]


@pytest.fixture
def quiet() -> Savepoint:
    """Return a savepoint of two operators, the second of which had had no rows."""
    with open_storage("memory://quiet") as target:
        made = a_savepoint(target)
    name = unnamed(1, {of.name for of in made.operators})
    alerts = SavedOperator(name, 1, "applyInPandasWithState", False, 4, {}, {}, True, {}, (), ())
    return read_manifest(replace(made, operators=(*made.operators, alerts), left_out=()).encode(), "one", "here")


def planned(savepoint: Savepoint, **changes: Any) -> dict[str, bool]:
    return {plan.name: plan.is_reset for plan in plans_of(savepoint, Changes(**changes))}


def test_an_operator_without_a_name_is_given_one(quiet: Savepoint) -> None:
    """It begins without state; the other one, which may be renamed too, goes on with its own."""
    assert planned(quiet, rename={"unnamed-1": "alerts"}) == {"totals": False, "alerts": True}
    assert planned(quiet, rename={"unnamed-1": "totals", "totals": "alerts"}) == {"alerts": False, "totals": True}
    assert planned(quiet, skip=frozenset({"unnamed-1"})) == {"totals": False}


def test_a_name_is_asked_for(quiet: Savepoint) -> None:
    """Or the check for misspelt names would have to let any operator pass."""
    for changes in ({}, {"rename": {"totals": "alerts"}}, {"reset": frozenset({"unnamed-1"})}):
        with pytest.raises(InvalidArgumentError, match=r"--rename unnamed-1=alerts.*operators=unnamed-1"):
            plans_of(quiet, Changes(**changes))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="its own name"):
        planned(quiet, rename={"unnamed-1": "totals"})
    with pytest.raises(NotFoundError, match=r"no operator of this name to rename.*operators='totals, unnamed-1'"):
        planned(quiet, rename={"unnamed-0": "alerts"})


def test_an_operator_without_tables_is_no_choice(quiet: Savepoint) -> None:
    """Who reads or edits the one operator that has tables need not name it."""
    assert quiet.find_operator(None).name == "totals"
    only = replace(quiet, operators=quiet.operators[1:])
    assert only.find_operator(None).name == "unnamed-1"
    with pytest.raises(NotFoundError, match="it has received no rows"):
        find_shown(only.operators[0].tables, "state")


def test_an_index_is_no_choice_and_the_error_says_so(quiet: Savepoint) -> None:
    """It has the keys of another table in the order of their times; users read that one."""
    tables = quiet.operators[0].tables
    for name in ("timers_by_due", *(f"{table}.expiring" for table in tables)):
        with pytest.raises(NotFoundError, match=rf"is an index of .*choose that table, table={name} tables="):
            find_shown(tables, name)
    with pytest.raises(NotFoundError, match="no such table: choose one"):
        find_shown(tables, "others.expiring")


def test_an_operator_that_is_called_so_has_its_name() -> None:
    """Of two that would have one name, that without rows gives way."""
    with open_storage("memory://named") as target:
        (named,) = a_savepoint(target).operators
    assert not replace(named, name="unnamed-1").is_unnamed
    assert unnamed(1, {"unnamed-1", "unnamed-1-"}) == "unnamed-1--"


def test_an_operator_with_more_shards_than_any_has_is_refused(quiet: Savepoint) -> None:
    """Nothing could open it. One that begins without state has as many as the query says."""
    totals, alerts = quiet.operators
    many = replace(quiet, operators=(replace(totals, shards=70_000), replace(alerts, shards=70_000)))
    named = {"rename": {"unnamed-1": "alerts"}}
    with pytest.raises(InvalidArgumentError, match=r"at most 65536 shards.*set shards.*70000"):
        planned(many, **named)
    assert planned(many, **named, shards=4) == {"totals": False, "alerts": True}
    assert planned(many, **named, reset=frozenset({"totals"})) == {"totals": True, "alerts": True}


SKIPPED = frozenset({"dedupe"})


def a_restorable(folder: Path, pinned: dict[str, str], changes: Changes | None = None) -> Restorable:
    target = str(folder / "savepoints")
    with open_storage(target) as savepoints:
        made = a_savepoint(savepoints)
    batch = json.dumps({"batchWatermarkMs": 900, "batchTimestampMs": 5, "conf": pinned})
    read = Restorable.read(target, "one", {}, changes or Changes(skip=SKIPPED))
    return replace(read, savepoint=replace(made, query=replace(made.query, batch=batch)), conf=pinned)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[OwnProcess]:
    with ThreadPoolExecutor(4) as executor:
        yield OwnProcess(str(tmp_path / "state"), {}, executor, 2, lambda _: None)


def pointers(folder: Path) -> dict[int, int | None]:
    with open_storage(str(folder)) as location:
        (step,) = stored_steps(location, QueryLocation(location).batch())
    rows = [row for of in step.pointers.values() for rows in of.values() for row in rows]
    return {row.shard: row.earliest_timer_ms for row in rows}


def test_a_query_starts_from_whole_restores(tmp_path: Path, alone: OwnProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped before any change to a storage, it leaves no ``metadata``; the next try makes the same as the first."""

    def restored(location: str, after: int) -> Power:
        power = Power(after)
        for opens in (module, restoring, tasks):
            monkeypatch.setattr(opens, "open_storage", power.open)
        restore_with(alone, saved, tmp_path / location)
        return power

    saved = a_restorable(tmp_path, PINNED | {"spark.sql.shuffle.partitions": "3"})
    whole = restored("first", NEVER)
    for after in whole.stops():
        with pytest.raises(Killed):
            restored("again", after)
        assert not (tmp_path / "again/metadata").exists()
    restored("again", NEVER)
    assert {path.name for path in (tmp_path / "again").iterdir()} == {
        *("metadata", "offsets", "commits", "sources", "state")
    }
    assert pointers(tmp_path / "again") == pointers(tmp_path / "first") == {0: None}


def test_the_logs_of_a_restored_query_say_what_its_state_is(tmp_path: Path, alone: OwnProcess) -> None:
    """Positions, watermark and pinned settings; and in which form rows stand, which an older Spark has not pinned."""
    saved = a_restorable(tmp_path, PINNED)
    query_id = restore_with(alone, saved, tmp_path / "new")
    with open_storage(str(tmp_path / "new")) as location:
        query = QueryLocation(location)
        batch = query.batch()
        assert (query.query_id(), batch.batch_id, batch.next_watermark_ms) == (query_id, 0, 1000)
    assert batch.sources == (("0", '{"logOffset":3}'), ("1", "-"))
    logged = json.loads(batch.batch)
    assert (logged["batchWatermarkMs"], logged["batchTimestampMs"]) == (900, 5)
    plain = {"rowChecksum.enabled": "false", "encodingFormat": "unsaferow"}
    assert logged["conf"] == PINNED | {f"spark.sql.streaming.stateStore.{name}": is_so for name, is_so in plain.items()}
    assert (tmp_path / "new/sources/0/3").read_bytes().startswith(b"v1")


def test_what_only_spark_writes_is_said_before_anything_is_written(tmp_path: Path, alone: OwnProcess) -> None:
    saved = a_restorable(tmp_path, {})
    with pytest.raises(NeedsSparkError):
        restore_with(alone, saved, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["savepoints"]


def test_a_location_that_is_in_use_is_refused_first(tmp_path: Path) -> None:
    """Before a Spark starts, and with nothing written; a state directory is called one."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used/thesis.tex").write_text("years of work")
    with pytest.raises(ConflictError, match=r"must be empty.*holds=thesis\.tex"):
        module.require_new_location(str(tmp_path / "used"), {})
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["thesis.tex"]
    module.require_new_location(str(tmp_path / "new"), {})
    assert not (tmp_path / "new").exists()


SPARK: Any = SimpleNamespace(conf=SimpleNamespace(getAll={}))


def committed(location: ObjectStorage, batch_id: int) -> None:
    location.put(f"offsets/{batch_id}", b'v1\n{"conf":{}}\n-')
    location.put(f"commits/{batch_id}", b'v1\n{"nextBatchWatermarkMs":0}')


CLONE, RESCALE, RESTORE = "clone", "rescale", "restore"


@pytest.mark.parametrize("what", [CLONE, RESCALE, RESTORE])
def test_before_the_next_part_of_a_new_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Another attempt takes its location for one that was left, while tasks or the stub run.

    A clone does not take it back, as well where the original has moved on meanwhile.
    """
    location = tmp_path / "location"
    begun: list[object] = []
    went_on: list[object] = []

    def taken(*arguments: object) -> None:
        begun.append(arguments)
        with open_storage(str(location)) as taking:
            module.forget(taking, module.begin(taking, "other"))
        with open_storage(str(tmp_path / "query")) as original:
            original.delete(["offsets/0", "commits/0"])
            committed(original, 1)

    def by_stub(_: object, __: object, new: NewQuery, operators: object) -> None:
        taken()
        new.require()

    def go_on(*arguments: object, **_: object) -> None:
        went_on.append(arguments)

    with open_storage(str(tmp_path / "savepoints")) as target:
        a_savepoint(target)
    with open_storage(str(tmp_path / "query")) as query:
        query.put("metadata", b'{"id":"5d1f"}')
        committed(query, 0)
    monkeypatch.setattr(copies, "stored_steps", lambda *_: [])
    monkeypatch.setattr(copies, "_copy_operators", taken)
    monkeypatch.setattr(copies, "copy_location", go_on)
    monkeypatch.setattr(copies, "save", taken)
    monkeypatch.setattr(copies, "restore_into", go_on)
    monkeypatch.setattr(restoring, "plans_of", lambda *_: [])
    monkeypatch.setattr(stub, "state_by_stub", by_stub)
    monkeypatch.setattr(restoring, "seed", go_on)
    spark: Any = SimpleNamespace(conf=SimpleNamespace(getAll={"spark.holdfast.state.dir": str(tmp_path / "durable")}))
    work: dict[str, Callable[[], object]] = {
        CLONE: lambda: copies.clone(spark, tmp_path / "query", location, to_state_dir=tmp_path / "green"),
        RESCALE: lambda: copies.rescale(spark, tmp_path / "query", location, shards=3),
        RESTORE: lambda: restoring.restore(spark, tmp_path / "savepoints", "one", location),
    }
    with pytest.raises(ConflictError, match="another command fills this checkpoint location"):
        work[what]()
    assert (len(begun), went_on) == (1, [])
    assert [path.name for path in location.iterdir() if path.is_file()] == ["holdfast-restoring-other"]
