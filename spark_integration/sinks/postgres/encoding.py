r"""Arrow columns as the text that ``COPY … FROM STDIN`` reads, column by column: no Python per row.

One row is ``value TAB value … LF``; a null is ``\N``; backslash, tab, line feed and carriage return are escaped by a
backslash. Only structs and maps, which become JSON, are written by Python, one call per value.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration.sinks.postgres.columns import is_list, is_text

_TEXT = pa.large_string()
_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))
_HEX = np.array([f"{byte:02x}".encode() for byte in range(256)], dtype="S2")
#: Rows that are encoded at once: what lies in memory besides the rows themselves.
SLICE_ROWS = 1 << 16


def encoded(rows: pa.RecordBatch, json_columns: frozenset[str]) -> Iterator[memoryview]:
    """Yield rows in COPY's format; lists in `json_columns` become JSON, others arrays.

    Raises `SchemaMismatchError` if a text holds a NUL byte, which PostgreSQL has not; the column is named.
    """
    for start in range(0, rows.num_rows, SLICE_ROWS):
        part = rows.slice(start, SLICE_ROWS)
        fields = [_field(part.column(i), part.schema.field(i).name, json_columns) for i in range(part.num_columns)]
        end = pa.scalar("\n", _TEXT)
        lines = pc.binary_join_element_wise(*fields, pa.scalar("\t", _TEXT))
        lines = _joined(lines, end)
        yield _bytes(lines)


def _field(column: pa.Array, name: str, json_columns: frozenset[str]) -> pa.Array:
    text = _json(column) if name in json_columns and not is_text(column.type) else _text(column)
    if _may_need_escapes(column.type):
        _refuse_nul(text, name)
        text = _escaped(text)
    return pc.fill_null(text, pa.scalar("\\N", _TEXT))


def _may_need_escapes(kind: pa.DataType) -> bool:
    return is_text(kind) or pa.types.is_nested(kind) or pa.types.is_dictionary(kind) or _is_binary(kind)


def _text(column: pa.Array) -> pa.Array:
    """Return a column's values as PostgreSQL reads them from text; nulls stay null."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _text(column.dictionary_decode())
    if _is_binary(kind):
        return _hex(column)
    if is_list(kind):
        return _array(column)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        # Arrow looks the zone up for every value, at 1 µs each: what it stores is UTC.
        return _joined(column.view(pa.timestamp(kind.unit)).cast(_TEXT), pa.scalar("Z", _TEXT))
    if pa.types.is_duration(kind):
        unit = {"s": " seconds", "ms": " milliseconds", "us": " microseconds"}[kind.unit]
        return _joined(column.cast(pa.int64()).cast(_TEXT), pa.scalar(unit, _TEXT))
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        return _json(column)
    return column.cast(_TEXT)


def _joined(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, pa.scalar("", _TEXT))


def _escaped(text: pa.Array) -> pa.Array:
    for plain, escaped in _ESCAPES:
        if pc.any(pc.match_substring(text, plain)).as_py():
            text = pc.replace_substring(text, plain, escaped)
    return text


def _refuse_nul(text: pa.Array, name: str) -> None:
    if pc.any(pc.match_substring(text, "\0")).as_py():
        raise SchemaMismatchError(
            "a string holds a NUL byte, which PostgreSQL's text cannot; replace it in the query, or write the column "
            "as binary into bytea",
            column=name,
        )


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _hex(column: pa.Array) -> pa.Array:
    column = column.cast(pa.large_binary())
    offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column) + 1]
    data = column.buffers()[2]
    raw = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data else np.empty(0, np.uint8)
    digits = pa.py_buffer(_HEX[raw].tobytes())
    begins = pa.py_buffer(((offsets - offsets[0]) * 2).tobytes())
    text = pa.Array.from_buffers(_TEXT, len(column), [None, begins, digits])
    prefixed = _joined(pa.scalar("\\x", _TEXT), text)
    return pc.if_else(column.is_valid(), prefixed, pa.scalar(None, _TEXT))


def _array(column: pa.Array) -> pa.Array:
    r"""Return lists as array literals: ``{1,NULL,"a\"b"}``."""
    column = column.cast(pa.large_list(column.type.value_type))
    elements = column.flatten()
    kind = elements.type
    if is_list(kind) and pc.any(pc.equal(pc.list_value_length(elements), 0)).as_py():
        raise SchemaMismatchError(
            "an array within an array is empty, which PostgreSQL's arrays cannot be: it would store {} for [[], []]; "
            "write the column into jsonb, or filter such rows",
            type=column.type,
        )
    text = _text(elements)
    if _may_need_escapes(kind) and not is_list(kind):
        for plain, escaped in (("\\", "\\\\"), ('"', '\\"')):
            text = pc.replace_substring(text, plain, escaped)
        quote = pa.scalar('"', _TEXT)
        text = _joined(quote, text, quote)
    elif pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        quote = pa.scalar('"', _TEXT)
        text = _joined(quote, text, quote)
    text = pc.fill_null(text, pa.scalar("NULL", _TEXT))
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))]).astype(np.int64))
    joined = pc.binary_join(pa.LargeListArray.from_arrays(offsets, text), pa.scalar(",", _TEXT))
    literal = _joined(pa.scalar("{", _TEXT), joined, pa.scalar("}", _TEXT))
    return pc.if_else(column.is_valid(), literal, pa.scalar(None, _TEXT))


def _json(column: pa.Array) -> pa.Array:
    try:
        return pa.array([_json_text(value) for value in column.to_pylist(maps_as_pydicts="strict")], _TEXT)
    except (ValueError, TypeError, KeyError, OverflowError):
        problem = (
            "JSON has no NaN and no infinity, a year in it is from 1 to 9999, and the keys of a map must be text or "
            "numbers, each there once; change the column in the query, or write it as text by to_json"
        )
    # Not from the error, which names a value.
    raise SchemaMismatchError(problem, type=column.type)


def _json_text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, default=_json_value, allow_nan=False)


def _json_value(value: Any) -> str:
    # As Spark's to_json writes them: bytes in base 64, times in ISO's form; decimals keep all digits as text.
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _bytes(lines: pa.Array) -> memoryview:
    offsets = np.frombuffer(lines.buffers()[1], np.int64)
    begin, end = offsets[lines.offset], offsets[lines.offset + len(lines)]
    return memoryview(lines.buffers()[2])[begin:end]
