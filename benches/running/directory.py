"""A directory of results.

::

    DIR/run.json                    the plan and its state, and what all results depend on
    DIR/<suite>/<name>.json         the document of a measurement that is done
    DIR/<suite>/<name>.runs.jsonl   the runs of one that is not, a line each
    DIR/.lock                       held by the command that works on the directory

Files are replaced whole, and a line counts once it is whole: whenever the command is killed, what it had measured
before is there. What was damaged since is an error that names the file; nothing is deleted but by ``--fresh``.
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
# What must be the same where a run goes on: results that differ in one of these do not belong together.
_IDENTITY = ("format", "profile", "shape", "seed", "turns", "disk", "machine", "versions")
_LOCK = ".lock"
# What a stopped command may leave beside a plan that it had not yet written.
_OURS = (_LOCK, f".{RUN}.new")
_LINE = {"turn": int, "label": str, "engine": str, "job": dict, "seconds": int | float, "run": dict}

Facts = dict[str, Any]


def facts_of(profile: Profile, seed: int, disk: str | None = None) -> Facts:
    """Return what all results of a run here and now depend on; `disk` is the directory to measure with, if given."""
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
    """See the module; its facts are those of `facts_of`, and the ``plan``."""

    def __init__(self, path: Path, facts: Facts) -> None:
        self.path = path
        self.facts = facts

    @classmethod
    @contextmanager
    def opened(cls, path: Path, facts: Facts, *, fresh: bool = False) -> Iterator[ResultsDirectory]:
        """Hold the directory of a run, new or continued, for this command alone.

        Refuses other content, and results of another run unless a `fresh` one deletes them.
        """
        path.mkdir(parents=True, exist_ok=True)
        if not (path / RUN).exists():
            others = [found.name for found in path.iterdir() if found.name not in _OURS]
            if others:
                raise InvalidArgumentError(
                    "the directory holds something, but no results; choose another one", directory=path, holds=others[0]
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
                    "the directory holds results of another run; choose another directory, or --fresh to delete them; "
                    f"there and here differ in {'; '.join(differ)}",
                    directory=path,
                )
            return cls(path, before)
        found = cls(path, facts | {"plan": []})
        found.write_facts()
        return found

    def write_facts(self) -> None:
        """Store the plan as it stands."""
        replace_json(self.path / RUN, self.facts)

    def plan(self, measurement: Measurement) -> dict[str, Any]:
        """Return a measurement's line of the plan, which is added if it is not there."""
        key = (measurement.suite, measurement.name)
        lines: list[dict[str, Any]] = self.facts["plan"]
        found = next((line for line in lines if (line["suite"], line["name"]) == key), None)
        if found is None:
            found = about(measurement) | {"minutes": measurement.minutes, "state": TO_DO, "reason": ""}
            lines.append(found)
        return found

    def set_state(self, measurement: Measurement, state: str, reason: str = "") -> None:
        """Store how far a measurement is, and why."""
        self.plan(measurement).update(state=state, reason=reason)
        self.write_facts()

    def document_file(self, measurement: Measurement) -> Path:
        """Return where a measurement's document is, once it is there."""
        return self.path / measurement.suite / f"{measurement.name}.json"

    def is_done(self, measurement: Measurement) -> bool:
        """Tell whether a measurement is done, and its document there and whole."""
        try:
            json.loads(self.document_file(measurement).read_bytes())
        except (OSError, ValueError):
            return False
        return bool(self.plan(measurement)["state"] == DONE)

    def runs_file(self, measurement: Measurement) -> Path:
        """Return where a measurement's runs are until it is done."""
        return self.path / measurement.suite / f"{measurement.name}.runs.jsonl"

    def runs(self, measurement: Measurement) -> list[dict[str, Any]]:
        """Return the lines of the runs that are done."""
        try:
            lines = self.runs_file(measurement).read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [_line_of_run(self.runs_file(measurement), line) for line in lines if line.endswith("\n")]

    def add_run(self, measurement: Measurement, line: Mapping[str, Any]) -> None:
        """Store a run so that it outlives whatever happens next."""
        file = self.runs_file(measurement)
        with storing(file):
            file.parent.mkdir(exist_ok=True)
            with open(file, "a+b") as runs:
                runs.truncate(_end_of_whole_lines(file))
                runs.write(json.dumps(line).encode() + b"\n")
                runs.flush()
                os.fsync(runs.fileno())

    def write_document(self, measurement: Measurement, document: Mapping[str, Any], *, whole: bool) -> None:
        """Store a document; when it is `whole`, its runs are needed no more."""
        file = self.document_file(measurement)
        with storing(file):
            file.parent.mkdir(exist_ok=True)
        replace_json(file, document)
        if whole:
            self.runs_file(measurement).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other commands from working on a directory."""
    with open(path / _LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise InvalidArgumentError(
                "another bench run works on this directory; wait for it, or choose another directory", directory=path
            ) from exc
        yield


def about(measurement: Measurement) -> dict[str, Any]:
    """Return what the plan and the document say of a measurement."""
    names = ("suite", "name", "question", "baseline", "along", "note")
    return {name: getattr(measurement, name) for name in names}


def _line_of_run(file: Path, line: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in _LINE.items()):
        raise CorruptionError(
            "a run is damaged; delete its line to measure it again, or choose --fresh", file=file, line=line[:60]
        )
    return found


def differences(before: object, now: object, where: str = "") -> list[str]:
    """Return in words where two nested values differ: ``machine cores: 2, 4``."""
    if before == now:
        return []
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = list(dict.fromkeys([*before, *now]))
        pairs = [(f"{where} {name}".strip(), before.get(name), now.get(name)) for name in names]
        return [line for name, a, b in pairs for line in differences(a, b, name)]
    return [f"{where}: {before}, {now}"]


def replace_json(file: Path, content: object) -> None:
    """Put a JSON file in the place of the one that was there, if any, in one step."""
    replace_text(file, json.dumps(content, indent=1) + "\n")


def _end_of_whole_lines(file: Path) -> int:
    content = file.read_bytes()
    return content.rfind(b"\n") + 1


def _delete(path: Path) -> None:
    """Delete the results of a directory, and nothing else."""
    for file in [*path.glob("*/*.json"), *path.glob("*/*.runs.jsonl")]:
        file.unlink()
    (path / RUN).unlink()
