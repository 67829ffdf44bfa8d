"""Who may work on an operator's directory: other queries, later runs, executors that come late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from holdfast.backends import stored_file
from holdfast.errors import ConflictError, CorruptionError, FencedError, SchemaMismatchError, UnavailableError
from holdfast.snapshotter.ownership.claim_listing import ALIVE_MS, claim_name, retained_versions
from holdfast.snapshotter.ownership.claims import KEPT_MS, Claims, Tenure
from holdfast.snapshotter.ownership.operator_record import declare_operator, find_operator
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.unit.snapshotter.ownership.runs import (
    STARTED,
    STARTED_MS,
    age,
    begin,
    claimant,
    claims,
    claims_of,
    everything,
    keys,
    record,
    take,
    take_of,
)


def test_a_claim_says_who_and_since_when(storage: ObjectStorage) -> None:
    """In its name what listings decide by, in its header what people ask for."""
    assert take(storage) == Tenure(1, STARTED_MS)
    (key,) = keys(storage)
    assert key.startswith(f"totals/claims/00000001.{STARTED_MS}.q1.r1.")
    header = stored_file.decode(storage.get(key), source=key, kind="claim").header
    who = {"query_id": "q1", "run_id": "r1", "query_name": "name of q1", "application": "app of r1"}
    where = {"host": "host-1", "machine": "machine-1", "process": "1-1"}
    at = {"batch_id": 0, "retained_versions": 100, "started_ms": STARTED_MS}
    assert header == {"operator": "totals", **who, **where, **at}
    assert find_operator(storage, "totals") is None, "a record says that there is state"


@pytest.mark.parametrize("start", [take, begin])
def test_another_query_is_refused_by_name_and_start_of_the_first(
    storage: ObjectStorage, start: Callable[[ObjectStorage], Tenure]
) -> None:
    start(storage)
    before = everything(storage)
    message = rf"another query uses this directory.*owner=q1 name='name of q1' started={STARTED} host=host-1 query=q2"
    with pytest.raises(ConflictError, match=message):
        take(storage, "q2", "r2")
    assert everything(storage) == before


@pytest.mark.parametrize(("age_ms", "lives"), [(ALIVE_MS - 20_000, True), (ALIVE_MS + 20_000, False)])
def test_a_claim_lives_for_five_minutes_by_the_clock_of_the_store(
    storage: ObjectStorage, tmp_path: Path, age_ms: int, lives: bool
) -> None:
    """The clock of this machine, as given to the claims, is years off."""
    take(storage)
    age(tmp_path, age_ms)
    if lives:
        with pytest.raises(ConflictError, match="uses this directory"):
            take(storage, "q2", "r2")
    else:
        take(storage, "q2", "r2")


def test_the_one_that_takes_the_place_of_the_dead_is_the_owner(storage: ObjectStorage, tmp_path: Path) -> None:
    """Also if the dead was only slow: nothing of it was stored, and its first commit is refused."""
    held = take(storage)
    age(tmp_path, ALIVE_MS + 1000)
    begin(storage, "q2", "r2")
    claims(storage, "q2", "r2").renew(take(storage, "q2", "r2"))
    claims(storage).renew(held)
    with pytest.raises(ConflictError, match="state of another query"):
        declare_operator(storage, record())
    with pytest.raises(ConflictError, match=r"name='name of q2'"):
        take(storage, "q1", "r3")


@pytest.mark.parametrize("is_known", [True, False])
def test_the_state_of_a_dead_query_is_not_taken_over(storage: ObjectStorage, tmp_path: Path, is_known: bool) -> None:
    """Where a record is, state may travel in the query's pointers; also one from before there were claims."""
    begin(storage)
    age(tmp_path, ALIVE_MS + 1000)
    if not is_known:
        storage.delete(keys(storage))
    before = everything(storage)
    seen = "2" if is_known else "None"
    with pytest.raises(
        ConflictError, match=rf"state of another query, which is not running.*owner=q1 last_seen={seen}"
    ):
        take(storage, "q2", "r2")
    assert everything(storage) == before
    take(storage, run="r3")


def test_a_claim_that_a_refused_query_has_left_disturbs_nobody(storage: ObjectStorage) -> None:
    """It was killed before it could withdraw: the record decides whose the directory is."""
    held = begin(storage)
    storage.put("totals/claims/00000001.1.q2.r2.1", b"")
    claims(storage).renew(held)
    take(storage, run="r9")


def test_state_of_another_shape_is_refused_before_anything_is_written(storage: ObjectStorage) -> None:
    """What tables the operator declares is checked before it claims: `spark_integration.shard.claiming`."""
    begin(storage)
    before = everything(storage)
    with pytest.raises(SchemaMismatchError):
        claims(storage, run="r2").take(replace(record(run="r2"), shards=8))
    assert everything(storage) == before


