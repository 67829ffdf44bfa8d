"""A query's health: running, stopped, stale or failing, since when and why, with figures and their sources.

::

    a persisting failure, lost state, starts that commit nothing         ─▶  failing
    active within its pace, and its processes have not ended             ─▶  running
    its processes have ended; or it pauses no longer than usual          ─▶  stopped
    restored, rescaled or cloned, and not started yet                    ─▶  stopped
    anything else: silent for longer than its pace, for no known reason  ─▶  stale

The **pace** is the longest of five minutes, twice the usual time between micro-batches, and four times the usual
duration of one. A query that runs for a minute each hour is *stopped* between its runs, and *stale* once it has
been silent for twice as long as usual.

The signs and their sources; none needs a response from the query::

    state directory     <operator>/claims/…     its runs: start, last activity, micro-batch, driver
                        shard-…/commits/…       when something was last stored
                        shard-…/troubles/…      what failed
    checkpointLocation  offsets/, commits/      when each retained micro-batch was planned and committed
    this machine        the processes of runs; state servers, with the rows of the last micro-batches
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from holdfast.errors import CorruptionError, HoldfastError, NotFoundError
from holdfast.snapshotter.ownership.claims import ALIVE_MS, Claim, ClaimingRun, claims_of, read_claim
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, read_operator
from holdfast.snapshotter.ownership.queries import QueryOrigin, find_origin
from holdfast.snapshotter.ownership.stored_tables import stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import OperatorListing, ShardListing
from holdfast.snapshotter.upkeep.troubles import batch_of, read_trouble
from holdfast.spark_integration.client.connection import over_executors
from holdfast.spark_integration.client.messages import RecentBatch
from holdfast.spark_integration.executor.processes import lives
from holdfast.spark_integration.spark_state.query_location import LoggedTimes
from holdfast.spark_integration.spark_types import type_name

_UNITS = ((24 * 60 * 60_000, "d"), (60 * 60_000, "h"), (60_000, "min"), (1_000, "s"))
SHOWN_MAX = 20
#: Shown as the last sign of work if the claim is the newest sign.
BY_CLAIM = "its claim in the state directory"
State = Literal["running", "stopped", "stale", "failing"]
#: The pace is determined from this many last micro-batches.
RECENT = 20
#: This many starts without a commit are a failure: the first may have been killed, the second may still be running.
STUCK_AFTER_STARTS = 3
_NO_LOG = "pass the query's checkpointLocation as well"
#: Names and types of the ``key`` and ``value`` columns, by table.
SparkTables = dict[str, dict[str, list[tuple[str, str]]]]


def count(value: float) -> str:
    """Format a whole number with thousands separators."""
    return f"{value:,.0f}"


def counted(value: float, noun: str) -> str:
    """Format a number with its noun: 1 commit, 2 commits."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def duration(ms: float) -> str:
    """Format a duration in its one or two largest units: 3 min 20 s."""
    if ms < 1_000:
        return f"{ms:.0f} ms"
    for place, (unit_ms, name) in enumerate(_UNITS):
        if ms >= unit_ms:
            whole, rest = divmod(int(ms), unit_ms)
            finer = "".join(f" {rest // ms} {unit}" for ms, unit in _UNITS[place + 1 : place + 2] if rest >= ms)
            return f"{whole:,} {name}{finer if whole < 10 else ''}"
    raise AssertionError


def ago(at_ms: int, now_ms: int) -> str:
    """Format the time since a moment; the future counts as now, since clocks differ a little."""
    return "now" if now_ms - at_ms < 1_000 else f"{duration(now_ms - at_ms)} ago"


def times(value: float) -> str:
    """Format a factor: 1.5 times."""
    return f"{value:,.0f} times" if value >= 100 else f"{value:.1f} times"


def percent(share: float) -> str:
    """Format a fraction as a percentage."""
    return "under 1 %" if 0 < share < 0.01 else f"{share:.0%}".replace("%", " %")


@dataclass(frozen=True, order=True)
class Report:
    """A failure report in a listing."""

    stored_ms: int
    shard: str  #: The shard's prefix
    key: str  #: Relative to the shard

    @property
    def batch_id(self) -> int | None:
        """The failed micro-batch; None for other failures."""
        return batch_of(self.key)


