"""What `holdfast bench compare` reads: directories of results, or single documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.benches.report import directory
from holdfast.benches.report.directory import BENCHMARKS
from holdfast.benches.report.results import Document
from holdfast.benches.running.directory import RUN, differences
from holdfast.errors import CorruptionError, InvalidArgumentError

_MICRO = "micro"
_FACTS = ("machine", "versions", "profile", "shape")


@dataclass(frozen=True)
class Measured:
    """All that one side of a comparison holds.

    Attributes
    ----------
    path : pathlib.Path
    documents : dict of str to dict
        By suite and name, ``jobs/job-a``.
    facts : dict
        ``machine``, ``versions``, ``profile`` and ``shape``, as far as they are stated.
    """

    path: Path
    documents: Mapping[str, Document]
    facts: Mapping[str, Any]


def read(path: Path) -> Measured:
    """Return the documents of a directory, or one document.

    Raises
    ------
    InvalidArgumentError
        There is none.
    NotFoundError
        The directory holds no results.
    CorruptionError
        A file does not hold what it should; the message says which, and where.
    """
    if path.is_dir():
        results = directory.read(path)
        documents = {f"{question.suite}/{question.name}": document for question, document in results.measured}
        if not documents:
            raise InvalidArgumentError("no measurement is done in this directory; run it again", directory=path)
        return Measured(path, documents, {name: results.run.get(name) for name in _FACTS})
    if path.name == RUN:
        raise CorruptionError("no document, but the plan of a directory; give the directory", file=path)
    found = directory.read_document(path)
    name = f"{found['suite']}/{found['name']}" if "suite" in found else str(found.get("bench", _MICRO))
    return Measured(path, {name: found}, {part: found.get(part) for part in ("machine", "versions")})


def is_micro(document: Document) -> bool:
    """Tell whether a document is pytest-benchmark's."""
    return BENCHMARKS in document


def is_wrong(document: Document) -> bool:
    """Tell whether the entries of a document found different results, so that no time of theirs counts."""
    runs = (run for engine in document.get("engines", {}).values() for run in engine["runs"])
    compared = [one.get("equality") for one in (document, *runs)]
    return any(not one["equal"] for one in compared if one)


def differ(base: Measured, new: Measured) -> list[str]:
    """Return in words how two sides differ in what their figures depend on, and what cannot be compared."""
    facts = [
        line
        for name in dict.fromkeys([*base.facts, *new.facts])
        for line in differences(base.facts.get(name), new.facts.get(name), name)
    ]
    for name in _both(base, new):
        facts += _differ(name, base.documents[name], new.documents[name])
    return facts


def _differ(name: str, before: Document, after: Document) -> Iterator[str]:
    for side, document in (("base", before), ("new", after)):
        if is_wrong(document):
            yield f"{name}: in {side} the entries found different results, so that it is not compared"
    if is_micro(before) != is_micro(after):
        yield f"{name}: one side is of single functions, the other of jobs, so that it is not compared"
    elif is_micro(before):
        functions = ([one["name"] for one in of[BENCHMARKS]] for of in (before, after))
        yield from _one_sided(name, *functions)
    else:
        yield from differences(before.get("baseline") or "none", after.get("baseline") or "none", f"{name} baseline")
        yield from differences(_compared(before), _compared(after), f"{name} equality")
        yield from _one_sided(name, list(before["engines"]), list(after["engines"]))
        jobs, others = before["settings"]["jobs"], after["settings"]["jobs"]
        for label in (label for label in jobs if label in others):
            yield from differences(jobs[label], others[label], f"{name} {label}")


def _one_sided(name: str, before: list[str], after: list[str]) -> Iterator[str]:
    for side, ours, theirs in (("base", before, after), ("new", after, before)):
        only = [label for label in ours if label not in theirs]
        if only:
            yield f"{name}: only {side} has {', '.join(only)}"


def _compared(document: Document) -> str:
    return "compared" if document.get("equality") else "not compared"


def common(base: Measured, new: Measured) -> list[str]:
    """Return the names of the documents that both sides have, and whose times count.

    Raises
    ------
    InvalidArgumentError
        The sides have no measurement in common.
    """
    return [
        name
        for name in _both(base, new)
        if is_micro(base.documents[name]) == is_micro(new.documents[name])
        and not (is_wrong(base.documents[name]) or is_wrong(new.documents[name]))
    ]


def _both(base: Measured, new: Measured) -> list[str]:
    both = [name for name in base.documents if name in new.documents]
    if not both:
        raise InvalidArgumentError(
            "the two have no measurement in common, so there is nothing to compare",
            base=" ".join(base.documents),
            new=" ".join(new.documents),
        )
    return both
