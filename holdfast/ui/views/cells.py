"""Values of state as text: whatever type they have, and whatever they hold.

What is in state was written by a query's users. A cell is text, cut off where it is long; control characters and bytes
that are no text are shown as escapes. The page's templates escape markup.
"""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from holdfast.backends.arrow.python_rows import python_value
from holdfast.ui.words import printable

TEXT_MAX = 300


@dataclass(frozen=True)
class ShownTable:
    """Rows as text.

    Attributes
    ----------
    name : str
        Of the state table.
    columns : list of (str, bool)
        Name, and whether it is a number, which stands on the right.
    rows : list of list of str or None
        None is a null.
    """

    name: str
    columns: list[tuple[str, bool]]
    rows: list[list[str | None]]


def shown_table(name: str, table: pa.Table) -> ShownTable:
    """Return rows as text."""
    columns = [texts(column) for column in table.columns]
    kinds = [(field.name, _is_number(field.type)) for field in table.schema]
    return ShownTable(name, kinds, [list(row) for row in zip(*columns, strict=True)] if columns else [])


def texts(column: pa.ChunkedArray | pa.Array) -> list[str | None]:
    """Return the values of a column as text; None for a null."""
    return [None if value is None else cut(text(value)) for value in map(python_value, column)]


def text(value: Any) -> str:
    """Return a value as people read it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return f"0x{value[:TEXT_MAX].hex()}"
    if isinstance(value, dt.datetime):
        return value.isoformat(" ")
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=text)
    return str(value)


def cut(found: str) -> str:
    """Return text without control characters, and no more of it than a cell holds."""
    shown = printable(found[:TEXT_MAX])
    return shown if len(found) <= TEXT_MAX else f"{shown}… ({len(found):,} characters)"


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