def test_a_new_run_begins_at_once_and_the_old_one_stops(storage: ObjectStorage) -> None:
    first = take(storage)
    second = take(storage, run="r0")  # sorts before the first: its epoch decides
    assert (first.epoch, second.epoch) == (1, 2)
    for call in (lambda: claims(storage).renew(first), lambda: take(storage)):
        with pytest.raises(FencedError, match=rf"newer run.*run=r1 newer_run=r0 newer_started={STARTED}"):
            call()
    claims(storage, run="r0").renew(second)
    assert take(storage, run="r5").epoch == 3


def test_an_executor_that_comes_late_shares_the_place_of_its_run(storage: ObjectStorage) -> None:
    first = take(storage)
    me = claimant(host="host-2", machine="machine-2", process="7-7")
    late = Claims(storage, "totals", me, set, now_ms=lambda: STARTED_MS + 60_000)
    assert late.take(record()) == first
    assert len(keys(storage)) == 2


def test_an_executor_that_an_old_run_gets_late_is_fenced(storage: ObjectStorage, tmp_path: Path) -> None:
    """Also when the old run has not renewed for hours: its claims are kept for that."""
    take(storage)
    age(tmp_path, KEPT_MS - 60_000)
    take(storage, run="r2")
    with pytest.raises(FencedError):
        take(storage)


def test_of_two_runs_that_begin_at_once_one_goes_on(storage: ObjectStorage) -> None:
    """Both listed nothing: ids decide, for both alike."""
    faulty = FaultyStorage(storage, [Fault("delay", "put", "*/claims/*", wait=lambda: take(storage, run="r2"))])
    with pytest.raises(FencedError):
        take(faulty, run="r1")
    faulty.assert_all_hit()
    storage.delete(keys(storage))
    faulty = FaultyStorage(storage, [Fault("delay", "put", "*/claims/*", wait=lambda: take(storage, run="r1"))])
    assert take(faulty, run="r2").epoch == 1
    faulty.assert_all_hit()


@pytest.mark.parametrize("nth", range(1, 5))
def test_of_two_queries_that_begin_at_once_at_most_one_goes_on(storage: ObjectStorage, nth: int) -> None:
    """The other one does all of its work just before the first one's n-th request."""
    outcome = []

    def begin_the_other() -> None:
        try:
            take(storage, "q2", "r2")
            outcome.append("q2")
        except ConflictError:
            pass

    faulty = FaultyStorage(storage, [Fault("delay", nth=nth, wait=begin_the_other)])
    try:
        take(faulty, "q1", "r1")
        outcome.append("q1")
    except ConflictError:
        pass
    faulty.assert_all_hit()
    assert len(outcome) == 1
    assert {key.split(".")[2] for key in keys(storage)} == set(outcome), "the other one has withdrawn"


def test_claims_do_not_pile_up(storage: ObjectStorage, tmp_path: Path) -> None:
    """Of a run only young ones stay, of earlier runs those of a day."""
    take(storage, run="r0")
    age(tmp_path, KEPT_MS)
    held = take(storage)
    for _ in range(30):
        age(tmp_path, 120_000)
        claims(storage).renew(held)
    assert not keys(storage, "r0")
    assert len(keys(storage, "r1")) <= 1 + ALIVE_MS // 120_000 + 1


