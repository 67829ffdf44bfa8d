"""Turn a task's rows into files of a Delta table: check them, split them by partition, describe them for the log.

Statistics are a file's row count and each column's null count, minimum and maximum. Readers skip files by them, so
a bound may be loose but never wrong. Bounds are omitted for columns with a NaN or infinite bound, years beyond four
digits or decimals of more than 15 digits, and for booleans, bytes and nested columns. Text bounds are cut to 32
characters; U+10FFFF is appended to a cut maximum.

Spark allows dates outside the years 1 to 9999, mostly mistakes. As a partition value in the log, such a date makes the
table unreadable, and `deltalake`'s merge fails on it. The task refuses them: once decided, they would stop the query.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.snapshotter.storage.options import StorageUrl
from holdfast.spark_integration.sinks.files.location import columns_of

#: Other Delta writers also describe 32 columns.
COLUMNS_MAX = 32
_TEXT_MAX = 32
_LAST_LETTER = "\U0010ffff"
_DIGITS_MAX = 15


def statistics(rows: pa.Table, columns_max: int = COLUMNS_MAX) -> str:
    """Return a file's statistics as JSON text."""
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
    """Return whether a decimal has more digits than a double holds, to which many writers limit JSON numbers."""
    return bool(pt.is_decimal(t) and t.precision > _DIGITS_MAX)


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """Return the minimum and maximum as JSON values; None if there is no correct bound."""
    t = column.type
    if pt.is_boolean(t) or pt.is_binary(t) or is_long_decimal(t):
        return None
    if pt.is_floating(t) and pc.any(pc.is_nan(column)).as_py():
        return None
    found = pc.min_max(column)
    try:
        low, high = found["min"].as_py(), found["max"].as_py()
    except (ValueError, OverflowError):  # a date outside Python's range, or text that is not UTF-8
        return None
    if low is None or high is None:
        return None
    if pt.is_string(t):
        if high[_TEXT_MAX : _TEXT_MAX + 1] == _LAST_LETTER:
            return None
        return low[:_TEXT_MAX], high if len(high) <= _TEXT_MAX else high[:_TEXT_MAX] + _LAST_LETTER
    return None if (bounds := (_shown(low, t), _shown(high, t))).count(None) else bounds


def _shown(value: Any, t: pa.DataType) -> Any:
    if pt.is_decimal(t):
        return float(value)  # exact: at most 15 digits
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return text + "Z" if t.tz else text
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


_EPOCH = date(1970, 1, 1)
_FIRST, _LAST = (date.min - _EPOCH).days, (date.max - _EPOCH).days
_DAY_US = 86_400_000_000