@dataclass(frozen=True)
class Failure:
    """A failure, read from its report."""

    shard: str  #: The shard's prefix
    stored_ms: int  #: When it was stored, by the store's clock
    what: str  #: What fails: ``snapshot``, ``clean-up`` or ``micro-batch 42``
    error: str
    in_a_row: int = 0  #: Number of failures in a row; 0 if the report cannot be read
    host: str = ""

    def sentence(self, now_ms: int) -> str:
        """Return the failure in words."""
        times = f", {self.in_a_row:,} times in a row" if self.in_a_row > 1 else ""
        host = f" on {self.host}" if self.host else ""
        return f"{self.shard}: {self.what} failed{times}, last {ago(self.stored_ms, now_ms)}{host}: {self.error}"


def reports(shards: Iterable[ShardListing], committed: int | None = None) -> list[Report]:
    """Return the persisting failures, newest first; those of micro-batches up to `committed` are resolved."""
    found = [Report(o.modified_ms, shard.prefix, o.key) for shard in shards for o in shard.troubles]
    return sorted(persisting(found, committed), reverse=True)


def persisting(found: Iterable[Report], committed: int | None) -> Iterator[Report]:
    """Yield the reports, except those of micro-batches that have since been committed."""
    return (one for one in found if one.batch_id is None or committed is None or one.batch_id > committed)


def read_failures(storage: ObjectStorage, of: Iterable[Report]) -> list[Failure]:
    """Read the first `SHOWN_MAX` reports. Raises `UnavailableError`."""
    found = []
    for report in [*of][:SHOWN_MAX]:
        try:
            trouble = read_trouble(PrefixedStorage(storage, report.shard), report.key)
        except NotFoundError:  # resolved since the listing
            continue
        except CorruptionError as exc:
            found.append(Failure(report.shard, report.stored_ms, report.key, str(exc)))
        else:
            what = trouble.what.replace("micro-batch-", "micro-batch ")
            found.append(Failure(report.shard, report.stored_ms, what, trouble.error, trouble.in_a_row, trouble.host))
    return found


@dataclass(frozen=True)
class QueryRun:
    """A run of a query, which begins with a start."""

    run_id: str
    started_ms: int  #: By the clock of the machine that started it
    seen_ms: int  #: When it was last active, by the store's clock
    batch_id: int | None  #: The micro-batch that it last ran; None if unknown
    has_ended: bool | None  #: Whether its driver has ended; None if this machine cannot tell


@dataclass(frozen=True)
class Signs:
    """What is known about a query."""

    runs: tuple[QueryRun, ...] = ()  #: The runs of the last day, from claims, newest last
    stored_ms: int = 0  #: The last time an operator stored a commit or snapshot; 0 if never
    #: The query's own micro-batches that Spark retains, ascending; None if its location is unknown
    log: tuple[LoggedTimes, ...] | None = None
    #: The last micro-batches known to state servers on this machine, newest first
    measured: tuple[RecentBatch, ...] = ()
    reports: tuple[Report, ...] = ()  #: Failures, resolved ones included, newest first
    lost: str = ""  #: Why the query's state cannot be used; empty if it can be, as far as known
    awaits_start: bool = False  #: Whether it was restored, rescaled or cloned, and no run has claimed it yet

    @property
    def run(self) -> QueryRun | None:
        return self.runs[-1] if self.runs else None

    @property
    def committed(self) -> LoggedTimes | None:
        """The last committed micro-batch, if Spark's log is known."""
        return next((one for one in reversed(self.log or ()) if one.committed_ms is not None), None)

    @property
    def planned(self) -> LoggedTimes | None:
        """The planned and uncommitted micro-batch, if any and if Spark's log is known."""
        newest = self.log[-1] if self.log else None
        return newest if newest and newest.committed_ms is None else None

    @property
    def committed_id(self) -> int | None:
        """The last micro-batch known to be committed, as any micro-batch before a run's current one is."""
        known = [run.batch_id - 1 for run in self.runs if run.batch_id is not None]
        known += [one.batch_id - 1 for one in self.measured if one.batch_id is not None]
        known += [self.committed.batch_id] if self.committed else []
        return max(known, default=None)

    @property
    def failing(self) -> tuple[Report, ...]:
        """The failures that persist, newest first."""
        return tuple(persisting(self.reports, self.committed_id))

    @property
    def seen(self) -> tuple[int, str]:
        """The time and source of the last activity; (0, "") if unknown."""
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
    record: OperatorRecord | HoldfastError  #: An error if it is damaged, or was deleted since the listing
    claim: Claim | None = None  #: The newest; None if absent or unreadable
    stored_ms: int = 0  #: As in `Signs`
    reports: tuple[Report, ...] = ()
    awaits_start: bool = False  #: As in `Signs`

    @classmethod
    def of(cls, storage: ObjectStorage, listing: OperatorListing) -> OperatorSigns:
        """Return the signs from a listing, the record, and the newest claim."""
        newest, claim, awaits_start = listing.claim(), None, False
        if newest is not None:
            with suppress(CorruptionError, NotFoundError):  # verify reports damage; old claims are deleted
                claim = read_claim(claims_of(storage, listing.name), newest)
        record: OperatorRecord | HoldfastError
        try:
            record = read_operator(storage, listing.name)
            awaits_start = newest is None and origin_of(storage, record.query_id) is not None
        except (CorruptionError, NotFoundError) as exc:
            record = exc
        stored = (o.modified_ms for shard in listing.shards.values() for o in shard.versions)
        found = tuple(reports(listing.shards.values()))
        return cls(listing.name, record, claim, max(stored, default=0), found, awaits_start)

    @property
    def query_id(self) -> str:
        """The owning query or, if the record is unreadable, the last to claim the operator; empty if unknown."""
        owner = self.record if isinstance(self.record, OperatorRecord) else self.claim
        return owner.query_id if owner else ""


