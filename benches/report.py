"""Bench documents as tables: one description for the terminal and for Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from holdfast.benches.results import Document, usage

# Parts of Spark's progress, as it names them.
_PHASES = ("addBatch", "queryPlanning", "walCommit", "commitOffsets", "latestOffset", "getBatch")


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
    yield _engines(document)
    if document["ratios"]:
        yield _ratios(document)
    yield _usage(document)
    if document["state_bytes"]:
        yield _state(document)
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
    return (
        "\n\n".join([f"## {document['bench']}", "\\\n".join(facts), *(s.markdown() for s in sheets(document))]) + "\n"
    )


def _engines(document: Document) -> Sheet:
    rows = []
    for label, engine in document["engines"].items():
        job = document["settings"]["jobs"][label]
        runs = engine["runs"]
        counted = [ms for run in runs for ms in run["batch_ms"][job["warmup"] :]]
        rows.append(
            (
                label,
                f"{engine['rows_per_second']:,.0f}",
                f"{engine['median_batch_ms']:,.0f}",
                f"{min(counted):,} to {max(counted):,}",
                " ".join(f"{run['rows_per_second']:,.0f}" for run in runs),
                " ".join(f"{run['load_before']:.1f}" for run in runs),
            )
        )
    columns = ("engine", "rows a second", "batch ms, median", "batch ms, range", "rows a second by run", "load before")
    return Sheet("Throughput", columns, rows)


def _ratios(document: Document) -> Sheet:
    rows = [
        (name, f"{ratio:.2f}", " ".join(f"{r:.2f}" for r in document["ratios_by_pair"][name]))
        for name, ratio in document["ratios"].items()
    ]
    return Sheet("Throughput of the first by that of the second", ("pair", "ratio", "by repeat"), rows)


def _usage(document: Document) -> Sheet:
    rows = []
    for label in document["engines"]:
        used = usage(document, label)
        rows.append(
            (
                label,
                f"{used['wall_s']:.2f}",
                f"{used['cpu_s']:.2f}",
                f"{used['jvm_s']:.2f}",
                f"{used['python_s']:.2f}",
                f"{used['server_s']:.3f}",
                f"{used['cores']:.2f}",
                f"{used['outside_ms']:.0f}",
            )
        )
    columns = ("engine", "wall s", "CPU s", "of it JVM", "Python", "state server", "cores busy", "driver alone, ms")
    return Sheet("What a micro-batch uses", columns, rows)


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


def _state(document: Document) -> Sheet:
    rows = [
        (
            label,
            f"{state['live_arrow']:,}",
            f"{state['local_peak']:,}",
            f"{state['local_final']:,}",
            f"{state['ratio']:.2f}",
        )
        for label, state in document["state_bytes"].items()
    ]
    return Sheet(
        "State, bytes", ("engine", "live state as Arrow", "local, peak", "local, at the end", "peak / live"), rows
    )


def _targets(document: Document) -> Sheet:
    rows = [(t["what"], t["wanted"], f"{t['measured']:.2f}", "yes" if t["met"] else "NO") for t in document["targets"]]
    return Sheet("Targets", ("figure", "wanted", "measured", "met"), rows)


def _profile(label: str, document: Document) -> Sheet:
    runs = document["engines"][label]["runs"]
    warmup = document["settings"]["jobs"][label]["warmup"]
    rows = [
        (f"progress: {phase}", "1", f"{_mean_phase(runs, warmup, phase):.1f}", "")
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


def _mean_phase(runs: list[dict[str, Any]], warmup: int, phase: str) -> float:
    return statistics.mean(p.get(phase, 0) for run in runs for p in run["phases_ms"][warmup:])
