"""A directory of results, as ``holdfast bench run`` leaves it: read, and checked before anything is made of it.

::

    DIR/run.json                    profile, machine, versions, and the plan: each question, and what became of it
    DIR/<suite>/<name>.json         what was measured: a document of `holdfast.benches.report.results`, or the JSON of
                                    pytest-benchmark in the suite "micro"
    DIR/<suite>/<name>.runs.jsonl   runs of a measurement that has not come to its end

Others wrote these files, so nothing in them is trusted: their shape is that of ``schema.json`` beside this module, sums
must agree, and a name is no way out of the directory. What is damaged is an error that names file and place; what is
absent is a gap that the report shows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from holdfast.benches.report.results import Document, job_of
from holdfast.benches.running.directory import DONE, RUN
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError

# What only the JSON of pytest-benchmark has.
BENCHMARKS = "benchmarks"
_SIZE_MAX = 256 << 20
_NESTED_MAX = 20
# Times are stored to a tenth of a millisecond, at least.
_ROUNDED_MS = 0.05
# A part of the micro-batches that restore.
PLAIN_DOWNLOAD = "plain download"


@dataclass(frozen=True)
class Question:
    """A line of the plan: what was asked, and what became of it.

    Attributes
    ----------
    suite, name, text : str
    baseline : str
        The label, or the engine, that the others are read against; empty where there is none.
    along : str
        The field of the jobs that is the x axis of a curve; empty: bars.
    state : str
        ``done``, ``failed``, ``left out`` or ``to do``.
    reason : str
        Why it is not done.
    note : str
        What a reader must know of the sizes.
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
    """All that a directory holds.

    Attributes
    ----------
    run : dict
        ``run.json``.
    measured : list
        Each question that has a document, and the document.
    missing : list of Question
        Those that have none, or not of all their entries.
    """

    run: Mapping[str, Any]
    measured: list[tuple[Question, Document]]
    missing: list[Question]

    @property
    def quick(self) -> bool:
        """Whether it measured the load of one user."""
        return self.run["profile"] == "quick"


def read(folder: Path) -> Results:
    """Return what a directory of results holds.

    Raises
    ------
    NotFoundError
        There is no ``run.json``.
    CorruptionError
        A file does not hold what it should; the message says which, and where.
    """
    if not (folder / RUN).is_file():
        raise NotFoundError("no results here; give a directory that holdfast bench run wrote", missing=folder / RUN)
    run = _checked(folder / RUN, RUN)
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
    """Return one document.

    Raises
    ------
    CorruptionError
        As of `read`.
    """
    found = _checked(file, None)
    if BENCHMARKS in found:
        return found
    for broken in _contradictions(found):
        _refuse(file, broken)
    for engine in found["engines"].values():
        for run in engine["runs"]:
            run.pop("spans", None)
    return found


def _contradictions(found: Document) -> Iterator[str]:
    """Yield what a document says that cannot be, though its shape is right."""
    for label, engine in found["engines"].items():
        for part, of in (("settings.jobs", found["settings"]["jobs"]), ("state_bytes", found["state_bytes"])):
            if label not in of:
                yield f"the engine {label!r} is not in {part}"
                return
        try:
            job = job_of(found, label)
            counted = job.counted
        except (KeyError, TypeError, ValueError, ArithmeticError) as exc:
            yield f"the job of {label!r} cannot be read by this version of holdfast: {exc!r}"
            return
        for run in engine["runs"]:
            if len(run["batch_ms"]) < counted.stop or len(run["phases_ms"]) < counted.stop:
                yield f"a run of {label!r} has fewer micro-batches than its job, which has {counted.stop}"
                return
            if not any(run["batch_ms"][batch] for batch in counted):
                yield f"the micro-batches of {label!r} took no time"
                return
            counted_ms = [run["batch_ms"][batch] for batch in counted]
            if not _is_sum(run, job.rows, counted_ms):
                yield f"the rows a second of {label!r} are not those of its micro-batches"
                return
            phases = [run["phases_ms"][batch] for batch in counted]
            if any(PLAIN_DOWNLOAD in of for of in phases) and not all(of.get(PLAIN_DOWNLOAD) for of in phases):
                yield f"a plain download of {label!r} took no time"
                return
        rates = [run["rows_per_second"] for run in engine["runs"]]
        if not min(rates) * 0.99 <= engine["rows_per_second"] <= max(rates) * 1.01:
            yield f"the rows a second of {label!r} are not those of its runs"
            return


def _is_sum(run: Mapping[str, Any], rows: int, counted_ms: list[float]) -> bool:
    """Tell whether a run's throughput follows from its times, which are rounded."""
    done, took_ms, lost_ms = rows * len(counted_ms), sum(counted_ms), _ROUNDED_MS * len(counted_ms)
    slowest, fastest = (done / ms * 1000 for ms in (took_ms + lost_ms, max(took_ms - lost_ms, _ROUNDED_MS)))
    return slowest * 0.999 - 0.1 <= run["rows_per_second"] <= fastest * 1.001 + 0.1


@functools.cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text())
    return schema


@functools.cache
def _validator(part: str) -> Draft202012Validator:
    return Draft202012Validator({"$defs": _schema()["$defs"], **_schema()[part]})


def _checked(file: Path, part: str | None) -> Document:
    try:
        if file.stat().st_size > _SIZE_MAX:
            _refuse(file, f"larger than {_SIZE_MAX >> 20} MiB")
        found = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as exc:
        raise CorruptionError("no JSON of holdfast bench", file=file, because=exc) from exc
    if _depth(found) > _NESTED_MAX:
        _refuse(file, f"nested more than {_NESTED_MAX} deep")
    if not isinstance(found, dict):
        _refuse(file, "no JSON object")
    part = part or ("micro" if BENCHMARKS in found else "document")
    error = best_match(_validator(part).iter_errors(found))
    if error is not None:
        _refuse(file, error.message[:300], error.json_path)
    document: Document = found
    return document


def _refuse(file: Path, what: str, where: str = "$") -> NoReturn:
    raise CorruptionError("not what holdfast bench run writes; run it again", file=file, at=where, found=what)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidArgumentError("a figure must be a finite number", found=name)


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        depth += 1
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [value for values in inner for value in values]
    return depth
