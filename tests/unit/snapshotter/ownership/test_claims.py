"""Who may work on an operator's directory: other queries, later runs, late executors, and copied checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.errors import ConflictError, CorruptionError, FencedError, UnavailableError
from holdfast.snapshotter.ownership.claims import ALIVE_MS, ENDING_MS, KEPT_MS, Claims, find_claim, retained_versions
from holdfast.snapshotter.ownership.operator_record import declare_operator, find_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.unit.snapshotter.ownership.conftest import (
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
    take_after,
)

FIRST = "totals/claims/00000000000000000001"


def runs(storage: ObjectStorage) -> list[str]:
    claim = find_claim(storage, "totals")
    return [run.run_id for run in claim.runs] if claim else []


def test_a_claim_says_who_since_when_and_how_far(storage: ObjectStorage) -> None:
    take(storage)
    assert keys(storage) == [FIRST]
    header = stored_file.decode(storage.get(FIRST), source=FIRST, kind="claim").header
    assert header == asdict(replace(claimant(), number=1)) | {"runs": [asdict(claimant().holder)]}
    assert find_operator(storage, "totals") is None, "a record says that there is state"


def test_another_query_is_refused_by_name_and_start_of_the_first(storage: ObjectStorage) -> None:
    take(storage)
    before = everything(storage)
    message = rf"another query uses this directory.*owner=q1 name='name of q1' started={STARTED} host=host-1 query=q2"
    with pytest.raises(ConflictError, match=message):
        take(storage, claimant("q2", "r2"))
    assert everything(storage) == before


def test_the_state_of_another_query_is_not_taken_however_old(storage: ObjectStorage, tmp_path: Path) -> None:
    """The record may have been written since the task looked for one: state may travel in the query's pointers."""
    begin(storage)
    age(tmp_path, ALIVE_MS + 1000)
    before = everything(storage)
    with pytest.raises(ConflictError, match=r"state of another query.*owner=q1"):
        take(storage, claimant("q2", "r2"))
    assert everything(storage) == before
    take(storage, claimant(run="r3"))


@pytest.mark.parametrize(("age_ms", "lives"), [(ALIVE_MS - 20_000, True), (ALIVE_MS + 20_000, False)])
def test_a_claim_lives_for_five_minutes_by_the_clock_of_the_store(
    storage: ObjectStorage, tmp_path: Path, age_ms: int, lives: bool
) -> None:
    """Which is the only one that is asked: when runs say that they began is years off."""
    take(storage)
    age(tmp_path, age_ms)
    if lives:
        with pytest.raises(ConflictError, match="uses this directory"):
            take(storage, claimant("q2", "r2"))
    else:
        assert take(storage, claimant("q2", "r2")).claim.number == 2


def test_the_one_that_takes_the_place_of_the_dead_is_the_owner(storage: ObjectStorage, tmp_path: Path) -> None:
    """Also if the dead was only slow: nothing of it was stored, and it finds out when it looks."""
    slow = claims_of(storage, claimant())
    held = slow.take(record(), clock.now_ms())
    age(tmp_path, ALIVE_MS + 1000)
    begin(storage, "q2", "r2")
    with pytest.raises(FencedError, match=r"another query uses this directory.*owner=q2"):
        slow.renew(held)
    with pytest.raises(ConflictError, match="state of another query"):
        declare_operator(storage, record())


def test_a_claim_of_another_query_does_not_keep_the_owner_out(storage: ObjectStorage) -> None:
    """The other one looked for the record a moment before there was one: the record decides whose the directory is."""
    take(storage, claimant("q2", "r2"))
    declare_operator(storage, record())
    assert take(storage).claim.number == 2


