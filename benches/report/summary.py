"""The summary: the ratios of each question, other figures, and which backend to choose.

Every line uses the figures of one answer and links to them. The backend to choose is the fastest; of backends that the
turns cannot distinguish, the one with the least peak memory; if that is equal too, `filesystem`, whose files survive a
restart.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.benches.jobs.shard import FULL_BYTES, NEW_BYTES, PLAIN_DOWNLOAD, RESTORE
from holdfast.benches.report.answers import FLOOR, Answer
from holdfast.benches.report.directory import Results
from holdfast.benches.report.results import asked_of_storage, counted_ms, requests_of
from holdfast.benches.report.words import count, duration, listed, name_of, of_field, size, times

# Suites whose loads resemble a user's own; others compare ways to write a query.
_OWN = "own-load"
_ADVISING = (_OWN, "jobs", "growth")
_AS_MUCH_MEMORY = 1.1
_IF_EQUAL = ("filesystem", "memory", "rocksdb")


@dataclass(frozen=True)
class Sentence:
    """A sentence, the question that it answers, and the anchor of its figures on the page."""

    text: str
    question: str
    target: str

    @classmethod
    def on(cls, answer: Answer, text: str) -> Sentence:
        return cls(text, answer.question.text, f"q-{answer.question.id}")


@dataclass(frozen=True)
class Choice:
    """The backend to choose for one load, and why; `settled` if the turns show how it compares with all others."""

    backend: str
    reason: str
    certainty: str
    settled: bool
    turns: int


@dataclass(frozen=True)
class Advice:
    sentence: Sentence
    choice: Choice


@dataclass(frozen=True)
class Summary:
    """The top of a report.

    The headline, in parts; the backends to choose; ratios with their baselines, bold if holdfast is slower; the costs
    of settings; and reasons to doubt figures.
    """

    headline: list[str] = field(default_factory=list)
    choices: list[Advice] = field(default_factory=list)
    ratios: list[tuple[str, Sentence]] = field(default_factory=list)
    costs: list[Sentence] = field(default_factory=list)
    doubts: list[Sentence] = field(default_factory=list)


def summarize(results: Results, answers: list[Answer]) -> Summary:
    found = Summary()
    for answer in answers:
        if not answer.equal:
            text = "The results of these engines differ, so none of their times counts."
            found.doubts.append(Sentence.on(answer, text))
            continue
        ratios = list(_ratios(answer))
        found.ratios.extend(ratios)
        if answer.curves:
            _read_crossing(found, answer)
        else:
            _read_bars(found, answer)
        if not ratios:
            found.costs.extend(_own_course(answer) if answer.curves else _by_download(answer))
    busy = {answer.question.name: answer.busy for answer in answers if answer.busy}
    if busy:
        text = f"up to {max(busy.values()):.1f} cores were busy before a run of {listed(list(busy))}."
        found.doubts.append(Sentence(text, "Other work was running:", "settings"))
    if results.missing:
        missing = listed([f"{question.name} ({question.state})" for question in results.missing])
        found.doubts.append(Sentence(f"{missing}.", "Not measured:", "missing"))
    return found


def missed(answer: Answer) -> dict[str, dict[str, Any]]:
    """Return the missed targets of an answer, by figure."""
    return {target["what"]: target for target in answer.document["targets"] if not target["met"]}


def _ratios(answer: Answer) -> Iterator[tuple[str, Sentence]]:
    """Yield each baseline of an answer, and the throughput of its entries relative to it."""
    by_base: dict[str, list[str]] = {}
    said: dict[str, str] = {}  # by baseline, the point of a curve that was named last
    turns: list[str] = []
    for label in answer.labels:
        base = answer.baseline(label)
        if base is None:
            continue
        ratio, other = answer.ratio(label, base), answer.name(base).text
        name, where = answer.name(label).text, ""
        if answer.curves:
            name = name_of(answer.engine(label)).text
            where = f"{count(answer.along(label) or 0)} {of_field(answer.question.along)}: "
            if base != answer.question.baseline:
                other = name_of(answer.engine(base)).text
        bold = "**" if answer.name(label).ours and not answer.name(base).ours and ratio.slower else ""
        turns = [f"in {ratio.turns} turns"] if ratio.turns > 1 else []
        target = missed(answer).get(f"{label}/{base}")
        spreads = f" ({times(ratio.least)} to {times(ratio.most)})" if ratio.turns > 1 else ""
        shown = f"{name.removeprefix('holdfast on ')} {bold}{times(ratio.median)}{bold}{spreads}"
        shown += f", wanted {target['wanted'].removeprefix('at least ')}" if target else ""
        by_base.setdefault(other, []).append(shown if said.get(other) == where else where + shown)
        said[other] = where
    for base, ratios in by_base.items():
        yield base, Sentence.on(answer, "; ".join(ratios + turns))


def _read_bars(found: Summary, answer: Answer) -> None:
    """Add the backend to choose, and for the first such answer a headline."""
    ours = [label for label in answer.labels if answer.name(label).ours]
    others = [label for label in answer.labels if not answer.name(label).ours and answer.engine(label) != FLOOR]
    base = next((base for label in answer.labels if (base := answer.baseline(label)) is not None), None)
    if base in others:
        others.sort(key=lambda label: label != base)
    if not ours or not others:
        return
    best = max(ours, key=answer.rows_per_second)
    choice = choose(answer) if answer.question.suite in _ADVISING else None
    if not found.headline:
        found.headline.extend(_headline(answer, best, others[0], choice))
    if choice is not None:
        found.choices.append(Advice(Sentence.on(answer, ""), choice))


def _headline(answer: Answer, best: str, other: str, choice: Choice | None) -> Iterator[str]:
    ratio, name = answer.ratio(best, other), answer.name(other).text
    if ratio.same:
        shown = "turns do not tell whether it is faster than" if ratio.unsettled else "no faster and no slower than"
        yield f"{shown} {name}{ratio.in_one_turn}"
    else:
        shown = f"{answer.name(best).text} has {times(ratio.median)} times the throughput of {name}{ratio.in_one_turn}"
        beside = _beside_floor(answer, best)
        yield shown + (f", and {beside}" if beside else "")
    if answer.question.suite == _OWN and choice is not None and choice.settled:
        yield f"use {choice.backend}"


def _beside_floor(answer: Answer, label: str) -> str:
    """Compare an entry with the floor in words; empty if there is none, or the turns are not conclusive."""
    floor = next((other for other in answer.labels if answer.engine(other) == FLOOR), None)
    by_floor = answer.ratio(label, floor) if floor else None
    if by_floor is None or by_floor.unsettled:
        return ""
    slowdown, shown = f"{times(1 / by_floor.median)} times ", by_floor.in_one_turn
    if by_floor.same:
        slowdown, shown = "", f", as far as {'one turn shows' if by_floor.turns == 1 else 'these turns show'}"
    return f"takes {slowdown}as long as the floor, the same query without state{shown}"


def _by_download(answer: Answer) -> Iterator[Sentence]:
    """Yield how long restores take, if they were measured."""
    for label in answer.labels if answer.has_phase(PLAIN_DOWNLOAD) else ():
        ours, plain = (counted_ms(answer.document, label, phase) for phase in (RESTORE, PLAIN_DOWNLOAD))
        ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
        text = f"{answer.name(label).text}: {duration(statistics.median(ours))}, {times(ratio)} times a plain download."
        yield Sentence.on(answer, text)


def _own_course(answer: Answer) -> Iterator[Sentence]:
    """Yield how each engine's figures grow with size, for curves without a baseline."""
    by_engine: dict[str, dict[float, str]] = {}
    for label in answer.labels:
        x = answer.along(label)
        if x is not None:
            by_engine.setdefault(answer.engine(label), {})[x] = label
    along = of_field(answer.question.along)
    for engine, of in by_engine.items():
        figures = [f"{_figure(answer, label)} at {count(x)}" for x, label in sorted(of.items())]
        what = _figure_of(answer, next(iter(of.values())))
        yield Sentence.on(answer, f"{name_of(engine).text}, {what}: {listed(figures)} {along}.")


