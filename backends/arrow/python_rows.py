"""Rows as Python's values, whatever they hold.

Spark stores strings of any bytes and times far beyond Python's calendar, of which pyarrow makes errors. Whoever shows
rows shows text instead, and all that stands beside it.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

#: What pyarrow raises for a text that is none, and for a time that Python does not have.
_BEYOND_PYTHON = (ValueError, OverflowError)


def python_rows(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as dicts; in place of a value that Python does not have, its text."""
    try:
        found: list[dict[str, Any]] = rows.to_pylist()
    except _BEYOND_PYTHON:
        columns = [[python_value(value) for value in column] for column in rows.columns]
        found = [dict(zip(rows.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]
    return found


def python_value(value: pa.Scalar) -> Any:
    """Return a value or, if Python does not have it, its text: bytes as escapes, a time as its number."""
    try:
        return value.as_py()
    except _BEYOND_PYTHON:
        pass
    t = value.type
    if pa.types.is_string(t) or pa.types.is_large_string(t):
        return value.as_buffer().to_pybytes().decode("utf-8", "backslashreplace")
    if pa.types.is_struct(t):
        return {field.name: python_value(part) for field, part in zip(t, value.values(), strict=True)}
    if pa.types.is_map(t):
        return [tuple(map(python_value, pair.values())) for pair in value.values]
    if pa.types.is_nested(t):
        return [python_value(element) for element in value.values]
    return f"{value.value} {t}"
