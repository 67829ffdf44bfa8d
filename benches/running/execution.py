"""Runs a plan: each measurement as turns of its entries, each run in a fresh process.

::

    job-a   turn 1   holdfast-memory  floor  spark-agg-rocksdb     the seed determines a new order for each turn,
            turn 2   floor  spark-agg-rocksdb  holdfast-memory     so that no entry gains by its position

A finished run is stored before the next one starts. An entry that fails is left out of later turns and the others
continue; the next run of the same command retries it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.benches.jobs.job import StoreJob
from holdfast.benches.report.directory import DONE
from holdfast.benches.report.results import Document, document
from holdfast.benches.running.directory import FAILED, TO_DO, ResultsDirectory, about, differences
from holdfast.benches.runs.child_process import call_in_child
from holdfast.benches.runs.paired import Entry, Run, run_engine
from holdfast.benches.suites.measurement import Measurement
from holdfast.errors import HoldfastError, InvalidArgumentError

# A run hangs if it takes longer than this multiple of its expected time, and longer than this many seconds.
_PATIENCE = 6
_PATIENCE_S = 900.0
_CHECK = "results"
_TIME_IS_UP = "time ran out before its run"
# Failures of an engine, its machine or a program that it needs; other measurements continue.
_FAILURES = (
    *(HoldfastError, OSError, subprocess.SubprocessError),
    *(ArithmeticError, LookupError, TypeError, ValueError),
)
_START_S, _ROW_S = 15.0, 5e-6
# Measured times correct expected ones; this is the weight of the expectation.
_PRIOR_S = 60.0
# Options named differently from the field of `Shape`.
_OPTIONS = {"rows": "rows-per-batch"}


@dataclass(frozen=True, eq=False)
class Step:
    """One run of one entry; the first turn is 0."""

    measurement: Measurement
    turn: int
    label: str

    @property
    def key(self) -> tuple[str, str, int, str]:
        return (self.measurement.suite, self.measurement.name, self.turn, self.label)

    @property
    def expected_s(self) -> float:
        """The run's share of the measurement's minutes, in proportion to its work."""
        seconds = self.measurement.minutes * 60 / self.measurement.repeats
        works = {label: _work_s(entry) for label, entry in self.measurement.entries.items()}
        return seconds * works[self.label] / sum(works.values()) if works else seconds

    def __str__(self) -> str:
        turns = f", turn {self.turn + 1} of {self.measurement.repeats}" if self.measurement.repeats > 1 else ""
        return f"{self.measurement.suite}/{self.measurement.name}: {self.label}{turns}"


def _work_s(entry: Entry) -> float:
    """Estimate how long an entry takes, relative to others."""
    job = entry.job
    fills = job.fill_batches or isinstance(job, StoreJob)
    rows = job.rows * job.batches + (job.keys if fills else 0)
    return _START_S + rows * _ROW_S


def steps_of(measurement: Measurement, seed: int) -> list[Step]:
    """Return the runs of a measurement in order."""
    steps = []
    for turn in range(measurement.repeats):
        labels = list(measurement.entries) or [measurement.micro]
        random.Random(f"{seed} {measurement.suite} {measurement.name} {turn}").shuffle(labels)
        steps += [Step(measurement, turn, label) for label in labels]
    return steps


class TimeLeft:
    """Estimates the time that the remaining steps take, corrected by the times measured so far."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._to_do = {step.key: step.expected_s for step in steps}
        self._expected_s = self._measured_s = _PRIOR_S

    def done(self, step: Step, seconds: float | None) -> None:
        """Note how long a run took, in this command or an earlier one; None if it was left out."""
        self._to_do.pop(step.key, None)
        if seconds is not None:
            self._expected_s += step.expected_s
            self._measured_s += seconds

    @property
    def left_s(self) -> float:
        return sum(self._to_do.values()) * self._measured_s / self._expected_s


#: Called before a step (None, "") and after it, with its seconds (None if it was left out) and its outcome in words.
Tell = Callable[[Step, float | None, str], None]


