"""A file's statistics in the Delta log: its rows, and per column the nulls, minimum and maximum.

Readers pass over files by it, so a bound may be wide but never wrong: what cannot be said exactly is left out. That are
columns with a NaN or an infinity, years beyond four digits, decimals of more than 15 digits, nested columns and bytes.
Text is cut to 32 characters, the greatest one with the last of all characters after it.
"""

from __future__ import annotations

import json
import math
from datetime import date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

#: As many columns as other writers of Delta describe.
COLUMNS_MAX = 32
_TEXT_MAX = 32
_LAST = "\U0010ffff"
_DIGITS_MAX = 15


def statistics(rows: pa.Table, columns_max: int = COLUMNS_MAX) -> str:
    """Return the statistics of a file's rows, as JSON text."""
    nulls: dict[str, int] = {}
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    for name, column in zip(rows.column_names[:columns_max], rows.columns, strict=False):
        if pt.is_nested(column.type):
            continue
        nulls[name] = column.null_count
        bounds = _bounds(column)
        if bounds is not None:
            least[name], greatest[name] = bounds
    return json.dumps(
        {"numRecords": rows.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls},
        separators=(",", ":"),
        allow_nan=False,
    )


def is_long_decimal(t: pa.DataType) -> bool:
    """Tell whether a type has values beyond floating-point precision, which JSON numbers have in many writers."""
    return bool(pt.is_decimal(t) and t.precision > _DIGITS_MAX)


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """Return minimum and maximum as JSON values; None if there is no exact bound."""
    t = column.type
    if pt.is_boolean(t) or pt.is_binary(t) or is_long_decimal(t):
        return None
    if pt.is_floating(t) and pc.any(pc.is_nan(column)).as_py():
        return None
    found = pc.min_max(column)
    try:
        low, high = found["min"].as_py(), found["max"].as_py()
    except (ValueError, OverflowError):  # a date that Python cannot hold, or text that is no UTF-8
        return None
    if low is None or high is None:
        return None
    if pt.is_string(t):
        return _text_bounds(low, high)
    return None if (bounds := (_shown(low, t), _shown(high, t))).count(None) else bounds


def _text_bounds(low: str, high: str) -> tuple[str, str] | None:
    if high[_TEXT_MAX : _TEXT_MAX + 1] == _LAST:
        return None
    return low[:_TEXT_MAX], high if len(high) <= _TEXT_MAX else high[:_TEXT_MAX] + _LAST


def _shown(value: Any, t: pa.DataType) -> Any:
    if pt.is_decimal(t):
        return float(value)  # of at most 15 digits, which come back as they were
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return text + "Z" if t.tz else text
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
