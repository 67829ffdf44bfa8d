"""Who may work on an operator's directory: other queries, later runs, executors that come late."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.errors import ConflictError, CorruptionError, FencedError, UnavailableError
from holdfast.snapshotter.ownership.claims import ALIVE_MS, KEPT_MS, find_claim, retained_versions
from holdfast.snapshotter.ownership.operator_record import declare_operator, find_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
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


def test_the_state_of_another_query_is_not_taken_over_however_old_its_claim(
    storage: ObjectStorage, tmp_path: Path
) -> None:
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


def test_an_executor_that_comes_late_shares_the_claim_of_its_run(storage: ObjectStorage) -> None:
    first = take(storage)
    late = take(storage, claimant(executor="another executor", started_ms=clock.now_ms()))
    assert replace(late.claim.holder, seen_ms=0) == first.claim.holder
    assert len(keys(storage)) == 1


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


def test_of_two_runs_that_begin_at_once_one_goes_on(storage: ObjectStorage) -> None:
    """Both listed nothing: the second put of the number fails, and who made it looks whom it met."""
    faulty = FaultyStorage(storage, [Fault("delay", "put", wait=lambda: take(storage, claimant(run="r2")))])
    with pytest.raises(ConflictError, match=r"another application.*run=r2"):
        take(faulty, lives={"driver of r2": True})
    faulty.assert_all_hit()
    assert runs(storage) == ["r2"]


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
    assert "delete it if no run of the query is at work" in told.value.__notes__[0]
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