class Execution:
    """Runs one measurement; refuses a directory whose runs under its name have different jobs."""

    def __init__(
        self,
        directory: ResultsDirectory,
        measurement: Measurement,
        *,
        seed: int = 1,
        disk: str | None = None,
        end_s: float = float("inf"),
    ) -> None:
        self._directory = directory
        self._measurement = measurement
        self._disk = disk
        self._end_s = end_s
        self._failed: dict[str, str] = {}
        self._begun = 0
        self._lines = directory.runs(measurement)
        self._require_same_jobs()
        done = {(line["turn"], line["label"]) for line in self._lines}
        self.is_done = directory.is_done(measurement)
        steps = [] if self.is_done else steps_of(measurement, seed)
        self.to_do = [step for step in steps if (step.turn, step.label) not in done]

    def _require_same_jobs(self) -> None:
        for line in self._lines:
            wanted = self._measurement.entries.get(line["label"])
            there = {"engine": line["engine"], "job": line["job"]}
            differ = differences(there, _stored(wanted)) if wanted else []
            if differ:
                raise InvalidArgumentError(
                    "the directory has runs of a different job; choose a different directory, or delete them with "
                    f"--fresh; stored and new differ in {'; '.join(differ)}",
                    directory=self._directory.path,
                    measurement=self._measurement.name,
                    entry=line["label"],
                )

    @property
    def done(self) -> list[tuple[Step, float]]:
        """The runs that an earlier command finished, and the seconds that each took."""
        return [(Step(self._measurement, line["turn"], line["label"]), line["seconds"]) for line in self._lines]

    def run(self, tell: Tell = lambda *_: None) -> str:
        """Do the remaining runs, store the document, and return the measurement's state."""
        if self.is_done:
            return DONE
        self._directory.set_state(self._measurement, TO_DO)
        self._check()
        for step in self.to_do:
            if self._failed.keys() & {step.label, _CHECK} or not self._has_time_for(step.turn):
                tell(step, None, "left out")
            else:
                self._run(step, tell)
        reason = "; ".join(f"{label}: {why}" for label, why in self._failed.items())
        state = FAILED if reason else DONE
        if not reason and self._turns < self._measurement.repeats:
            reason = f"{self._turns} of {self._measurement.repeats} turns, then time ran out"
        found = self._document()
        if found is not None:
            self._directory.write_document(self._measurement, found, whole=state == DONE)
        self._directory.set_state(self._measurement, state, reason)
        return state

    def _check(self) -> None:
        """Compare the entries' results unless that is done already; if they differ, nothing is measured."""
        line = self._directory.plan(self._measurement)
        if self._measurement.check is None or line.get("equality"):
            return
        try:
            found = self._measurement.check()
        except _FAILURES as exc:
            self._failed[_CHECK] = _described(exc)
            return
        if found.get("equal", True):
            line["equality"] = found
        else:
            self._failed[_CHECK] = f"the entries' results differ: {found['what']}"

    def _has_time_for(self, turn: int) -> bool:
        """Return whether a turn may start, judged by the turn before it; a turn that has started continues."""
        if turn == 0 or self._begun >= turn:
            return True
        before_s = sum(line["seconds"] for line in self._lines if line["turn"] == turn - 1)
        if time.monotonic() + before_s > self._end_s:
            return False
        self._begun = turn
        return True

    def _run(self, step: Step, tell: Tell) -> None:
        tell(step, None, "")
        begun_s = time.monotonic()
        if begun_s >= self._end_s:
            self._give_up(step, _TIME_IS_UP)
            tell(step, 0.0, _TIME_IS_UP)
            return
        limit_s = min(max(_PATIENCE_S, _PATIENCE * step.expected_s), max(1.0, self._end_s - begun_s))
        entry = self._measurement.entries.get(step.label)
        try:
            if entry is None:
                run = run_micro(self._measurement.micro, limit_s)
            else:
                run = run_engine(entry, disk=self._disk, limit_s=limit_s)
        except _FAILURES as exc:
            self._give_up(step, _described(exc))
            tell(step, time.monotonic() - begun_s, f"failed: {_described(exc)}")
            return
        seconds = round(time.monotonic() - begun_s, 1)
        ran = {"engine": "pytest-benchmark", "job": {}} if entry is None else _stored(entry)
        line = {"turn": step.turn, "label": step.label, **ran, "seconds": seconds, "run": run}
        self._directory.add_run(self._measurement, line)
        self._lines.append(line)
        tell(step, seconds, f"{run['rows_per_second']:,.0f} rows a second" if "rows_per_second" in run else "done")

    def _give_up(self, step: Step, why: str) -> None:
        """Mark a label as failed, unless time ran out during a later turn: the earlier turns still count."""
        if step.turn == 0 or time.monotonic() < self._end_s:
            self._failed[step.label] = why

    @property
    def _turns(self) -> int:
        """The number of turns that all entries have finished, failed entries aside."""
        labels = [label for label in self._labels if label not in self._failed]
        return min((sum(line["label"] == label for line in self._lines) for label in labels), default=0)

    @property
    def _labels(self) -> list[str]:
        return list(self._measurement.entries) or [self._measurement.micro]

    def _document(self) -> Document | None:
        """Return the document of the entries that finished all turns; None if there are none."""
        by_turn = sorted(self._lines, key=lambda line: line["turn"])
        runs: dict[str, list[Run]] = {}
        for label in self._labels:
            of_label = [line["run"] for line in by_turn if line["label"] == label]
            if of_label and len(of_label) >= self._turns:
                runs[label] = of_label[: self._turns]
        if not runs:
            return None
        one = self._measurement
        if one.micro:
            (of_module,) = runs.values()
            return {**of_module[0], **about(one)}
        entries = {label: one.entries[label] for label in runs}
        has_baseline = one.baseline in {*runs, *(entry.engine for entry in entries.values())}
        facts = {name: self._directory.facts[name] for name in ("started", "machine", "versions", "seed")}
        return {
            **document(one.name, entries, runs, {"command": self._command(), **facts}, one.targets),
            **about(one if has_baseline else replace(one, baseline="")),
            "entries": {label: entry.engine for label, entry in entries.items()},
            **self._equality(runs),
        }

    def _equality(self, runs: Mapping[str, list[Run]]) -> dict[str, Any]:
        """Return the comparison made before the runs or by each of them, if any."""
        checked = self._directory.plan(self._measurement).get("equality")
        by_run = [run["equality"] for of_label in runs.values() for run in of_label if run.get("equality")]
        if not checked and by_run:
            checked = {**by_run[0], "equal": all(one["equal"] for one in by_run)}
        return {"equality": {"compared": checked["what"], **checked}} if checked else {}

    def _command(self) -> str:
        facts = self._directory.facts
        options = ["--full"]
        if facts["profile"] == "quick":
            shape = {name.replace("_", "-"): value for name, value in facts["shape"].items()}
            options = ["--quick", *(f"--{_OPTIONS.get(name, name)} {value:.10g}" for name, value in shape.items())]
        return " ".join(["holdfast bench run", *options, f"--suite {self._measurement.suite} --seed {facts['seed']}"])