def _figure_of(answer: Answer, label: str) -> str:
    """Return the name of an entry's main figure: throughput, unless its requests or its bytes were counted."""
    asked = asked_of_storage(answer.document, label)
    if NEW_BYTES in asked:
        return "bytes of a snapshot by those of a full one"
    return "requests of a micro-batch" if "bytes up" in asked else "rows a second"


def _figure(answer: Answer, label: str) -> str:
    asked = asked_of_storage(answer.document, label)
    if asked.get(FULL_BYTES) and NEW_BYTES in asked:
        return f"{asked[NEW_BYTES] / asked[FULL_BYTES]:.3g}"
    return f"{requests_of(asked):.1f}" if "bytes up" in asked else count(answer.rows_per_second(label))


def _read_crossing(found: Summary, answer: Answer) -> None:
    """Add the backend to choose at each measured size."""
    along, all_of = of_field(answer.question.along), _contenders(answer)
    of_a_part = any(answer.engine(label).startswith("store-") for label in all_of.values())
    if of_a_part or answer.question.suite not in _ADVISING:
        return
    chosen: list[list[tuple[float, Choice]]] = []
    places = sorted({x for label in answer.labels if (x := answer.along(label)) is not None})
    before = None
    for x in places:
        here = [label for label in answer.labels if answer.along(label) == x]
        choice = choose(answer, here)
        if choice is not None and before == choice.backend:
            chosen[-1].append((x, choice))
        elif choice is not None:
            chosen.append([(x, choice)])
        before = choice and choice.backend
        absent = sorted(all_of.keys() - _contenders(answer, here).keys())
        if absent:
            found.doubts.append(Sentence.on(answer, f"No figure of {listed(absent)} at {count(x)} {along}."))
    for span in chosen:
        (least, _), (most, choice) = span[0], span[-1]  # the larger size is more telling
        reach = " to ".join(dict.fromkeys((count(least), count(most))))
        at = "At every size measured," if len(places) == len(span) > 1 else "At"
        found.choices.append(Advice(Sentence.on(answer, f"{at} {reach} {along}."), choice))
    if found.headline and len(chosen) > 1 and all(choice.settled for span in chosen for _, choice in span):
        most, choice = chosen[-1][-1]
        once = " (one turn)" if choice.turns == 1 else ""
        found.headline.append(f"use {choice.backend} at {count(most)} {along}{once}")


