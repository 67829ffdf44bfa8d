"""Whether a query is running, stopped, stale or failing; since when, and why; and figures with their sources.

::

    a failure that is not over, lost state, starts that commit nothing   ─▶  failing
    seen within its pace, and its processes have not ended               ─▶  running
    its processes have ended; or it pauses no longer than it does        ─▶  stopped
    restored, rescaled or cloned, and not started yet                    ─▶  stopped
    anything else: silent longer than its pace, and nothing says why     ─▶  stale

The **pace** is five minutes, or twice the usual time between micro-batches, or four times what one usually takes,
whichever is longest. A query that runs for a minute each hour is *stopped* between its runs, and *stale* once it has
been silent for twice as long as usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from holdfast.health.failures import Failure, Report, ago, count, duration
from holdfast.health.signs import BY_CLAIM, Run, Signs
from holdfast.snapshotter.ownership.stored_claims import ALIVE_MS

State = Literal["running", "stopped", "stale", "failing"]
#: The pace is that of this many of the last micro-batches.
RECENT = 20
#: So many starts without a commit are a failure: the first may have been killed, the second be at work.
STARTS_IN_VAIN = 3


@dataclass(frozen=True)
class Pace:
    """The pace of a query, from its last micro-batches."""

    batches: int = 0  #: Of how many micro-batches; 0 if unknown
    between_ms: float | None = None  #: The usual time from one to the next
    takes_ms: float | None = None  #: How long one usually takes
    span_ms: int = 0  #: The time in which they began
    pause_ms: float | None = None  #: How long it usually pauses, if it has paused at least twice
    known_from: str = ""

    @property
    def silence_ms(self) -> float:
        """How long a running query may be silent."""
        return max(ALIVE_MS, 2 * (self.between_ms or 0), 4 * (self.takes_ms or 0))


@dataclass(frozen=True)
class Verdict:
    """A query's state, and why."""

    state: State
    since_ms: int  #: Since when; 0 where that is not known
    why: str  #: In a sentence or two
    failure: Report | None = None  #: The newest failure that is not over


def pace_of(signs: Signs) -> Pace:
    """Return a query's pace."""
    # The time between two starts is not a pause if the first run was at work until the second.
    pauses = _pauses((after.started_ms - before.seen_ms for before, after in pairwise(signs.runs)), ALIVE_MS)
    if signs.log and len(signs.log) > 1:
        planned = [one.planned_ms for one in signs.log]
        took = [one.committed_ms - one.planned_ms for one in signs.log[-RECENT:] if one.committed_ms is not None]
        took = [one for one in took if one >= 0]  # a copy of a location has the times of copying
        known = _paced(planned, "Spark's log", median(took) if took else None, signs.runs)
        pauses = pauses or _pauses((after - before for before, after in pairwise(planned)), known.silence_ms)
    else:
        known = _paced([one.batch_ms for one in signs.measured], "state servers on this machine", None, signs.runs)
    return replace(known, pause_ms=median(pauses) if pauses else None)


def _paced(begun_ms: Sequence[int], known_from: str, takes_ms: float | None, runs: Sequence[Run]) -> Pace:
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


def _is_between_runs(before_ms: int, after_ms: int, runs: Sequence[Run]) -> bool:
    """Tell whether a known start of the query falls between two micro-batches."""
    starts = [run.started_ms for run in runs]
    if any(before_ms < start <= after_ms for start in starts):
        return True
    # What began before all known starts is unknown.
    return len(starts) > 1 and before_ms < min(starts)


def _pauses(gaps_ms: Iterable[int], silence_ms: float) -> list[int]:
    """Return the pauses between micro-batches; empty if there is only one."""
    found = [gap for gap in gaps_ms if gap > silence_ms]
    return found if len(found) > 1 else []


