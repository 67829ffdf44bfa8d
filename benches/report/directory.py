"""Reads and validates the results directory that ``holdfast bench run`` wrote.

::

    DIR/run.json                    profile, machine, versions, and the plan: each question and its state
    DIR/<suite>/<name>.json         a document of `holdfast.benches.report.results`, or in the suite "micro"
                                    pytest-benchmark's JSON
    DIR/<suite>/<name>.runs.jsonl   runs of an unfinished measurement

The files may come from elsewhere, so nothing in them is trusted: they must match ``schema.json`` beside this module,
each run must have the micro-batches of its job, and names cannot lead out of the directory. A damaged file is an error
that names file and position; a missing one is a gap that the report shows.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from holdfast.benches.report.results import Document, job_of
from holdfast.benches.report.tables import BENCHMARKS
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, UnavailableError

FORMAT = 1
RUN, DONE = "run.json", "done"


@dataclass(frozen=True)
class Question:
    """An entry of the plan.

    `baseline` is the label or engine to compare with; `along` is the job's field in which entries of one engine differ.
    The state is ``done``, ``failed``, ``left out`` or ``to do``, for a `reason`.
    """

    suite: str
    name: str
    text: str
    baseline: str
    along: str
    state: str
    reason: str
    note: str

    @property
    def id(self) -> str:
        return f"{self.suite}-{self.name}"


@dataclass(frozen=True)
class Results:
    """The content of a directory: measured questions with their documents, and missing or incomplete questions."""

    run: Mapping[str, Any]
    measured: list[tuple[Question, Document]]
    missing: list[Question]

    @property
    def described(self) -> str:
        """When, with which version and on which machine the suites were measured, in words."""
        documents = [document for _, document in self.measured] or [{}]
        machines = dict.fromkeys(map(self._machine, documents))
        suites: dict[str, dict[str, None]] = {}
        for question, document in self.measured:
            parts = [self._begun(document), *([self._machine(document)] if len(machines) > 1 else [])]
            suites.setdefault(", ".join(filter(None, parts)), {})[question.suite] = None
        if len(suites) > 1:
            begun = [f"{', '.join(of)} {text}" for text, of in suites.items()]
        else:
            begun = list(suites) or [self._begun({})]
        where = machines if len(machines) == 1 else ()
        return ", ".join(filter(None, [f"Profile {self.run['profile']}", "; ".join(begun), *where]))

    def _begun(self, document: Mapping[str, Any]) -> str:
        started, versions = (document.get(name, self.run[name]) for name in ("started", "versions"))
        return f"begun {started[:10]}" + (f", holdfast {versions['holdfast']}" if "holdfast" in versions else "")

    def _machine(self, document: Mapping[str, Any]) -> str:
        machine = document.get("machine", self.run["machine"])
        if "cpu" not in machine:
            return ""
        return f"{machine['cpu']} ({machine.get('cores', '?')} cores, {machine.get('memory_gb', '?')} GB)"

    @property
    def quick(self) -> bool:
        return self.run["profile"] == "quick"


def read(folder: Path) -> Results:
    """Return the results in a directory; raise `CorruptionError` with file and position if one is damaged."""
    if not (folder / RUN).is_file():
        raise NotFoundError("no results here; give a directory that holdfast bench run wrote", missing=folder / RUN)
    run = read_facts(folder)
    measured, missing = [], []
    for question in map(_question, run["plan"]):
        file = folder / question.suite / f"{question.name}.json"
        if file.is_file():
            found = read_document(file)
            # A failed entry is no baseline.
            measured.append((replace(question, baseline=found.get("baseline", question.baseline) or ""), found))
        if not file.is_file() or question.state != DONE:
            missing.append(_not_whole(question, file))
    twice = {question.id for question, _ in measured if [q.id for q, _ in measured].count(question.id) > 1}
    if twice:
        raise CorruptionError("the plan has a question twice; remove one", file=folder / RUN, questions=sorted(twice))
    return Results(run, measured, missing)


def read_facts(folder: Path) -> dict[str, Any]:
    return _checked(folder / RUN, RUN)


def _question(planned: Mapping[str, Any]) -> Question:
    texts = {name: planned.get(name) or "" for name in ("baseline", "along", "reason", "note")}
    return Question(planned["suite"], planned["name"], planned["question"], state=planned["state"], **texts)


def _not_whole(question: Question, file: Path) -> Question:
    begun = file.with_suffix(".runs.jsonl")
    runs = len(begun.read_bytes().splitlines()) if begun.is_file() else 0
    reasons = [question.reason] if question.reason else []
    if file.is_file():
        reasons.append("measured in part")
    elif question.state == DONE:
        reasons.append(f"its results are not in {question.suite}/{file.name}")
    if runs:
        reasons.append(f"stopped after {runs} runs")
    return replace(question, reason="; ".join(reasons))


def read_document(file: Path) -> Document:
    found = _checked(file, None)
    for broken in _contradictions(found) if BENCHMARKS not in found else ():
        _refuse(file, broken)
    return found


def _contradictions(found: Document) -> Iterator[str]:
    """Yield the contradictions in a document that the schema cannot find."""
    for label, engine in found["engines"].items():
        if not (label in found["settings"]["jobs"] and label in found["state_bytes"]):
            yield f"the engine {label!r} has no settings or no state_bytes"
            return
        try:
            counted = job_of(found, label).counted
        except (KeyError, TypeError, ValueError, ArithmeticError) as exc:
            yield f"the job of {label!r} cannot be read by this version of holdfast: {exc!r}"
            return
        for run in engine["runs"]:
            if len(run["batch_ms"]) < counted.stop or len(run["phases_ms"]) < counted.stop:
                yield f"a run of {label!r} has fewer micro-batches than its job, which has {counted.stop}"
            elif not any(run["batch_ms"][batch] for batch in counted):
                yield f"the micro-batches of {label!r} took no time"


@functools.cache
def _validator(part: str) -> Draft202012Validator:
    schema = json.loads(Path(__file__).with_name("schema.json").read_text())
    return Draft202012Validator({"$defs": schema["$defs"], **schema[part]})


def _checked(file: Path, part: str | None) -> Document:
    try:
        found = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as exc:
        raise CorruptionError("not a JSON file of holdfast bench", file=file, because=exc) from exc
    if not isinstance(found, dict):
        _refuse(file, "no JSON object")
    part = part or ("micro" if BENCHMARKS in found else "document")
    error = best_match(_validator(part).iter_errors(found))
    if error is not None:
        _refuse(file, error.message[:300], error.json_path)
    document: Document = found
    return document


def _refuse(file: Path, what: str, where: str = "$") -> NoReturn:
    problem = "holdfast bench run did not write this; measure again, in a different directory or with --fresh"
    raise CorruptionError(problem, file=file, at=where, found=what)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidArgumentError("figures must be finite numbers", found=name)


@contextmanager
def storing(file: Path) -> Iterator[None]:
    """Map errors of writing a result, as on a full disk."""
    try:
        yield
    except OSError as exc:
        problem = "a result cannot be stored; earlier results are safe, and the same command continues from them"
        raise UnavailableError(problem, file=file, because=exc) from exc


def replace_text(file: Path, content: str) -> None:
    """Write a text file atomically."""
    new = file.with_name(f".{file.name}.new")
    with storing(file):
        try:
            new.write_text(content, encoding="utf-8")
            os.replace(new, file)
        except OSError:
            new.unlink(missing_ok=True)
            raise