def origin_of(storage: ObjectStorage, query_id: str) -> QueryOrigin | None:
    """Return a query's origin; None if it has none, or if it is unreadable."""
    try:
        return find_origin(storage, query_id)
    except CorruptionError:  # reported when the query starts
        return None


def own_batches(log: Iterable[LoggedTimes], origin: QueryOrigin | None) -> list[LoggedTimes]:
    """Return the micro-batches that a query ran itself; a restore's log entries have the time of the restore."""
    first = origin.first_batch if origin else 0
    return [one for one in log if one.batch_id >= first]


def signs_of(
    query_id: str,
    operators: Sequence[OperatorSigns],
    log: Sequence[LoggedTimes] | None,
    live: Iterable[RecentBatch],
) -> Signs:
    """Return a query's signs; `log`: see `own_batches`; `live`: from this machine's state servers."""
    lost = [one.name for one in operators if isinstance(one.record, HoldfastError)]
    return Signs(
        runs_of((one.claim for one in operators if one.claim), query_id),
        max(one.stored_ms for one in operators),
        None if log is None else tuple(log),
        _busiest(live, query_id),
        tuple(sorted((report for one in operators for report in one.reports), reverse=True)),
        f"The record of {lost[0]} cannot be read." if lost else "",
        all(one.awaits_start for one in operators),
    )


def _busiest(batches: Iterable[RecentBatch], query_id: str) -> tuple[RecentBatch, ...]:
    """Return a query's last micro-batches, newest first, as measured by its operator with the most rows."""
    by_operator: dict[str, list[RecentBatch]] = {}
    for one in over_executors(one for one in batches if one.query == query_id):
        by_operator.setdefault(one.operator, []).append(one)
    return tuple(max(by_operator.values(), key=lambda of: sum(one.values.get("rows", 0) for one in of), default=[]))


def runs_of(claims: Iterable[Claim], query_id: str) -> tuple[QueryRun, ...]:
    """Return a query's runs, read from its claims, newest last by the store's clock."""
    by_run: dict[str, list[ClaimingRun]] = {}
    for claim in claims:
        if claim.query_id == query_id:
            for run in claim.runs:
                by_run.setdefault(run.run_id, []).append(run)
    return tuple(sorted(map(_run, by_run.values()), key=lambda run: (run.seen_ms, run.started_ms)))


