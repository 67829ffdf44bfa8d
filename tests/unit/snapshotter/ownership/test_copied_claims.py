"""Claims where a checkpoint location was copied: who is refused, who begins beside another run, who stops."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.errors import ConflictError, FencedError
from holdfast.snapshotter.ownership.claims import ALIVE_MS, ENDING_MS, Claims
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from tests.unit.snapshotter.ownership.runs import (
    STARTED,
    age,
    asked,
    begin,
    claimant,
    claims_of,
    everything,
    keys,
    record,
    take,
)


class Run:
    """A run that claims and looks, with a clock of its own."""

    def __init__(
        self,
        storage: ObjectStorage,
        run: str,
        lives: Mapping[str, bool] | None = None,
        now_ms: int | None = None,
        **changed: Any,
    ):
        self._storage, self._run, self._lives, self._changed = storage, run, lives, changed
        self.monotonic_ms = 0
        self.held = self._claims().take(record(run=run), clock.now_ms() if now_ms is None else now_ms)

    def _claims(self) -> Claims:
        me = claimant(run=self._run, **self._changed)
        return claims_of(self._storage, me, self._lives, lambda: self.monotonic_ms)

    def look(self, after_ms: int = 0, **changed: Any) -> None:
        self.monotonic_ms += after_ms
        self._changed |= changed
        self.held = self._claims().renew(self.held)

    @property
    def is_beside(self) -> bool:
        return self.held.since_ms is not None


def claimed(storage: ObjectStorage) -> list[str]:
    """Return the keys of claims, without those of runs beside."""
    return [key for key in keys(storage) if "@" not in key]


def test_copies_that_begin_again_and_again_beside_a_living_run_leave_little(storage: ObjectStorage) -> None:
    """Each look lists what they have put: whoever holds the directory deletes it when it renews."""
    begin(storage)
    original = Run(storage, "r1", batch_id=7)
    for number in range(20):
        assert Run(storage, f"copy {number}", batch_id=7).is_beside
    assert len(keys(storage)) - len(claimed(storage)) == 20
    original.look()
    assert keys(storage) == claimed(storage)


@pytest.mark.parametrize(
    ("lives", "batch_id"),
    [
        ({"driver of r1": True}, 9),
        ({"executor of r1": True}, 9),
        ({"driver of r1": False, "executor of r1": True}, 9),
        ({}, 6),
    ],
    ids=["its driver lives", "its executor lives", "only the process that defined it has gone", "it is further on"],
)
def test_a_copy_is_refused_while_the_other_application_is_at_work(
    storage: ObjectStorage, tmp_path: Path, lives: Mapping[str, bool], batch_id: int
) -> None:
    """Somebody copied the checkpoint location: one query id. The first run does not notice, the copy is told why."""
    begin(storage)
    first = Run(storage, "r1", batch_id=7)
    first.look()
    before = everything(storage)
    message = (
        r"another application is running.*location was copied.*or wait (30\d|29\d) s.*copy\s+spark.holdfast.state"
        rf".dir.*name='name of q1' started={STARTED} host=host-1 run=r1 batch=7 own_run=r2 own_batch={batch_id}"
    )
    for _ in range(2):
        with pytest.raises(ConflictError, match=message):
            Run(storage, "r2", lives, batch_id=batch_id)
        assert everything(storage) == before
    first.look()
    age(tmp_path, ALIVE_MS + 1000)
    copy = Run(storage, "r2", lives, batch_id=batch_id)
    assert (copy.is_beside, copy.held.claim.number) == (False, 4), "set back on purpose, or idle for long"


@pytest.mark.parametrize(
    ("lives", "changed"),
    [
        ({"driver of r1": False, "executor of r1": False}, {}),
        ({"driver of r1": False}, {}),
        ({"driver of r1": True}, {"application": "app of r1"}),
        ({"driver of r1": True}, {"driver": "driver of r1"}),
        ({"executor of r1": True}, {"executor": "executor of r1"}),
    ],
    ids=[
        "it has ended",
        "its driver has, its executors are elsewhere",
        "the same application",
        "one driver's process",
        "one executor, as of a server",
    ],
)
def test_after_a_run_that_cannot_live_any_more_the_next_begins_at_once(
    storage: ObjectStorage, lives: Mapping[str, bool], changed: dict[str, str]
) -> None:
    """Killed a moment ago, or stopped: also where the query was set back, and its processes are still there."""
    take(storage, claimant(batch_id=7))
    held = take(storage, claimant(run="r2", batch_id=3, **changed), lives)
    assert (held.claim.number, held.since_ms) == (2, None)


def test_that_an_executor_has_gone_does_not_tell_that_its_run_has(storage: ObjectStorage) -> None:
    """Executors come and go: a copy on the machine of the one that claimed last must not end the query."""
    take(storage, claimant())
    assert take(storage, claimant(run="r2"), {"executor of r1": False}).since_ms is not None


def test_where_nothing_is_known_a_run_begins_beside_and_stops_at_a_sign_of_life(
    storage: ObjectStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On another machine: a restart must not wait, and a copy must not stop what is at work, nor claim anything."""
    first = Run(storage, "r1", batch_id=7)
    before = everything(storage)
    copy = Run(storage, "r2", batch_id=8)
    assert "'totals' starts beside run r1 of the same query" in caplog.text
    assert copy.held.retained(100, 5000) == 5000, "and deletes nothing"
    copy.look(ALIVE_MS - 1)
    assert copy.is_beside
    told = [key for key in keys(storage) if key not in before]
    assert [key.split("@")[2] for key in told] == ["r2"], "it only says that it is there"
    first.look(batch_id=90)
    age(tmp_path, -ENDING_MS - 1000)
    for _ in range(2):
        with pytest.raises(
            FencedError, match=r"another application is running.*run=r1 batch=90 own_run=r2 own_batch=8"
        ):
            copy.look(2 * ALIVE_MS)
    first.look()
    assert len(claimed(storage)) == 3, "all of them the first one's"