def judge(signs: Signs, now_ms: int) -> Verdict:
    """Judge a query by its signs. `now_ms`: the time, by a clock close to the store's."""
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
        return Verdict("stopped", signs.stored_ms, "It was made from another query, and has not been started yet.")
    if vain := _starts_in_vain(signs):
        return vain
    resting = _at_rest(signs, pace, now_ms)
    if resting:
        return resting
    if newest:
        what = newest.key.partition("/")[2].rpartition("-")[0]
        why = f"Micro-batches run, but a {what} of {newest.shard} fails: {_effect(what)}."
        return Verdict("failing", newest.stored_ms, why, newest)
    return _running(signs, now_ms)


def _effect(what: str) -> str:
    return "storage grows" if what == "clean-up" else "commits pile up, and the query will have to wait"


def _running(signs: Signs, now_ms: int) -> Verdict:
    since_ms = signs.run.started_ms if signs.run else 0
    if signs.planned:
        number, at_ms = signs.planned.batch_id, signs.planned.planned_ms
        return Verdict("running", since_ms, f"Micro-batch {number:,} is at work, planned {ago(at_ms, now_ms)}.")
    if signs.committed and signs.committed.committed_ms:
        number, at_ms = signs.committed.batch_id, signs.committed.committed_ms
        return Verdict("running", since_ms, f"Micro-batch {number:,} was committed {ago(at_ms, now_ms)}.")
    seen_ms, shown_by = signs.seen
    return Verdict("running", since_ms, f"Last seen at work {ago(seen_ms, now_ms)}, according to {shown_by}.")


def _starts_in_vain(signs: Signs) -> Verdict | None:
    """Return a verdict if one start after another gets no further."""
    run = signs.run
    if run is None or run.batch_id is None or (signs.committed_id or -1) >= run.batch_id:
        return None
    same = [one for one in signs.runs if one.batch_id == run.batch_id]
    if len(same) < STARTS_IN_VAIN:
        return None
    vain = "none of them has committed" if signs.log else "none of them is known to have committed"
    why = (
        f"The query has been started {len(same)} times at micro-batch {run.batch_id:,}, which {vain}; the error is "
        "in the program's own log."
    )
    return Verdict("failing", same[0].started_ms, why)


def _at_rest(signs: Signs, pace: Pace, now_ms: int) -> Verdict | None:
    """Return a verdict of stopped or stale; None if the query is at work."""
    seen_ms, shown_by = signs.seen
    if not seen_ms:
        return Verdict("stale", 0, "The query has never been seen at work: no micro-batch, claim or commit.")
    silent_ms = max(now_ms - seen_ms, 0)  # the store's clock may be ahead
    has_ended = signs.run.has_ended if signs.run and signs.run.seen_ms >= seen_ms - ALIVE_MS else None
    if not has_ended and silent_ms <= pace.silence_ms:
        return None
    silence = f"No micro-batch for {duration(silent_ms)}, according to {shown_by}"
    if shown_by == BY_CLAIM:  # it may have worked for two minutes more
        silence = (
            f"Last seen at work {ago(seen_ms, now_ms)}, according to {shown_by}, which is renewed every two minutes"
        )
    left = f" Micro-batch {signs.planned.batch_id:,} is planned and not committed." if signs.planned else ""
    if pace.pause_ms and silent_ms > 2 * pace.pause_ms:
        return Verdict("stale", seen_ms, f"{silence}; it usually pauses for {duration(pace.pause_ms)}.{left}")
    if has_ended:
        then = " The next start runs it again." if left else ""
        return Verdict("stopped", seen_ms, f"{silence}, and its processes on this machine have ended.{left}{then}")
    if pace.pause_ms and not left:
        return Verdict("stopped", seen_ms, f"{silence}; it usually pauses for {duration(pace.pause_ms)}.")
    if has_ended is False:
        rest = "its process on this machine still runs: it has no input, was stopped in the program, or hangs"
    else:
        rest = "this machine cannot tell whether it still runs"
    return Verdict("stale", seen_ms, f"{silence}; {rest}.{left}")


_NAME_IT = "pass the query's checkpointLocation as well"


