"""Which backend to choose, by what was measured, with the reason and how sure it is.

The rule: the fastest backend, unless others are as fast within what the turns can tell. Of these, the one that takes
the least memory at its peak; where that is the same too, `filesystem`, whose files a restart finds again.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from holdfast.benches.report.answers import Answer
from holdfast.benches.report.page.words import count, duration, listed, size, spread, times

_AS_MUCH_MEMORY = 1.1
_IF_EQUAL = ("filesystem", "memory", "rocksdb")


@dataclass(frozen=True)
class Choice:
    """A backend for one load.

    Attributes
    ----------
    backend : str
    reason, certainty : str
        Sentences.
    settled : bool
        Whether the turns tell it from every other backend, or show that the two are equally fast.
    turns : int
    """

    backend: str
    reason: str
    certainty: str
    settled: bool
    turns: int


def contenders(answer: Answer, labels: list[str] | None = None) -> dict[str, str]:
    """Return by backend the entry of the one way to write the function that most backends were measured with."""
    by_way: dict[str, dict[str, str]] = {}
    for label in answer.labels if labels is None else labels:
        backend, engine = answer.name(label).backend, answer.engine(label)
        if backend:
            by_way.setdefault(engine.replace(backend, ""), {}).setdefault(backend, label)
    return max(by_way.values(), key=len, default={})


def choose(answer: Answer, labels: list[str] | None = None) -> Choice | None:
    """Return the backend to choose among an answer's entries, None if there is only one or none to trust."""
    of = contenders(answer, labels)
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
    ratios = [f"{other} {spread(answer.ratio(of[chosen], of[other]))}" for other in against]
    agree = all(not r.least <= 1 <= r.most for r in (answer.ratio(of[chosen], of[other]) for other in against))
    order = "All turns agree" if agree else "The turns disagree on the order"
    return f"{order}, {measured}. Throughput of {chosen} by that of {'; of '.join(ratios)}."
