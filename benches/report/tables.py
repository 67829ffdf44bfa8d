"""Tables of the documents of benches and of pytest-benchmark, for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from holdfast.benches.jobs.sinks import FEW_ROWS
from holdfast.benches.report.results import (
    Document,
    asked_of_storage,
    counted_ms,
    job_of,
    memory,
    requests_of,
    usage,
    written,
)

# The names of process kinds in tables.
_KINDS = {"jvm": "JVM", "python": "Python", "server": "state server", "store": "store", "background": "background"}
_NOT_MEASURED = "-"
# The key that only pytest-benchmark's JSON has, and the command that writes it.
BENCHMARKS = "benchmarks"
MICRO_COMMAND = "make bench-micro ARGS=--benchmark-json=FILE"


@dataclass(frozen=True)
class Sheet:
    """A table of strings."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        head = ["| " + " | ".join(self.columns) + " |", "|---" + "|---:" * (len(self.columns) - 1) + "|"]
        body = ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([f"**{self.title}**", "", *head, *body])


def sheets(document: Document) -> Iterator[Sheet]:
    yield _throughput(document)
    yield _latencies(document)
    if document["ratios"]:
        yield _ratios(document)
    against_plain = _against_plain(document)
    if against_plain.rows:
        yield against_plain
    yield _used(document)
    yield _held(document)
    if any(asked_of_storage(document, label) for label in document["engines"]):
        yield _storage(document)
    if document["targets"]:
        yield _targets(document)


def markdown(document: Document) -> str:
    """Return a document as Markdown: its facts, then its tables."""
    if BENCHMARKS in document:
        cpu = document["machine_info"]["cpu"]
        made = f"{cpu.get('brand_raw', 'unknown processor')}, {cpu.get('count')} cores"
        title, tables = "bench-micro", micro_sheets(document)
        facts = [f"`{MICRO_COMMAND}`, {document['datetime'][:10]}", made]
    else:
        machine, versions = document["machine"], document["versions"]
        title, tables = document["bench"], sheets(document)
        facts = [
            f"`{document['command']}`, {document['started'][:10]}",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['os']}",
            ", ".join(f"{name} {version}" for name, version in versions.items()),
        ]
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
    return Sheet("Throughput", ("engine", "rows/s", "by run", "cores busy before"), rows)


def _latencies(document: Document) -> Sheet:
    rows = []
    for label, engine in document["engines"].items():
        rows.append(_latency(label, counted_ms(document, label)))
        phases = [] if "triggerExecution" in engine["runs"][0]["phases_ms"][0] else engine["runs"][0]["phases_ms"][0]
        rows += [_latency(f"{label}: {phase}", counted_ms(document, label, phase)) for phase in phases]
    columns = ("engine", "batches", "median", "p95", "p99", "max", "max / median", "min")
    return Sheet("Micro-batch times, ms", columns, rows)


def _against_plain(document: Document) -> Sheet:
    """Compare each sink with plain writes to its target: throughput, and the extra time of a small micro-batch."""
    rows = []
    for label, engine in document["engines"].items():
        for name in engine["runs"][0]["phases_ms"][0]:
            plain = name.partition(" (")[0]
            many, few = (
                [np.array(counted_ms(document, label, f"{way}{few}")) for way in (f"{plain}, plain", name)]
                for few in ("", FEW_ROWS)
            )
            if all(times.all() for times in (*many, *few)):
                ratios, more = many[0] / many[1], few[1] - few[0]
                span = f"{ratios.min():.2f} to {ratios.max():.2f}"
                rows.append((f"{label}: {name}", f"{np.median(ratios):.2f}", span, f"{np.median(more):.0f}"))
    columns = ("sink", "throughput / plain", "range", "extra ms with few rows")
    return Sheet("Compared with plain writes, by micro-batch", columns, rows)


def _latency(label: str, ms: Sequence[float]) -> tuple[str, ...]:
    median, p95, p99 = np.percentile(ms, (50, 95, 99))
    shown = [f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in (median, p95, p99, max(ms), min(ms))]
    return (label, f"{len(ms)}", *shown[:4], f"{max(ms) / max(median, 1e-3):.1f}", shown[4])


def _ratios(document: Document) -> Sheet:
    rows = [
        (name, f"{ratio:.2f}", " ".join(f"{r:.2f}" for r in document["ratios_by_pair"][name]))
        for name, ratio in document["ratios"].items()
    ]
    return Sheet("Throughput ratios", ("pair", "ratio", "by repeat"), rows)


