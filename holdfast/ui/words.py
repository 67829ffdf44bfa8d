"""Values as the page shows them: the filters of its templates."""

from __future__ import annotations

from holdfast.commands.target import moment, printable, size
from holdfast.health.failures import ago, count, duration


def times(value: float) -> str:
    """Return a factor in words."""
    return f"{value:,.0f} times" if value >= 100 else f"{value:.1f} times"


def percent(share: float) -> str:
    """Return a share of 1."""
    return "under 1 %" if 0 < share < 0.01 else f"{share:.0%}".replace("%", " %")


def clock_time(at_ms: int) -> str:
    """Return the time of the day, in UTC."""
    return moment(at_ms).partition(" ")[2] or moment(at_ms)


__all__ = [
    "FILTERS",
    "ago",
    "clock_time",
    "count",
    "duration",
    "moment",
    "percent",
    "printable",
    "size",
    "times",
]

FILTERS = {
    "count": count,
    "clock_time": clock_time,
    "duration": duration,
    "moment": moment,
    "percent": percent,
    "printable": printable,
    "size": size,
    "times": times,
}