def test_of_a_run_that_has_ended_one_claim_stays_however_many_executors_it_had(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    """A job that runs every minute on many executors: what each start lists is one claim a run, and no more."""
    executors = [{"process": f"{number}-1"} for number in range(10, 20)]
    for run in ("r1", "r2", "r3"):
        for executor in executors:
            claims_of(storage, claimant(run=run, application="", **executor)).take(record(run=run))
        age(tmp_path, ALIVE_MS + 20_000)
    take(storage, run="r4")
    assert [len(keys(storage, run)) for run in ("r1", "r2", "r3", "r4")] == [1, 1, 1, 1]
    with pytest.raises(FencedError):
        take(storage, run="r1")


def test_requests_of_a_run(storage: ObjectStorage, tmp_path: Path) -> None:
    take(storage)
    before = storage.requests
    held = take(storage, run="r2")
    begun = storage.requests
    assert {n: begun[n] - before[n] for n in ("put", "get", "list", "delete")} == {
        "put": 1, "get": 1, "list": 2, "delete": 0
    }  # fmt: skip
    age(tmp_path, 2 * ALIVE_MS, "*.r2.*")
    claims(storage, run="r2").renew(held)
    claims(storage, run="r2").renew(held)
    renewed = storage.requests
    assert {n: renewed[n] - begun[n] for n in ("put", "get", "list", "delete")} == {
        "put": 2, "get": 0, "list": 2, "delete": 1
    }  # fmt: skip


def test_a_storage_that_does_not_answer_gives_no_claim(storage: ObjectStorage) -> None:
    """Each request of it may fail, and the next attempt begins anew."""
    for action, pattern in (
        ("list", "*/claims/*"),
        ("get", "*/operator"),
        ("put", "*/claims/*"),
    ):
        faulty = FaultyStorage(storage, [Fault("fail", action, pattern)])  # type: ignore[arg-type]
        with pytest.raises(UnavailableError):
            take(faulty)
        faulty.assert_all_hit()
        assert not keys(storage)
    take(storage)


def test_what_another_release_wrote_among_the_claims_is_left_alone(storage: ObjectStorage) -> None:
    for name in ("README", "2.0000.q2.r2.1", "00000009.x.q2.r2.1"):
        storage.put(f"totals/claims/{name}", b"?")
    assert take(storage).epoch == 1
    assert len(keys(storage)) == 4


def test_a_claim_that_leaves_no_epoch_is_named(storage: ObjectStorage, tmp_path: Path) -> None:
    """Nobody comes that far by runs; without a name for it, each start would claim what it cannot find again."""
    last = f"totals/claims/{claim_name(claimant(run='r8'), 99_999_999, 1)}.1"
    storage.put(last, b"?")
    age(tmp_path, ALIVE_MS + 1000)
    with pytest.raises(CorruptionError, match=f"{last} has the last epoch.*delete it"):
        take(storage)
    assert keys(storage) == [last]
    storage.delete([last])
    take(storage)


def test_operators_beside_each_other_do_not_meet(storage: ObjectStorage) -> None:
    take(storage)
    storage.put("totals-2/shard-0000/commits/1-0123456789abcdef", b"a neighbour's")
    other = replace(record("q2", "r2"), operator="totals-2")
    Claims(storage, "totals-2", claimant("q2", "r2"), lambda _: ()).take(other)


def test_a_store_that_does_not_list_what_it_took_gives_no_claim(storage: ObjectStorage) -> None:
    """Without the time nobody can tell who lives; the error says so, and is one that is tried again."""

    class Forgetful(FaultyStorage):
        def list(self, prefix: str) -> list[ObjectInfo]:
            return [info for info in super().list(prefix) if "now." not in info.key and ".r3." not in info.key]

    begin(storage)
    forgetful = Forgetful(storage)
    with pytest.raises(UnavailableError, match=r"does not list what was just stored.*key=now\..*totals/claims"):
        take(forgetful, "q2", "r2")
    with pytest.raises(UnavailableError, match=r"does not list what was just stored.*key=.*\.r3\..*totals/claims"):
        claims_of(forgetful, claimant(run="r3", machine="machine-3")).take(record(run="r3"))
    assert not [info.key for info in storage.list("totals/claims/") if "now." in info.key]


def test_stamps_that_were_left_behind_are_deleted(storage: ObjectStorage, tmp_path: Path) -> None:
    """Who put them was killed before it could delete them; young ones may be in use."""
    held = take(storage)
    storage.put("totals/claims/now.0123456789abcdef", b"")
    claims(storage).renew(held)
    assert len(keys(storage, "0123456789abcdef")) == 0
    age(tmp_path, ALIVE_MS + 1000, "now.*")
    storage.put("totals/claims/now.fedcba9876543210", b"")
    claims(storage).renew(held)
    assert [k for k in keys(storage) if "now." in k] == ["totals/claims/now.fedcba9876543210"]


def test_the_greatest_retention_counts_that_a_run_or_the_record_says(storage: ObjectStorage, tmp_path: Path) -> None:
    """A query may be started with another minBatchesToRetain: then its claims say more than the record, or less."""
    whose = record()
    declare_operator(storage, whose)
    assert retained_versions(storage, whose) == 100
    for run, number, greatest in (("r1", 7, 100), ("r2", 500, 500), ("r3", 20, 500)):
        take_of(claims_of(storage, claimant(run=run, retained_versions=number)), run)
        assert retained_versions(storage, whose) == greatest
    age(tmp_path, ALIVE_MS, "*.r2.*")
    assert retained_versions(storage, whose) == 100, "a run that was at work long before the end"
    age(tmp_path, KEPT_MS)
    requests = storage.requests["get"]
    assert retained_versions(storage, whose) == 100
    assert storage.requests["get"] - requests == 2, "as many as runs were at work at the end"
    me = claimant(run="r9", retained_versions=20)
    key = f"totals/claims/{claim_name(me, 9, 1)}.1"
    storage.put(key, stored_file.encode("claim", asdict(me) | {"operator": "totals", "started_ms": True})[0])
    with pytest.raises(CorruptionError, match="cannot be, field=started_ms"):
        retained_versions(storage, whose)
