"""What the page shows below its summary: sections, each a question about all measurements, and the charts in it.

Charts are small and many: a card for each measurement, so that none is overloaded. Below each stand its figures as a
table, and the command that repeats it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.benches.jobs.requests import requests_of
from holdfast.benches.report import micro_tables
from holdfast.benches.report.answers import RESTORE, Answer
from holdfast.benches.report.charts.bars import Bar, draw_bars
from holdfast.benches.report.charts.canvas import number
from holdfast.benches.report.charts.strips import Strip, draw_strips
from holdfast.benches.report.directory import PLAIN_DOWNLOAD
from holdfast.benches.report.page import growth
from holdfast.benches.report.page.cards import Card, described, sheet_of
from holdfast.benches.report.page.words import duration, size, times
from holdfast.benches.report.results import Document, asked_of_storage, counted_ms, written
from holdfast.benches.report.tables import Sheet

PEERS = "peers"
_KINDS = {"jvm": "JVM", "python": "Python", "server": "state server", "store": "store", "background": "background"}


@dataclass(frozen=True)
class Section:
    """A question about all measurements.

    Attributes
    ----------
    id, title, lead : str
        Anchor, heading, and how to read the charts.
    cards : list of Card
    """

    id: str
    title: str
    lead: str
    cards: list[Card] = field(default_factory=list)


def sections(answers: Sequence[Answer], micro: Iterable[tuple[str, Document]]) -> list[Section]:
    """Return the sections that have something to show."""
    plain = [a for a in answers if not a.curves and not a.has_phase(PLAIN_DOWNLOAD)]
    own = [a for a in plain if a.question.suite != PEERS]
    found = [
        Section(
            "throughput",
            "Throughput",
            "Rows a second, the median of the turns, and how many times that is the baseline's. A line across a bar's "
            "end goes from the least to the most of the turns.",
            _cards(own, throughput),
        ),
        Section(
            "peers",
            "Other engines",
            "The same keyed aggregation in other engines, fed from the same file. Rows a second.",
            _cards([a for a in plain if a.question.suite == PEERS], throughput),
        ),
        Section(
            "batch-times",
            "Batch times",
            "How long micro-batches take. The thick line holds the middle half of them, the thin one nine tenths; the "
            "upright line is the median; each dot is a micro-batch where there are few.",
            _cards(plain, batch_times),
        ),
        Section(
            "growth",
            "Growth",
            "What becomes of throughput, batch times, memory and bytes as a size grows. An axis is logarithmic where "
            "more than a factor of three lies on it. What changes by less than a tenth is not drawn.",
            [card for a in answers if a.curves for card in growth.cards(a)],
        ),
        Section(
            "memory",
            "Memory",
            "The peak of the whole run by kind of process. Pages that processes share are divided among them.",
            _cards(plain, memory),
        ),
        Section(
            "bytes",
            "Bytes and requests",
            "What a micro-batch writes to disk, Spark's shuffle files included; by how much the durable state grows; "
            "and what it asks of the object storage.",
            [card for a in plain for card in (*_some(bytes_written(a)), *_some(requests(a)))],
        ),
        Section(
            "restore",
            "Restore",
            "How long it takes until state that is in the storage only can be read again, beside a plain download of "
            "the same objects by as many threads.",
            _cards([a for a in answers if a.has_phase(PLAIN_DOWNLOAD)], restore),
        ),
        Section(
            "micro",
            "Single operations",
            "The store's operations and single steps of a shard call, each by itself.",
            [card for name, found in micro for card in single_operations(name, found)],
        ),
    ]
    return [section for section in found if section.cards]


def _cards(answers: Iterable[Answer], draw: Callable[[Answer], Card | None]) -> list[Card]:
    return [card for answer in answers for card in _some(draw(answer))]


def _some(card: Card | None) -> list[Card]:
    return [] if card is None else [card]


def throughput(answer: Answer) -> Card:
    """Return the chart of rows a second."""
    bars = []
    for label in answer.labels:
        name, rows, base = answer.name(label), answer.rows_per_second(label), answer.baseline(label)
        by_turn = [run["rows_per_second"] for run in answer.runs(label)]
        note = number(rows)
        if base is not None:
            note += f"  {times(answer.ratio(label, base).median)}\N{MULTIPLICATION SIGN}"
        bars.append(Bar(name.text, note, name.hue, (rows,), min(by_turn), max(by_turn)))
    chart_id, title = f"throughput-{answer.question.id}", f"Rows a second: {answer.question.text}"
    svg = draw_bars(chart_id, title, described(bars), bars)
    sheets = sheet_of(answer, "Throughput"), sheet_of(answer, "Filling")
    return Card.of(answer, chart_id, svg, sheets)


def batch_times(answer: Answer) -> Card:
    """Return the chart of how long micro-batches take."""
    strips, notes = [], []
    for label in answer.labels:
        values, name = answer.batch_ms(label), answer.name(label)
        median, p95 = statistics.median(values), float(np.percentile(values, 95))
        strips.append(Strip(name.text, duration(median), name.hue, values))
        notes.append(f"{name.text}: median {duration(median)}, 95 % within {duration(p95)}.")
    chart_id, title = f"batch-times-{answer.question.id}", f"Batch times: {answer.question.text}"
    svg = draw_strips(chart_id, title, " ".join(notes), strips, "ms of a micro-batch")
    sheets = sheet_of(answer, "A micro-batch"), sheet_of(answer, "What a micro-batch uses")
    return Card.of(answer, chart_id, svg, sheets)


def memory(answer: Answer) -> Card | None:
    """Return the chart of the peak memory."""
    held = {label: answer.memory_bytes(label) for label in answer.labels}
    return _stacked(answer, "memory", "Peak memory", held, "Memory")


def bytes_written(answer: Answer) -> Card | None:
    """Return the chart of what a micro-batch writes."""
    by_label = {label: written(answer.document, label) for label in answer.labels}
    durable = {label: of.pop("durable", None) for label, of in by_label.items()}
    marks = durable if any(durable.values()) else {}
    return _stacked(answer, "bytes", "Written in a micro-batch", by_label, "Written", marks)


def _stacked(
    answer: Answer,
    what: str,
    title: str,
    by_label: dict[str, dict[str, float]] | dict[str, dict[str, int]],
    sheet: str,
    marks: dict[str, float | None] | None = None,
) -> Card | None:
    kinds = [kind for kind in _KINDS if any(of.get(kind) for of in by_label.values())]
    if not kinds:
        return None
    bars = []
    for label, of in by_label.items():
        name, parts = answer.name(label), tuple(max(0.0, float(of.get(kind, 0))) for kind in kinds)
        bars.append(Bar(name.text, size(sum(parts)), name.hue, parts, mark=(marks or {}).get(label)))
    chart_id = f"{what}-{answer.question.id}"
    mark = "durable state grows by" if marks else ""
    legend = [_KINDS[kind] for kind in kinds]
    svg = draw_bars(chart_id, f"{title}: {answer.question.text}", described(bars), bars, legend, mark)
    return Card.of(answer, chart_id, svg, (sheet_of(answer, sheet), sheet_of(answer, "State, bytes")))


def requests(answer: Answer) -> Card | None:
    """Return the chart of what a micro-batch asks of the storage, where that was counted."""
    bars = []
    for label in answer.labels:
        asked = asked_of_storage(answer.document, label)
        if "bytes up" in asked:
            name, ours = answer.name(label), requests_of(asked)
            bars.append(Bar(name.text, f"{ours:.1f} requests", name.hue, (ours,)))
    if not bars:
        return None
    chart_id = f"requests-{answer.question.id}"
    svg = draw_bars(chart_id, f"Requests of a micro-batch: {answer.question.text}", described(bars), bars)
    return Card.of(answer, chart_id, svg, (sheet_of(answer, "Asked of the storage"),))


def restore(answer: Answer) -> Card:
    """Return the chart of how long a restore takes."""
    bars, rows = [], []
    for label in answer.labels:
        name = answer.name(label)
        restored, plain = (counted_ms(answer.document, label, phase) for phase in (RESTORE, PLAIN_DOWNLOAD))
        median, plainly = statistics.median(restored), statistics.median(plain)
        ratio = statistics.median(a / b for a, b in zip(restored, plain, strict=True) if b) if all(plain) else 0.0
        note = f"{duration(median)}  {times(ratio)}\N{MULTIPLICATION SIGN}"
        bars.append(Bar(name.text, note, name.hue, (median,), min(restored), max(restored), mark=plainly))
        rows.append((label, f"{len(restored)}", f"{median:,.0f}", f"{plainly:,.0f}", f"{ratio:.2f}"))
    chart_id = f"restore-{answer.question.id}"
    svg = draw_bars(chart_id, f"Restore: {answer.question.text}", described(bars), bars, mark="plain download")
    columns = ("engine", "restores", "median, ms", "plain download, ms", "by the plain download, median of pairs")
    return Card.of(answer, chart_id, svg, (Sheet("Restore", columns, rows), sheet_of(answer, "Asked of the storage")))


def single_operations(name: str, found: Document) -> Iterator[Card]:
    """Yield a chart of each of the store's operations, by keys; and the table of all."""
    yield from growth.operations(name, found)
    for place, sheet in enumerate(micro_tables.sheets(found)):
        facts = f"make bench-micro ARGS=--benchmark-json=FILE, {found['datetime'][:10]}"
        yield Card(f"micro-{name}-{place}", sheet.title, "", [sheet], facts.partition(",")[0], opened=True)
