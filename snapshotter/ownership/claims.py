"""The claims on an operator's directory: which run of which query works there.

::

    <operator>/operator                                                   whose state it is, for ever
    <operator>/claims/<epoch>.<started ms>.<query id>.<run id>.<…>.<id>   who works on it, where, and how far

Each executor of a run puts a claim before it writes anything else, and renews it every `RENEW_EVERY_MS` while
micro-batches run. The rules:

another query     is refused while the first one has renewed within `ALIVE_MS`, with an error that names it; it then
                  claims a directory of its own (docs/decisions/0018-task-identity.md). Later it replaces one that has
                  no record, and so no state; it never takes over the state of another query
the same query    starts at once after runs of the same application, or of processes that have ended on this machine:
                  it takes the next epoch. A run of an older epoch that is still alive notices on renewal, and stops
a copy of it      has the same query id: somebody copied the checkpoint location. It is refused if the other run
                  lives on this machine, or is at a later micro-batch. If neither is known, it starts **beside** the
                  other run, with epoch 0, and stops at the first sign of life; if none comes within `ALIVE_MS`, the
                  other run is dead, and this one takes the next epoch

Invariants
----------
* **look, write, look again**: of two queries that start in an empty directory at once, at least one sees the other and
  withdraws. A claim comes before the record, and the record before the first state.
* **incumbent first**: a run of epoch 0 stops no other run, and deletes nothing that the other may need.
* **one clock**: ages are differences between the store's own times; start times are only labels.
* **nothing waits**: a claim is not a lock. The state is safe because every object has a unique name, and Spark accepts
  the pointers of one run only.

Cost: to begin, 2 lists, 1 put, 1 get, and 1 delete where old claims lie about; to renew, 1 list, 1 put, 1 delete.
Beside another run 1 list more, and 1 put when its place is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.errors import ConflictError, CorruptionError, FencedError, UnavailableError
from holdfast.snapshotter.ownership.claim_listing import (
    ALIVE_MS,
    EPOCH_MAX,
    KIND,
    Claimant,
    ListedClaim,
    claim_name,
    claims_of,
    digest,
    list_claims,
    read_claim,
)
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, check_operator, find_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage

RENEW_EVERY_MS = 2 * 60_000
ENDING_MS = 60_000
"""How long executors may outlive their driver: claims from that time are no sign of life."""
KEPT_MS = 24 * 3600_000
"""How long an earlier run's last claim stays: an executor that joins that run late must see what came after it."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tenure:
    """A run's term of office in a directory.

    Attributes
    ----------
    epoch : int
        Orders the query's runs; 0 beside another run that may live.
    started_ms : int
        When the run began, as a label.
    since_ms : int or None
        Beside another run: since when, by the store's clock.
    from_batch_id : int or None
        Beside another run: the micro-batch that both had reached when this one began.
    """

    epoch: int
    started_ms: int
    since_ms: int | None = None
    from_batch_id: int | None = None

    def retained(self, retained_versions: int, version: int) -> int:
        """Return how many versions before an accepted one must stay.

        Beside another run, everything that both shared stays: all that the other one wrote since builds on it.
        """
        return retained_versions + (0 if self.from_batch_id is None else max(0, version - self.from_batch_id))


