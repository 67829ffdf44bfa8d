"""Curves: what grows along a size, one chart for each figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from markupsafe import Markup

from holdfast.benches.jobs.requests import requests_of
from holdfast.benches.jobs.store.snapshots import FULL_BYTES, NEW_BYTES, RESTORE_MS
from holdfast.benches.report.answers import Answer
from holdfast.benches.report.charts.canvas import number
from holdfast.benches.report.charts.curves import Curve, draw_curves
from holdfast.benches.report.names import name_of
from holdfast.benches.report.page.cards import Card, sheet_of
from holdfast.benches.report.page.words import of_field
from holdfast.benches.report.results import asked_of_storage
from holdfast.benches.report.tables import Sheet

_MIB = 2**20
_FLAT = 1.1


def cards(answer: Answer) -> Iterator[Card]:
    """Yield the charts of an answer along a size."""
    figures: Mapping[str, tuple[str, Callable[[str], float]]] = {
        "rows a second": ("Throughput", answer.rows_per_second),
        "median of a micro-batch, ms": ("A micro-batch", lambda label: statistics.median(answer.batch_ms(label))),
        "peak memory, MiB": ("Memory", lambda label: sum(answer.memory_bytes(label).values()) / _MIB),
        "requests of a micro-batch": ("Asked of the storage", lambda label: _requests(answer, label)),
        "bytes of a snapshot, MiB": ("Asked of the storage", lambda label: _stored(answer, label, FULL_BYTES) / _MIB),
        "bytes sent by a snapshot, MiB": (
            "Asked of the storage",
            lambda label: _stored(answer, label, NEW_BYTES) / _MIB,
        ),
        "restore, ms": ("Asked of the storage", lambda label: _stored(answer, label, RESTORE_MS)),
        "local state at its peak, MiB": ("State, bytes", lambda label: answer.local_state_bytes(label) / _MIB),
    }
    along = of_field(answer.question.along)
    for place, (what, (sheet, figure)) in enumerate(figures.items()):
        by_engine: dict[str, list[tuple[float, float]]] = {}
        for label in answer.labels:
            x, y = answer.along(label), figure(label)
            if x is not None and y > 0:
                by_engine.setdefault(answer.engine(label), []).append((x, y))
        if any(_changes(points) for points in by_engine.values()):
            chart_id = f"growth-{answer.question.id}-{place}"
            svg = _draw(chart_id, f"{answer.question.text} {what}", by_engine, (along, what))
            points = _points(answer, by_engine, along, what)
            yield Card.of(answer, chart_id, svg, (points, sheet_of(answer, sheet)), f"{what[0].upper()}{what[1:]}")


def _changes(points: list[tuple[float, float]]) -> bool:
    """Return whether there is something to see: more than a tenth between the least and the most."""
    ys = [y for _, y in points]
    return max(ys) > _FLAT * min(ys)


def _requests(answer: Answer, label: str) -> float:
    asked = asked_of_storage(answer.document, label)
    return requests_of(asked) if "bytes up" in asked else 0.0


def _stored(answer: Answer, label: str, what: str) -> float:
    return asked_of_storage(answer.document, label).get(what, 0.0)


def operations(name: str, found: Mapping[str, Any]) -> Iterator[Card]:
    """Yield a chart of each of the store's operations along the keys, for the values that most sizes were run with."""
    of_store = [b for b in found["benchmarks"] if "backend" in b["extra_info"]]
    widths = [b["extra_info"]["value_bytes"] for b in of_store]
    width = statistics.mode(widths) if widths else 0
    by_operation: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in of_store:
        about = one["extra_info"]
        if about["value_bytes"] == width and one["stats"]["median"] > 0:
            operation = one["name"].partition("[")[0].removeprefix("test_")
            curves = by_operation.setdefault(operation, {})
            curves.setdefault(f"store-{about['backend']}", []).append((about["keys"], one["stats"]["median"] * 1000))
    for place, (operation, by_backend) in enumerate(by_operation.items()):
        if len({x for points in by_backend.values() for x, _ in points}) > 1:
            chart_id, title = f"operation-{name}-{place}", f"{operation}, values of {width:,} bytes: ms"
            svg = _draw(chart_id, title, by_backend, ("keys", "ms"))
            rows = [
                (backend, number(x), f"{y:.3g}") for backend, points in by_backend.items() for x, y in sorted(points)
            ]
            sheet = Sheet(operation, ("engine", "keys", "median, ms"), rows)
            yield Card(f"card-{chart_id}", title, Markup(svg), [sheet])  # noqa: S704 - of matplotlib


def _draw(
    chart_id: str, title: str, by_engine: Mapping[str, list[tuple[float, float]]], axes_names: tuple[str, str]
) -> str:
    names = {engine: name_of(engine) for engine in by_engine}
    curves = [Curve(names[engine].text, names[engine].hue, sorted(points)) for engine, points in by_engine.items()]
    told = [
        f"{curve.label}: {number(curve.points[0][1])} at {number(curve.points[0][0])} {axes_names[0]}, "
        f"{number(curve.points[-1][1])} at {number(curve.points[-1][0])}."
        for curve in curves
    ]
    return draw_curves(chart_id, title, " ".join(told), curves, axes_names)


def _points(answer: Answer, by_engine: Mapping[str, list[tuple[float, float]]], along: str, what: str) -> Sheet:
    places = sorted({x for points in by_engine.values() for x, _ in points})
    rows = []
    for engine, points in by_engine.items():
        at = dict(points)
        rows.append((name_of(engine).text, *(number(at[x]) if x in at else "-" for x in places)))
    return Sheet(f"{what} by {along}", ("engine", *map(number, places)), rows)
