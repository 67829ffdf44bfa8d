"""What a new checkpoint location is filled with: the settings that its state was made with, and nothing by halves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConflictError, CorruptionError, InvalidArgumentError
from holdfast.snapshotter.savepoints.manifest import PlannedBatch, SavedQuery, SavedSource
from holdfast.snapshotter.savepoints.savepoints import savepoint_folder
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints.new_query import begin, finish, forget
from holdfast.spark_integration.savepoints.seeding import (
    moved,
    partitions_of,
    pinned,
    seed,
    state_of_stub,
)
from holdfast.spark_integration.spark_state.query_location import LoggedBatch
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.model.shard_history import TimedStorage

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
def test_paths_of_the_states_own_files_are_those_of_the_new_place(
    key: str, before: str, location: str, after: str
) -> None:
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
    """An operator without rows is saved with as many: no manifest may name what no reader takes."""

    def logged(conf: Mapping[str, object]) -> LoggedBatch:
        return LoggedBatch(4, "v1", json.dumps({"conf": conf}), (), 0)

    assert [partitions_of(logged(conf)) for conf in (PINNED, {})] == [2, 1]
    for given in ("many", "0", "-1", "3000000000", None, [2], "9" * 5000):
        with pytest.raises(CorruptionError, match="an impossible number of partitions"):
            partitions_of(logged({"spark.sql.shuffle.partitions": given}))


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
    with pytest.raises(ConflictError, match="another restore writes this checkpoint location"):
        finish(FaultyStorage(location, [Fault("delay", "put", "metadata", wait=second)]), "first")
    assert location.objects["metadata"][0] == b'{"id":"second"}'


def test_a_mark_that_cannot_be_deleted_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """The query is whole: who is told of a failure would delete it."""
    location = TimedStorage()
    begin(location, "first")
    finish(FaultyStorage(location, [Fault("fail", "delete")]), "first")
    assert sorted(location.objects) == ["holdfast-restoring-first", "metadata"]
    assert "the query is whole" in caplog.text
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
