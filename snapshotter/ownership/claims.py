"""Claims on an operator's directory: a fence whose newest claim names the run that holds the directory.

::

    <operator>/operator                         the query that owns the state, for good
    <operator>/claims/00000000000000000017      the run that works on it, its host and its progress: `Claim`
    <operator>/claims/beside@00001795287600000@<run id>@<application>@<driver>@5f0c1d…      see `Beside`

A run claims before it writes anything else, by taking the number after the newest (`holdfast.snapshotter.fence`); its
executors share the claim (`spark_integration/shard_call/claiming.py`). While micro-batches run, they check the number
every `RENEW_EVERY_MS`, and if nobody has taken the next one, one of them does. Who may take the next number
(docs/decisions/0023-copied-checkpoints.md; `spark_integration/executor/processes.py` checks whether a run is alive):

another query     not if the first query has claimed within `ALIVE_MS`, or has a record: the other query claims a
                  separate directory. A query without a record has no state, and is replaced
the same query    at once, if it is the same application, or if the previous run has ended on this machine or has not
                  claimed within `ALIVE_MS`. The previous run finds the new number at its next check, and stops
otherwise         a restart, a second driver and a copied location look alike. The run is refused if the other run is
                  alive on this machine, or at a later micro-batch. If neither is known, it starts **beside** the
                  other and writes no claim: if a new claim appears, the other is alive, and this run stops; if none
                  appears for `ALIVE_MS`, the other is dead, and this run takes the next number
several beside    each announces itself when it begins and at each check; later runs wait for all runs that did so
                  within `ALIVE_MS`, however old the claim is. So the run that began first takes the number

Invariants
----------
* **one holder**: of all runs that take the same number, one succeeds.
* **incumbent first**: a run beside the holder stops no other run, and deletes none of its objects.
* **one clock**: ages are differences between the store's own times, or are measured by a monotonic clock.
* **nothing waits**: a claim is not a lock. State is safe anyway: object names are unique, and Spark accepts one run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from urllib.parse import quote, unquote

import xxhash

from holdfast import clock
from holdfast.errors import ConflictError, CorruptionError, FencedError
from holdfast.snapshotter.fence import Fence, key_of, looks, number_of, read_newest
from holdfast.snapshotter.fields import Fields, PositiveInt, Stored
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, check_operator, find_operator
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

FOLDER = "claims"
#: The run of an older claim has ended, was killed, or is idle.
ALIVE_MS = 5 * 60_000
_BESIDE = re.compile(r"beside@([0-9]{17})@([^@/]+)@([0-9a-f]{16}|)@([^@/]*)@([0-9a-f]{16})")
RENEW_EVERY_MS = 2 * 60_000
#: How long executors may outlive their driver: their claims during that time do not show that the query is alive.
ENDING_MS = 60_000
#: How long a claim lists earlier runs: an executor that joins an old run late must learn that newer runs exist.
KEPT_MS = 24 * 3600_000
#: After this long without a new claim, runs stop waiting for others, which all have died. Otherwise short runs on
#: different machines would wait for their predecessors forever, and none would clean up.
WAITED_MS = 6 * ALIVE_MS
_RUNS_MAX = 20
#: At most this many objects of runs beside a holder are kept; more are deleted, in one request.
_BESIDES_KEPT = 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClaimingRun(Stored, notice=True):
    """A run of a query, as described in a claim."""

    run_id: str
    started_ms: int  #: Start time, for display
    seen_ms: int  #: Time of its last claim, by the store's clock; for a claim's own run, when the claim was stored
    batch_id: int | None  #: Its micro-batch at that time; None if unknown
    retained_versions: PositiveInt  #: How many versions the query may go back
    #: The processes of its driver, if known, and of the executor that claimed last, in the format of `place_of`
    driver: str
    executor: str


@dataclass(frozen=True)
class Claim(Stored, kind="claim", notice=True):
    """A claim on an operator's directory."""

    operator: str
    number: PositiveInt  #: Position in the sequence, from 1
    #: The query's id, and the name that the user gave it
    query_id: str
    query_name: str | None
    application: str  #: Spark's id of the run's application
    host: str  #: Host of the executor that claimed
    runs: tuple[ClaimingRun, ...]  #: Recent runs of the query; the last run holds the directory

    def require(self, header: Fields) -> None:
        if not self.runs:
            header.refuse("names no run")

    @property
    def holder(self) -> ClaimingRun:
        return self.runs[-1]


