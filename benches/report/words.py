"""Figures in words, as the summary and the tables write them."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.benches.report.answers import Ratio


def times(ratio: float) -> str:
    """Return a ratio with two digits that count: 4.1, 0.85, 23, 0.0041."""
    if ratio < 0.0995:
        return f"{ratio:.2g}"
    return f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}" if ratio >= 0.995 else f"{ratio:.2f}"


def in_one_turn(ratio: Ratio) -> str:
    """Return the words that a figure of a single turn needs, empty for others."""
    return " in one turn" if ratio.turns == 1 else ""


def spread(ratio: Ratio) -> str:
    """Return what the turns gave, least and most."""
    if ratio.turns == 1:
        return "one turn"
    return f"{times(ratio.least)} to {times(ratio.most)} in {ratio.turns} turns"


def count(value: float) -> str:
    """Return a number of things in words: 20 million, 100,000."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"


def number(value: float) -> str:
    """Return a number in few characters: 667,928 is 668k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def size(value_bytes: float) -> str:
    """Return a number of bytes in the unit that fits."""
    for unit_bytes, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value_bytes) >= unit_bytes:
            shown = value_bytes / unit_bytes
            return f"{shown:,.0f} {unit}" if shown >= 100 else f"{shown:.1f} {unit}"
    return f"{value_bytes:,.0f} B"


def duration(ms: float) -> str:
    """Return a time in the unit that fits."""
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def listed(parts: Sequence[str]) -> str:
    """Return parts as a sentence lists them: a, b and c."""
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def of_field(job_field: str) -> str:
    """Return the words of a job's field: ``fill_rows`` is fill rows, ``store_latency_ms`` store latency, ms."""
    name = job_field
    for unit in ("_ms", "_mb", "_bytes"):
        if name.endswith(unit):
            name = f"{name.removesuffix(unit)}, {unit.strip('_')}"
    return name.replace("_", " ")
