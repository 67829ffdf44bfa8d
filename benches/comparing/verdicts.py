"""What became faster or slower between two runs of the same suites, figure by figure: directories, or documents."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
# The quartiles of a normal distribution lie so many standard deviations apart; and a median varies more than a mean.
_QUARTILES, _MEDIAN = 1.349, 1.2533
# Times are stored to a tenth of a millisecond.
_SHORTEST_MS = 0.05


_MICRO = "micro"
_FACTS = ("machine", "versions", "profile", "shape")


@dataclass(frozen=True)
class Measured:
    """All that one side of a comparison holds: documents by suite and name, and what their figures depend on."""

    path: Path
    documents: Mapping[str, Document]
    facts: Mapping[str, Any]


def read(path: Path) -> Measured:
    """Return the documents of a directory, or one document."""
    if path.is_dir():
        results = directory.read(path)
        documents = {f"{question.suite}/{question.name}": document for question, document in results.measured}
        if not documents:
            raise InvalidArgumentError("no measurement is done in this directory; run it again", directory=path)
        return Measured(path, documents, {name: results.run.get(name) for name in _FACTS})
    if path.name == RUN:
        raise CorruptionError("no document, but the plan of a directory; give the directory", file=path)
    found = directory.read_document(path)
    name = f"{found['suite']}/{found['name']}" if "suite" in found else str(found.get("bench", _MICRO))
    return Measured(path, {name: found}, {part: found.get(part) for part in ("machine", "versions")})


def _is_micro(document: Document) -> bool:
    """Tell whether a document is pytest-benchmark's."""
    return BENCHMARKS in document


def _is_wrong(document: Document) -> bool:
    """Tell whether the entries of a document found different results, so that no time of theirs counts."""
    runs = (run for engine in document.get("engines", {}).values() for run in engine["runs"])
    compared = [one.get("equality") for one in (document, *runs)]
    return any(not one["equal"] for one in compared if one)


def differ(base: Measured, new: Measured) -> list[str]:
    """Return in words how two sides differ in what their figures depend on, and what cannot be compared."""
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
            yield f"{name}: in {side} the entries found different results, so that it is not compared"
    if _is_micro(before) != _is_micro(after):
        yield f"{name}: one side is of single functions, the other of jobs, so that it is not compared"
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
    """Return the names of the documents that both sides have, and whose times count."""
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
            "the two have no measurement in common, so there is nothing to compare",
            base=" ".join(base.documents),
            new=" ".join(new.documents),
        )
    return both


@dataclass(frozen=True)
class Figure:
    """A figure that both sides have, larger is better: a `RATIO` to the baseline, or the throughput of an `ENTRY`."""

    measurement: str
    kind: str
    name: str
    base: Sample
    new: Sample
    decides: bool


@dataclass(frozen=True)
class Verdict:
    """A figure and what became of it.

    Base and new are ratios, or geometric means of rows or runs a second; the change is new by base, less 1. `p` is the
    chance of such a change by noise, adjusted for all figures. A regression decides, and exceeds the threshold.
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

    def stored(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def compare(base: Measured, new: Measured, threshold: float) -> list[Verdict]:
    """Return a verdict on every ratio and entry that both sides have; only changes of the threshold count.

    Ratios decide, since the machine affects both runs; throughput only without a baseline, on one machine. "No
    difference" means that the interval lies within the threshold.
    """
    same_machine = not [line for line in differ(base, new) if line.startswith("machine")]
    figures = [one for name in _common(base, new) for one in _figures(name, base, new, same_machine)]
    found = []
    for kind in (RATIO, ENTRY):  # each kind by itself: they differ in their noise
        of_kind = [one for one in figures if one.kind == kind]
        suites = [one.measurement.partition("/")[0] for one in of_kind]
        changed = changes([(one.base, one.new) for one in of_kind], suites)
        found += [_verdict(one, change, threshold) for one, change in zip(of_kind, changed, strict=True)]
    return found


def smallest_visible(verdicts: Sequence[Verdict]) -> float:
    """Return how much slower something must become to be told from noise, in the median of the figures that decide."""
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
    """Return the entry that one is read against: in a curve, that of the baseline's engine at the same place."""
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
    # As many turns as both have.
    logs = tuple(a - b for a, b in zip(ours.logs, theirs.logs, strict=False))
    return Sample(logs, ours.within + theirs.within)


def _micro(document: Document) -> dict[str, Sample]:
    """Return by benchmark the runs a second, by the median round; each was measured in one process only."""
    samples = {}
    for one in document.get("benchmarks", []):
        stats = one["stats"]
        spread = stats.get("iqr", 0.0) / _QUARTILES / stats["median"]
        name = one["name"].removeprefix("test_")
        samples[name] = Sample((-math.log(stats["median"]),), (_MEDIAN * spread) ** 2 / stats["rounds"])
    return samples