def _run(claimed: Sequence[ClaimingRun]) -> QueryRun:
    newest = max(claimed, key=lambda run: run.seen_ms)
    at = [run.batch_id for run in claimed if run.batch_id is not None]
    of_driver = lives(newest.driver, 0)
    has_ended = False if of_driver or lives(newest.executor, 0) else None if of_driver is None else True
    started_ms = min(run.started_ms for run in claimed)
    return QueryRun(newest.run_id, started_ms, newest.seen_ms, max(at, default=None), has_ended)


@dataclass(frozen=True)
class Pace:
    """The pace of a query, from its last micro-batches."""

    batches: int = 0  #: Number of micro-batches considered; 0 if unknown
    between_ms: float | None = None  #: Median time between micro-batches
    takes_ms: float | None = None  #: Median duration of a micro-batch
    span_ms: int = 0  #: Time from the first to the last
    pause_ms: float | None = None  #: Median pause, if there were at least two
    known_from: str = ""

    @property
    def silence_ms(self) -> float:
        """How long a running query may be silent."""
        return max(ALIVE_MS, 2 * (self.between_ms or 0), 4 * (self.takes_ms or 0))


@dataclass(frozen=True)
class Verdict:
    """A query's state and the reason for it."""

    state: State
    since_ms: int  #: 0 if unknown
    why: str  #: One or two sentences
    failure: Report | None = None  #: The newest persisting failure


def pace_of(signs: Signs) -> Pace:
    """Return a query's pace."""
    # The time between two starts is not a pause if the first run worked until the second.
    pauses = _pauses((after.started_ms - before.seen_ms for before, after in pairwise(signs.runs)), ALIVE_MS)
    if signs.log:
        planned = [one.planned_ms for one in signs.log]
        took = [one.committed_ms - one.planned_ms for one in signs.log[-RECENT:] if one.committed_ms is not None]
        took = [one for one in took if one >= 0]  # a copied location has the times of the copy
        known = _paced(planned, "Spark's log", median(took) if took else None, signs.runs)
        pauses = pauses or _pauses((after - before for before, after in pairwise(planned)), known.silence_ms)
    else:
        known = _paced([one.batch_ms for one in signs.measured], "state servers on this machine", None, signs.runs)
    return replace(known, pause_ms=median(pauses) if pauses else None)


def _paced(begun_ms: Sequence[int], known_from: str, takes_ms: float | None, runs: Sequence[QueryRun]) -> Pace:
    last = sorted(begun_ms)[-RECENT:]
    if len(last) < 2:
        return Pace(takes_ms=takes_ms)
    gaps = [after - before for before, after in pairwise(last) if not _is_between_runs(before, after, runs)]
    between = median(gaps) if gaps else None
    # A pause does not count towards the pace.
    going = [last[-1]]
    for before, after in reversed([*pairwise(last)]):
        if after - before > max(ALIVE_MS, 2 * (between or 0)):
            break
        going.insert(0, before)
    return Pace(len(going), between, takes_ms, going[-1] - going[0], known_from=known_from)


def _is_between_runs(before_ms: int, after_ms: int, runs: Sequence[QueryRun]) -> bool:
    """Return whether a known start of the query falls between two micro-batches."""
    starts = [run.started_ms for run in runs]
    if any(before_ms < start <= after_ms for start in starts):
        return True
    # Starts before the first known one are unknown.
    return len(starts) > 1 and before_ms < min(starts)


def _pauses(gaps_ms: Iterable[int], silence_ms: float) -> list[int]:
    """Return the pauses between micro-batches; empty if there is only one."""
    found = [gap for gap in gaps_ms if gap > silence_ms]
    return found if len(found) > 1 else []


def judge(signs: Signs, now_ms: int) -> Verdict:
    """Judge a query by its signs. `now_ms`: the time by a clock close to the store's."""
    pace, failing = pace_of(signs), signs.failing
    of_batch = next((one for one in failing if one.batch_id is not None), None)
    newest = failing[0] if failing else None
    if signs.lost:
        return Verdict("failing", 0, signs.lost, newest)
    if of_batch:
        since = "has not been committed since" if signs.log else "is not known to have been committed since"
        why = f"Micro-batch {of_batch.batch_id:,} failed and {since}."
        return Verdict("failing", of_batch.stored_ms, why, of_batch)
    if signs.awaits_start and not signs.measured:
        return Verdict("stopped", signs.stored_ms, "Created from another query, and not started yet.")
    if stuck := _stuck(signs):
        return stuck
    idle = _idle(signs, pace, now_ms)
    if idle:
        return idle
    if newest:
        what = newest.key.partition("/")[2].rpartition("-")[0]
        effect = "storage grows" if what == "clean-up" else "commits pile up, and the query will have to wait"
        why = f"Micro-batches are running, but a {what} of {newest.shard} keeps failing: {effect}."
        return Verdict("failing", newest.stored_ms, why, newest)
    return _running(signs, now_ms)


