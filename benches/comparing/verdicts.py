"""Verdicts on what became faster or slower between two directories, or two documents, figure by figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.benches.comparing.noise import Change, Sample, changes, midmean
from holdfast.benches.report import directory
from holdfast.benches.report.directory import RUN
from holdfast.benches.report.results import Document, job_of
from holdfast.benches.report.tables import BENCHMARKS
from holdfast.benches.running.directory import differences
from holdfast.errors import CorruptionError, InvalidArgumentError

SLOWER, FASTER, SAME, UNKNOWN = "slower", "faster", "no difference", "cannot tell"
RATIO, ENTRY = "ratio", "entry"
# For a normal distribution: the interquartile range in standard deviations, and a median's error relative to a mean's.
_QUARTILES, _MEDIAN = 1.349, 1.2533
# Times are rounded to a tenth of a millisecond.
_SHORTEST_MS = 0.05
_FACTS = ("machine", "versions", "profile", "shape")


@dataclass(frozen=True)
class Measured:
    """One side of a comparison: documents by suite and name, and the facts that their figures depend on."""

    path: Path
    documents: Mapping[str, Document]
    facts: Mapping[str, Any]


def read(path: Path) -> Measured:
    if path.is_dir():
        results = directory.read(path)
        documents = {f"{question.suite}/{question.name}": document for question, document in results.measured}
        if not documents:
            raise InvalidArgumentError("no measurement in this directory is done; run it again", directory=path)
        return Measured(path, documents, {name: results.run.get(name) for name in _FACTS})
    if path.name == RUN:
        raise CorruptionError("this is the plan of a directory, not a document; give the directory", file=path)
    found = directory.read_document(path)
    name = f"{found['suite']}/{found['name']}" if "suite" in found else str(found.get("bench", "micro"))
    return Measured(path, {name: found}, {part: found.get(part) for part in ("machine", "versions")})


def _is_micro(document: Document) -> bool:
    return BENCHMARKS in document


def _is_wrong(document: Document) -> bool:
    """Return whether a document's entries found different results, so that their times do not count."""
    runs = (run for engine in document.get("engines", {}).values() for run in engine["runs"])
    compared = [one.get("equality") for one in (document, *runs)]
    return any(not one["equal"] for one in compared if one)


def differ(base: Measured, new: Measured) -> list[str]:
    """Describe how the facts of two sides differ, and what cannot be compared."""
    facts = [
        line
        for name in dict.fromkeys([*base.facts, *new.facts])
        for line in differences(base.facts.get(name), new.facts.get(name), name)
    ]
    for name in _both(base, new):
        facts += _differ(name, base.documents[name], new.documents[name])
    return facts


def _differ(name: str, before: Document, after: Document) -> Iterator[str]:
    for side, document in (("base", before), ("new", after)):
        if _is_wrong(document):
            yield f"{name}: not compared, because its entries found different results in {side}"
    if _is_micro(before) != _is_micro(after):
        yield f"{name}: not compared, because one side measured single functions, the other jobs"
    elif _is_micro(before):
        functions = ([one["name"] for one in of[BENCHMARKS]] for of in (before, after))
        yield from _one_sided(name, *functions)
    else:
        yield from differences(before.get("baseline") or "none", after.get("baseline") or "none", f"{name} baseline")
        yield from differences(_compared(before), _compared(after), f"{name} equality")
        yield from _one_sided(name, list(before["engines"]), list(after["engines"]))
        jobs, others = before["settings"]["jobs"], after["settings"]["jobs"]
        for label in (label for label in jobs if label in others):
            yield from differences(jobs[label], others[label], f"{name} {label}")


def _one_sided(name: str, before: list[str], after: list[str]) -> Iterator[str]:
    for side, ours, theirs in (("base", before, after), ("new", after, before)):
        only = [label for label in ours if label not in theirs]
        if only:
            yield f"{name}: only {side} has {', '.join(only)}"


def _compared(document: Document) -> str:
    return "compared" if document.get("equality") else "not compared"


def _common(base: Measured, new: Measured) -> list[str]:
    """Return the names of the documents that both sides have and whose times count."""
    return [
        name
        for name in _both(base, new)
        if _is_micro(base.documents[name]) == _is_micro(new.documents[name])
        and not (_is_wrong(base.documents[name]) or _is_wrong(new.documents[name]))
    ]


def _both(base: Measured, new: Measured) -> list[str]:
    both = [name for name in base.documents if name in new.documents]
    if not both:
        raise InvalidArgumentError(
            "the two have no measurement in common; compare runs of the same suites",
            base=" ".join(base.documents),
            new=" ".join(new.documents),
        )
    return both


@dataclass(frozen=True)
class Figure:
    """A figure of both sides, where larger is better: a `RATIO` to the baseline, or the throughput of an `ENTRY`."""

    measurement: str
    kind: str
    name: str
    base: Sample
    new: Sample
    decides: bool


