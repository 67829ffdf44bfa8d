"""Distinguishes changes from noise when each figure comes from only a few runs.

All values are logarithms, so that a change is a factor. A sample has one value per turn: the throughput of an entry's
run, or the ratio of two runs of the same turn, which cancels disturbances of the whole turn. Micro-batches of one run
are not independent: they share a JVM, its memory layout and the condition of the machine (Georges, Buytaert, Eeckhout:
Statistically rigorous Java performance evaluation, OOPSLA 2007; Kalibera, Jones: Rigorous benchmarking in reasonable
time, ISMM 2013). So the noise of a comparison is the variance between runs, and at least the variance that the
micro-batches of one run imply.

Two or three runs say little about a variance, but the figures of a suite share a machine. So each figure's variance is
shrunk towards that of its suite, which counts for `BELIEF` degrees of freedom (after G. K. Smyth: Linear models and
empirical Bayes methods for assessing differential expression in microarray experiments, Stat. Appl. Genet. Mol. Biol.
3(1), 2004). The change, divided by its standard error, then follows Student's t. If nothing ran twice, the prior is
`UNKNOWN_SD`.

Of a hundred comparisons without a change, five look significant. So verdicts control the false discovery rate
(Benjamini, Hochberg: Controlling the false discovery rate, J. R. Statist. Soc. B 57, 1995), separately for slower and
for faster: if nothing changed, the chance that anything is called slower is `ERRORS`.

tests/unit/benches/test_comparing.py measures both kinds of error. With runs that vary by 1.5 % and micro-batches that
vary by 6 %, five turns find a regression of a tenth in one entry of four measurements in 91 of 100 cases, three turns
in 63, two in 41; noise alone is called a regression in 1 to 7.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads its submodules lazily, which saves all other commands a second of CPU time

# The accepted rate of false positives.
ERRORS = 0.05
# The standard deviation of single runs of an engine on an idle machine, and the degrees of freedom that it counts for.
UNKNOWN_SD, UNKNOWN_DF = 0.06, 4.0
# A suite with fewer degrees of freedom is less certain than that prior.
_ENOUGH = 8.0
# The most degrees of freedom that a suite's variance counts for.
BELIEF = 8.0


@dataclass(frozen=True)
class Variance:
    """A variance with its degrees of freedom."""

    value: float
    df: float


@dataclass(frozen=True)
class Sample:
    """One figure: its natural logarithm by turn, and the variance of micro-batches `within` turns."""

    logs: tuple[float, ...]
    within: float = 0.0

    @property
    def mean(self) -> float:
        return statistics.fmean(self.logs)


@dataclass(frozen=True)
class Change:
    """The change of a figure, new / base, with its confidence interval and adjusted p-value."""

    factor: float
    low: float
    high: float
    p: float

    @property
    def is_real(self) -> bool:
        return self.p <= ERRORS


def changes(pairs: Sequence[tuple[Sample, Sample]], suites: Sequence[str]) -> list[Change]:
    """Return the change of each figure from base to new; figures of one suite have similar noise."""
    if not pairs:
        return []
    own = [_pooled(base, new) for base, new in pairs]
    common = {
        suite: _common([one for one, of in zip(own, suites, strict=True) if of == suite]) for suite in set(suites)
    }
    between = [_shrunk(one, common[suite]) for one, suite in zip(own, suites, strict=True)]
    noise = np.array([max(of.value, (a.within + b.within) / 2) for of, (a, b) in zip(between, pairs, strict=True)])
    error = np.sqrt(noise * [1 / len(a.logs) + 1 / len(b.logs) for a, b in pairs])
    error = np.maximum(error, 1e-9)
    df = np.array([of.df for of in between])
    difference = np.array([b.mean - a.mean for a, b in pairs])
    half = scipy.stats.t.isf(ERRORS / 2, df) * error
    factor, low, high = np.exp([difference, difference - half, difference + half]).tolist()
    slower, faster = (
        scipy.stats.false_discovery_control(tail(difference / error, df))
        for tail in (scipy.stats.t.cdf, scipy.stats.t.sf)
    )
    columns = (factor, low, high, np.minimum(slower, faster).tolist())
    return [Change(*figures) for figures in zip(*columns, strict=True)]


def midmean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the middle half of some values, and its variance.

    Some micro-batches are always delayed: this mean varies less than the plain mean and than the median (Wilcox:
    Introduction to robust estimation and hypothesis testing, 2022, 3.3 and 4.3).
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    cut = len(ordered) // 4
    middle = float(ordered[cut : len(ordered) - cut].mean())
    if len(ordered) < 2:
        return middle, 0.0
    winsorized = np.clip(ordered, ordered[cut], ordered[len(ordered) - cut - 1])
    kept = 1 - 2 * cut / len(ordered)
    return middle, float(winsorized.var(ddof=1)) / (kept**2 * len(ordered))


def _pooled(base: Sample, new: Sample) -> Variance:
    """Return the pooled variance between turns."""
    squares = sum((log - sample.mean) ** 2 for sample in (base, new) for log in sample.logs)
    df = len(base.logs) + len(new.logs) - 2
    return Variance(squares / df if df else 0.0, float(df))


def _common(own: Sequence[Variance]) -> Variance:
    """Return the common variance of a suite's figures; they share baselines, so half of them count."""
    squares, df = sum(one.value * one.df for one in own), sum(one.df for one in own)
    if df < _ENOUGH:
        return Variance((UNKNOWN_DF * UNKNOWN_SD**2 + squares) / (UNKNOWN_DF + df), UNKNOWN_DF)
    return Variance(squares / df, df / 2)


def _shrunk(own: Variance, common: Variance) -> Variance:
    """Return a variance shrunk towards the common one."""
    weight = min(common.df, BELIEF)
    df = own.df + weight
    return Variance((own.df * own.value + weight * common.value) / df, df)
