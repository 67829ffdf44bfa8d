"""A directory of results.

::

    DIR/run.json                    the plan, the state of each measurement, and the facts that all results depend on
    DIR/<suite>/<name>.json         the document of a finished measurement
    DIR/<suite>/<name>.runs.jsonl   the runs of an unfinished measurement, a line each
    DIR/.lock                       locked by the command that works on the directory

Files are replaced atomically, and only complete lines count, so a killed command loses no finished run. A damaged file
is an error that names it; only ``--fresh`` deletes results.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.benches.instruments.machine import machine, versions
from holdfast.benches.report.directory import DONE, FORMAT, RUN, read_facts, replace_text, storing
from holdfast.benches.suites.measurement import Measurement, Profile
from holdfast.errors import CorruptionError, InvalidArgumentError

TO_DO, FAILED, LEFT_OUT = "to do", "failed", "left out"
# A run may continue only where these facts are unchanged.
_IDENTITY = ("format", "profile", "shape", "seed", "turns", "disk", "machine", "versions")
_LOCK = ".lock"
# Files that a command leaves if it stops before it has written the plan.
_OURS = (_LOCK, f".{RUN}.new")
_LINE = {"turn": int, "label": str, "engine": str, "job": dict, "seconds": int | float, "run": dict}

Facts = dict[str, Any]


def facts_of(profile: Profile, seed: int, disk: str | None = None) -> Facts:
    """Return the facts that all results of a new run depend on; `disk` is the directory to measure on, if given."""
    return {
        "format": FORMAT,
        "profile": "quick" if profile.quick else "full",
        "shape": asdict(profile.shape),
        "seed": seed,
        "disk": disk and str(Path(disk).resolve()),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
    }


class ResultsDirectory:
    """Reads and writes one directory of results. `facts`: those of `facts_of`, and the ``plan``."""

    def __init__(self, path: Path, facts: Facts) -> None:
        self.path = path
        self.facts = facts

    @classmethod
    @contextmanager
    def opened(cls, path: Path, facts: Facts, *, fresh: bool = False) -> Iterator[ResultsDirectory]:
        """Lock the directory of a new or continued run.

        Refuses a directory with other content, and results of a different run unless `fresh` deletes them.
        """
        path.mkdir(parents=True, exist_ok=True)
        if not (path / RUN).exists():
            others = [found.name for found in path.iterdir() if found.name not in _OURS]
            if others:
                raise InvalidArgumentError(
                    "the directory has files, but no results; choose a different one", directory=path, found=others[0]
                )
        with _locked(path):
            yield cls._prepared(path, facts, fresh=fresh)

    @classmethod
    def _prepared(cls, path: Path, facts: Facts, *, fresh: bool) -> ResultsDirectory:
        if (path / RUN).exists() and fresh:
            _delete(path)
        elif (path / RUN).exists():
            before = read_facts(path)
            differ = differences({k: before.get(k) for k in _IDENTITY}, {k: facts.get(k) for k in _IDENTITY})
            if differ:
                raise InvalidArgumentError(
                    "the directory has results of a different run; choose a different directory, or delete them with "
                    f"--fresh; stored and new differ in {'; '.join(differ)}",
                    directory=path,
                )
            return cls(path, before)
        found = cls(path, facts | {"plan": []})
        found.write_facts()
        return found

    def write_facts(self) -> None:
        replace_json(self.path / RUN, self.facts)

    def plan(self, measurement: Measurement) -> dict[str, Any]:
        """Return a measurement's entry in the plan, adding it if it is missing."""
        key = (measurement.suite, measurement.name)
        lines: list[dict[str, Any]] = self.facts["plan"]
        found = next((line for line in lines if (line["suite"], line["name"]) == key), None)
        if found is None:
            found = about(measurement) | {"minutes": measurement.minutes, "state": TO_DO, "reason": ""}
            lines.append(found)
        return found

    def set_state(self, measurement: Measurement, state: str, reason: str = "") -> None:
        self.plan(measurement).update(state=state, reason=reason)
        self.write_facts()

    def document_file(self, measurement: Measurement) -> Path:
        return self.path / measurement.suite / f"{measurement.name}.json"

    def is_done(self, measurement: Measurement) -> bool:
        """Return whether a measurement is done and its document readable."""
        try:
            json.loads(self.document_file(measurement).read_bytes())
        except (OSError, ValueError):
            return False
        return bool(self.plan(measurement)["state"] == DONE)

    def runs_file(self, measurement: Measurement) -> Path:
        return self.path / measurement.suite / f"{measurement.name}.runs.jsonl"

    def runs(self, measurement: Measurement) -> list[dict[str, Any]]:
        try:
            lines = self.runs_file(measurement).read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [_line_of_run(self.runs_file(measurement), line) for line in lines if line.endswith("\n")]

    def add_run(self, measurement: Measurement, line: Mapping[str, Any]) -> None:
        """Append a run durably."""
        file = self.runs_file(measurement)
        with storing(file):
            file.parent.mkdir(exist_ok=True)
            with open(file, "a+b") as runs:
                runs.truncate(file.read_bytes().rfind(b"\n") + 1)  # drops a line that a killed command left unfinished
                runs.write(json.dumps(line).encode() + b"\n")
                runs.flush()
                os.fsync(runs.fileno())

    def write_document(self, measurement: Measurement, document: Mapping[str, Any], *, whole: bool) -> None:
        """Store a document; if it is `whole`, delete its runs."""
        file = self.document_file(measurement)
        with storing(file):
            file.parent.mkdir(exist_ok=True)
        replace_json(file, document)
        if whole:
            self.runs_file(measurement).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a directory against other commands."""
    with open(path / _LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise InvalidArgumentError(
                "another bench run works on this directory; wait for it, or choose a different one", directory=path
            ) from exc
        yield


def about(measurement: Measurement) -> dict[str, Any]:
    """Return the facts of a measurement that its plan and its document share."""
    names = ("suite", "name", "question", "baseline", "along", "note")
    return {name: getattr(measurement, name) for name in names}


def _line_of_run(file: Path, line: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in _LINE.items()):
        raise CorruptionError(
            "a stored run is damaged; delete its line to repeat it, or start over with --fresh",
            file=file,
            line=line[:60],
        )
    return found


def differences(before: object, now: object, where: str = "") -> list[str]:
    """Describe where two nested values differ: ``machine cores: 2, 4``."""
    if before == now:
        return []
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = list(dict.fromkeys([*before, *now]))
        pairs = [(f"{where} {name}".strip(), before.get(name), now.get(name)) for name in names]
        return [line for name, a, b in pairs for line in differences(a, b, name)]
    return [f"{where}: {before}, {now}"]


def replace_json(file: Path, content: object) -> None:
    """Write a JSON file atomically."""
    replace_text(file, json.dumps(content, indent=1) + "\n")


def _delete(path: Path) -> None:
    """Delete the results of a directory and keep its other files."""
    for file in [*path.glob("*/*.json"), *path.glob("*/*.runs.jsonl")]:
        file.unlink()
    (path / RUN).unlink()