@dataclass(frozen=True)
class Verdict:
    """How a figure changed.

    `base` and `new` are ratios, or geometric means of rows or runs per second; `change` is new / base - 1, `p` its
    p-value, adjusted for all figures. A `regression` is a slowdown beyond the threshold of a figure that `decides`.
    """

    measurement: str
    kind: str
    name: str
    base: float
    new: float
    turns: tuple[int, int]
    change: float
    low: float
    high: float
    p: float
    verdict: str
    decides: bool
    regression: bool


def compare(base: Measured, new: Measured, threshold: float) -> list[Verdict]:
    """Return a verdict on every ratio and entry that both sides have.

    Ratios decide, since the machine affects both of their runs; throughput decides only if there is no baseline and
    both sides ran on the same machine. "No difference" means that the interval lies within the threshold.
    """
    same_machine = not [line for line in differ(base, new) if line.startswith("machine")]
    figures = [one for name in _common(base, new) for one in _figures(name, base, new, same_machine)]
    found = []
    for kind in (RATIO, ENTRY):  # separately, since their noise differs
        of_kind = [one for one in figures if one.kind == kind]
        suites = [one.measurement.partition("/")[0] for one in of_kind]
        changed = changes([(one.base, one.new) for one in of_kind], suites)
        found += [_verdict(one, change, threshold) for one, change in zip(of_kind, changed, strict=True)]
    return found


def smallest_visible(verdicts: Sequence[Verdict]) -> float:
    """Return the smallest slowdown that stands out from noise, the median of the figures that decide."""
    halves = [1 - (1 + one.low) / (1 + one.change) for one in verdicts if one.decides]
    return statistics.median(halves) if halves else 0.0


def _verdict(one: Figure, change: Change, threshold: float) -> Verdict:
    if change.is_real:
        verdict = FASTER if change.factor > 1 else SLOWER
    else:
        verdict = SAME if 1 - threshold <= change.low and change.high <= 1 + threshold else UNKNOWN
    return Verdict(
        measurement=one.measurement,
        kind=one.kind,
        name=one.name,
        base=math.exp(one.base.mean),
        new=math.exp(one.new.mean),
        turns=(len(one.base.logs), len(one.new.logs)),
        change=change.factor - 1,
        low=change.low - 1,
        high=change.high - 1,
        p=change.p,
        verdict=verdict,
        decides=one.decides,
        regression=one.decides and verdict == SLOWER and change.factor <= 1 - threshold,
    )


def _figures(name: str, base: Measured, new: Measured, same_machine: bool) -> Iterator[Figure]:
    before, after = base.documents[name], new.documents[name]
    if _is_micro(before) or _is_micro(after):
        old, now = _micro(before), _micro(after)
        for test in (test for test in old if test in now):
            yield Figure(name, ENTRY, test, old[test], now[test], same_machine)
        return
    labels = [label for label in before["engines"] if label in after["engines"]]
    read_against = {label: _baseline(before, label) for label in labels}
    compared = {label: baseline for label, baseline in read_against.items() if baseline and baseline in labels}
    for label, baseline in compared.items():
        yield Figure(name, RATIO, label, _ratio(before, label, baseline), _ratio(after, label, baseline), True)
    for label in labels:
        decides = same_machine and not compared
        yield Figure(name, ENTRY, label, _throughput(before, label), _throughput(after, label), decides)


def _baseline(document: Document, label: str) -> str | None:
    """Return the entry to compare with: in a curve, that of the baseline's engine at the same point."""
    wanted, along = document.get("baseline", ""), document.get("along", "")
    jobs, engines = document["settings"]["jobs"], document.get("entries", {})
    if wanted in jobs:
        return str(wanted) if wanted != label else None
    for other in jobs:
        if other != label and engines.get(other) == wanted and jobs[other].get(along) == jobs[label].get(along):
            return str(other)
    return None


def _throughput(document: Document, label: str) -> Sample:
    job = job_of(document, label)
    typical = [
        midmean([math.log(max(run["batch_ms"][batch], _SHORTEST_MS) / 1000 / job.rows) for batch in job.counted])
        for run in document["engines"][label]["runs"]
    ]
    return Sample(tuple(-log for log, _ in typical), statistics.fmean(variance for _, variance in typical))


def _ratio(document: Document, label: str, baseline: str) -> Sample:
    ours, theirs = _throughput(document, label), _throughput(document, baseline)
    # Only turns that both have.
    logs = tuple(a - b for a, b in zip(ours.logs, theirs.logs, strict=False))
    return Sample(logs, ours.within + theirs.within)


def _micro(document: Document) -> dict[str, Sample]:
    """Return the runs per second of each benchmark, by its median round; each was measured in one process."""
    samples = {}
    for one in document.get("benchmarks", []):
        stats = one["stats"]
        spread = stats.get("iqr", 0.0) / _QUARTILES / stats["median"]
        name = one["name"].removeprefix("test_")
        samples[name] = Sample((-math.log(stats["median"]),), (_MEDIAN * spread) ** 2 / stats["rounds"])
    return samples
