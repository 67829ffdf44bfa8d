"""Bench documents as tables: one description for the terminal and for Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from holdfast.benches.jobs.requests import requests_of
from holdfast.benches.report.results import Document, asked_of_storage, counted_ms, job_of, memory, usage, written

# Parts of Spark's progress, as it names them.
_PHASES = ("addBatch", "queryPlanning", "walCommit", "commitOffsets", "latestOffset", "getBatch")
# Kinds of process, as tables name them.
_KINDS = {"jvm": "JVM", "python": "Python", "server": "state server", "store": "store", "background": "background"}
_NOT_MEASURED = "-"
#: What the names of parts end with that are about small micro-batches.
FEW_ROWS = ", few rows"


@dataclass(frozen=True)
class Sheet:
    """A table of text."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def rich(self) -> Table:
        """Return the table for a terminal."""
        table = Table(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return the table as Markdown."""
        head = ["| " + " | ".join(self.columns) + " |", "|---" + "|---:" * (len(self.columns) - 1) + "|"]
        body = ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([f"**{self.title}**", "", *head, *body])


def sheets(document: Document) -> Iterator[Sheet]:
    """Yield the tables of a document."""
    yield _throughput(document)
    yield _latencies(document)
    if document["ratios"]:
        yield _ratios(document)
    against_plain = _against_plain(document)
    if against_plain.rows:
        yield against_plain
    yield _usage(document)
    yield _memory(document)
    yield _written(document)
    if any(asked_of_storage(document, label) for label in document["engines"]):
        yield _storage(document)
    yield _state(document)
    if any(job_of(document, label).fill_batches for label in document["engines"]):
        yield _filling(document)
    if document["targets"]:
        yield _targets(document)
    for label, engine in document["engines"].items():
        if engine["runs"][0].get("spans"):
            yield _profile(label, document)


def markdown(document: Document) -> str:
    """Return a document as Markdown: how it was made, then its tables."""
    machine, versions = document["machine"], document["versions"]
    facts = [
        f"`{document['command']}`, {document['started'][:10]}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['os']}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    return page(document["bench"], facts, sheets(document))


def page(title: str, facts: Sequence[str], tables: Iterator[Sheet]) -> str:
    """Return a title, facts line by line, and tables as Markdown."""
    return "\n\n".join([f"## {title}", "\\\n".join(facts), *(sheet.markdown() for sheet in tables)]) + "\n"


def _throughput(document: Document) -> Sheet:
    rows = [
        (
            label,
            f"{engine['rows_per_second']:,.0f}",
            " ".join(f"{run['rows_per_second']:,.0f}" for run in engine["runs"]),
            " ".join(f"{run.get('busy_before_cores', 0.0):.1f}" for run in engine["runs"]),
        )
        for label, engine in document["engines"].items()
    ]
    return Sheet("Throughput", ("engine", "rows a second", "by run", "cores busy before"), rows)


def _latencies(document: Document) -> Sheet:
    rows = []
    for label, engine in document["engines"].items():
        rows.append(_latency(label, counted_ms(document, label)))
        phases = [] if "triggerExecution" in engine["runs"][0]["phases_ms"][0] else engine["runs"][0]["phases_ms"][0]
        rows += [_latency(f"{label}: {phase}", counted_ms(document, label, phase)) for phase in phases]
    columns = ("engine", "batches", "median", "p95", "p99", "max", "max / median", "min")
    return Sheet("A micro-batch, ms", columns, rows)


def _against_plain(document: Document) -> Sheet:
    """Of each part that has a plain way beside it: what part of its throughput, and what a small one costs more.

    ``postgres`` and ``postgres (…)`` are beside ``postgres, plain``.
    """
    rows = []
    for label, engine in document["engines"].items():
        for name in engine["runs"][0]["phases_ms"][0]:
            plain = name.partition(" (")[0]
            many, few = (
                [np.array(counted_ms(document, label, f"{way}{few}")) for way in (f"{plain}, plain", name)]
                for few in ("", FEW_ROWS)
            )
            if all(times.all() for times in (*many, *few)):
                ratios = many[0] / many[1]
                rows.append(
                    (
                        f"{label}: {name}",
                        f"{np.median(ratios):.2f}",
                        f"{ratios.min():.2f} to {ratios.max():.2f}",
                        f"{np.median(few[1] - few[0]):.0f}",
                    )
                )
    columns = ("part", "throughput by the plain way's", "range", "with few rows, ms more")
    return Sheet("Beside the plain way, micro-batch by micro-batch", columns, rows)


def _latency(label: str, ms: Sequence[float]) -> tuple[str, ...]:
    median, p95, p99 = np.percentile(ms, (50, 95, 99))
    shown = [f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in (median, p95, p99, max(ms), min(ms))]
    return (label, f"{len(ms)}", *shown[:4], f"{max(ms) / max(median, 1e-3):.1f}", shown[4])


def _ratios(document: Document) -> Sheet:
    rows = [
        (name, f"{ratio:.2f}", " ".join(f"{r:.2f}" for r in document["ratios_by_pair"][name]))
        for name, ratio in document["ratios"].items()
    ]
    return Sheet("Throughput of the first by that of the second", ("pair", "ratio", "by repeat"), rows)


def _kinds(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the kinds of process that some entry has, in the order of tables."""
    return [kind for kind in _KINDS if any(kind in of for of in measured.values())]


def _usage(document: Document) -> Sheet:
    used = {label: usage(document, label) for label in document["engines"]}
    kinds = [kind for kind in _KINDS if any(f"{kind}_s" in of for of in used.values())]
    rows = [
        (
            label,
            f"{of['wall_s']:.2f}",
            f"{of['cpu_s']:.2f}",
            *(f"{of.get(f'{kind}_s', 0):.3f}" for kind in kinds),
            f"{of['cores']:.2f}",
            f"{of['outside_ms']:.0f}" if of["outside_ms"] else _NOT_MEASURED,
        )
        for label, of in used.items()
    ]
    columns = ("engine", "wall s", "CPU s", *(_KINDS[kind] for kind in kinds), "cores busy", "driver alone, ms")
    return Sheet("What a micro-batch uses", columns, rows)


def _memory(document: Document) -> Sheet:
    held = {label: memory(document, label) for label in document["engines"]}
    rows = [
        (label, _KINDS[kind], *(f"{of[kind][name] / 2**20:,.0f}" for name in ("rss", "pss", "anonymous")))
        for label, of in held.items()
        for kind in _kinds({label: of})
    ]
    columns = ("engine", "processes", "all pages", "shared ones divided", "asked for by themselves")
    return Sheet("Memory, peak of the whole run, MiB", columns, rows)


def _written(document: Document) -> Sheet:
    bytes_of = {label: written(document, label) for label in document["engines"]}
    kinds = _kinds(bytes_of)
    rows = [
        (
            label,
            f"{sum(of.get(kind, 0) for kind in kinds) / 2**20:.2f}",
            *(f"{of.get(kind, 0) / 2**20:.2f}" for kind in kinds),
            f"{of['durable'] / 2**20:.2f}" if "durable" in of else _NOT_MEASURED,
        )
        for label, of in bytes_of.items()
    ]
    columns = ("engine", "in all", *(_KINDS[kind] for kind in kinds), "durable state grows by")
    return Sheet("Written to disk in a micro-batch, MiB (shuffle files too)", columns, rows)


def _storage(document: Document) -> Sheet:
    rows = []
    for label in document["engines"]:
        asked = asked_of_storage(document, label)
        if "bytes up" in asked:
            rows.append((label, "requests of ours, in all", f"{requests_of(asked):,.2f}"))
        rows += [(label, what, f"{number:,.2f}") for what, number in asked.items()]
    return Sheet("Asked of the storage in a micro-batch", ("engine", "what", "mean"), rows)


def _state(document: Document) -> Sheet:
    rows = [
        (
            label,
            _NOT_MEASURED if state["live_arrow"] is None else f"{state['live_arrow']:,}",
            f"{state['local_peak']:,}",
            f"{state['local_final']:,}",
            f"{state['local_final'] / job_of(document, label).keys:.0f}",
            _NOT_MEASURED if state["ratio"] is None else f"{state['ratio']:.2f}",
        )
        for label, state in document["state_bytes"].items()
    ]
    columns = ("engine", "live state as Arrow", "local, peak", "local, at the end", "a possible key", "peak / live")
    return Sheet("State, bytes", columns, rows)


def _filling(document: Document) -> Sheet:
    rows = []
    for label, engine in document["engines"].items():
        job = job_of(document, label)
        seconds = [sum(run["batch_ms"][: job.fill_batches]) / 1000 for run in engine["runs"]]
        rows.append((label, f"{job.keys:,}", f"{job.fill_batches}", " ".join(f"{s:,.1f}" for s in seconds)))
    return Sheet("Filling the state, not counted", ("engine", "keys", "micro-batches", "s by run"), rows)


def what_limits(document: Document) -> str:
    """Return in words what keeps two slots from being twice as fast as one; for a document of ``scaling``."""
    many, one = list(document["engines"])[:2]
    cores = document["machine"]["cores"]
    gain = document["ratios"][f"{many}/{one}"]
    before, after = usage(document, one), usage(document, many)
    alone = after["outside_ms"] / 1000 / after["wall_s"]
    return (
        f"{many} is {gain:.2f} times as fast as {one}. One slot already keeps {before['cores']:.2f} of {cores} cores "
        f"busy (Python and the JVM work at the same time, and so does the JVM's compiler), so that the cores allow "
        f"{cores / before['cores']:.2f} times; with {after['cores']:.2f} cores busy, {alone:.0%} of the wall time is "
        "the driver's own work, when no task runs."
    )


def _targets(document: Document) -> Sheet:
    rows = [(t["what"], t["wanted"], f"{t['measured']:.3g}", "yes" if t["met"] else "NO") for t in document["targets"]]
    return Sheet("Targets", ("figure", "wanted", "measured", "met"), rows)


def _profile(label: str, document: Document) -> Sheet:
    runs = document["engines"][label]["runs"]
    rows = [
        (f"progress: {phase}", "1", f"{statistics.mean(counted_ms(document, label, phase)):.1f}", "")
        for phase in ("triggerExecution", *_PHASES)
    ]
    spans: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for span, spent in run["spans"].items():
            spans.setdefault(span, []).append(spent)
    means = {
        span: [statistics.mean(spent[key] for spent in of) for key in ("calls", "ms", "cpu_ms")]
        for span, of in spans.items()
    }
    rows += [
        (f"workers: {span}", f"{calls:.1f}", f"{ms:.1f}", f"{cpu:.1f}")
        for span, (calls, ms, cpu) in sorted(means.items(), key=lambda item: -item[1][2])
    ]
    title = f"Where a micro-batch of {label} goes (workers: added up over tasks; spans hold others)"
    return Sheet(title, ("span", "calls", "ms", "CPU ms"), rows)
