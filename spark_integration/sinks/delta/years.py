"""Dates that a Delta table cannot show: refused in the task, since a decided one would stop the query for good.

Spark has dates of years beyond 1 to 9999, mostly by a slip. As the value of a partition, such a date stands in the log
as a text that no reader takes for a date: the table cannot be opened any more. And `deltalake`'s merge breaks off where
it compares or describes one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from holdfast.errors import SchemaMismatchError

_EPOCH = date(1970, 1, 1)
_FIRST, _LAST = (date.min - _EPOCH).days, (date.max - _EPOCH).days
_DAY_US = 86_400_000_000


def require_years(rows: pa.Table, keys: Sequence[str], partition_by: Sequence[str]) -> None:
    """Check all dates of an upsert, also nested ones, and its keys' timestamps; of appended rows the partitions.

    Raises
    ------
    SchemaMismatchError
        One is not of the years 1 to 9999.
    """
    for name in rows.column_names if keys else partition_by:
        column = rows[name]
        found = [pc.min_max(dates.cast(pa.int32())).as_py() for dates in _dates(column)]
        if pt.is_timestamp(column.type) and name in keys:
            ends = pc.min_max(column.cast(pa.int64())).as_py()
            found.append({end: us and us // _DAY_US for end, us in ends.items()})
        if any(days["min"] is not None and (days["min"] < _FIRST or days["max"] > _LAST) for days in found):
            raise SchemaMismatchError(
                "a date that a Delta table cannot show: keys, partitions, and all dates of an upsert must be of the "
                "years 1 to 9999; filter such rows, or replace the date with null",
                column=name,
            )


def _dates(column: pa.ChunkedArray) -> Iterator[pa.ChunkedArray]:
    """Yield all dates in a column, at whatever depth."""
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