def test_a_new_run_begins_at_once_and_the_old_one_stops(storage: ObjectStorage) -> None:
    old = claims_of(storage, claimant())
    first = old.take(record(), clock.now_ms())
    second = take_after(storage, "r0", "r1")
    assert (first.claim.number, second.claim.number) == (1, 2)
    for call in (lambda: old.renew(first), lambda: take(storage)):
        with pytest.raises(FencedError, match=rf"newer run.*run=r1 newer_run=r0 newer_started={STARTED}"):
            call()
    assert claims_of(storage, claimant(run="r0")).renew(second).claim.number == 3
    assert take_after(storage, "r5", "r0").claim.number == 4


def test_one_executor_of_a_run_renews_for_all(storage: ObjectStorage) -> None:
    """So the number of requests does not grow with theirs; when a run began stays."""
    executors = [claims_of(storage, claimant(executor=f"executor {n}", started_ms=n)) for n in range(3)]
    held = [claims.take(record(), clock.now_ms()) for claims in executors]
    held[0] = executors[0].renew(held[0])
    held[1:] = [claims.renew(tenure) for claims, tenure in zip(executors[1:], held[1:], strict=True)]
    assert [tenure.claim.number for tenure in held] == [2, 2, 2]
    assert executors[2].renew(held[2]).claim.number == 3, "whoever finds that nobody has"
    assert find_claim(storage, "totals").holder.started_ms == 0  # type: ignore[union-attr]


def test_executors_that_renew_at_once_put_one_claim(storage: ObjectStorage) -> None:
    claims = [claims_of(storage, claimant(executor=f"executor {n}")) for n in (1, 2)]
    held = [one.take(record(), clock.now_ms()) for one in claims]
    faulty = FaultyStorage(storage, [Fault("delay", "put", wait=lambda: claims[1].renew(held[1]))])
    assert claims_of(faulty, claimant()).renew(held[0]).claim.holder.executor == "executor 2"
    assert len(keys(storage)) == 2


def test_an_executor_that_an_old_run_gets_late_is_fenced(storage: ObjectStorage, tmp_path: Path) -> None:
    """Also when the old run has not renewed for hours: the newest claim tells of it."""
    take(storage)
    age(tmp_path, KEPT_MS - 60_000)
    take(storage, claimant(run="r2"))
    with pytest.raises(FencedError):
        take(storage)


@pytest.mark.parametrize("nth", range(1, 4))
def test_of_two_queries_that_begin_at_once_one_goes_on(storage: ObjectStorage, nth: int) -> None:
    """The other one does all of its work just before the first one's n-th request."""
    outcome = []

    def begin_the_other() -> None:
        try:
            take(storage, claimant("q2", "r2"))
            outcome.append("q2")
        except ConflictError:
            pass

    faulty = FaultyStorage(storage, [Fault("delay", nth=nth, wait=begin_the_other)])
    try:
        take(faulty)
        outcome.append("q1")
    except ConflictError:
        pass
    faulty.assert_all_hit()
    assert len(outcome) == len(keys(storage)) == 1
    assert find_claim(storage, "totals").query_id == outcome[0]  # type: ignore[union-attr]


def test_claims_do_not_pile_up(storage: ObjectStorage, tmp_path: Path) -> None:
    """However long a run is, and however many there are in a day: each start of a scheduled job lists them."""
    held = take(storage)
    for _ in range(40):
        held = claims_of(storage, claimant()).renew(held)
    assert len(keys(storage)) < 32
    for n in range(2, 42):
        take_after(storage, f"r{n}", f"r{n - 1}")
    assert len(keys(storage)) < 32
    assert runs(storage) == [f"r{n}" for n in range(22, 42)]
    age(tmp_path, KEPT_MS)
    take(storage, claimant(run="r50"))
    assert runs(storage) == [*[f"r{n}" for n in range(23, 42)], "r50"], "a day before the last one, not before now"


