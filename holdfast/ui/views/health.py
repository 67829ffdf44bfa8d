"""The health of a directory's queries: a card for each, from listings and named checkpoint locations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.health.failures import read_failures
from holdfast.health.health import Health, health_of
from holdfast.health.signs import of_its_own, signs_of
from holdfast.spark_integration.client.recent import RecentBatch
from holdfast.ui.directory import Directory
from holdfast.ui.inquiry import Dated, Patience, answers
from holdfast.ui.named_query import Pointers
from holdfast.ui.survey import OperatorSurvey, Survey

#: Per directory; further queries have no card.
CARDS_MAX = 20


@dataclass(frozen=True)
class Card:
    """A query's health, as a card shows it."""

    directory: int
    health: Health
    failing: dict[str, int]  #: How many failures persist, by operator


def cards(
    directory: Directory, survey: Survey, live: Iterable[RecentBatch], patience: Patience, now_ms: int
) -> list[Card]:
    """Return the health of the queries with state in a directory; those with the most operators first.

    Raises `UnavailableError` if the storage does not answer.
    """
    operators: dict[str, list[OperatorSurvey]] = {}
    for one in survey.operators.values():
        operators.setdefault(one.of_query, []).append(one)
    chosen = sorted((query for query in operators if query), key=lambda query: -len(operators[query]))[:CARDS_MAX]
    told = answers({place: query.pointers for place, query in enumerate(directory.queries)}, patience)
    logs = [one for one in told.values() if isinstance(one, Dated)]
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
    """Return the health of an operator's query; None if the query is unknown. Raises as `cards`."""
    of_query = {name: one for name, one in survey.operators.items() if one.of_query == operator.of_query}
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
    log = of_its_own(pointers.log, directory.storage, pointers.query_id) if pointers else None
    signs = signs_of(query_id, [one.signs for one in operators], log, live)
    persist = signs.failing
    failures = read_failures(directory.storage, persist[:1])
    failing = dict.fromkeys(names, 0) | Counter(one.shard.partition("/")[0] for one in persist)
    health = health_of(query_id, sorted(names), signs, failures, now_ms)
    return Card(directory.place, health, failing)
