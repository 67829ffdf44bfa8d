"""The overview: health of each query, the largest operator, the hottest shard, upload lag, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from holdfast.commands.target import size
from holdfast.errors import HoldfastError
from holdfast.health import (
    Health,
    count,
    counted,
    duration,
    health_of,
    own_batches,
    percent,
    read_failures,
    signs_of,
    times,
)
from holdfast.snapshotter.sink_log import SinkState
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.spark_integration.client.messages import RecentBatch
from holdfast.ui.inquiry import Dated, Patience, answers
from holdfast.ui.site import Awaited, Directory, NamedQuery, Pointers, Site, named_by
from holdfast.ui.survey import OperatorSurvey, Survey

#: Per directory; further queries have no card.
CARDS_MAX = 20
#: The most commits without a snapshot if snapshots keep up, apart from a few while a snapshot is made.
_LAG = SnapshotPolicy().max_commits
_LAG_BEHIND = 2 * _LAG
#: A shard is hot if it writes this many times the median.
_HOT = 1.5
#: Rows per table of operators or sinks.
_ROWS_MAX = 200


@dataclass(frozen=True)
class Card:
    """A query's health, as a card shows it."""

    directory: int
    health: Health
    failing: dict[str, int]  #: How many failures persist, by operator


def cards(
    directory: Directory, survey: Survey, live: Iterable[RecentBatch], patience: Patience, now_ms: int
) -> list[Card]:
    """Return the health of the queries with state in a directory; those with the most operators first."""
    operators: dict[str, list[OperatorSurvey]] = {}
    for one in survey.operators.values():
        operators.setdefault(one.signs.query_id, []).append(one)
    chosen = sorted((query for query in operators if query), key=lambda query: -len(operators[query]))[:CARDS_MAX]
    pointers = answers({place: query.pointers for place, query in enumerate(directory.queries)}, patience)
    logs = [one for one in pointers.values() if isinstance(one, Dated)]
    batches = list(live)
    return [_card(directory, query, operators[query], logs, batches, now_ms) for query in chosen]


def card_of(
    directory: Directory,
    survey: Survey,
    operator: OperatorSurvey,
    live: Iterable[RecentBatch],
    patience: Patience,
    now_ms: int,
) -> Card | None:
    """Return the health of an operator's query; None if the query is unknown. Raises the errors of `cards`."""
    query_id = operator.signs.query_id
    of_query = {name: one for name, one in survey.operators.items() if one.signs.query_id == query_id}
    found = cards(directory, Survey(of_query, (), 0, ()), live, patience, now_ms)
    return found[0] if found else None


def _card(
    directory: Directory,
    query_id: str,
    operators: list[OperatorSurvey],
    logs: list[Dated[Pointers]],
    live: list[RecentBatch],
    now_ms: int,
) -> Card:
    names = {one.name for one in operators}
    pointers = next((one.found for one in logs if names & one.found.named.keys()), None)
    log = own_batches(pointers.log, directory.origin_of(pointers.query_id)) if pointers else None
    signs = signs_of(query_id, [one.signs for one in operators], log, live)
    persist = signs.failing
    failures = read_failures(directory.storage, persist[:1])
    failing = dict.fromkeys(names, 0) | Counter(one.shard.partition("/")[0] for one in persist)
    health = health_of(query_id, sorted(names), signs, failures, now_ms)
    return Card(directory.place, health, failing)


@dataclass(frozen=True)
class OperatorRow:
    operator: OperatorSurvey
    share: float  #: The fraction of all operators' state
    newest_version: int
    lag: int  #: Commits since the snapshot that is furthest behind
    has_snapshot: bool
    failures: int


@dataclass(frozen=True)
class LinkTarget:
    """The target of a link: an operator, or one of its shards."""

    directory: int
    operator: str
    shard: int | None = None


@dataclass(frozen=True)
class Answer:
    question: str
    answer: str  #: In a few words
    detail: str
    verdict: str = "plain"
    place: LinkTarget | None = None  #: Where to look