def require_years(rows: pa.Table, keys: Sequence[str], partition_by: Sequence[str]) -> None:
    """Raise `SchemaMismatchError` for a date outside the years 1 to 9999 in an upsert or a partition column."""
    for name in rows.column_names if keys else partition_by:
        column = rows[name]
        found = [pc.min_max(dates.cast(pa.int32())).as_py() for dates in _dates(column)]
        if pt.is_timestamp(column.type) and name in keys:
            ends = pc.min_max(column.cast(pa.int64())).as_py()
            found.append({end: us and us // _DAY_US for end, us in ends.items()})
        if any(days["min"] is not None and (days["min"] < _FIRST or days["max"] > _LAST) for days in found):
            raise SchemaMismatchError(
                "a date in a key, a partition or an upsert is outside the years 1 to 9999: filter out such rows, or "
                "replace the date with null",
                column=name,
            )


def _dates(column: pa.ChunkedArray) -> Iterator[pa.ChunkedArray]:
    """Yield the date arrays in a column, at any depth."""
    t = column.type
    if pt.is_date(t):
        yield column
    elif pt.is_struct(t):
        for field in column.flatten():
            yield from _dates(field)
    elif pt.is_map(t):
        yield from _dates(pa.chunked_array([chunk.keys for chunk in column.chunks], t.key_type))
        yield from _dates(pa.chunked_array([chunk.items for chunk in column.chunks], t.item_type))
    elif pt.is_list(t):
        yield from _dates(pc.list_flatten(column))


# The maximum length of a folder name in a file system, and of a key in S3-compatible stores.
_FOLDER_BYTES_MAX, _KEY_BYTES_MAX = 255, 1024
# Reserved in a key for the file name.
_FILE_NAME_BYTES = 64
_ESCAPED_BYTES = 3
# The folder name for null; the longest folder name of a non-text value.
_NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
_NO_TEXT_BYTES = len(_NULL_FOLDER)
#: A task with more files than this describes fewer columns per file, to limit the driver's memory.
_DESCRIBED = 8
_FILES_MAX = 10_000


def check_partitions(schema: pa.Schema, partition_by: Sequence[str]) -> None:
    """Raise if a partition column is missing or has an unsupported type, or if all columns are partition columns."""
    for name in partition_by:
        if name not in schema.names:
            raise SchemaMismatchError("the rows lack a partition column", column=name)
        t = schema.field(name).type
        if not (pt.is_string(t) or pt.is_integer(t) or pt.is_date(t) or pt.is_boolean(t)):
            raise SchemaMismatchError(
                "a partition column must be a string, an integer, a date or a boolean", column=name, type=str(t)
            )
    if partition_by and len(partition_by) == len(schema):
        raise InvalidArgumentError("a partitioned table needs at least one column that is not a partition column")


def described(
    rows: pa.Table, partition_by: Sequence[str], keys: Sequence[str], url: StorageUrl
) -> Iterator[tuple[pa.Table, Mapping[str, Any]]]:
    """Split rows into files and describe each; an upsert's rows form a single file."""
    require_years(rows, keys, partition_by)
    rows = _without_empty(rows, partition_by)
    if keys:
        _require_folders(rows, partition_by, url)
    parts = _parts(rows, () if keys else partition_by)
    columns_max = COLUMNS_MAX if len(parts) <= _DESCRIBED else COLUMNS_MAX // _DESCRIBED
    for number, (part, values) in enumerate(parts):
        details: dict[str, Any] = {"stats": statistics(part, columns_max)}
        if number == 0:
            details["columns"] = columns_of(rows.schema)
        if values:
            details["partition"] = values
        nulls = [name for name in part.column_names if part[name].null_count]
        if nulls := [name for name in rows.column_names if name in nulls or values.get(name, "") is None]:
            details["nulls"] = nulls
        yield part, details


def _require_folders(rows: pa.Table, partition_by: Sequence[str], url: StorageUrl) -> None:
    """Raise `SchemaMismatchError` for a partition value that is too long for a folder name, or would become null."""
    is_local = url.scheme == "file"
    room = _FOLDER_BYTES_MAX if is_local else _KEY_BYTES_MAX - len(url.path.encode()) - _FILE_NAME_BYTES
    for name in partition_by:
        if pt.is_string(rows[name].type) and pc.any(pc.equal(rows[name], _NULL_FOLDER)).as_py():
            raise SchemaMismatchError(
                f"an upsert would turn the partition {_NULL_FOLDER} into null: replace it in the query", column=name
            )
        folder = f"{name}=".encode()
        if len(folder) + (value_bytes := _longest(rows[name], room - len(folder))) > room:
            raise SchemaMismatchError(
                "a partition value is too long for its folder name: shorten it in the query, or partition by "
                "another column",
                column=name,
                escaped_bytes=value_bytes,
                limit_bytes=room - len(folder),
            )
        room -= 0 if is_local else len(folder) + value_bytes + 1


def _longest(column: pa.ChunkedArray, room: int) -> int:
    """Return the longest URL-escaped value's length in bytes, or an upper bound if that fits."""
    if not pt.is_string(column.type):
        return _NO_TEXT_BYTES
    bound: int = _ESCAPED_BYTES * (pc.max(pc.binary_length(column)).as_py() or 0)
    if bound <= room:
        return max(bound, _NO_TEXT_BYTES)
    return max(len(quote(value, safe="")) for value in column.unique().drop_null().to_pylist())


def _without_empty(rows: pa.Table, partition_by: Sequence[str]) -> pa.Table:
    """Replace empty text in partition columns by null, as Delta's log does."""
    for name in partition_by:
        column = rows[name]
        if pt.is_string(column.type):
            is_empty = pc.equal(column, "")
            emptied = pc.if_else(is_empty, pa.scalar(None, column.type), column)
            rows = rows.set_column(rows.schema.get_field_index(name), name, emptied)
    return rows


def _parts(rows: pa.Table, partition_by: Sequence[str]) -> list[tuple[pa.Table, dict[str, str | None]]]:
    if not partition_by:
        return [(rows, {})]
    codes = np.zeros(rows.num_rows, dtype=np.int64)
    for name in partition_by:
        column = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
        _, codes = np.unique(codes * len(column.dictionary) + column.indices.to_numpy(), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    if len(starts) > _FILES_MAX:
        raise InvalidArgumentError(
            "a task's rows belong to too many partitions: repartition by the partition columns first, or choose others",
            partitions=len(starts),
        )
    ordered = rows.take(pa.array(order))
    parts = []
    for start, end in zip(starts, [*starts[1:], rows.num_rows], strict=True):
        part = ordered.slice(start, end - start)
        values = {name: _text(part[name][0]) for name in partition_by}
        parts.append((part.drop_columns(list(partition_by)), values))
    return parts


def _text(value: pa.Scalar) -> str | None:
    """Return a partition value as text for Delta's log."""
    if not value.is_valid:
        return None
    if pt.is_boolean(value.type):
        return "true" if value.as_py() else "false"
    return str(pc.cast(value, pa.string()).as_py())
