"""Claims where a checkpoint location was copied: who is refused, who begins beside another run, who stops."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConflictError, FencedError
from holdfast.snapshotter.ownership.claim_listing import ALIVE_MS
from holdfast.snapshotter.ownership.claims import ENDING_MS, Claims, Tenure
from holdfast.snapshotter.ownership.operator_record import declare_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from tests.unit.snapshotter.ownership.runs import (
    STARTED,
    STARTED_MS,
    age,
    claimant,
    claims_of,
    everything,
    keys,
    record,
    take_of,
)


def copy(storage: ObjectStorage, batch_id: int, alive: Collection[str] = (), **changed: Any) -> Claims:
    """Return the claims of run r2, by default on another machine than r1."""
    place = {"machine": "machine-2", "host": "host-2"} | changed
    return claims_of(storage, claimant(run="r2", batch_id=batch_id, **place), alive)


@pytest.mark.parametrize(
    ("changed", "alive", "batch_id"),
    [
        ({"machine": "machine-1"}, ["1-1"], 9),
        ({}, [], 6),
    ],
    ids=["its executor lives on this machine", "it is further on"],
)
def test_a_copy_is_refused_while_the_other_application_is_at_work(
    storage: ObjectStorage, tmp_path: Path, changed: dict[str, str], alive: list[str], batch_id: int
) -> None:
    """Somebody copied the checkpoint location: one query id. The first run does not notice, the copy is told why."""
    first = claims_of(storage, claimant(batch_id=7))
    held = take_of(first, "r1")
    declare_operator(storage, record())
    before = everything(storage)
    message = (
        r"another application is running.*location was copied.*or wait (30\d|29\d) s.*copy\s+spark.holdfast.state"
        rf".dir.*name='name of q1' started={STARTED} host=host-1 run=r1 batch=7 own_run=r2 own_batch={batch_id}"
    )
    for _ in range(2):
        with pytest.raises(ConflictError, match=message):
            take_of(copy(storage, batch_id, alive, **changed))
        assert everything(storage) == before
    assert first.renew(held) == held
    age(tmp_path, ALIVE_MS + 1000)
    assert take_of(copy(storage, batch_id, alive, **changed)).epoch == 2, "set back on purpose, or idle for long"


@pytest.mark.parametrize(
    "changed",
    [
        {"machine": "machine-1"},
        {"application": "app of r1"},
        {"machine": "machine-1", "process": "1-1"},
    ],
    ids=["its process has ended", "the same application", "one process, one application after another"],
)
def test_after_a_run_that_cannot_live_any_more_the_next_begins_at_once(
    storage: ObjectStorage, changed: dict[str, str]
) -> None:
    """Killed a moment ago, or stopped: also where the query was set back, and its executor is still there."""
    take_of(claims_of(storage, claimant(batch_id=7)), "r1")
    alive = ["1-1"] if len(changed) != 1 or "application" in changed else []
    assert take_of(copy(storage, 3, alive, **changed)) == Tenure(2, STARTED_MS)


def test_of_an_application_one_executor_that_is_known_tells_of_all(storage: ObjectStorage) -> None:
    """Its others may be on machines of which nothing can be told."""
    for n in (1, 2):
        me = claimant(machine=f"machine-{n}", process=f"{n}-{n}")
        take_of(claims_of(storage, me), "r1")
    assert take_of(copy(storage, 0, process="2-2")).epoch == 2


def test_where_nothing_is_known_a_run_begins_beside_and_stops_at_a_sign_of_life(
    storage: ObjectStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On another machine: a restart must not wait, and a copy must not stop what is at work."""
    first = claims_of(storage, claimant(batch_id=7))
    held = take_of(first, "r1")
    second = copy(storage, 8)
    beside = take_of(second)
    assert "'totals' starts beside run r1 of the same query" in caplog.text
    assert (beside.epoch, beside.from_batch_id) == (0, 7)
    assert copy(storage, 30).renew(beside).from_batch_id == 7, "and keeps what both had then"
    age(tmp_path, ENDING_MS + 1000)
    first_on = claims_of(storage, claimant(batch_id=90))
    assert first_on.renew(held) == held, "it is not stopped"
    late = replace(beside, since_ms=(beside.since_ms or 0) - ENDING_MS - 1000)
    for _ in range(2):
        with pytest.raises(
            FencedError, match=r"another application is running.*run=r1 batch=90 own_run=r2 own_batch=8"
        ):
            second.renew(late)
        assert not keys(storage, "r2"), "and disturbs nobody any more"
    assert first_on.renew(held) == held


