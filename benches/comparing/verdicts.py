"""What became faster or slower between two runs of the same suites, figure by figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.benches.comparing.documents import Measured, common, differ, is_micro
from holdfast.benches.comparing.noise import Change, Place, Sample, changes, midmean
from holdfast.benches.report.results import Document, job_of

SLOWER, FASTER, SAME, UNKNOWN = "slower", "faster", "no difference", "cannot tell"
RATIO, ENTRY = "ratio", "entry"
# The quartiles of a normal distribution lie so many standard deviations apart; and a median varies more than a mean.
_QUARTILES, _MEDIAN = 1.349, 1.2533
# Times are stored to a tenth of a millisecond.
_SHORTEST_MS = 0.05


@dataclass(frozen=True)
class Figure:
    """A figure that both sides have.

    Attributes
    ----------
    measurement : str
        ``jobs/job-a``.
    kind : str
        `RATIO`: throughput by that of the baseline. `ENTRY`: throughput.
    name : str
        The entry, or the micro-benchmark.
    base, new : Sample
        Larger is better.
    decides : bool
        Whether it may be a regression, or only says more about others.
    """

    measurement: str
    kind: str
    name: str
    base: Sample
    new: Sample
    decides: bool


@dataclass(frozen=True)
class Verdict:
    """A figure and what became of it.

    Attributes
    ----------
    measurement, kind, name : str
        As `Figure` has them.
    base, new : float
        Rows a second in a typical micro-batch, or their ratio; of micro-benchmarks runs a second. Geometric means.
    turns : tuple of int
        Of base and new.
    change, low, high : float
        New by base, less 1: -0.1 is a tenth slower. The interval is of this figure alone.
    p : float
        The chance of such a change where there is none, adjusted for all figures.
    verdict : str
        `SLOWER`, `FASTER`, `SAME` or `UNKNOWN`.
    decides : bool
        Whether it may be a regression.
    regression : bool
        Whether it decides, and is slower by more than the threshold.
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
    """Return a verdict on every ratio and every entry that both sides have.

    Parameters
    ----------
    threshold : float
        The change that counts: 0.05 is 5 %.

    Notes
    -----
    How noise is told from change: `holdfast.benches.comparing.noise`. A ratio decides, since what changes the machine
    changes both of its runs. Throughput decides only where a measurement has no baseline, and both sides ran on one
    machine. "No difference" means that the interval lies within the threshold on both sides.
    """
    same_machine = not [line for line in differ(base, new) if line.startswith("machine")]
    figures = [one for name in common(base, new) for one in _figures(name, base, new, same_machine)]
    found = []
    for kind in (RATIO, ENTRY):  # each kind by itself: they differ in their noise
        of_kind = [one for one in figures if one.kind == kind]
        for one, change in zip(
            of_kind,
            changes([(one.base, one.new) for one in of_kind], [_place(one.measurement) for one in of_kind]),
            strict=True,
        ):
            found.append(_verdict(one, change, threshold))
    return found


def _place(measurement: str) -> Place:
    suite, _, _ = measurement.partition("/")
    return Place(suite, measurement)


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
    if is_micro(before) or is_micro(after):
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
