"""An operator as it was after a micro-batch, and what was found of it: what `StoredQuery` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from holdfast.backends.run import TableSchema
from holdfast.spark_integration.processor.state.variable_tables import grouping_columns, is_of_entry
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.tables.key_timers import TIMERS

Key = Mapping[str, Any]
"""A value for each column that the operator is grouped by: ``{"user": "ann"}``."""


@dataclass(frozen=True)
class StoredOperator:
    """An operator of holdfast's as it was after a micro-batch.

    Attributes
    ----------
    name : str
    batch_id : int
        The micro-batch.
    number : int
        Spark's number of the operator that holds the pointers.
    host : str
        Spark's name of it.
    shards : int
        How many the operator has.
    tables : mapping of str to TableSchema
        Those that users see, with the columns that are declared by now.
    pointers : mapping of str to tuple of PointerRow
        By directory below the state directory, ascending by shard. A shard that never had rows has none; the
        attribute ``pointer`` of one without state is None.
    """

    name: str
    batch_id: int
    number: int
    host: str
    shards: int
    tables: Mapping[str, TableSchema]
    pointers: Mapping[str, tuple[PointerRow, ...]]

    @cached_property
    def grouping(self) -> tuple[str, ...]:
        """The key columns that the operator is grouped by."""
        return grouping_of(self.tables)

    @cached_property
    def places(self) -> dict[int, tuple[str, PointerRow]]:
        """By shard its directory and its pointer; of those that were read."""
        return {row.shard: (directory, row) for directory, rows in self.pointers.items() for row in rows}


def grouping_of(tables: Mapping[str, TableSchema]) -> tuple[str, ...]:
    """Return the key columns that an operator with these tables, those that users see, is grouped by."""
    if certain := next(filter(None, (grouping_columns(tables, name) for name in tables)), ()):
        return certain
    # A processor with maps only, or none but timers: each has key columns of its own behind those of the group.
    if TIMERS in tables:
        return tuple(tables[TIMERS].key.names[:-1])
    names: list[str] = next((schema.key.names for schema in tables.values()), [])
    own = (place for place, name in enumerate(names) if place and is_of_entry(name))
    return tuple(names[: next(own, len(names))])


@dataclass(frozen=True)
class KeyVersion:
    """What a key held from one micro-batch on.

    Attributes
    ----------
    batch_id : int
        The first retained micro-batch after which it held this.
    batch_ms : int
        When that micro-batch was planned, in ms since 1970.
    is_oldest : bool
        Whether nothing older is retained: it may have held this before.
    tables : mapping of str to pyarrow.Table
        Its rows by table, as `StoredQuery.get` returns them.
    """

    batch_id: int
    batch_ms: int
    is_oldest: bool
    tables: Mapping[str, pa.Table]


@dataclass(frozen=True)
class Page:
    """Some rows of a shard, in the order of their hashes.

    Attributes
    ----------
    rows : pyarrow.Table
        The key columns, then the value columns.
    after : str or None
        What gives the next page; None on the last one.
    """

    rows: pa.Table
    after: str | None
