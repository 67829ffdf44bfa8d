"""What a measurement answers: its entries by name, and each one's throughput by that of the baseline."""

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
# Ratios nearer to 1 are no difference: between two turns of one engine on an idle machine lies as much.
_SAME = 0.05
_SAME_IN_ONE_TURN = 0.10
# Other work that keeps this share of the cores busy just before a run is told to the reader.
_DISTURBING = 0.1


@dataclass(frozen=True)
class Ratio:
    """The throughput of one entry by that of another: of the turns the median, the least and the most."""

    median: float
    least: float
    most: float
    turns: int

    @classmethod
    def of(cls, by_turn: list[float]) -> Ratio:
        """Return the ratio of some turns, at least one."""
        return cls(statistics.median(by_turn), min(by_turn), max(by_turn), len(by_turn))

    @property
    def _margin(self) -> float:
        return _SAME if self.turns > 1 else _SAME_IN_ONE_TURN

    @property
    def same(self) -> bool:
        """Whether these turns show no difference: they disagree, or nearly nothing lies between the two."""
        return abs(self.median - 1) < self._margin or self.least <= 1 <= self.most

    @property
    def unsettled(self) -> bool:
        """Whether these turns show neither a difference nor that there is none."""
        return self.same and not 1 - self._margin <= self.least <= self.most <= 1 + self._margin

    @property
    def faster(self) -> bool:
        """Whether the first is the faster one."""
        return not self.same and self.median > 1

    @property
    def slower(self) -> bool:
        """Whether the first is the slower one."""
        return not self.same and self.median < 1

    @property
    def in_one_turn(self) -> str:
        """The words that a figure of a single turn needs, empty for others."""
        return " in one turn" if self.turns == 1 else ""

    @property
    def spread(self) -> str:
        """What the turns gave, least and most, in words."""
        return "one turn" if self.turns == 1 else f"{times(self.least)} to {times(self.most)} in {self.turns} turns"


@dataclass(frozen=True)
class Answer:
    """A question and what was measured."""

    question: Question
    document: Document

    @property
    def labels(self) -> list[str]:
        """The entries that have a run, in the order of the turns."""
        return list(self.document["engines"])

    def engine(self, label: str) -> str:
        """Return the engine of an entry."""
        engine: str = self.document.get("entries", {}).get(label, label)
        return engine

    def name(self, label: str) -> Name:
        """Return what an entry is called."""
        return name_of(self.engine(label), label)

    def along(self, label: str) -> float | None:
        """Return where on the x axis an entry stands, None if it stands nowhere."""
        value = self.document["settings"]["jobs"][label].get(self.question.along)
        return float(value) if isinstance(value, int | float) else None

    @functools.cached_property
    def curves(self) -> bool:
        """Whether it asks how something grows: then each engine has several entries."""
        return bool(self.question.along) and all(self.along(label) is not None for label in self.labels)

    def baseline(self, label: str) -> str | None:
        """Return the entry that this one is read against: that of the same size in a curve."""
        wanted = self.question.baseline or (self._first_of_others if self.curves else "")
        for other in self.labels:
            named = wanted == other or (self.curves and wanted == self.engine(other))
            if other != label and named and (wanted == other or self.along(other) == self.along(label)):
                return other
        return None

    @functools.cached_property
    def _first_of_others(self) -> str:
        """The engine that curves are read against where nothing else is said."""
        others = [label for label in self.labels if not self.name(label).ours and self.engine(label) != FLOOR]
        return self.engine(others[0]) if others else ""

    def runs(self, label: str) -> list[dict[str, Any]]:
        """Return the runs of an entry."""
        runs: list[dict[str, Any]] = self.document["engines"][label]["runs"]
        return runs

    def ratio(self, first: str, second: str) -> Ratio:
        """Return the throughput of one entry by that of another."""
        pairs = zip(self.runs(first), self.runs(second), strict=False)
        return Ratio.of([a["rows_per_second"] / b["rows_per_second"] for a, b in pairs])

    def rows_per_second(self, label: str) -> float:
        """Return the throughput, the median of the turns."""
        rows: float = self.document["engines"][label]["rows_per_second"]
        return rows

    def batch_ms(self, label: str) -> list[float]:
        """Return the times of the counted micro-batches of all turns."""
        return counted_ms(self.document, label)

    def memory_bytes(self, label: str) -> dict[str, int]:
        """Return the largest memory of each kind of process; pages that processes share are divided among them."""
        return {kind: held["pss"] for kind, held in memory(self.document, label).items()}

    def has_phase(self, phase: str) -> bool:
        """Return whether micro-batches have a part of this name."""
        return any(phase in phases for label in self.labels for run in self.runs(label) for phases in run["phases_ms"])

    @property
    def equality(self) -> list[dict[str, Any]]:
        """What was compared: of all entries together, and of each run by itself."""
        runs = [run for label in self.labels for run in self.runs(label)]
        found = [one["equality"] for one in (self.document, *runs) if one.get("equality")]
        return [one for place, one in enumerate(found) if one not in found[:place]]

    @property
    def equal(self) -> bool:
        """Whether the results were the same, as far as they were compared: otherwise no time of theirs counts."""
        return all(one["equal"] for one in self.equality)

    @property
    def busy(self) -> float | None:
        """How many cores other work kept busy just before a run, the most of all runs, if that disturbs a run."""
        found = [run.get("busy_before_cores", 0.0) for label in self.labels for run in self.runs(label)]
        busy = max(found, default=0.0)
        return busy if busy > _DISTURBING * self.document["machine"]["cores"] else None

    def local_state_bytes(self, label: str) -> float:
        """Return the largest size of the working state."""
        size: float = self.document["state_bytes"][label]["local_peak"]
        return size


def answers_of(results: Results) -> list[Answer]:
    """Return the questions that paired runs answered, without those of the suite of single functions."""
    return [Answer(question, found) for question, found in results.measured if BENCHMARKS not in found]