def test_requests_of_a_run(storage: ObjectStorage) -> None:
    """A first one; the next one; each further executor of it; a look, that renews and that need not."""
    for me, lives, made in (
        (claimant(), {}, {"list": 2, "put": 1}),
        (claimant(run="r2"), {"driver of r1": False}, {"list": 2, "get": 1, "put": 1}),
        (claimant(run="r2", executor="another"), {}, {"list": 1, "get": 1}),
    ):
        before = storage.requests
        held = take(storage, me, lives)
        assert asked(storage, before) == made
    renewing = claims_of(storage, claimant(run="r2"))
    for made in ({"list": 2, "put": 1}, {"list": 1, "get": 1}):
        before = storage.requests
        renewing.renew(held)
        assert asked(storage, before) == made


def test_twenty_executors_that_begin_at_once_put_one_claim(storage: ObjectStorage) -> None:
    """In whatever order their requests come."""
    with ThreadPoolExecutor(20) as pool:
        held = list(pool.map(lambda n: take(storage, claimant(executor=f"executor {n}")), range(20)))
    assert {tenure.claim.number for tenure in held} == {1}
    assert len(keys(storage)) == 1


def test_a_storage_that_does_not_answer_gives_no_claim(storage: ObjectStorage) -> None:
    """Each request of it may fail, and the next attempt begins anew."""
    begin(storage)
    for action in ("list", "get", "put"):
        faulty = FaultyStorage(storage, [Fault("fail", action)])  # type: ignore[arg-type]
        with pytest.raises(UnavailableError):
            take_after(faulty, "r2", "r1")  # type: ignore[arg-type]
        faulty.assert_all_hit()
        assert runs(storage) == ["r1"]
    take_after(storage, "r2", "r1")


def test_a_claim_of_which_no_answer_came_is_the_runs_own(storage: ObjectStorage) -> None:
    """The retried task joins it."""
    faulty = FaultyStorage(storage, [Fault("fail", "list", nth=2)])
    with pytest.raises(UnavailableError):
        take(faulty)
    assert take(storage).claim.number == 1


def test_what_another_release_wrote_among_the_claims_is_left_alone(storage: ObjectStorage) -> None:
    """As the claims of a release before this one, whose names said all."""
    for name in ("README", "00000001.1.q2.r2.0.0123456789abcdef.0123456789abcdef.1-1.x", "0" * 20):
        storage.put(f"totals/claims/{name}", b"?")
    assert take(storage).claim.number == 1
    assert len(keys(storage)) == 4


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_claim_that_cannot_be_read_lets_nobody_in_and_is_named(storage: ObjectStorage, is_moved: bool) -> None:
    """It may be anybody's; nothing is lost where it is deleted."""
    take(storage)
    second = f"{FIRST[:-1]}2"
    storage.put(second, bytes(storage.get(FIRST)) if is_moved else b"?")
    before = everything(storage)
    problem = "belongs elsewhere.*operator=totals number=1" if is_moved else "is not a whole holdfast file"
    with pytest.raises(CorruptionError, match=f"{second} {problem}") as told:
        take_after(storage, "r2", "r1")
    assert "delete it if no run of the query is active" in told.value.__notes__[0]
    assert everything(storage) == before
    storage.delete([second])
    take_after(storage, "r2", "r1")


def test_a_run_whose_claims_were_deleted_claims_anew(storage: ObjectStorage) -> None:
    held = take(storage)
    storage.delete(keys(storage))
    assert claims_of(storage, claimant()).renew(held).claim.number == 1


def test_operators_beside_each_other_do_not_meet(storage: ObjectStorage) -> None:
    take(storage)
    storage.put("totals-2/shard-0000/commits/1-0123456789abcdef", b"a neighbour's")
    other = replace(record("q2", "r2"), operator="totals-2")
    me = replace(claimant("q2", "r2"), operator="totals-2")
    assert claims_of(storage, me).take(other, clock.now_ms()).claim.number == 1