def _used(document: Document) -> Sheet:
    """Per counted micro-batch: time, CPU time by kind of process, and bytes written, including shuffle files."""
    used = {label: usage(document, label) for label in document["engines"]}
    bytes_of = {label: written(document, label) for label in document["engines"]}
    kinds = [kind for kind in _KINDS if any(f"{kind}_s" in of for of in used.values())]
    rows = [
        (
            label,
            f"{of['wall_s']:.2f}",
            f"{of['cpu_s']:.2f}",
            *(f"{of.get(f'{kind}_s', 0):.3f}" for kind in kinds),
            f"{of['cores']:.2f}",
            f"{of['outside_ms']:.0f}" if of["outside_ms"] else _NOT_MEASURED,
            f"{sum(size for kind, size in bytes_of[label].items() if kind != 'durable') / 2**20:.2f}",
            f"{bytes_of[label].get('durable', 0) / 2**20:.2f}",
        )
        for label, of in used.items()
    ]
    by_kind = (f"{_KINDS[kind]} s" for kind in kinds)
    columns = ("engine", "wall s", "CPU s", *by_kind, "cores busy", "driver only, ms", "MiB written", "MiB durable")
    return Sheet("Used per micro-batch", columns, rows)


def _held(document: Document) -> Sheet:
    """Of a whole run: peak memory by kind of process, and the working state."""
    rows = []
    for label, state in document["state_bytes"].items():
        held, job = memory(document, label), job_of(document, label)
        fills = [sum(run["batch_ms"][: job.fill_batches]) / 1000 for run in document["engines"][label]["runs"]]
        rows.append(
            (
                label,
                ", ".join(f"{_KINDS[kind]} {held[kind]['pss'] / 2**20:,.0f}" for kind in _KINDS if kind in held),
                f"{sum(of['pss'] for of in held.values()) / 2**20:,.0f}",
                f"{sum(of['anonymous'] for of in held.values()) / 2**20:,.0f}",
                f"{state['local_peak'] / 2**20:,.2f}",
                f"{state['local_final'] / job.keys:.0f}",
                _NOT_MEASURED if state["ratio"] is None else f"{state['ratio']:.2f}",
                " ".join(f"{seconds:,.1f}" for seconds in fills) if job.fill_batches else _NOT_MEASURED,
            )
        )
    columns = ("engine", "MiB", "total", "anonymous", "state, MiB", "bytes/key", "state / live state", "filling, s")
    return Sheet("Peak memory and state of a run, shared pages divided", columns, rows)


def _storage(document: Document) -> Sheet:
    rows = []
    for label in document["engines"]:
        asked = asked_of_storage(document, label)
        if "bytes up" in asked:
            rows.append((label, "holdfast's requests, total", f"{requests_of(asked):,.2f}"))
        rows += [(label, what, f"{number:,.2f}") for what, number in asked.items()]
    return Sheet("Storage requests per micro-batch", ("engine", "request", "mean"), rows)


def _targets(document: Document) -> Sheet:
    rows = [(t["what"], t["wanted"], f"{t['measured']:.3g}", "yes" if t["met"] else "NO") for t in document["targets"]]
    return Sheet("Targets", ("figure", "wanted", "measured", "met"), rows)


def micro_sheets(found: Document) -> Iterator[Sheet]:
    """Yield a table of the store's operations by backend, and a table of all other steps."""
    of_store = [b for b in found["benchmarks"] if "backend" in b["extra_info"]]
    others = [b for b in found["benchmarks"] if "backend" not in b["extra_info"]]
    if of_store:
        yield _by_backend(of_store)
    if others:
        rows = [(_operation(b), _ms(b), f"{b['stats']['rounds']}") for b in others]
        yield Sheet("Single steps, ms: median (min to max)", ("step", "ms", "rounds"), rows)


def _by_backend(measured: list[Document]) -> Sheet:
    cells: dict[tuple[str, int, int], dict[str, str]] = {}
    for one in measured:
        about = one["extra_info"]
        cells.setdefault((_operation(one), about["keys"], about["value_bytes"]), {})[about["backend"]] = _ms(one)
    backends = list(dict.fromkeys(one["extra_info"]["backend"] for one in measured))
    operations = list(dict.fromkeys(operation for operation, _, _ in cells))
    rows = [
        (operation, f"{keys:,}", f"{width:,}", *(of.get(backend, _NOT_MEASURED) for backend in backends))
        for (operation, keys, width), of in sorted(cells.items(), key=lambda of: (operations.index(of[0][0]), of[0]))
    ]
    columns = ("operation", "keys", "value bytes", *backends)
    return Sheet("Operations of the store, ms: median (min to max)", columns, rows)


def _operation(measured: Document) -> str:
    name: str = measured["name"].partition("[")[0].removeprefix("test_")
    operation: str = measured["extra_info"].get("operation", name)
    return operation


def _ms(measured: Document) -> str:
    median, least, most = (measured["stats"][name] * 1000 for name in ("median", "min", "max"))
    return f"{_short(median)} ({_short(least)} to {_short(most)})"


def _short(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 1 else f"{ms:.2f}"