def test_what_ends_after_its_driver_gives_no_sign_of_life(storage: ObjectStorage) -> None:
    """An executor may begin a task, and renew, before it hears that its driver has gone."""
    first, second = Run(storage, "r1"), Run(storage, "r2")
    first.look()
    second.look(ALIVE_MS)
    assert second.is_beside
    second.look(ALIVE_MS - 1)
    assert second.is_beside, "from then on it counts"
    second.look(1)
    assert not second.is_beside, "it has died"
    assert second.held.retained(100, 5000) == 100
    with pytest.raises(FencedError, match="newer run"):
        first.look()


def test_a_run_beside_another_stops_too_where_a_third_one_takes_its_place(storage: ObjectStorage) -> None:
    """The third one is on the machine of the first one, and knows that it has ended."""
    Run(storage, "r1")
    second = Run(storage, "r2")
    assert not Run(storage, "r3", {"driver of r1": False}).is_beside
    with pytest.raises(FencedError, match=r"another application is running.*run=r3"):
        second.look()


def test_executors_of_a_run_beside_another_take_one_place(storage: ObjectStorage) -> None:
    Run(storage, "r1")
    executors = [Run(storage, "r2", executor=f"executor {n}") for n in (2, 3)]
    assert [one.is_beside for one in executors] == [True, True]
    for one in executors:
        one.look(ALIVE_MS)
    assert [(one.is_beside, one.held.claim.number) for one in executors] == [(False, 2)] * 2
    assert Run(storage, "r2", executor="executor 4").held.claim.number == 2


def test_of_two_copies_one_stays(storage: ObjectStorage, tmp_path: Path) -> None:
    """Both began beside a run that has died: the one that did so first."""
    Run(storage, "r1")
    first = Run(storage, "r2")
    age(tmp_path, 1000)
    second = Run(storage, "r3")
    second.look(ALIVE_MS)
    first.look(ALIVE_MS)
    with pytest.raises(FencedError, match="run=r2"):
        second.look(ALIVE_MS)
    first.look()


def test_a_restart_within_its_application_is_not_held_up_by_a_copy(storage: ObjectStorage) -> None:
    """The copy is beside; whoever follows the one whose place it is takes the next one."""
    Run(storage, "r1")
    Run(storage, "r2")
    assert not Run(storage, "r3", driver="driver of r1").is_beside


