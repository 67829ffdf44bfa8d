"""Numbers and lengths of time as people read them."""

from __future__ import annotations

_UNITS = ((24 * 60 * 60_000, "d"), (60 * 60_000, "h"), (60_000, "min"), (1_000, "s"))


def count(value: float) -> str:
    """Return a whole number with its thousands marked."""
    return f"{value:,.0f}"


def counted(value: float, noun: str) -> str:
    """Return how many of something there are: 1 commit, 2 commits."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def duration(ms: float) -> str:
    """Return a length of time in its largest unit, or two of them: 3 min 20 s."""
    if ms < 1_000:
        return f"{ms:.0f} ms"
    for place, (unit_ms, name) in enumerate(_UNITS):
        if ms >= unit_ms:
            whole, rest = divmod(int(ms), unit_ms)
            finer = f" {rest // below[0]} {below[1]}" if (below := _finer(place)) and rest >= below[0] else ""
            return f"{whole:,} {name}{finer if whole < 10 else ''}"
    raise AssertionError


def _finer(place: int) -> tuple[int, str] | None:
    return _UNITS[place + 1] if place + 1 < len(_UNITS) else None


def ago(at_ms: int, now_ms: int) -> str:
    """Return how long ago a moment was; a future one is now, since clocks differ a little."""
    return "now" if now_ms - at_ms < 1_000 else f"{duration(now_ms - at_ms)} ago"
