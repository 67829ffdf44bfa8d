"""Backend options, from Spark's settings ``spark.holdfast.<backend>.<option>``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast.errors import InvalidArgumentError

PREFIX = "spark.holdfast."
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_options(
    backend: str, known: Mapping[str, Callable[[str], Any]], options: Mapping[str, str]
) -> dict[str, Any]:
    """Parse options with the parsers in `known`. Raises an `InvalidArgumentError` that names the key."""
    values = {}
    for name, text in options.items():
        key = f"{PREFIX}{backend}.{name}"
        if name not in known:
            near = nearest_name(name, known)
            names = ", ".join(f"{PREFIX}{backend}.{n}" for n in known)
            listed = f"known settings: {names}" if known else f"backend {backend!r} has no options"
            hint = f"did you mean {PREFIX}{backend}.{near}?" if near else listed
            raise InvalidArgumentError(f"unknown setting {key!r}: {hint}")
        try:
            values[name] = known[name](text)
        except ValueError as exc:
            raise InvalidArgumentError(f"{key} cannot be {text!r}: {exc}") from exc
    return values


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, ignoring case, or None."""
    by_lower = {each.lower(): each for each in sorted(known)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to an unknown-name error, or an empty string."""
    near = nearest_name(name, known)
    return f"; did you mean {near!r}?" if near else ""


def parse_size(text: str) -> int:
    """Parse a size in Spark's notation (``512m``, ``2g``, ``65536``) as bytes; units are powers of 1024."""
    found = re.fullmatch(r"\s*(\d+)\s*([bkmgt]?)b?\s*", text.lower())
    if found is None or int(found[1]) == 0:
        raise ValueError("it must be a size such as 512m or 2g")
    return int(found[1]) * _UNITS[found[2]]