class Claims:
    """The claims on one operator's directory, made by one run.

    Parameters
    ----------
    storage : ObjectStorage
    operator : str
    me : Claimant
    living : callable
        Takes processes of this machine and returns those that still run; it may give ending ones a moment.
    new_id, now_ms : callable, optional
        As in `holdfast.clock`.

    Notes
    -----
    Threads: any; executors of one run need not know of each other.
    """

    def __init__(
        self,
        storage: ObjectStorage,
        operator: str,
        me: Claimant,
        living: Callable[[Iterable[str]], Collection[str]],
        new_id: Callable[[], str] = clock.new_id,
        now_ms: Callable[[], int] = clock.now_ms,
    ) -> None:
        self._storage = storage
        self._operator = operator
        self._me = me
        self._living = living
        self._new_id, self._now_ms = new_id, now_ms
        self._folder = claims_of(storage, operator)
        self._application, self._machine = digest(me.application), digest(me.machine)
        self._where = {"operator": operator, "storage": storage.url}

    def take(self, record: OperatorRecord) -> Tenure:
        """Claim the directory for this run.

        Parameters
        ----------
        record : OperatorRecord
            Of this run's operator; nothing is written if the stored record does not allow it.

        Raises
        ------
        ConflictError
            Another query runs or has state here, another application runs this query, or another operator of this
            query has the name.
        FencedError
            A newer run of this query has begun.
        SchemaMismatchError
            The state was written with another number of shards.
        """
        listed, _ = self._list()
        stored = find_operator(self._storage, self._operator)
        self._refuse_others(listed, stored)
        if stored is not None:
            check_operator(stored, record, self._storage.url)
        tenure = self._place(listed)
        self._refuse_newer(listed, tenure)
        key = self._put(tenure)
        listed, stamps = self._list()
        try:
            self._refuse_others(listed, stored)
            tenure = self._settled(listed, tenure, self._modified_ms(listed, key))
        except ConflictError:
            self._folder.delete([key])
            raise
        self._refuse_newer(listed, tenure)
        self._delete_old(listed, stamps)
        return tenure

    def renew(self, tenure: Tenure) -> Tenure:
        """Show that this run is alive; returns its tenure from now on.

        Raises
        ------
        FencedError
            A newer run of this query has begun, or an older one beside which this one began is alive: stop.
        """
        listed, stamps = self._list()
        own = max((claim.epoch for claim in listed if claim.run_id == self._me.run_id), default=0)
        if tenure.since_ms is not None and own:  # another executor of this run has taken its place
            tenure = Tenure(own, tenure.started_ms)
        self._refuse_newer(listed, tenure)
        self._stop_beside_the_living(listed, tenure)
        key = self._put(tenure)
        if tenure.since_ms is not None:
            listed, stamps = self._list()
            tenure = self._settled(listed, tenure, self._modified_ms(listed, key))
        self._delete_old(listed, stamps)
        return tenure

    def _list(self) -> tuple[list[ListedClaim], dict[str, int]]:
        return list_claims(self._folder)

    def _modified_ms(self, listed: list[ListedClaim], key: str) -> int:
        """Return when this run's claim was stored: the time by the store's clock."""
        return self._found_ms({claim.key: claim.modified_ms for claim in listed}, key)

    def _found_ms(self, modified: dict[str, int], key: str) -> int:
        if key not in modified:
            raise UnavailableError("the storage does not list what was just stored", key=key, storage=self._folder.url)
        return modified[key]

    def _of_others(self, listed: list[ListedClaim]) -> list[ListedClaim]:
        return [claim for claim in listed if claim.query_id != self._me.query_id]

    def _place(self, listed: list[ListedClaim]) -> Tenure:
        """Return the run's tenure: as another executor has claimed it, the next epoch, or beside another run."""
        own = [claim for claim in listed if claim.run_id == self._me.run_id]
        if any(claim.epoch for claim in own):
            return Tenure(max(claim.epoch for claim in own), min(claim.started_ms for claim in own))
        started_ms = min((claim.started_ms for claim in own), default=self._now_ms())
        if own or self._perhaps_alive(listed):
            return Tenure(0, started_ms)
        return self._next(listed, started_ms)

    def _next(self, listed: list[ListedClaim], started_ms: int) -> Tenure:
        newest = max(listed, key=lambda claim: claim.epoch, default=None)
        if newest is not None and newest.epoch == EPOCH_MAX:
            raise CorruptionError(
                f"{self._folder.url}/{newest.key} has the last epoch that there is, which no query reaches: delete it"
            )
        return Tenure(1 + newest.epoch if newest else 1, started_ms)

    def _put(self, tenure: Tenure) -> str:
        key = f"{claim_name(self._me, tenure.epoch, tenure.started_ms)}.{self._new_id()}"
        header = {"operator": self._operator, **asdict(self._me), "started_ms": tenure.started_ms}
        self._folder.put(key, stored_file.encode(KIND, header)[0])
        return key

    def _perhaps_alive(self, listed: list[ListedClaim], since_ms: int = 0) -> list[ListedClaim]:
        """Return the claims, made since, of this query's other runs that may live in another application.

        Spark runs a query once in an application, and one application in a process.
        """
        me = self._me
        others = [c for c in listed if c.query_id == me.query_id and c.run_id != me.run_id]
        ours = {c.run_id for c in others if self._is_ours(c) or self._process_of(c) == me.process}
        holder = max((c for c in others if c.epoch), key=lambda c: (c.epoch, c.run_id), default=None)
        if holder is not None and holder.run_id in ours:  # whoever is beside it is beside this run, too
            return []
        others = [c for c in others if c.run_id not in ours and c.modified_ms > since_ms]
        here = {process for claim in others if (process := self._process_of(claim)) is not None}
        ended = here.difference(self._living(here))
        return [claim for claim in others if self._process_of(claim) not in ended]

    def _is_ours(self, claim: ListedClaim) -> bool:
        return bool(self._me.application) and claim.application == self._application

    def _process_of(self, claim: ListedClaim) -> str | None:
        """Return the process that claims; None where it is one of another machine."""
        return claim.process if claim.machine == self._machine else None

    def _settled(self, listed: list[ListedClaim], tenure: Tenure, now_ms: int) -> Tenure:
        """Return the tenure of a run that began beside others: unchanged or, once they have died, the next epoch.

        Raises
        ------
        ConflictError
            One of them lives, or is further on than this run.
        """
        if tenure.epoch:
            return tenure
        alive = self._perhaps_alive(listed, now_ms - ALIVE_MS)
        if not alive:
            tenure = self._next(listed, tenure.started_ms)
            self._put(tenure)
            return tenure
        if tenure.since_ms is None:
            known = [claim for claim in alive if self._process_of(claim) or claim.is_further_than(self._me.batch_id)]
            if known:
                newest = max(known, key=lambda claim: claim.modified_ms)
                raise self._of_a_copy(ConflictError, newest, wait_ms=ALIVE_MS - (now_ms - newest.modified_ms))
            _log.warning(
                "%r starts beside run %s of the same query, which may still run on another machine; it stops once "
                "that run renews its claim",
                *(self._operator, alive[0].run_id),
            )
        since_ms = now_ms if tenure.since_ms is None else tenure.since_ms
        reached = [claim.batch_id for claim in listed if claim in alive or claim.run_id == self._me.run_id]
        reached += [self._me.batch_id] if tenure.from_batch_id is None else [tenure.from_batch_id]
        # Where one is not known, nothing goes.
        return Tenure(0, tenure.started_ms, since_ms, min(0 if batch_id is None else batch_id for batch_id in reached))

    def _stop_beside_the_living(self, listed: list[ListedClaim], tenure: Tenure) -> None:
        """Withdraw, and raise FencedError, if a run beside which this one began has shown that it lives."""
        if tenure.since_ms is None:
            return
        mine = (tenure.started_ms, self._me.run_id)
        for claim in self._perhaps_alive(listed, tenure.since_ms + ENDING_MS):
            if claim.epoch or (claim.started_ms, claim.run_id) < mine:
                self._folder.delete([claim.key for claim in listed if claim.run_id == self._me.run_id])
                raise self._of_a_copy(FencedError, claim, wait_ms=ALIVE_MS)

    def _of_a_copy(self, error: type[ConflictError], claim: ListedClaim, wait_ms: int) -> ConflictError:
        return error(
            "another application is running this query: its checkpoint location was copied, or is in use twice. Stop "
            f"that application, or wait {-(-wait_ms // 1000)} s if it has ended; to run a copy on purpose, copy "
            "spark.holdfast.state.dir too, and set it to the copy",
            **self._where,
            **self._described(claim),
            run=claim.run_id,
            batch=claim.batch_id,
            own_run=self._me.run_id,
            own_batch=self._me.batch_id,
        )

    def _refuse_newer(self, listed: list[ListedClaim], tenure: Tenure) -> None:
        """Raise FencedError if another run of this query comes after this one; run ids decide between equal epochs."""
        if not tenure.epoch:
            return
        runs = [claim for claim in listed if claim.query_id == self._me.query_id]
        newest = max(runs, key=lambda claim: (claim.epoch, claim.run_id), default=None)
        if newest is not None and (newest.epoch, newest.run_id) > (tenure.epoch, self._me.run_id):
            raise FencedError(
                "a newer run of this query has taken over its state, so this one stops: let only one application use a "
                "checkpoint location",
                **self._where,
                query=self._me.query_id,
                run=self._me.run_id,
                newer_run=newest.run_id,
                newer_started=_time(newest.started_ms),
            )

    def _refuse_others(self, listed: list[ListedClaim], stored: OperatorRecord | None) -> None:
        """Raise ConflictError if the directory is another query's: it has a record, or a young claim and nobody has."""
        me = self._me
        if stored is not None and stored.query_id == me.query_id:
            return
        owners = [c for c in listed if c.query_id == stored.query_id] if stored else self._of_others(listed)
        newest = max(owners, key=lambda claim: claim.modified_ms, default=None)
        if newest is not None and self._lives(newest):
            raise ConflictError(
                f"another query uses this directory, or did so within {ALIVE_MS // 60_000} minutes: stop it, give "
                "this operator another name, or set spark.holdfast.state.dir to another directory",
                **self._where,
                **self._described(newest),
                query=me.query_id,
            )
        if stored is not None:
            raise ConflictError(
                "this directory holds the state of another query, which is not running: give the operator another "
                "name, or set spark.holdfast.state.dir to another directory (delete the old one if that query "
                "is gone for good)",
                **self._where,
                owner=stored.query_id,
                last_seen=newest and _time(newest.modified_ms),
                query=me.query_id,
            )

    def _lives(self, claim: ListedClaim) -> bool:
        """Tell whether a claim is young, by the store's clock."""
        stamp = f"now.{self._new_id()}"
        self._folder.put(stamp, b"")
        try:
            now_ms = self._found_ms(self._list()[1], stamp)
        finally:
            self._folder.delete([stamp])
        return now_ms - claim.modified_ms < ALIVE_MS

    def _described(self, claim: ListedClaim) -> dict[str, Any]:
        """Return what a user knows the claim's query by, as far as the claim can be read: its name has decided."""
        try:
            claimant = read_claim(self._folder, claim)  # none where it was renewed since it was listed
        except CorruptionError as exc:
            _log.warning("who claims %r cannot be told: %s", self._operator, exc)
            claimant = None
        return {
            "owner": claim.query_id,
            "name": (claimant and claimant.query_name) or "(none)",
            "started": _time(claim.started_ms),
            "host": claimant and claimant.host,
        }

    def _delete_old(self, listed: list[ListedClaim], stamps: dict[str, int]) -> None:
        """Delete claims that newer ones of their run have replaced, those of runs long past, and stamps left behind."""
        newest_ms = max((claim.modified_ms for claim in listed), default=0)
        # One is enough to tell a late executor of an ended run its place: what stays grows with runs, not executors.
        last = {claim.run_id: claim for claim in sorted(listed, key=lambda claim: (claim.epoch, claim.modified_ms))}

        def is_old(claim: ListedClaim) -> bool:
            kept_ms = KEPT_MS if claim is last[claim.run_id] else ALIVE_MS
            return newest_ms - claim.modified_ms > kept_ms

        old = [claim.key for claim in listed if is_old(claim)]
        old += [key for key, modified_ms in stamps.items() if newest_ms - modified_ms > ALIVE_MS]
        if old:
            self._folder.delete(old)


def _time(milliseconds: int) -> str:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):  # what stands in a name may be anything
        return f"{milliseconds} ms"
