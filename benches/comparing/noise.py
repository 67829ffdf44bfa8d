"""Tells a change from noise, where each figure was measured in a few runs only.

All is done on logarithms, so that a change is a factor. A sample is one value a turn: of an entry the throughput of its
run, of a ratio that of the two runs of the same turn, so that what disturbs a whole turn cancels out. Micro-batches of
one run are no independent samples: they share the JVM, the layout of its memory and the weather of the machine, and
only a new process draws these anew (Georges, Buytaert, Eeckhout: Statistically rigorous Java performance evaluation,
OOPSLA 2007; Kalibera, Jones: Rigorous benchmarking in reasonable time, ISMM 2013). So the noise of a comparison is the
variance between runs, and never less than what the micro-batches of a run alone make of it.

Two or three runs say little about a variance. Many figures of a suite were measured on the same machine, though, and
what they have in common is a good guess at each one's own: a figure's variance is its own and the suite's, which counts
for `BELIEF` degrees of freedom (after G. K. Smyth: Linear models and empirical Bayes methods for assessing differential
expression in microarray experiments, Stat. Appl. Genet. Mol. Biol. 3(1), 2004). The change by its standard error then
follows Student's t with the degrees of freedom of both. Where nothing was run twice, the guess is `UNKNOWN_SD`.

Among a hundred comparisons five are "significant" by chance alone. Verdicts therefore control the false discovery rate
(Benjamini, Hochberg: Controlling the false discovery rate, J. R. Statist. Soc. B 57, 1995), of what is slower and of
what is faster by itself: if nothing has changed, the chance that anything is called slower is `ERRORS`.

tests/unit/benches/test_comparing.py measures both kinds of error. With runs that differ by 1.5 % and micro-batches that
differ by 6 %, a regression of a tenth in one entry of four measurements is found in 91 of 100 cases after five turns
each, in 63 after three, and in 41 after two; noise alone is called a regression in 1 to 7.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its parts load when they are asked: a second of CPU time for every other command

# How often nothing may be called something.
ERRORS = 0.05
# Single runs of one engine on one idle machine differ by so much (benches/RESULTS.md), and how sure that is: as if it
# had been measured with so many degrees of freedom.
UNKNOWN_SD, UNKNOWN_DF = 0.06, 4.0
# Fewer degrees of freedom of a whole suite say less than that guess.
_ENOUGH = 8.0
# What a variance takes from its suite counts no more than so many degrees of freedom of its own.
BELIEF = 8.0


@dataclass(frozen=True)
class Variance:
    """A variance, and the degrees of freedom behind it."""

    value: float
    df: float


@dataclass(frozen=True)
class Sample:
    """What was measured of one figure: a natural logarithm a turn, and the variance `within` one, of micro-batches."""

    logs: tuple[float, ...]
    within: float = 0.0

    @property
    def mean(self) -> float:
        """The mean logarithm."""
        return statistics.fmean(self.logs)


@dataclass(frozen=True)
class Change:
    """How a figure changed, new by base, with its interval; `p` is the chance of that where there is no change."""

    factor: float
    low: float
    high: float
    p: float

    @property
    def is_real(self) -> bool:
        """Whether it is more than noise."""
        return self.p <= ERRORS


def changes(pairs: Sequence[tuple[Sample, Sample]], suites: Sequence[str]) -> list[Change]:
    """Return how each figure changed, from base to new; figures of one suite are alike in noise."""
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

    The machine always holds up some micro-batches: a mean without the outer quarters varies less than the plain one and
    than the median (Wilcox: Introduction to robust estimation and hypothesis testing, 2022, 3.3 and 4.3).
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
    """Return the variance between turns, of both sides."""
    squares = sum((log - sample.mean) ** 2 for sample in (base, new) for log in sample.logs)
    df = len(base.logs) + len(new.logs) - 2
    return Variance(squares / df if df else 0.0, float(df))


def _common(own: Sequence[Variance]) -> Variance:
    """Return the variance that a suite's figures have in common; they share baselines, so half of them count."""
    squares, df = sum(one.value * one.df for one in own), sum(one.df for one in own)
    if df < _ENOUGH:
        return Variance((UNKNOWN_DF * UNKNOWN_SD**2 + squares) / (UNKNOWN_DF + df), UNKNOWN_DF)
    return Variance(squares / df, df / 2)


def _shrunk(own: Variance, common: Variance) -> Variance:
    """Return a variance drawn towards the common one, which counts for `BELIEF` degrees of freedom at most."""
    weight = min(common.df, BELIEF)
    df = own.df + weight
    return Variance((own.df * own.value + weight * common.value) / df, df)
