"""The report as one HTML file without scripts or external resources.

A content security policy in its head forbids scripts and requests, even if a document contains hostile names; Jinja2
escapes all values, too. Bars are drawn in table cells beside figures that say the same to readers who cannot see them.
Tables fold with ``<details>``, and colours follow the reader's light or dark mode.
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

_SHAPE = {"rows": "rows/micro-batch", "value_bytes": "bytes of state/key", "store_latency_ms": "ms to the store"}


def render(results: Results) -> str:
    answers = answers_of(results)
    environment = Environment(
        loader=PackageLoader("holdfast.benches.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cards = [*map(_card, answers)]
    for question, found in results.measured:
        if BENCHMARKS in found:
            card = {"question": question, "command": MICRO_COMMAND, "rows": [], "equality": []}
            cards.append(card | {"sheets": list(tables.micro_sheets(found))})
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
    """Return a question with the figures of its entries, and bars in % of the column's maximum."""
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
    """Return each column's figure of an entry and its format."""
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
        "rows/s": (answer.rows_per_second, number),
        "micro-batch, median": (lambda label: statistics.median(answer.batch_ms(label)), duration),
        "vs. plain download": (by_download, times),
        "peak memory": (lambda label: sum(answer.memory_bytes(label).values()), size),
        "requests/micro-batch": (requests, lambda value: f"{value:.1f}"),
        "snapshot size": (asked(FULL_BYTES), size),
        "uploaded": (asked(NEW_BYTES), size),
        "restore": (asked(RESTORE_MS), duration),
    }


def _named(answer: Answer, label: str) -> str:
    where = answer.along(label) if answer.curves else None
    if where is None:
        return answer.name(label).text
    return f"{name_of(answer.engine(label)).text}, {count(where)} {of_field(answer.question.along)}"


def _by_baseline(answer: Answer, label: str) -> dict[str, str]:
    """Return an entry's ratio to its baseline, with spread and verdict."""
    base = answer.baseline(label)
    if base is None:
        return {"ratio": "", "spread": "", "verdict": ""}
    ratio = answer.ratio(label, base)
    verdict = "same" if ratio.same else "faster" if ratio.faster else "slower"
    verdict = verdict if answer.equal else "results differ"
    return {"ratio": times(ratio.median), "spread": ratio.spread, "verdict": verdict}


def _settings(answer: Answer) -> Sheet:
    """Return the settings of an answer's entries; a shared value is shown once."""
    jobs, engines = (answer.document["settings"].get(part, {}) for part in ("jobs", "engines"))
    by_label = {label: {**jobs[label], **engines.get(label, {})} for label in answer.labels}
    rows = []
    for name in dict.fromkeys(name for of in by_label.values() for name in of):
        values = ["" if (value := of.get(name)) is None else str(value) for of in by_label.values()]
        rows.append((name, *(values if len(set(values)) > 1 else (values[0], *[""] * (len(values) - 1)))))
    return Sheet("Settings", ("setting", *answer.labels), rows)
