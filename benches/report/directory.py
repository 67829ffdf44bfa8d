"""A directory of results, as ``holdfast bench run`` leaves it: read, and checked before anything is made of it.

::

    DIR/run.json                    profile, machine, versions, and the plan: each question, and what became of it
    DIR/<suite>/<name>.json         what was measured: a document of `holdfast.benches.report.results`, or the JSON of
                                    pytest-benchmark in the suite "micro"
    DIR/<suite>/<name>.runs.jsonl   runs of a measurement that has not come to its end

Others wrote these files, so nothing in them is trusted: their shape is that of ``schema.json`` beside this module, each
run has the micro-batches of its job, and a name is no way out of the directory. What is damaged is an error that names
file and place; what is absent is a gap that the report shows.
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
    """A line of the plan: what was asked, and what became of it.

    The others are read against the `baseline`, a label or an engine; entries of an engine differ in the field `along`
    of their jobs. The state is ``done``, ``failed``, ``left out`` or ``to do``, for a `reason`.
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
        """A name for it that is unique in the directory."""
        return f"{self.suite}-{self.name}"


@dataclass(frozen=True)
class Results:
    """All that a directory holds: each question that has a document, and those that lack one, or some entries of it."""

    run: Mapping[str, Any]
    measured: list[tuple[Question, Document]]
    missing: list[Question]

    @property
    def described(self) -> str:
        """When, by what and where it was measured; suite by suite if these were begun in several runs."""
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
        """Return on which day the run of a document was begun, and with which holdfast."""
        started, versions = (document.get(name, self.run[name]) for name in ("started", "versions"))
        return f"begun {started[:10]}" + (f", holdfast {versions['holdfast']}" if "holdfast" in versions else "")

    def _machine(self, document: Mapping[str, Any]) -> str:
        machine = document.get("machine", self.run["machine"])
        if "cpu" not in machine:
            return ""
        return f"{machine['cpu']} ({machine.get('cores', '?')} cores, {machine.get('memory_gb', '?')} GB)"

    @property
    def quick(self) -> bool:
        """Whether it measured the load of one user."""
        return self.run["profile"] == "quick"


def read(folder: Path) -> Results:
    """Return what a directory of results holds; a `CorruptionError` says which file is damaged, and where."""
    if not (folder / RUN).is_file():
        raise NotFoundError("no results here; give a directory that holdfast bench run wrote", missing=folder / RUN)
    run = read_facts(folder)
    measured, missing = [], []
    for question in map(_question, run["plan"]):
        file = folder / question.suite / f"{question.name}.json"
        if file.is_file():
            found = read_document(file)
            # A baseline that failed is none.
            measured.append((replace(question, baseline=found.get("baseline", question.baseline) or ""), found))
        if not file.is_file() or question.state != DONE:
            missing.append(_not_whole(question, file))
    twice = {question.id for question, _ in measured if [q.id for q, _ in measured].count(question.id) > 1}
    if twice:
        raise CorruptionError("the plan has a question twice", file=folder / RUN, questions=sorted(twice))
    return Results(run, measured, missing)


def read_facts(folder: Path) -> dict[str, Any]:
    """Return ``run.json``."""
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
    """Return one document."""
    found = _checked(file, None)
    if BENCHMARKS in found:
        return found
    for broken in _contradictions(found):
        _refuse(file, broken)
    return found


def _contradictions(found: Document) -> Iterator[str]:
    """Yield what a document says that cannot be, though its shape is right."""
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
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text())
    return schema


@functools.cache
def _validator(part: str) -> Draft202012Validator:
    return Draft202012Validator({"$defs": _schema()["$defs"], **_schema()[part]})


def _checked(file: Path, part: str | None) -> Document:
    try:
        found = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as exc:
        raise CorruptionError("no JSON of holdfast bench", file=file, because=exc) from exc
    if not isinstance(found, dict):
        _refuse(file, "no JSON object")
    part = part or ("micro" if BENCHMARKS in found else "document")
    error = best_match(_validator(part).iter_errors(found))
    if error is not None:
        _refuse(file, error.message[:300], error.json_path)
    document: Document = found
    return document


def _refuse(file: Path, what: str, where: str = "$") -> NoReturn:
    raise CorruptionError(
        "not what holdfast bench run writes; measure it again, in another directory or with --fresh",
        file=file,
        at=where,
        found=what,
    )


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidArgumentError("a figure must be a finite number", found=name)


@contextmanager
def storing(file: Path) -> Iterator[None]:
    """Say what is lost where a file cannot be written, as on a full disk."""
    try:
        yield
    except OSError as exc:
        raise UnavailableError(
            "a result cannot be stored; earlier results are safe, and the same command continues from them",
            file=file,
            because=exc,
        ) from exc


def replace_text(file: Path, content: str) -> None:
    """Put a file in the place of the one that was there, if any, in one step."""
    new = file.with_name(f".{file.name}.new")
    with storing(file):
        try:
            new.write_text(content, encoding="utf-8")
            os.replace(new, file)
        except OSError:
            new.unlink(missing_ok=True)
            raise