@dataclass(frozen=True)
class Beside:
    """A run beside the directory's holder, stored as an object whose name holds all fields."""

    #: When the run began, or the ended run that it succeeds, by the store's clock: of several runs, the earliest may
    #: take the number
    begun_ms: int
    run_id: str
    application: str  #: A digest of Spark's id of the run's application; empty if unknown
    driver: str  #: See `ClaimingRun.driver`
    object_id: str  #: Distinguishes the run's objects: it stores one at each check
    seen_ms: int = 0  #: When the object was stored, by the store's clock

    @classmethod
    def of(cls, info: ObjectInfo) -> Beside | None:
        """Parse a listed object's name; return None for other objects."""
        match = _BESIDE.fullmatch(info.key)
        if match is None:
            return None
        begun, run, application, driver, object_id = match.groups()
        found = cls(int(begun), unquote(run), application, unquote(driver), object_id, info.modified_ms)
        return found if found.key == info.key else None

    @property
    def key(self) -> str:
        """The object's key in the folder of claims."""
        run, driver = (quote(text, safe="") for text in (self.run_id, self.driver))
        return f"beside@{self.begun_ms:017d}@{run}@{self.application}@{driver}@{self.object_id}"


def claims_of(storage: ObjectStorage, operator: str) -> PrefixedStorage:
    """Return the folder of an operator's claims."""
    return PrefixedStorage(storage, f"{operator}/{FOLDER}")


def read_claim(folder: PrefixedStorage, info: ObjectInfo) -> Claim:
    """Read a listed claim. Raises `CorruptionError`, `NotFoundError`."""
    expected = {"operator": folder.prefix.removesuffix(f"/{FOLDER}"), "number": number_of(info.key)}
    claim = Claim.decode(folder.get(info.key), f"{folder.url}/{info.key}", **expected)
    return replace(claim, runs=(*claim.runs[:-1], replace(claim.holder, seen_ms=info.modified_ms)))


def find_claim(storage: ObjectStorage, operator: str) -> Claim | None:
    """Return the newest claim on an operator's directory, or None."""
    return look(storage, operator)[0]


def look(storage: ObjectStorage, operator: str, known: Claim | None = None) -> tuple[Claim | None, Sequence[Beside]]:
    """Return the newest claim on a directory, if any, and the runs beside its holder; does not read `known` again."""
    folder = claims_of(storage, operator)

    def read(newest: ObjectInfo, infos: Sequence[ObjectInfo]) -> tuple[Claim, Sequence[Beside]]:
        claim = known if known and newest.key == key_of(known.number) else read_claim(folder, newest)
        return claim, [beside for info in infos if (beside := Beside.of(info)) is not None]

    return read_newest(folder, read) or (None, ())


def retained_versions(storage: ObjectStorage, record: OperatorRecord) -> int:
    """Return how many versions the query may go back: the maximum over its record and its recent runs."""
    claim = find_claim(storage, record.operator)
    runs = claim.runs if claim is not None and claim.query_id == record.query_id else ()
    latest = [run.retained_versions for run in runs if runs[-1].seen_ms - run.seen_ms < ALIVE_MS]
    return max([record.retained_versions, *latest])


@dataclass(frozen=True)
class Tenure:
    """A run's position in a directory, holder or beside the holder, as known to one of its executors."""

    claim: Claim  #: The holder's newest claim
    #: Beside the holder: the monotonic time at which this executor first saw the claim
    since_ms: int | None = None
    #: Beside the holder: `Beside.begun_ms` of this run
    begun_ms: int = 0

    def retained(self, retained_versions: int, version: int) -> int:
        """Return how many versions to keep before an accepted version: all, if another run may need them."""
        return retained_versions if self.since_ms is None else max(retained_versions, version)