def _running(signs: Signs, now_ms: int) -> Verdict:
    since_ms = signs.run.started_ms if signs.run else 0
    if signs.planned:
        number, at_ms = signs.planned.batch_id, signs.planned.planned_ms
        return Verdict("running", since_ms, f"Micro-batch {number:,} is running, planned {ago(at_ms, now_ms)}.")
    if signs.committed and signs.committed.committed_ms:
        number, at_ms = signs.committed.batch_id, signs.committed.committed_ms
        return Verdict("running", since_ms, f"Micro-batch {number:,} was committed {ago(at_ms, now_ms)}.")
    seen_ms, shown_by = signs.seen
    return Verdict("running", since_ms, f"Last active {ago(seen_ms, now_ms)}, according to {shown_by}.")


def _stuck(signs: Signs) -> Verdict | None:
    """Return a verdict if repeated starts reach the same micro-batch without committing it."""
    run = signs.run
    if run is None or run.batch_id is None or (signs.committed_id or -1) >= run.batch_id:
        return None
    same = [one for one in signs.runs if one.batch_id == run.batch_id]
    if len(same) < STUCK_AFTER_STARTS:
        return None
    reached = f"{len(same)} starts have reached micro-batch {run.batch_id:,}"
    outcome = "none has committed it" if signs.log else "none is known to have committed it"
    why = f"{reached}, and {outcome}; the error is in the program's own log."
    return Verdict("failing", same[0].started_ms, why)


def _idle(signs: Signs, pace: Pace, now_ms: int) -> Verdict | None:
    """Return a verdict of stopped or stale; None if the query is active."""
    seen_ms, shown_by = signs.seen
    if not seen_ms:
        return Verdict("stale", 0, "The query has never been active: there is no micro-batch, claim or commit.")
    silent_ms = max(now_ms - seen_ms, 0)  # the store's clock may be ahead
    has_ended = signs.run.has_ended if signs.run and signs.run.seen_ms >= seen_ms - ALIVE_MS else None
    if not has_ended and silent_ms <= pace.silence_ms:
        return None
    silence = f"No micro-batch for {duration(silent_ms)}, according to {shown_by}"
    if shown_by == BY_CLAIM:  # it may have been active for two more minutes
        silence = f"Last active {ago(seen_ms, now_ms)}, according to {shown_by}, which is renewed every two minutes"
    left = f" Micro-batch {signs.planned.batch_id:,} is planned and not committed." if signs.planned else ""
    if pace.pause_ms and silent_ms > 2 * pace.pause_ms:
        return Verdict("stale", seen_ms, f"{silence}; it usually pauses for {duration(pace.pause_ms)}.{left}")
    if has_ended:
        then = " The next start runs it again." if left else ""
        return Verdict("stopped", seen_ms, f"{silence}, and its processes on this machine have ended.{left}{then}")
    if pace.pause_ms and not left:
        return Verdict("stopped", seen_ms, f"{silence}; it usually pauses for {duration(pace.pause_ms)}.")
    if has_ended is False:
        rest = "its process on this machine is still running: it has no input, was stopped by the program, or hung"
    else:
        rest = "this machine cannot tell whether it is still running"
    return Verdict("stale", seen_ms, f"{silence}; {rest}.{left}")


@dataclass(frozen=True)
class Figure:
    """A figure about a query, with its source."""

    name: str
    value: str  #: ``unknown`` without a source
    known_from: str  #: Its source, or why it is unknown


@dataclass(frozen=True)
class Health:
    """A query's health."""

    query_id: str
    operators: tuple[str, ...]  #: The names of its operators' directories
    state: State
    since_ms: int  #: 0 if unknown
    why: str
    figures: tuple[Figure, ...]
    failure: Failure | None  #: The newest persisting failure
    committed: int | None  #: The last micro-batch known to be committed


