"""The page: everything in one file, which loads nothing and runs nothing.

A content security policy in the page's head forbids scripts and requests, so that not even a document with a hostile
name in it could begin one; besides, Jinja2 escapes whatever the template is given. A bar is a cell of a table, as long
as its figure says: who sees no bars has the figures. Tables fold by ``<details>``, colours follow the reader's choice
of light or dark, and all of it prints.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from holdfast.benches.jobs.shard import FULL_BYTES, NEW_BYTES, PLAIN_DOWNLOAD, RESTORE, RESTORE_MS
from holdfast.benches.report import tables
from holdfast.benches.report.answers import Answer, answers_of
from holdfast.benches.report.directory import Results
from holdfast.benches.report.results import asked_of_storage, counted_ms, requests_of
from holdfast.benches.report.summary import summarize
from holdfast.benches.report.tables import BENCHMARKS, MICRO_COMMAND, Sheet
from holdfast.benches.report.words import count, duration, name_of, number, of_field, size, times

_SHAPE = {"rows": "rows a micro-batch", "value_bytes": "bytes of state a key", "store_latency_ms": "ms to the store"}


def render(results: Results) -> str:
    """Return the page of a directory of results."""
    answers = answers_of(results)
    environment = Environment(
        loader=PackageLoader("holdfast.benches.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cards = [*map(_card, answers)]
    cards += [
        {
            "question": question,
            "rows": [],
            "sheets": list(tables.micro_sheets(found)),
            "command": MICRO_COMMAND,
            "equality": [],
        }
        for question, found in results.measured
        if BENCHMARKS in found
    ]
    facts = {**results.run["machine"], **results.run["versions"], "seed": results.run.get("seed")}
    return environment.get_template("report.html").render(
        title="Which backend for me?" if results.quick else "holdfast, measured",
        load=_load(results.run.get("shape") or {}) if results.quick else "",
        results=results,
        suites={
            suite: [card for card in cards if card["question"].suite == suite]
            for suite in dict.fromkeys(card["question"].suite for card in cards)
        },
        summary=summarize(results, answers),
        targets=[(answer, target) for answer in answers for target in answer.document["targets"]],
        facts=facts.items(),
    )


def _load(shape: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{count(value) if isinstance(value, int | float) else value} {_SHAPE.get(name, of_field(name))}"
        for name, value in shape.items()
    )


def _card(answer: Answer) -> dict[str, Any]:
    """Return a question with its entries' figures side by side, and bars in % of the column's longest."""
    figures = [(name, *of) for name, of in _figures(answer).items() if any(map(of[0], answer.labels))]
    most = [max(abs(figure(label)) for label in answer.labels) for _, figure, _ in figures]
    rows = []
    for label in answer.labels:
        cells = [
            {"text": shown(value), "share": round(100 * abs(value) / end, 1)}
            for (_, figure, shown), end in zip(figures, most, strict=True)
            for value in [figure(label)]
        ]
        name = answer.name(label)
        about = {"name": _named(answer, label), "hue": name.hue, "ours": name.ours}
        rows.append(about | {"cells": cells} | _by_baseline(answer, label))
    return {
        "question": answer.question,
        "columns": [name for name, _, _ in figures],
        "rows": rows,
        "sheets": [*tables.sheets(answer.document), _settings(answer)],
        "command": answer.document["command"],
        "equality": answer.equality,
    }


def _figures(answer: Answer) -> dict[str, tuple[Callable[[str], float], Callable[[float], str]]]:
    """Return by column what is shown of an entry, and how."""
    document = answer.document

    def asked(what: str) -> Callable[[str], float]:
        return lambda label: asked_of_storage(document, label).get(what, 0.0)

    def requests(label: str) -> float:
        counts = asked_of_storage(document, label)
        return requests_of(counts) if "bytes up" in counts else 0.0

    def by_download(label: str) -> float:
        restored, plain = (counted_ms(document, label, phase) for phase in (RESTORE, PLAIN_DOWNLOAD))
        return statistics.median(a / b for a, b in zip(restored, plain, strict=True)) if all(plain) else 0.0

    return {
        "rows a second": (answer.rows_per_second, number),
        "micro-batch, median": (lambda label: statistics.median(answer.batch_ms(label)), duration),
        "by a plain download": (by_download, times),
        "peak memory": (lambda label: sum(answer.memory_bytes(label).values()), size),
        "requests a micro-batch": (requests, lambda value: f"{value:.1f}"),
        "bytes of a snapshot": (asked(FULL_BYTES), size),
        "bytes sent by it": (asked(NEW_BYTES), size),
        "restore": (asked(RESTORE_MS), duration),
    }


def _named(answer: Answer, label: str) -> str:
    where = answer.along(label) if answer.curves else None
    if where is None:
        return answer.name(label).text
    return f"{name_of(answer.engine(label)).text}, {count(where)} {of_field(answer.question.along)}"


def _by_baseline(answer: Answer, label: str) -> dict[str, str]:
    """Return the ratio of an entry to its baseline, its spread, and what it says."""
    base = answer.baseline(label)
    if base is None:
        return {"ratio": "", "spread": "", "verdict": ""}
    ratio = answer.ratio(label, base)
    verdict = "same" if ratio.same else "faster" if ratio.faster else "slower"
    return {
        "ratio": times(ratio.median),
        "spread": ratio.spread,
        "verdict": verdict if answer.equal else "results differ",
    }


def _settings(answer: Answer) -> Sheet:
    """Return what differs between the settings of an answer's entries, and what they share."""
    jobs, engines = (answer.document["settings"].get(part, {}) for part in ("jobs", "engines"))
    by_label = {label: {**jobs[label], **engines.get(label, {})} for label in answer.labels}
    rows = []
    for name in dict.fromkeys(name for of in by_label.values() for name in of):
        values = ["" if (value := of.get(name)) is None else str(value) for of in by_label.values()]
        rows.append((name, *(values if len(set(values)) > 1 else (values[0], *[""] * (len(values) - 1)))))
    return Sheet("Settings", ("setting", *answer.labels), rows)