class Claims:
    """One run's claims on an operator's directory; `lives` returns whether a process is alive, None if unknown."""

    def __init__(
        self,
        storage: ObjectStorage,
        me: Claim,
        lives: Callable[[str], bool | None],
        monotonic_ms: Callable[[], int] = clock.monotonic_ms,
        new_id: Callable[[], str] = clock.new_id,
    ) -> None:
        self._storage, self._me, self._mine = storage, me, me.holder
        self._lives, self._monotonic_ms, self._new_id = lives, monotonic_ms, new_id
        self._application = xxhash.xxh3_64_hexdigest(me.application.encode()) if me.application else ""
        self._folder = claims_of(storage, me.operator)
        self._fence = Fence(storage, f"{me.operator}/{FOLDER}")
        self._where = {"operator": me.operator, "storage": storage.url}

    def take(self, record: OperatorRecord, store_ms: int) -> Tenure:
        """Claim the directory for this run, join its claim, or begin beside another run; raise if that is refused."""

        def begun(newest: Claim | None, besides: Sequence[Beside]) -> Tenure | None:
            if newest is None:
                return None
            if newest.query_id != self._me.query_id:
                self._refuse_others(newest, record, store_ms)
                return None
            if newest.holder.run_id == self._mine.run_id:
                return Tenure(newest)
            if any(run.run_id == self._mine.run_id for run in newest.runs):
                raise self._fenced(newest)
            return self._beside(newest, besides, store_ms)

        return self._place(begun, None)

    def renew(self, tenure: Tenure) -> Tenure:
        """Renew this run's claim or its place beside the holder. Raises `FencedError` if another run took over."""

        def kept(newest: Claim | None, besides: Sequence[Beside]) -> Tenure | None:
            if newest is None:  # the claims were deleted
                return None
            if newest.query_id != self._me.query_id:
                raise self._other_query(FencedError, newest)
            if newest.holder.run_id == self._mine.run_id:
                return None if newest.number == tenure.claim.number else Tenure(newest)
            if tenure.since_ms is None:
                raise self._fenced(newest)
            return self._still_beside(tenure, tenure.since_ms, newest, besides)

        if tenure.since_ms is not None:  # before the listing, which then shows the store's time
            self._announce(tenure.begun_ms)
        return self._place(kept, tenure.claim)

    def _place(self, found: Callable[[Claim | None, Sequence[Beside]], Tenure | None], known: Claim | None) -> Tenure:
        """Return the place that `found` derives from the newest claim; if it returns None, make a claim."""
        for _ in looks(self._fence.url):
            newest, besides = self._look(known)
            tenure = found(newest, besides)
            if tenure is not None:
                return tenure
            claim = self._after(newest)
            try:
                numbers = self._fence.take(claim.number, claim.encode())
            except ConflictError:  # another run, or another executor of this run, was faster: look again
                continue
            old = [key_of(number) for number in self._fence.old(numbers)]
            is_due = old or len(besides) > _BESIDES_KEPT
            if is_due or newest is None or newest.holder.run_id != self._mine.run_id:
                self._delete(old, besides)
            return Tenure(claim)
        raise AssertionError("unreachable: the last look raises")

    def _look(self, known: Claim | None) -> tuple[Claim | None, Sequence[Beside]]:
        try:
            return look(self._storage, self._me.operator, known)
        except CorruptionError as exc:
            exc.add_note("a claim holds no state: delete it if no run of the query is active")
            raise

    def _announce(self, begun_ms: int) -> None:
        """Announce that this run works beside the holder."""
        run = Beside(begun_ms, self._mine.run_id, self._application, self._mine.driver, self._new_id())
        self._folder.put(run.key, self._me.host.encode())

    def _delete(self, keys: Iterable[str], besides: Iterable[Beside]) -> None:
        going = [*keys, *(run.key for run in besides)]
        if going:
            self._folder.delete(going)

    def _after(self, newest: Claim | None) -> Claim:
        """Return this run's next claim after the newest claim."""
        mine, earlier = self._mine, newest.runs if newest and newest.query_id == self._me.query_id else ()
        if earlier and earlier[-1].run_id == mine.run_id:
            mine, earlier = replace(mine, started_ms=earlier[-1].started_ms), earlier[:-1]
        kept = [run for run in earlier if earlier[-1].seen_ms - run.seen_ms < KEPT_MS][1 - _RUNS_MAX :]
        return replace(self._me, number=newest.number + 1 if newest else 1, runs=(*kept, mine))

    def _refuse_others(self, newest: Claim, record: OperatorRecord, store_ms: int) -> None:
        """Raise ConflictError if another query owns the directory by its record or, without one, by a recent claim."""
        stored = find_operator(self._storage, self._me.operator)  # a query claims before it writes its record
        if stored is not None:
            check_operator(stored, record, self._storage.url)
        elif store_ms - newest.holder.seen_ms < ALIVE_MS:
            raise self._other_query(ConflictError, newest)

    def _beside(self, newest: Claim, besides: Sequence[Beside], store_ms: int) -> Tenure | None:
        """Return this run's place beside a holder that may be alive; None if this run may take the number."""
        mine, other = self._mine, newest.holder
        age_ms = store_ms - other.seen_ms
        seen = _seen(besides, store_ms) if age_ms <= WAITED_MS else []
        if age_ms > ALIVE_MS and not seen:
            return None
        lives = self._may_live(newest.application, other.driver, other.executor)
        if lives is False:
            return None
        before = [run for run in seen if run.run_id == mine.run_id or self._succeeds(run)]
        last_ms = max((run.begun_ms for run in seen), default=0)  # a store's clock may have seconds only
        begun_ms = min((run.begun_ms for run in before), default=max(store_ms, last_ms + 1))
        if age_ms > ALIVE_MS and not self._earlier(begun_ms, [run for run in seen if run not in before]):
            return None
        is_further = mine.batch_id is not None and (other.batch_id or 0) > mine.batch_id
        if age_ms <= ALIVE_MS and (lives or is_further):
            raise self._other_run(ConflictError, newest, wait_ms=ALIVE_MS - age_ms)
        _log.warning(
            "%r starts beside run %s of the same query, which may still run on another machine; it stops if "
            "that run renews its claim",
            *(self._me.operator, other.run_id),
        )
        if not any(run.run_id == mine.run_id for run in seen):  # otherwise another executor has announced it
            self._announce(begun_ms)
        return Tenure(newest, self._monotonic_ms(), begun_ms)

    def _still_beside(self, tenure: Tenure, since_ms: int, newest: Claim, besides: Sequence[Beside]) -> Tenure | None:
        """Return this run's place beside the holder; None if it may take the number. Raises `FencedError`."""
        if newest.number == tenure.claim.number:
            own = sorted((run for run in besides if run.run_id == self._mine.run_id), key=lambda run: run.seen_ms)
            if self._monotonic_ms() - since_ms >= ALIVE_MS and own:
                now_ms = own[-1].seen_ms
                if not self._earlier(tenure.begun_ms, _seen(besides, now_ms)):
                    return None
            self._delete([], own[:-1])
            return tenure
        is_same = newest.holder.run_id == tenure.claim.holder.run_id
        if not is_same or newest.holder.seen_ms > tenure.begun_ms + ENDING_MS:
            raise self._other_run(FencedError, newest, wait_ms=ALIVE_MS)
        return Tenure(newest, self._monotonic_ms(), tenure.begun_ms)

    def _earlier(self, begun_ms: int, besides: Iterable[Beside]) -> list[Beside]:
        return [run for run in besides if run.run_id != self._mine.run_id and run.begun_ms < begun_ms]

    def _succeeds(self, run: Beside) -> bool:
        """Return whether `run` is an earlier run of this application, or has certainly ended."""
        is_same = bool(self._application) and run.application == self._application
        return is_same or self._may_live("", run.driver, "") is False

    def _may_live(self, application: str, driver: str, executor: str) -> bool | None:
        """Return whether another run may be alive; None if unknown. An application runs a query in one process only."""
        mine = self._mine
        if {application, driver, executor} & {self._me.application, mine.driver, mine.executor} - {""}:
            return False
        of_driver = self._lives(driver)
        return True if of_driver or self._lives(executor) else of_driver

    def _fenced(self, newest: Claim) -> FencedError:
        return FencedError(
            "a newer run of this query has taken over: run a checkpoint location in one application only",
            **self._where,
            query=self._me.query_id,
            run=self._mine.run_id,
            newer_run=newest.holder.run_id,
            newer_started=_time(newest.holder.started_ms),
        )

    def _other_query(self, error: type[ConflictError], newest: Claim) -> ConflictError:
        return error(
            f"another query uses this directory, or did so in the last {ALIVE_MS // 60_000} minutes: stop it, give "
            "this operator a different name, or set spark.holdfast.state.dir to a different directory",
            **self._where,
            **_described(newest),
            query=self._me.query_id,
        )

    def _other_run(self, error: type[ConflictError], newest: Claim, wait_ms: int) -> ConflictError:
        return error(
            "another application is running this query: its checkpoint location was copied, or is in use twice. Stop "
            f"that application, or wait {-(-wait_ms // 1000)} s if it has ended; to run a copy on purpose, copy "
            "spark.holdfast.state.dir too, and set it to the copy",
            **self._where,
            **_described(newest),
            run=newest.holder.run_id,
            batch=newest.holder.batch_id,
            own_run=self._mine.run_id,
            own_batch=self._mine.batch_id,
        )


def _seen(besides: Iterable[Beside], now_ms: int) -> list[Beside]:
    """Return the runs that announced themselves recently; a copied object may have any later time."""
    return [run for run in besides if abs(now_ms - run.seen_ms) <= ALIVE_MS and run.begun_ms <= run.seen_ms + ALIVE_MS]


def _described(claim: Claim) -> dict[str, str]:
    started = _time(claim.holder.started_ms)
    return {"owner": claim.query_id, "name": claim.query_name or "(none)", "started": started, "host": claim.host}


def _time(milliseconds: int) -> str:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):  # a stored time may be any number
        return f"{milliseconds} ms"