def health_of(
    query_id: str, operators: Iterable[str], signs: Signs, failures: Iterable[Failure], now_ms: int
) -> Health:
    """Return a query's health. `now_ms`: the time, by a clock close to the store's."""
    found, pace = judge(signs, now_ms), pace_of(signs)
    known = list(failures)
    newest = next(
        (
            one
            for one in known
            if found.failure and (one.shard, one.stored_ms) == (found.failure.shard, found.failure.stored_ms)
        ),
        next(iter(known), None),
    )
    rows, pending = _rows(signs), _pending(signs)
    figures: tuple[Figure, ...] = (_frequency(pace, signs), rows, _batch_duration(pace, signs), pending)
    if found.state == "stopped":  # no process can provide them
        figures = tuple(one for one in figures if one.value != "unknown" or one not in (rows, pending))
    return Health(
        query_id, tuple(operators), found.state, found.since_ms, found.why, figures, newest, signs.committed_id
    )


def _frequency(pace: Pace, signs: Signs) -> Figure:
    name = "Micro-batches per minute"
    if pace.batches < 2 or not pace.span_ms:
        is_known = pace.known_from or signs.log is not None
        return Figure(name, "unknown", "fewer than two consecutive micro-batches are known" if is_known else _NO_LOG)
    often = (pace.batches - 1) / pace.span_ms * 60_000
    value = f"{often:,.1f}" if often >= 0.1 else f"one in {duration(60_000 / often)}"
    return Figure(name, value, f"over the last {pace.batches} uninterrupted micro-batches, from {pace.known_from}")


def _rows(signs: Signs) -> Figure:
    name, last = "Rows per second", signs.measured[:RECENT]
    # The newest may still be running: its duration is unknown.
    if len(last) < 2 or last[0].batch_ms <= last[-1].batch_ms:
        where = "only state servers on the query's machines count rows"
        return Figure(name, "unknown", "this machine's servers saw fewer than two micro-batches" if last else where)
    rows = sum(one.values.get("rows", 0) for one in last[1:])
    value = count(rows * 1000 / (last[0].batch_ms - last[-1].batch_ms))
    return Figure(name, value, f"the last {len(last)} micro-batches of {last[0].operator}, from this machine's servers")


def _batch_duration(pace: Pace, signs: Signs) -> Figure:
    name = "Micro-batch duration"
    if pace.takes_ms is None:
        return Figure(name, "unknown", _NO_LOG if signs.log is None else "Spark's log has no committed micro-batch")
    if not pace.between_ms:
        return Figure(name, duration(pace.takes_ms), "from plan to commit, in Spark's log")
    share = min(pace.takes_ms / pace.between_ms, 1)
    if share >= 0.9:
        known_from = "from plan to commit, in Spark's log; micro-batches run back to back"
        return Figure(name, duration(pace.takes_ms), known_from)
    value = f"{duration(pace.takes_ms)} of every {duration(pace.between_ms)}"
    rest = f"idle {round((1 - share) * 100)} % of the time"
    return Figure(name, value, f"from plan to commit, and to the next plan, in Spark's log; {rest}")


def _pending(signs: Signs) -> Figure:
    """Return the planned, uncommitted input: Spark logs what it has read, not what its sources still hold."""
    name = "Pending input"
    if signs.planned:
        return Figure(name, f"micro-batch {signs.planned.batch_id:,}", "planned and not committed, in Spark's log")
    known_from = "Spark's log shows what was read, not what is pending: see sources in query.lastProgress"
    return Figure(name, "unknown", known_from)


def tables_of(storage: ObjectStorage, record: OperatorRecord | HoldfastError) -> SparkTables | HoldfastError:
    """Return an operator's current tables, or the error of its record or tables."""
    if isinstance(record, HoldfastError):
        return record
    try:
        schemas = stored_tables(storage, record).live
    except (CorruptionError, NotFoundError) as exc:
        return exc
    return {
        name: {
            side: [(field.name, type_name(field.type)) for field in columns]
            for side, columns in (("key", schema.key), ("value", schema.value))
        }
        for name, schema in schemas.items()
    }
