"""Savepoints of a query that runs: what must fail does so before it is stopped, and says whose fault it is.

Spark's own part, its state and the query, is played: all that counts here is what is asked, and when.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints import creating, tasks
from holdfast.spark_integration.spark_state.pointers import StatefulStep
from holdfast.testing.faulty_storage import Fault, FaultyStorage

DEDUPLICATION = StatefulStep(0, "dedupe", is_ours=False, has_timeout=False, pointers={})
TOTALS = StatefulStep(1, "applyInPandasWithState", is_ours=True, has_timeout=False, pointers={"totals": []})


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
        self._monkeypatch.setattr(tasks, "stored_steps", lambda *_: steps())

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


def test_state_that_cannot_be_read_stops_no_query(ground: Ground) -> None:
    ground.has_state(lost(ground, moves_on=False))
    with pytest.raises(StateLostError, match="is not in the state directory"):
        ground.stop()
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


def test_state_that_is_lost_is_named_as_such(ground: Ground) -> None:
    ground.has_state(lost(ground, moves_on=False))
    with pytest.raises(StateLostError, match="is not in the state directory"):
        ground.create()


@pytest.mark.parametrize(("place", "called"), [("query", "checkpointLocation"), ("durable", "state directory")])
def test_savepoints_do_not_lie_in_a_directory_of_the_querys(ground: Ground, place: str, called: str) -> None:
    """They would go with the query that they should outlive; it keeps running."""
    target = f"file://{ground.folder}/{place}/"
    with pytest.raises(InvalidArgumentError, match=f"this is the query's {called}: choose another directory"):
        creating.stop(ground.spark, ground.query, ground.folder / "query", target, "one")
    assert ground.query.is_running
    with pytest.raises(InvalidArgumentError, match=f"this is the query's {called}: choose another directory"):
        creating.create(ground.spark, ground.folder / "query", target, "one")
    assert not list(ground.folder.rglob("one"))