@dataclass(frozen=True)
class QueryRow:
    """A query in a table: its progress, or why that is unknown."""

    location: str
    pointers: Pointers | None
    error: str = ""
    late_ms: int | None = None  #: When the pointers were requested, if newer pointers are overdue


@dataclass(frozen=True)
class ShownDirectory:
    """A directory, its largest operators, and sinks; or why it cannot be shown."""

    place: int
    url: str
    dated: Dated[Survey] | None
    rows: list[OperatorRow]
    sinks: tuple[SinkState, ...]
    error: HoldfastError | None
    queries: tuple[QueryRow, ...] = ()
    operator_count: int = 0


@dataclass(frozen=True)
class Overview:
    directories: list[ShownDirectory]
    cards: list[Card]
    answers: list[Answer]
    awaited: list[Awaited]

    @property
    def taken_ms(self) -> int | None:
        """When the oldest listing shown was made."""
        return min((d.dated.taken_ms for d in self.directories if d.dated), default=None)


def overview(site: Site, now_ms: int) -> Overview:
    """Return the overview of all named locations."""
    shown: list[ShownDirectory] = []
    queries: list[Card] = []
    found: list[tuple[int, OperatorSurvey]] = []
    lost: list[str] = []
    patience = Patience.of_a_view()
    homes, awaited = site.look(patience)
    for query in (query for home in homes for query in home.queries):
        query.pointers.begin()  # in parallel with listing directories
    surveys = answers({home.place: home.surveyor for home in homes}, patience)
    for directory in homes:
        dated = surveys[directory.place]
        if isinstance(dated, HoldfastError):
            shown.append(ShownDirectory(directory.place, directory.storage.url, None, [], (), dated))
            continue
        if empty := directory.awaited:
            awaited.append(empty)
            if dated.error is None:
                continue
        found += [(directory.place, one) for one in dated.found.operators.values()]
        lost += dated.found.without_record
        own = cards(directory, dated.found, site.batches(patience), patience, now_ms)
        queries += own
        shown.append(_shown(directory, dated, own, patience))
    return Overview(shown, queries, _answers(found, lost, queries) if found else [], awaited)


def _shown(directory: Directory, dated: Dated[Survey], own: list[Card], patience: Patience) -> ShownDirectory:
    operators = sorted(dated.found.operators.values(), key=lambda one: -one.state_bytes)
    whole = sum(one.state_bytes for one in operators)
    failing = {name: number for card in own for name, number in card.failing.items()}
    pointers = answers({place: one.pointers for place, one in enumerate(directory.queries)}, patience)
    return ShownDirectory(
        directory.place,
        directory.storage.url,
        dated,
        [_row(one, whole, failing) for one in operators[:_ROWS_MAX]],
        dated.found.sinks[:_ROWS_MAX],
        None,
        tuple(_query(directory.queries[place], answer) for place, answer in pointers.items()),
        len(operators),
    )


def _query(query: NamedQuery, answer: Dated[Pointers] | HoldfastError) -> QueryRow:
    if isinstance(found := named_by(query.location, answer), Awaited):
        return QueryRow(query.location, None, error=found.what)
    assert isinstance(answer, Dated)
    return QueryRow(query.location, answer.found, late_ms=answer.taken_ms if answer.is_late else None)


def _row(operator: OperatorSurvey, whole: int, failing: Mapping[str, int]) -> OperatorRow:
    objects = operator.objects
    return OperatorRow(
        operator,
        operator.state_bytes / max(whole, 1),
        int(objects.newest_version.max(initial=0)),
        int(objects.lag.max(initial=0)),
        bool(objects.snapshot_ms.any()),
        failing.get(operator.name, len(operator.signs.reports)),
    )


def _answers(found: list[tuple[int, OperatorSurvey]], lost: list[str], queries: list[Card]) -> list[Answer]:
    shown = [_biggest(found), _hottest(found), _behind(found), _failing(found, lost, queries)]
    is_any_running = any(card.health.state == "running" for card in queries)
    if is_any_running:
        return shown
    # Without a running query, past success says nothing about now.
    past = "No, as of the last activity"
    return [replace(one, answer=past, verdict="plain") if one.verdict == "good" else one for one in shown]