def _stored(entry: Entry) -> dict[str, Any]:
    return {"engine": entry.engine, "job": entry.job.stored()}


def _described(exc: Exception) -> str:
    return str(exc) if isinstance(exc, HoldfastError) else f"{type(exc).__name__}: {exc}"


_MACHINE = ("cpu", "python_version", "system")
# Without configuration files, so that it is the same wherever holdfast is installed.
_PLAIN = ("-c", os.devnull, "--import-mode=importlib", "-pno:cacheprovider", "-pno:xdist", "--quiet", "--tb=short")


def run_micro(module: str, limit_s: float | None = None) -> dict[str, Any]:
    """Return pytest-benchmark's JSON, without the times of single rounds and the machine's name."""
    call = f"{__name__}:_run_pytest"
    found: dict[str, Any] = call_in_child(f"the micro-benchmarks of {module}", call, module, limit_s=limit_s)
    found["machine_info"] = {name: found["machine_info"][name] for name in _MACHINE}
    found.pop("commit_info", None)
    for benchmark in found["benchmarks"]:
        benchmark["stats"].pop("data", None)
    return found


def _run_pytest(module: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        result, file = Path(folder, "micro.json"), Path(__file__).parents[1] / "micro" / f"{module}.py"
        command = [sys.executable, "-m", "pytest", str(file), *_PLAIN, "--benchmark-only", f"--benchmark-json={result}"]
        subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, check=True)
        return json.loads(result.read_text())