def test_the_greatest_retention_counts_that_a_run_or_the_record_says(storage: ObjectStorage, tmp_path: Path) -> None:
    """A query may be started with another minBatchesToRetain: then its claim says more than the record, or less."""
    whose = record()
    declare_operator(storage, whose)
    assert retained_versions(storage, whose) == 100
    for run, before, number, greatest in (("r1", "r0", 7, 100), ("r2", "r1", 500, 500), ("r3", "r2", 20, 500)):
        take_after(storage, run, before, retained_versions=number)
        assert retained_versions(storage, whose) == greatest
    age(tmp_path, -ALIVE_MS)
    take_after(storage, "r4", "r3", retained_versions=30)
    age(tmp_path, -ALIVE_MS)
    assert retained_versions(storage, whose) == 100, "r2 was at work long before r4"


class Run:
    """A run that claims and looks, with a clock of its own."""

    def __init__(self, storage: ObjectStorage, run: str, lives: Mapping[str, bool] | None = None, **changed: Any):
        self._storage, self._run, self._lives = storage, run, lives
        self.monotonic_ms, now_ms = 0, changed.pop("now_ms", None)
        self._changed = changed
        self.held = self._claims().take(record(run=run), now_ms or clock.now_ms())

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


AT_WORK: dict[str, tuple[dict[str, bool], int]] = {
    "its driver lives": ({"driver of r1": True}, 9),
    "its executor lives": ({"executor of r1": True}, 9),
    "only the process that defined it has gone": ({"driver of r1": False, "executor of r1": True}, 9),
    "it is further on": ({}, 6),
}
#: What is known of a run that cannot live any more, and what the next one has in common with it.
OVER: dict[str, tuple[dict[str, bool], dict[str, str]]] = {
    "it has ended": ({"driver of r1": False, "executor of r1": False}, {}),
    "its driver has, its executors are elsewhere": ({"driver of r1": False}, {}),
    "the same application": ({"driver of r1": True}, {"application": "app of r1"}),
    "one driver's process": ({"driver of r1": True}, {"driver": "driver of r1"}),
    "one executor, as of a server": ({"executor of r1": True}, {"executor": "executor of r1"}),
}


@pytest.mark.parametrize(("lives", "batch_id"), AT_WORK.values(), ids=AT_WORK)
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


@pytest.mark.parametrize(("lives", "changed"), OVER.values(), ids=OVER)
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


def test_a_restart_within_its_application_is_not_held_up_by_a_copy(storage: ObjectStorage) -> None:
    """The copy is beside; whoever follows the one whose place it is takes the next one."""
    Run(storage, "r1")
    Run(storage, "r2")
    assert not Run(storage, "r3", driver="driver of r1").is_beside


def test_a_job_on_another_machine_each_time_takes_its_place_in_time(storage: ObjectStorage, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("lives", "changed"),
    [({"driver of r2": False}, {}), ({}, {"application": "app of r2"}), ({}, {"driver": "driver of r2"})],
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
    after_zero = (f"@@@{told}", "r9@@@", f"r9@@@{told}@", f"r9@..@@{told}", f"r 9@@@{told}", f"%72@@@{told}")
    hostile = ("beside", f"beside@-1@r9@@@{told}", *(f"beside@{zero}@{rest}" for rest in after_zero))
    for name in hostile:
        storage.put(f"totals/claims/{name}", b"?")
    assert not Run(storage, "r2").is_beside
    assert len(keys(storage)) == len(hostile) + 2


def test_who_is_seen_in_the_future_counts_for_nothing(storage: ObjectStorage, tmp_path: Path) -> None:
    """A copied object may have any time."""
    Run(storage, "r1")
    age(tmp_path, ALIVE_MS + 1000)
    storage.put("totals/claims/beside@" + "0" * 17 + "@r9@@@5f0c1d2e5f0c1d2e", b"?")
    path = next((tmp_path / "totals/claims").glob("beside*"))
    later = path.stat().st_mtime + ALIVE_MS / 1000 + 60
    os.utime(path, (later, later))
    assert not Run(storage, "r2").is_beside


def test_who_comes_later_ranks_later_though_clocks_have_seconds_only(storage: ObjectStorage, tmp_path: Path) -> None:
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