def _biggest(found: list[tuple[int, OperatorSurvey]]) -> Answer:
    place, operator = max(found, key=lambda one: one[1].state_bytes)
    whole = sum(one.state_bytes for _, one in found)
    share = f", {percent(operator.state_bytes / whole)} of all" if len(found) > 1 and whole else ""
    detail = f"{size(operator.state_bytes)} in {count(len(operator.objects.shards))} shards{share}"
    return Answer("Which operator is largest?", operator.name, detail, place=LinkTarget(place, operator.name))


def _hottest(found: list[tuple[int, OperatorSurvey]]) -> Answer:
    question = "Which shard is hot?"
    hot = [(int(o.objects.recent_bytes.max(initial=0)), place, o) for place, o in found]
    most, place, operator = max(hot, key=lambda one: one[0])
    if not most:
        return Answer(question, "None", "No commit object is stored; small commits stay in the checkpointLocation.")
    written = operator.objects.recent_bytes
    shard = int(operator.objects.shards[int(np.argmax(written))])
    median = float(np.median(written))
    by = f", {times(most / median)} the median" if median and len(written) > 1 else ""
    detail = f"{size(most)} committed in the hour before the operator's newest commit{by}"
    if median and most < _HOT * median:
        even = f"All shards write about the same amount; {operator.name} {shard} writes most, {detail}"
        return Answer(question, "None stands out", even, place=LinkTarget(place, operator.name, shard))
    return Answer(question, f"{operator.name} {shard}", detail, place=LinkTarget(place, operator.name, shard))


def _behind(found: list[tuple[int, OperatorSurvey]]) -> Answer:
    question = "Are snapshots behind?"
    lags = [(int(o.objects.lag.max(initial=0)), place, o) for place, o in found]
    most, place, operator = max(lags, key=lambda one: one[0])
    at = int(np.argmax(operator.objects.lag)) if len(operator.objects.shards) else 0
    if not most:
        is_any = any(o.objects.snapshot_ms.any() for _, o in found)
        all_in = "Each shard's newest snapshot covers all its commit objects."
        return Answer(question, "No", all_in if is_any else "Nothing is stored yet that needs a snapshot.", "good")
    shard, lag_ms = int(operator.objects.shards[at]), int(operator.objects.lag_ms[at])
    since = "since the newest snapshot" if operator.objects.snapshot_ms[at] else "and no snapshot yet"
    far = f"{counted(most, 'commit')} in {duration(lag_ms)} {since}: {operator.name} {shard}"
    behind = sum(int((o.objects.lag > _LAG_BEHIND).sum()) for _, o in found)
    if behind:
        answer = f"Yes, {counted(behind, 'shard')}"
        return Answer(question, answer, f"At most {far}", "bad", LinkTarget(place, operator.name, shard))
    return Answer(question, "No", f"At most {far}", "good", LinkTarget(place, operator.name, shard))


def _failing(found: list[tuple[int, OperatorSurvey]], lost: list[str], queries: list[Card]) -> Answer:
    question = "Is anything failing?"
    unreadable = [(place, o) for place, o in found if o.is_unreadable]
    troubled = [(number, card.directory, name) for card in queries for name, number in card.failing.items() if number]
    if unreadable:
        place, operator = unreadable[0]
        detail = f"The record of {operator.name} cannot be read"
        return Answer(question, "Yes", detail, "bad", LinkTarget(place, operator.name))
    if lost:
        return Answer(question, "Yes", f"The record of {lost[0]} is gone: its state cannot be used", "bad")
    if troubled:
        _, place, name = max(troubled)
        number = sum(number for number, _, _ in troubled)
        detail = f"{counted(number, 'report')} of failed micro-batches, snapshots or clean-ups"
        return Answer(question, "Yes", detail, "bad", LinkTarget(place, name))
    stuck = [card for card in queries if card.health.state == "failing"]
    if stuck:
        return Answer(question, "Yes", stuck[0].health.why, "bad")
    nothing = "No micro-batch, snapshot or clean-up has failed."
    return Answer(question, "No", nothing, "good")