def test_a_job_that_runs_on_another_machine_each_time_takes_its_place_after_a_while(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    """Else no run of it would ever clean up: each may be the one that comes first, for half an hour."""
    Run(storage, "r1")
    beside = []
    for n in range(2, 64):
        age(tmp_path, 61_000)
        beside.append(Run(storage, f"r{n}").is_beside)
        assert len(keys(storage)) <= 32
    assert beside == [*29 * [True], False] * 2 + [True, True]


def test_requests_of_a_run_beside_another(storage: ObjectStorage) -> None:
    """It says that it is there, looks, and deletes what it said before; to take the place it puts once more."""
    Run(storage, "r1")
    before = storage.requests
    beside = Run(storage, "r2")
    assert asked(storage, before) == {"list": 1, "get": 1, "put": 1}
    before = storage.requests
    Run(storage, "r2", executor="another")
    assert asked(storage, before) == {"list": 1, "get": 1}
    for after_ms, made in (
        (0, {"put": 1, "list": 1, "delete": 1}),
        (ALIVE_MS, {"put": 2, "list": 2, "delete": 2}),  # a request for all, but on a local disk
        (0, {"put": 1, "list": 2}),
    ):
        before = storage.requests
        beside.look(after_ms)
        assert asked(storage, before) == made


def test_who_begins_on_a_third_machine_waits_for_who_is_beside_a_dead_run(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    """However old the dead run's claim is: one that restarts is not to be stopped by a copy."""
    Run(storage, "r1")
    age(tmp_path, ALIVE_MS - 60_000)
    restarted = Run(storage, "r2")
    age(tmp_path, 2 * 60_000)
    copy = Run(storage, "r3")
    assert copy.is_beside, "though the claim is six minutes old"
    restarted.look(2 * 60_000)
    copy.look(ALIVE_MS)
    assert copy.is_beside, "the other one has looked since"
    restarted.look(ALIVE_MS - 2 * 60_000)
    assert not restarted.is_beside
    assert keys(storage) == claimed(storage), "what was said beside is deleted"
    with pytest.raises(FencedError, match=r"another application is running.*run=r2"):
        copy.look()
    restarted.look()


def test_who_is_beside_and_dies_is_followed_by_the_next(storage: ObjectStorage, tmp_path: Path) -> None:
    """It has not looked for five minutes: then the next one takes the number, or whoever begins anew."""
    Run(storage, "r1")
    Run(storage, "r2")
    age(tmp_path, 60_000)
    third = Run(storage, "r3")
    third.look(ALIVE_MS)
    assert third.is_beside
    age(tmp_path, ALIVE_MS - 30_000)
    third.look()
    assert not third.is_beside
    third.look()


@pytest.mark.parametrize(
    ("lives", "changed"),
    [
        ({"driver of r2": False}, {}),
        ({}, {"application": "app of r2"}),
        ({}, {"driver": "driver of r2"}),
    ],
    ids=["its driver has ended", "the same application", "one driver's process"],
)
def test_a_restart_of_who_is_beside_has_its_place(
    storage: ObjectStorage, tmp_path: Path, lives: Mapping[str, bool], changed: dict[str, str]
) -> None:
    """Also where a copy began between the two."""
    Run(storage, "r1")
    Run(storage, "r2")
    age(tmp_path, 60_000)
    copy = Run(storage, "r3")
    restarted = Run(storage, "r4", lives, **changed)
    assert restarted.is_beside
    copy.look(ALIVE_MS)
    assert copy.is_beside
    restarted.look(ALIVE_MS)
    assert not restarted.is_beside


def test_an_executor_that_joins_a_run_beside_has_its_place(storage: ObjectStorage, tmp_path: Path) -> None:
    """So a copy that began meanwhile does not come between."""
    Run(storage, "r1")
    age(tmp_path, 2 * 60_000)
    Run(storage, "r2")
    age(tmp_path, ALIVE_MS - 60_000)
    assert Run(storage, "r3").is_beside
    late = Run(storage, "r2", executor="another")
    assert not late.is_beside, "the claim is six minutes old, and nobody else came before"


def test_what_only_looks_like_one_beside_counts_for_nothing(storage: ObjectStorage, tmp_path: Path) -> None:
    """Names that we would not give keep nobody out, and stay."""
    Run(storage, "r1")
    age(tmp_path, ALIVE_MS + 1000)
    zero, told = "0" * 17, "5f0c1d2e5f0c1d2e"
    hostile = (
        "beside",
        f"beside@-1@r9@@@{told}",
        f"beside@{zero}@@@@{told}",
        f"beside@{zero}@r9@@@",
        f"beside@{zero}@r9@@@{told}@",
        f"beside@{zero}@r9@..@@{told}",
        f"beside@{zero}@r 9@@@{told}",
        f"beside@{zero}@%72@@@{told}",
    )
    for name in hostile:
        storage.put(f"totals/claims/{name}", b"?")
    assert not Run(storage, "r2").is_beside
    assert len(keys(storage)) == len(hostile) + 2


def test_who_began_long_ago_and_is_seen_in_the_future_counts_for_nothing(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    """A copied object may have any time."""
    Run(storage, "r1")
    age(tmp_path, ALIVE_MS + 1000)
    storage.put("totals/claims/beside@" + "0" * 17 + "@r9@@@5f0c1d2e5f0c1d2e", b"?")
    path = next((tmp_path / "totals/claims").glob("beside*"))
    later = path.stat().st_mtime + ALIVE_MS / 1000 + 60
    os.utime(path, (later, later))
    assert not Run(storage, "r2").is_beside


def test_who_comes_later_ranks_later_though_the_stores_clock_has_seconds_only(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    """A copy that begins within the same second, and looks first, does not take the place of a restart."""
    Run(storage, "r1")
    now_ms = clock.now_ms() // 1000 * 1000
    restarted, copy = Run(storage, "r2", now_ms=now_ms), Run(storage, "r3", now_ms=now_ms)
    copy.look(ALIVE_MS)
    assert copy.is_beside
    restarted.look(ALIVE_MS)
    assert not restarted.is_beside


def test_who_says_to_begin_at_the_end_of_time_counts_for_nothing(storage: ObjectStorage) -> None:
    """Nobody could come after it."""
    Run(storage, "r1")
    storage.put("totals/claims/beside@" + "9" * 17 + "@r9@@@5f0c1d2e5f0c1d2e", b"?")
    second = Run(storage, "r2")
    second.look(ALIVE_MS)
    assert not second.is_beside
