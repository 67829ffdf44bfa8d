"""Signs of a query's health and their sources, none of which needs the query to answer.

::

    state directory     <operator>/claims/…     its runs: begun when, seen when, at which micro-batch, which driver
                        shard-…/commits/…       when something was stored last
                        shard-…/troubles/…      what failed
    checkpointLocation  offsets/, commits/      when each retained micro-batch was planned and committed
    this machine        the processes of runs; state servers, which remember the rows of the last micro-batches

A claim is renewed every two minutes while micro-batches run, so it says little more than that; Spark's log is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.errors import CorruptionError, HoldfastError, NotFoundError
from holdfast.health.failures import Report, reports, still
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.ownership.query_origin import QueryOrigin, find_origin
from holdfast.snapshotter.ownership.stored_claims import Claim, ClaimingRun, claims_of, read_claim
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.catalogue import OperatorListing
from holdfast.spark_integration.client.recent import RecentBatch, over_executors
from holdfast.spark_integration.executor.processes import lives
from holdfast.spark_integration.spark_state.query_location import BatchTimes

#: What shows a query at work where nothing newer than its claim does.
BY_CLAIM = "its claim in the state directory"


@dataclass(frozen=True)
class Run:
    """One start of a query."""

    run_id: str
    started_ms: int  #: By the clock of the machine that began it
    seen_ms: int  #: When it showed last that it was at work, by the store's clock
    batch_id: int | None  #: At which micro-batch it was then; None where that is not known
    has_ended: bool | None  #: Whether its driver has; None where that cannot be seen from this machine


@dataclass(frozen=True)
class Signs:
    """What is known of a query."""

    runs: tuple[Run, ...] = ()  #: The last ones of a day, as far as claims tell; the newest last
    stored_ms: int = 0  #: When an operator stored a commit or snapshot last; 0 where none has
    #: The query's own micro-batches that Spark retains, ascending; None where its location is not known
    log: tuple[BatchTimes, ...] | None = None
    #: The last micro-batches that state servers on this machine remember, newest first
    measured: tuple[RecentBatch, ...] = ()
    reports: tuple[Report, ...] = ()  #: Failures, the newest first, whether they are over or not
    lost: str = ""  #: Why state of the query cannot be used; empty where it can, as far as is known
    awaits_start: bool = False  #: Whether it was restored, rescaled or cloned, and no run has claimed it yet

    @property
    def run(self) -> Run | None:
        """The newest run."""
        return self.runs[-1] if self.runs else None

    @property
    def committed(self) -> BatchTimes | None:
        """The last committed micro-batch, if Spark's log is known."""
        return next((one for one in reversed(self.log or ()) if one.committed_ms is not None), None)

    @property
    def planned(self) -> BatchTimes | None:
        """The planned and uncommitted micro-batch, if any and if Spark's log is known."""
        newest = self.log[-1] if self.log else None
        return newest if newest and newest.committed_ms is None else None

    @property
    def committed_id(self) -> int | None:
        """The last micro-batch known to be committed: the one before a run's current one."""
        known = [run.batch_id - 1 for run in self.runs if run.batch_id is not None]
        known += [one.batch_id - 1 for one in self.measured if one.batch_id is not None]
        known += [self.committed.batch_id] if self.committed else []
        return max(known, default=None)

    @property
    def failing(self) -> tuple[Report, ...]:
        """The failures that persist, newest first."""
        return tuple(still(self.reports, self.committed_id))

    @property
    def seen(self) -> tuple[int, str]:
        """When the query was last seen at work, and by what; (0, "") if never."""
        signs = [(self.stored_ms, "the newest stored commit")]
        signs += [(self.run.seen_ms, BY_CLAIM)] if self.run else []
        signs += [(one.batch_ms, "a state server on this machine") for one in self.measured[:1]]
        signs += [(one.planned_ms, "Spark's log") for one in (self.log or ())[-1:]]
        signs += [(self.committed.committed_ms or 0, "Spark's log")] if self.committed else []
        return max(signs) if max(signs)[0] else (0, "")


