"""Rows of a partitioned table, split so that each file has one value of each partition column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.snapshotter.storage.url import StorageUrl
from holdfast.spark_integration.sinks.delta.statistics import COLUMNS_MAX, statistics
from holdfast.spark_integration.sinks.delta.years import require_years
from holdfast.spark_integration.sinks.files.columns import columns_of

# What a file system takes as the name of a folder, and what S3 and its like take as a key.
_FOLDER_BYTES_MAX, _KEY_BYTES_MAX = 255, 1024
# In a key, after the folders.
_FILE_NAME_BYTES = 64
_ESCAPED_BYTES = 3
# Null is the longest of all that is no text: __HIVE_DEFAULT_PARTITION__.
_NO_TEXT_BYTES = 26
#: Of so many files the driver keeps the statistics of all columns.
_DESCRIBED = 8
_FILES_MAX = 10_000


def check_partitions(schema: pa.Schema, partition_by: Sequence[str]) -> None:
    """Check a table's partition columns.

    Raises
    ------
    SchemaMismatchError
        One is missing, or cannot be the name of a partition.
    InvalidArgumentError
        No other column is left.
    """
    for name in partition_by:
        if name not in schema.names:
            raise SchemaMismatchError("the rows lack a partition column", column=name)
        t = schema.field(name).type
        if not (pt.is_string(t) or pt.is_integer(t) or pt.is_date(t) or pt.is_boolean(t)):
            raise SchemaMismatchError(
                "a partition column must be a string, an integer, a date or a boolean", column=name, type=str(t)
            )
    if partition_by and len(partition_by) == len(schema):
        raise InvalidArgumentError("a partitioned table needs a column besides those of its partitions")


def described(
    partition_by: Sequence[str], keys: Sequence[str], url: StorageUrl
) -> Callable[[pa.Table], Iterable[tuple[pa.Table, Mapping[str, Any]]]]:
    """Return a function that splits rows into files and describes each, for a file sink's transaction.

    Parameters
    ----------
    partition_by : sequence of str
    keys : sequence of str
        Those of an upsert, whose files are merged later and are not taken apart.
    url : StorageUrl
        The table's.
    """

    def split(rows: pa.Table) -> Iterable[tuple[pa.Table, Mapping[str, Any]]]:
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
            if nulls := [name for name in rows.column_names if _has_nulls(part, values, name)]:
                details["nulls"] = nulls
            yield part, details

    return split


def _require_folders(rows: pa.Table, partition_by: Sequence[str], url: StorageUrl) -> None:
    """Check that a merge, which writes files below folders named after partitions, can make them.

    Raises
    ------
    SchemaMismatchError
        A partition's value is too long, escaped as in a URL.
    """
    is_local = url.scheme == "file"
    room = _FOLDER_BYTES_MAX if is_local else _KEY_BYTES_MAX - len(url.path.encode()) - _FILE_NAME_BYTES
    for name in partition_by:
        folder = f"{name}=".encode()
        if len(folder) + (value_bytes := _longest(rows[name], room - len(folder))) > room:
            raise SchemaMismatchError(
                "a partition's value is too long for the name of its folder: shorten it in the query, or partition by "
                "another column",
                column=name,
                escaped_bytes=value_bytes,
                limit_bytes=room - len(folder),
            )
        room -= 0 if is_local else len(folder) + value_bytes + 1


def _longest(column: pa.ChunkedArray, room: int) -> int:
    """Return the bytes of the longest value, escaped as in a URL, or an upper bound if that fits."""
    if not pt.is_string(column.type):
        return _NO_TEXT_BYTES
    bound: int = _ESCAPED_BYTES * (pc.max(pc.binary_length(column)).as_py() or 0)
    if bound <= room:
        return max(bound, _NO_TEXT_BYTES)
    return max(len(quote(value, safe="")) for value in column.unique().drop_null().to_pylist())


def _without_empty(rows: pa.Table, partition_by: Sequence[str]) -> pa.Table:
    """Return rows with null for empty text in partition columns, keys included, as in Delta's log."""
    for name in partition_by:
        column = rows[name]
        if pt.is_string(column.type):
            is_empty = pc.equal(column, "")
            emptied = pc.if_else(is_empty, pa.scalar(None, column.type), column)
            rows = rows.set_column(rows.schema.get_field_index(name), name, emptied)
    return rows


def _has_nulls(part: pa.Table, values: Mapping[str, str | None], name: str) -> bool:
    return values[name] is None if name in values else part[name].null_count > 0


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
    """Return a value in the form of Delta's log."""
    if not value.is_valid:
        return None
    if pt.is_boolean(value.type):
        return "true" if value.as_py() else "false"
    return str(pc.cast(value, pa.string()).as_py())