def test_what_ends_after_its_driver_gives_no_sign_of_life(storage: ObjectStorage, tmp_path: Path) -> None:
    """An executor may begin a task, and renew, before it hears that its driver has gone."""
    held = take_of(claims_of(storage, claimant()), "r1")
    second = copy(storage, 1)
    beside = take_of(second)
    claims_of(storage, claimant()).renew(held)
    assert second.renew(beside) == beside
    age(tmp_path, ALIVE_MS + 1000)
    assert second.renew(beside) == Tenure(2, STARTED_MS), "it has died"
    with pytest.raises(FencedError, match="newer run"):
        claims_of(storage, claimant()).renew(held)


def test_executors_of_a_run_beside_another_take_one_place(storage: ObjectStorage, tmp_path: Path) -> None:
    take_of(claims_of(storage, claimant()), "r1")
    executors = [copy(storage, 1, machine=f"machine-{n}") for n in (2, 3)]
    beside = [take_of(executor) for executor in executors]
    assert [held.epoch for held in beside] == [0, 0]
    age(tmp_path, ALIVE_MS + 1000)
    taken = [executor.renew(held) for executor, held in zip(executors, beside, strict=True)]
    assert taken == [Tenure(2, STARTED_MS)] * 2
    assert take_of(copy(storage, 1, machine="machine-4")) == taken[0]


def test_of_two_copies_one_stays(storage: ObjectStorage, tmp_path: Path) -> None:
    """Both beside a run that has died: the one that began first, and ids decide in the same ms."""
    take_of(claims_of(storage, claimant()), "r1")
    runs = [claims_of(storage, claimant(run=run, machine=run)) for run in ("r2", "r3")]
    held = [take_of(claims, run) for claims, run in zip(runs, ("r2", "r3"), strict=True)]
    age(tmp_path, 2 * ENDING_MS, "*.r1.*")
    early = [replace(h, since_ms=(h.since_ms or 0) - ENDING_MS - 1000) for h in held]
    assert runs[0].renew(early[0]).epoch == 0
    with pytest.raises(FencedError, match="run=r2"):
        runs[1].renew(early[1])
    age(tmp_path, ALIVE_MS + 1000)
    assert runs[0].renew(early[0]).epoch == 2


def test_a_restart_within_its_application_is_not_held_up_by_a_copy(storage: ObjectStorage) -> None:
    """The copy is beside; whoever follows the one whose place it is takes the next one."""
    take_of(claims_of(storage, claimant()), "r1")
    take_of(copy(storage, 5))
    again = claimant(run="r3", application="app of r1", process="1-1")
    assert take_of(claims_of(storage, again), "r3").epoch == 2


def test_requests_of_a_run_beside_another(storage: ObjectStorage) -> None:
    """One list more for each claim, and one put to take the place."""
    take_of(claims_of(storage, claimant()), "r1")
    before = storage.requests
    beside = take_of(copy(storage, 1))
    begun = storage.requests
    assert {n: begun[n] - before[n] for n in ("put", "get", "list", "delete")} == {
        "put": 1, "get": 1, "list": 2, "delete": 0
    }  # fmt: skip
    copy(storage, 2).renew(beside)
    renewed = storage.requests
    assert {n: renewed[n] - begun[n] for n in ("put", "get", "list", "delete")} == {
        "put": 1, "get": 0, "list": 2, "delete": 0
    }  # fmt: skip
