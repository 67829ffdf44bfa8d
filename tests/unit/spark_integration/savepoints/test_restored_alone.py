"""Restores by a process without Spark: a whole query or none, wherever it is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import ConflictError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints import new_query, restoring, tasks
from holdfast.spark_integration.savepoints.changes import Changes
from holdfast.spark_integration.savepoints.restoring import Restorable, restore_with
from holdfast.spark_integration.savepoints.tasks import OwnProcess
from holdfast.spark_integration.spark_state.operators import NotKnownError
from holdfast.spark_integration.spark_state.pointers import stored_steps
from holdfast.spark_integration.spark_state.query_location import QueryLocation
from tests.power import NEVER, Killed, Power
from tests.unit.snapshotter.savepoints.sample import a_savepoint
from tests.unit.spark_integration.spark_state.test_new_state import PINNED

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
        yield OwnProcess.of(str(tmp_path / "state"), {}, executor, 2, lambda _: None)


def pointers(folder: Path) -> dict[int, int | None]:
    with open_storage(str(folder)) as location:
        (step,) = stored_steps(location, QueryLocation(location).batch())
    return {row.shard: row.earliest_timer_ms for rows in step.pointers.values() for row in rows}


def test_a_query_starts_from_a_whole_restore_only(
    tmp_path: Path, alone: OwnProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before any change to a storage, it leaves no ``metadata``; the next try makes the same as the first."""

    def restored(location: str, after: int) -> Power:
        power = Power(after)
        for module in (new_query, restoring, tasks):
            monkeypatch.setattr(module, "open_storage", power.open)
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
    with pytest.raises(NotKnownError):
        restore_with(alone, saved, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["savepoints"]


def test_a_location_that_is_in_use_is_refused_first(tmp_path: Path) -> None:
    """Before a Spark starts, and with nothing written; a state directory is called one."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used/thesis.tex").write_text("years of work")
    with pytest.raises(ConflictError, match=r"must be empty.*holds=thesis\.tex"):
        new_query.require_new_location(str(tmp_path / "used"), {})
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["thesis.tex"]
    new_query.require_new_location(str(tmp_path / "new"), {})
    assert not (tmp_path / "new").exists()