@dataclass(frozen=True)
class OperatorSigns:
    """The signs in one operator's directory."""

    name: str
    stored_ms: int  #: As in `Signs`
    reports: tuple[Report, ...]
    claim: Claim | None  #: The newest; None where there is none, or it cannot be read
    is_lost: bool  #: Whether its record cannot be read
    awaits_start: bool  #: As in `Signs`

    @classmethod
    def of(
        cls, storage: ObjectStorage, listing: OperatorListing, record: OperatorRecord | HoldfastError
    ) -> OperatorSigns:
        """Return the signs in a listing, its newest claim, and its record or why that cannot be read."""
        newest, claim = listing.claim(), None
        if newest is not None:
            with suppress(CorruptionError, NotFoundError):  # of which verify tells; deleted as an old one since
                claim = read_claim(claims_of(storage, listing.name), newest)
        stored = (o.modified_ms for shard in listing.shards.values() for o in shard.versions)
        found = tuple(reports(listing.shards.values()))
        stored_ms = max(stored, default=0)
        if isinstance(record, HoldfastError):
            return cls(listing.name, stored_ms, found, claim, is_lost=True, awaits_start=False)
        awaits_start = newest is None and _origin(storage, record.query_id) is not None
        return cls(listing.name, stored_ms, found, claim, is_lost=False, awaits_start=awaits_start)

    @property
    def claimed_by(self) -> str:
        """The query of the newest claim; empty without one."""
        return self.claim.query_id if self.claim else ""


def _origin(storage: ObjectStorage, query_id: str) -> QueryOrigin | None:
    try:
        return find_origin(storage, query_id)
    except CorruptionError:  # of which the start tells
        return None


def of_its_own(log: Iterable[BatchTimes], storage: ObjectStorage, query_id: str) -> list[BatchTimes]:
    """Return the micro-batches that a query ran itself, not those with which a restore or a clone began.

    Those have the time of restoring. Raises `UnavailableError` if the storage does not answer.

    `storage`: the state directory; `query_id`: as the checkpoint location has it.
    """
    origin = _origin(storage, query_id)
    first = origin.first_batch if origin else 0
    return [one for one in log if one.batch_id >= first]


def signs_of(
    query_id: str,
    operators: Sequence[OperatorSigns],
    log: Sequence[BatchTimes] | None,
    live: Iterable[RecentBatch],
) -> Signs:
    """Return what is known of a query.

    Parameters
    ----------
    operators : sequence of OperatorSigns
        At least one.
    log : sequence of BatchTimes or None
        What Spark's log says, as `of_its_own` returns it; None if the query's location is not known.
    live : iterable of RecentBatch
        What state servers on this machine remember, of whatever query.
    """
    return Signs(
        runs_of((one.claim for one in operators if one.claim), query_id),
        max(one.stored_ms for one in operators),
        None if log is None else tuple(log),
        _busiest(live, query_id),
        tuple(sorted((report for one in operators for report in one.reports), reverse=True)),
        next((f"The record of {one.name} cannot be read." for one in operators if one.is_lost), ""),
        all(one.awaits_start for one in operators),
    )


def _busiest(batches: Iterable[RecentBatch], query_id: str) -> tuple[RecentBatch, ...]:
    """Return a query's last micro-batches, newest first, as measured by its operator with the most rows."""
    by_operator: dict[str, list[RecentBatch]] = {}
    for one in over_executors(one for one in batches if one.query == query_id):
        by_operator.setdefault(one.operator, []).append(one)
    return tuple(max(by_operator.values(), key=lambda of: sum(one.values.get("rows", 0) for one in of), default=[]))


def runs_of(claims: Iterable[Claim], query_id: str) -> tuple[Run, ...]:
    """Return the runs of a query, the newest last, as the claims of its operators tell.

    Who was seen last goes by the store's clock alone: machines differ in when they began.
    """
    by_run: dict[str, list[ClaimingRun]] = {}
    for claim in claims:
        if claim.query_id == query_id:
            for run in claim.runs:
                by_run.setdefault(run.run_id, []).append(run)
    return tuple(sorted(map(_run, by_run.values()), key=lambda run: (run.seen_ms, run.started_ms)))


def _run(told: Sequence[ClaimingRun]) -> Run:
    newest = max(told, key=lambda run: run.seen_ms)
    at = [run.batch_id for run in told if run.batch_id is not None]
    of_driver = lives(newest.driver, 0)
    has_ended = False if of_driver or lives(newest.executor, 0) else None if of_driver is None else True
    started_ms = min(run.started_ms for run in told)
    return Run(newest.run_id, started_ms, newest.seen_ms, max(at, default=None), has_ended)
