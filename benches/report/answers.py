"""The answer of a measurement: its entries by name, and their throughput relative to the baseline."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import Any

from holdfast.benches.report.directory import Question, Results
from holdfast.benches.report.results import Document, counted_ms, memory
from holdfast.benches.report.tables import BENCHMARKS
from holdfast.benches.report.words import Name, name_of, times

FLOOR = "floor"
# Ratios this close to 1 show no difference: turns of one engine on an idle machine vary as much.
_SAME = 0.05
_SAME_IN_ONE_TURN = 0.10
# The report warns if other work kept this share of the cores busy just before a run.
_DISTURBING = 0.1


@dataclass(frozen=True)
class Ratio:
    """The ratio of two entries' throughput: median, minimum and maximum of the turns."""

    median: float
    least: float
    most: float
    turns: int

    @classmethod
    def of(cls, by_turn: list[float]) -> Ratio:
        return cls(statistics.median(by_turn), min(by_turn), max(by_turn), len(by_turn))

    @property
    def _margin(self) -> float:
        return _SAME if self.turns > 1 else _SAME_IN_ONE_TURN

    @property
    def same(self) -> bool:
        """Whether the turns show no difference: they disagree, or the ratio is close to 1."""
        return abs(self.median - 1) < self._margin or self.least <= 1 <= self.most

    @property
    def unsettled(self) -> bool:
        """Whether the turns show neither a difference nor equality."""
        return self.same and not 1 - self._margin <= self.least <= self.most <= 1 + self._margin

    @property
    def faster(self) -> bool:
        return not self.same and self.median > 1

    @property
    def slower(self) -> bool:
        return not self.same and self.median < 1

    @property
    def in_one_turn(self) -> str:
        """A remark for a figure of a single turn, empty for others."""
        return " in one turn" if self.turns == 1 else ""

    @property
    def spread(self) -> str:
        return "one turn" if self.turns == 1 else f"{times(self.least)} to {times(self.most)} in {self.turns} turns"


@dataclass(frozen=True)
class Answer:
    """A question and its measurements."""

    question: Question
    document: Document

    @property
    def labels(self) -> list[str]:
        return list(self.document["engines"])

    def engine(self, label: str) -> str:
        engine: str = self.document.get("entries", {}).get(label, label)
        return engine

    def name(self, label: str) -> Name:
        return name_of(self.engine(label), label)

    def along(self, label: str) -> float | None:
        """Return an entry's value on the x axis, or None."""
        value = self.document["settings"]["jobs"][label].get(self.question.along)
        return float(value) if isinstance(value, int | float) else None

    @functools.cached_property
    def curves(self) -> bool:
        """Whether each engine has several entries, along an x axis."""
        return bool(self.question.along) and all(self.along(label) is not None for label in self.labels)

    def baseline(self, label: str) -> str | None:
        """Return the entry to compare with: in a curve, the one at the same x."""
        wanted = self.question.baseline or (self._first_of_others if self.curves else "")
        for other in self.labels:
            named = wanted == other or (self.curves and wanted == self.engine(other))
            if other != label and named and (wanted == other or self.along(other) == self.along(label)):
                return other
        return None

    @functools.cached_property
    def _first_of_others(self) -> str:
        """The engine to compare curves with if the question names no baseline."""
        others = [label for label in self.labels if not self.name(label).ours and self.engine(label) != FLOOR]
        return self.engine(others[0]) if others else ""

    def runs(self, label: str) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = self.document["engines"][label]["runs"]
        return runs

    def ratio(self, first: str, second: str) -> Ratio:
        pairs = zip(self.runs(first), self.runs(second), strict=False)
        return Ratio.of([a["rows_per_second"] / b["rows_per_second"] for a, b in pairs])

    def rows_per_second(self, label: str) -> float:
        rows: float = self.document["engines"][label]["rows_per_second"]
        return rows

    def batch_ms(self, label: str) -> list[float]:
        return counted_ms(self.document, label)

    def memory_bytes(self, label: str) -> dict[str, int]:
        """Return the peak memory of each kind of process; shared pages are divided among processes."""
        return {kind: held["pss"] for kind, held in memory(self.document, label).items()}

    def has_phase(self, phase: str) -> bool:
        return any(phase in phases for label in self.labels for run in self.runs(label) for phases in run["phases_ms"])

    @property
    def equality(self) -> list[dict[str, Any]]:
        """The comparisons of results: of all entries together, and of each run."""
        runs = [run for label in self.labels for run in self.runs(label)]
        found = [one["equality"] for one in (self.document, *runs) if one.get("equality")]
        return [one for place, one in enumerate(found) if one not in found[:place]]

    @property
    def equal(self) -> bool:
        """Whether all comparisons found equal results; if not, the times do not count."""
        return all(one["equal"] for one in self.equality)

    @property
    def busy(self) -> float | None:
        """The most cores that other work kept busy just before a run, or None if too few to disturb it."""
        found = [run.get("busy_before_cores", 0.0) for label in self.labels for run in self.runs(label)]
        busy = max(found, default=0.0)
        return busy if busy > _DISTURBING * self.document["machine"]["cores"] else None

    def local_state_bytes(self, label: str) -> float:
        size: float = self.document["state_bytes"][label]["local_peak"]
        return size


def answers_of(results: Results) -> list[Answer]:
    """Return the questions that paired runs answered, without the micro-benchmarks."""
    return [Answer(question, found) for question, found in results.measured if BENCHMARKS not in found]
