"""What pytest-benchmark measured (``--benchmark-json``), as the tables of a bench."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.benches.report.tables import Sheet, page

_Measured = Mapping[str, Any]
_ABSENT = "-"


def sheets(found: _Measured) -> Iterator[Sheet]:
    """Yield a table of the store's operations by backend, and one of all other steps."""
    of_store = [b for b in found["benchmarks"] if "backend" in b["extra_info"]]
    others = [b for b in found["benchmarks"] if "backend" not in b["extra_info"]]
    if of_store:
        yield _by_backend(of_store)
    if others:
        rows = [(b["name"].removeprefix("test_"), _ms(b), f"{b['stats']['rounds']}") for b in others]
        yield Sheet("Single steps, ms: median (min to max)", ("step", "ms", "rounds"), rows)


def _by_backend(measured: list[_Measured]) -> Sheet:
    cells: dict[tuple[str, int, int], dict[str, str]] = {}
    for one in measured:
        about = one["extra_info"]
        operation = one["name"].partition("[")[0].removeprefix("test_")
        cells.setdefault((operation, about["keys"], about["value_bytes"]), {})[about["backend"]] = _ms(one)
    backends = list(dict.fromkeys(one["extra_info"]["backend"] for one in measured))
    operations = list(dict.fromkeys(operation for operation, _, _ in cells))
    rows = [
        (operation, f"{keys:,}", f"{width:,}", *(of.get(backend, _ABSENT) for backend in backends))
        for (operation, keys, width), of in sorted(
            cells.items(), key=lambda cell: (operations.index(cell[0][0]), cell[0])
        )
    ]
    columns = ("operation", "keys", "bytes of a value", *backends)
    return Sheet("Operations of the store, ms: median (min to max)", columns, rows)


def _ms(measured: _Measured) -> str:
    median, least, most = (measured["stats"][name] * 1000 for name in ("median", "min", "max"))
    return f"{_short(median)} ({_short(least)} to {_short(most)})"


def _short(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 1 else f"{ms:.2f}"


def markdown(found: _Measured) -> str:
    """Return what was measured as Markdown."""
    cpu = found["machine_info"]["cpu"]
    facts = [
        f"`make bench-micro ARGS=--benchmark-json=FILE`, {found['datetime'][:10]}",
        f"{cpu.get('brand_raw', 'unknown processor')}, {cpu.get('count')} cores",
    ]
    return page("bench-micro", facts, sheets(found))