def _contenders(answer: Answer, labels: list[str] | None = None) -> dict[str, str]:
    """Return the entries, by backend, of the API that was measured with the most backends."""
    by_way: dict[str, dict[str, str]] = {}
    for label in answer.labels if labels is None else labels:
        backend, engine = answer.name(label).backend, answer.engine(label)
        if backend:
            by_way.setdefault(engine.replace(backend, ""), {}).setdefault(backend, label)
    return max(by_way.values(), key=len, default={})


def choose(answer: Answer, labels: list[str] | None = None) -> Choice | None:
    """Return the backend to choose among an answer's entries; None if there is only one, or their results differ."""
    of = _contenders(answer, labels)
    if len(of) < 2 or not answer.equal:
        return None
    fastest = max(of, key=lambda backend: answer.rows_per_second(of[backend]))
    near = [backend for backend in of if backend == fastest or answer.ratio(of[fastest], of[backend]).same]
    held = {backend: sum(answer.memory_bytes(of[backend]).values()) for backend in near}
    least = min(held.values())
    lean = [backend for backend in near if held[backend] <= least * _AS_MUCH_MEMORY]
    chosen = min(lean, key=_IF_EQUAL.index)
    settled = not any(answer.ratio(of[chosen], of[other]).unsettled for other in of if other != chosen)
    reason, certainty = _reason(answer, of, chosen, near, held), _certainty(answer, of, chosen)
    return Choice(chosen, reason, certainty, settled, len(answer.runs(of[chosen])))


def _reason(answer: Answer, of: dict[str, str], chosen: str, near: list[str], held: dict[str, int]) -> str:
    others = [backend for backend in of if backend not in near]
    slower = [f"{times(answer.ratio(of[chosen], of[other]).median)} times {other}" for other in others]
    equal = [backend for backend in near if backend != chosen]
    parts = []
    if equal:
        rest = f"; it has {listed(slower)}" if slower else ""
        heavier = max(held[backend] for backend in equal)
        if heavier > held[chosen] * _AS_MUCH_MEMORY:
            why = f"{chosen} takes the least memory: {size(held[chosen])} at its peak, {size(heavier)} otherwise"
        elif chosen == "filesystem":
            why = "a restart on the same machine finds its files again"
        else:
            why = "it needs no state server on the path of a micro-batch"
        alike = listed([chosen, *equal])
        unsettled = any(answer.ratio(of[chosen], of[other]).unsettled for other in equal)
        speed = f"these turns do not tell which of {alike} is faster" if unsettled else f"{alike} are equally fast"
        parts.append(f"{speed}{'' if unsettled else ', as far as these turns tell'}, and {why}{rest}")
    else:
        parts.append(f"it has the highest throughput: {listed(slower)}")
    if chosen == "memory":
        parts.append(f"the state took {size(answer.local_state_bytes(of[chosen]))} of RAM at its peak")
    return "; ".join(parts) + "."


def _certainty(answer: Answer, of: dict[str, str], chosen: str) -> str:
    turns = len(answer.runs(of[chosen]))
    batches = len(answer.batch_ms(of[chosen]))
    median = duration(statistics.median(answer.batch_ms(of[chosen])))
    measured = f"{count(batches)} micro-batches counted, median {median}"
    against = [other for other in of if other != chosen]
    if turns == 1:
        return f"One turn only, {measured}: take differences below 10 % as chance."
    ratios = [f"{other} {answer.ratio(of[chosen], of[other]).spread}" for other in against]
    agree = all(not r.least <= 1 <= r.most for r in (answer.ratio(of[chosen], of[other]) for other in against))
    order = "All turns agree" if agree else "The turns disagree on the order"
    return f"{order}, {measured}. Throughput of {chosen} by that of {'; of '.join(ratios)}."