@dataclass(frozen=True)
class Figure:
    """One figure of a query."""

    name: str
    value: str  #: ``unknown`` if it is
    known_from: str  #: Its source; or why it is unknown


@dataclass(frozen=True)
class Health:
    """A query's health."""

    query_id: str
    operators: tuple[str, ...]  #: The names of its operators' directories
    state: State
    since_ms: int  #: Since when; 0 where that is not known
    why: str
    figures: tuple[Figure, ...]
    failure: Failure | None  #: The newest one that is not over
    committed: int | None  #: The last micro-batch that is known to be committed


def health_of(
    query_id: str, operators: Iterable[str], signs: Signs, failures: Iterable[Failure], now_ms: int
) -> Health:
    """Return a query's health.

    `failures`: the reports of the first of ``signs.failing``; `now_ms`: the time, by a clock close to the store's.
    """
    found, pace = judge(signs, now_ms), pace_of(signs)
    told = list(failures)
    newest = next(
        (
            one
            for one in told
            if found.failure and (one.shard, one.stored_ms) == (found.failure.shard, found.failure.stored_ms)
        ),
        next(iter(told), None),
    )
    rows, left = _rows(signs), _left(signs)
    figures: tuple[Figure, ...] = (_often(pace, signs), rows, _takes(pace, signs), left)
    if found.state == "stopped":  # no program is there that could tell them
        figures = tuple(one for one in figures if one.value != "unknown" or one not in (rows, left))
    return Health(
        query_id, tuple(operators), found.state, found.since_ms, found.why, figures, newest, signs.committed_id
    )


def _often(pace: Pace, signs: Signs) -> Figure:
    name = "Micro-batches a minute"
    if pace.batches < 2 or not pace.span_ms:
        is_told = pace.known_from or signs.log is not None
        return Figure(name, "unknown", "fewer than two consecutive ones are known" if is_told else _NAME_IT)
    often = (pace.batches - 1) / pace.span_ms * 60_000
    value = f"{often:,.1f}" if often >= 0.1 else f"one in {duration(60_000 / often)}"
    return Figure(name, value, f"the last {pace.batches} without a pause, from {pace.known_from}")


def _rows(signs: Signs) -> Figure:
    name, last = "Rows a second", signs.measured[:RECENT]
    # The newest may be at work, and none after it says how long it took.
    if len(last) < 2 or last[0].batch_ms <= last[-1].batch_ms:
        where = "only state servers on the query's own machines count rows"
        return Figure(name, "unknown", "this machine's servers know fewer than two micro-batches" if last else where)
    rows = sum(one.values.get("rows", 0) for one in last[1:])
    value = count(rows * 1000 / (last[0].batch_ms - last[-1].batch_ms))
    return Figure(name, value, f"the last {len(last)} micro-batches into {last[0].operator}, by this machine's servers")


def _takes(pace: Pace, signs: Signs) -> Figure:
    name = "A micro-batch takes"
    if pace.takes_ms is None:
        return Figure(name, "unknown", _NAME_IT if signs.log is None else "Spark's log has no committed one")
    if not pace.between_ms:
        return Figure(name, duration(pace.takes_ms), "from plan to commit, in Spark's log")
    share = min(pace.takes_ms / pace.between_ms, 1)
    if share >= 0.9:
        known_from = "from plan to commit, in Spark's log; micro-batches run back to back"
        return Figure(name, duration(pace.takes_ms), known_from)
    value = f"{duration(pace.takes_ms)} of every {duration(pace.between_ms)}"
    rest = f"idle {round((1 - share) * 100)} % of the time"
    return Figure(name, value, f"from plan to commit, and to the next plan, in Spark's log; {rest}")


def _left(signs: Signs) -> Figure:
    name = "Input left"
    if signs.planned:
        return Figure(name, f"micro-batch {signs.planned.batch_id:,}", "planned and not committed, in Spark's log")
    return Figure(name, "unknown", "only the program knows: query.lastProgress")
