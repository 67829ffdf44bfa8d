"""A query's health in words: its state, since when and why, and figures with their sources."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.health.failures import Failure
from holdfast.health.signs import Signs
from holdfast.health.verdict import RECENT, Pace, State, judge, pace_of
from holdfast.health.words import count, duration

_NAME_IT = "to know it, pass the query's checkpointLocation, too"


@dataclass(frozen=True)
class Figure:
    """One figure of a query.

    Attributes
    ----------
    name : str
    value : str
        ``unknown`` where it is.
    known_from : str
        What tells it; or why it is unknown.
    """

    name: str
    value: str
    known_from: str


@dataclass(frozen=True)
class Health:
    """How a query is.

    Attributes
    ----------
    query_id : str
    operators : tuple of str
        The names of its operators' directories.
    state : {"running", "stopped", "stale", "failing"}
    since_ms : int
        Since when; 0 where that is not known.
    why : str
    figures : tuple of Figure
    failure : Failure or None
        The newest one that is not over.
    committed : int or None
        The last micro-batch that is known to be committed.
    """

    query_id: str
    operators: tuple[str, ...]
    state: State
    since_ms: int
    why: str
    figures: tuple[Figure, ...]
    failure: Failure | None
    committed: int | None


def health_of(
    query_id: str, operators: Iterable[str], signs: Signs, failures: Iterable[Failure], now_ms: int
) -> Health:
    """Return how a query is.

    Parameters
    ----------
    query_id : str
    operators : iterable of str
    signs : Signs
    failures : iterable of Failure
        What the first of ``signs.failing`` say.
    now_ms : int
        The time, by a clock close to the store's.
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
    figures = (_often(pace, signs), _rows(signs), _takes(pace, signs), _left(signs))
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
    return Figure(name, value, f"the last {pace.batches} without a pause, in {pace.known_from}")


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
        known_from = "from plan to commit, in Spark's log; they follow each other without rest"
        return Figure(name, duration(pace.takes_ms), known_from)
    value = f"{duration(pace.takes_ms)} of every {duration(pace.between_ms)}"
    rest = f"it rests {round((1 - share) * 100)} % of the time"
    return Figure(name, value, f"from plan to commit, and to the next plan, in Spark's log; {rest}")


def _left(signs: Signs) -> Figure:
    name = "Input left"
    if signs.planned:
        return Figure(name, f"micro-batch {signs.planned.batch_id:,}", "planned and not committed, in Spark's log")
    return Figure(name, "unknown", "only the program knows: query.lastProgress")
