"""The page: everything in one file, which loads nothing and runs nothing.

A content security policy in the page's head forbids scripts and requests, so that not even a document with a hostile
name in it could begin one; besides, Jinja2 escapes whatever the template is given. Tables and charts fold by
``<details>``, colours follow the reader's choice of light or dark, and all of it prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from holdfast.benches.report.answers import Answer, answers_of
from holdfast.benches.report.directory import BENCHMARKS, Results
from holdfast.benches.report.names import name_of
from holdfast.benches.report.page.sections import sections
from holdfast.benches.report.page.summary import summarize
from holdfast.benches.report.page.words import count, of_field, spread, times
from holdfast.benches.report.tables import Sheet

_SHAPE = {
    "rows": "rows a micro-batch",
    "value_bytes": "bytes of state a key",
    "store_latency_ms": "ms to the store",
}
_CLOSING = (
    ("equality", "Equality checks"),
    ("missing", "Not measured"),
    ("settings", "Settings"),
    ("repeat", "Repeat"),
)


@dataclass(frozen=True)
class RatioRow:
    """A line of the table of ratios: an entry by its baseline."""

    place: int
    question: str
    target: str
    entry: str
    base: str
    hue: str
    ratio: str
    spread: str
    verdict: str
    ours: bool


def render(results: Results) -> str:
    """Return the page of a directory of results."""
    answers = answers_of(results)
    micro = [(question.name, found) for question, found in results.measured if BENCHMARKS in found]
    environment = Environment(
        loader=PackageLoader("holdfast.benches.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown, ratios = sections(answers, micro), list(ratio_rows(answers))
    return environment.get_template("report.html").render(
        title="Which backend for me?" if results.quick else "holdfast, measured",
        load=_load(results.run.get("shape") or {}) if results.quick else "",
        facts=_facts(results),
        contents=[
            *([("ratios", "Ratios")] if ratios else []),
            *((section.id, section.title) for section in shown),
            *_CLOSING,
        ],
        results=results,
        answers=answers,
        summary=summarize(results, answers),
        ratios=ratios,
        targets=[(answer, target) for answer in answers for target in answer.document["targets"]],
        sections=shown,
        equality=[(answer, found) for answer in answers for found in answer.equality],
        machine=[*results.run["machine"].items(), *results.run["versions"].items(), ("seed", results.run.get("seed"))],
        settings=list(_settings(answers)),
        commands=list(commands(results, answers)),
    )


def commands(results: Results, answers: list[Answer]) -> Iterator[tuple[str, str]]:
    """Yield each question with the command that repeats its figures."""
    for answer in answers:
        yield answer.question.text, answer.document["command"]
    for question, found in results.measured:
        if BENCHMARKS in found:
            yield question.text, "make bench-micro ARGS=--benchmark-json=FILE"


def described_machine(results: Results) -> str:
    """Return when and where it was measured."""
    machine = results.run["machine"]
    parts = [f"Profile {results.run['profile']}, begun {results.run['started'][:10]}"]
    if "holdfast" in results.run["versions"]:
        parts[0] += f", holdfast {results.run['versions']['holdfast']}"
    if "cpu" in machine:
        parts.append(f"{machine['cpu']}, {machine.get('cores', '?')} cores, {machine.get('memory_gb', '?')} GB")
    return "; ".join(parts)


def _facts(results: Results) -> str:
    return (
        f"{described_machine(results)}. Engines take turns on one machine; a ratio is the median of the ratios within "
        "each turn, and warm-up is not counted."
    )


def ratio_rows(answers: list[Answer]) -> Iterator[RatioRow]:
    """Yield the ratios of all entries to their baselines."""
    for place, answer in enumerate(answers):
        for label in answer.labels:
            base = answer.baseline(label)
            if base is not None:
                ratio = answer.ratio(label, base)
                verdict = "same" if ratio.same else "faster" if ratio.faster else "slower"
                yield RatioRow(
                    place,
                    answer.question.text,
                    answer.question.id,
                    _at(answer, label),
                    answer.name(base).text if answer.question.baseline == base else name_of(answer.engine(base)).text,
                    answer.name(label).hue,
                    times(ratio.median),
                    spread(ratio),
                    verdict if answer.equal else "results differ",
                    answer.name(label).ours,
                )


def _at(answer: Answer, label: str) -> str:
    where = answer.along(label) if answer.curves else None
    if where is None:
        return answer.name(label).text
    return f"{name_of(answer.engine(label)).text}, {count(where)} {of_field(answer.question.along)}"


def _load(shape: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{count(value) if isinstance(value, int | float) else value} {_SHAPE.get(name, of_field(name))}"
        for name, value in shape.items()
    )


def _settings(answers: list[Answer]) -> Iterator[tuple[Answer, Sheet]]:
    """Yield what differs between the settings of an answer's entries, and what they share."""
    for answer in answers:
        jobs, engines = (answer.document["settings"].get(part, {}) for part in ("jobs", "engines"))
        by_label = {label: {**jobs[label], **engines.get(label, {})} for label in answer.labels}
        names = list(dict.fromkeys(name for of in by_label.values() for name in of))
        rows = []
        for name in names:
            values = ["" if (value := of.get(name)) is None else str(value) for of in by_label.values()]
            rows.append((name, *values) if len(set(values)) > 1 else (name, values[0], *[""] * (len(values) - 1)))
        yield answer, Sheet("Settings", ("setting", *answer.labels), rows)
