"""What `holdfast bench compare` reads: directories of results, or single documents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.benches.running.directory import RUN, differences, read_facts
from holdfast.errors import CorruptionError, InvalidArgumentError

Document = dict[str, Any]
MICRO = "micro"


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
    CorruptionError
        A file is no document of a bench.
    """
    if path.is_dir():
        facts = read_facts(path)
        files = [path / line["suite"] / f"{line['name']}.json" for line in facts["plan"]]
        documents = {f"{file.parent.name}/{file.stem}": _document(file) for file in files if file.exists()}
        if not documents:
            raise InvalidArgumentError("no measurement is done in this directory; run it again", directory=path)
        return Measured(
            path, documents, {name: facts.get(name) for name in ("machine", "versions", "profile", "shape")}
        )
    found = _document(path)
    name = f"{found['suite']}/{found['name']}" if "suite" in found else str(found.get("bench", MICRO))
    return Measured(path, {name: found}, {part: found.get(part) for part in ("machine", "versions")})


def is_micro(document: Document) -> bool:
    """Tell whether a document is pytest-benchmark's."""
    return "benchmarks" in document


def differ(base: Measured, new: Measured) -> list[str]:
    """Return in words how two sides differ in what their figures depend on."""
    facts = [
        line
        for name in dict.fromkeys([*base.facts, *new.facts])
        for line in differences(base.facts.get(name), new.facts.get(name), name)
    ]
    for name in common(base, new):
        before, after = base.documents[name], new.documents[name]
        if not (is_micro(before) or is_micro(after)):
            jobs, others = before["settings"]["jobs"], after["settings"]["jobs"]
            both = [label for label in jobs if label in others]
            facts += [line for label in both for line in differences(jobs[label], others[label], f"{name} {label}")]
    return facts


def common(base: Measured, new: Measured) -> list[str]:
    """Return the names of the documents that both sides have.

    Raises
    ------
    InvalidArgumentError
        There are none.
    """
    both = [name for name in base.documents if name in new.documents]
    if not both:
        raise InvalidArgumentError(
            "the two have no measurement in common, so that there is nothing to compare",
            base=" ".join(base.documents),
            new=" ".join(new.documents),
        )
    return both


def _document(file: Path) -> Document:
    try:
        found: Any = json.loads(file.read_text())
    except (OSError, ValueError) as exc:
        raise CorruptionError("no document of a bench can be read here", file=file, because=exc) from exc
    if not isinstance(found, dict) or not ("benchmarks" in found or {"engines", "settings"} <= set(found)):
        kind = f"; {RUN} belongs to its directory" if file.name == RUN else ""
        raise CorruptionError(f"not a document of a bench{kind}", file=file)
    document: Document = found
    return document
