"""The rows of an operator after any micro-batch that is retained: page by page, filtered, or those of one key.

A page holds `ROWS_MAX` rows, or `HISTORY_MAX` versions of a key. With a filter it looks through `SEARCHED_MAX` rows at
most, and the next page continues after them: so each answer is bounded, whatever the state's size.

Values are shown as look-ups take them. Long ones are cut, control characters and bytes that are not text become
escapes, and the page's templates escape markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import pyarrow as pa

from holdfast.backends.arrow.values import python_value
from holdfast.commands.target import cell_text, printable
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.lookup.query_pointers import KeyVersion, StoredOperator
from holdfast.spark_integration.lookup.stored_query import StoredQuery

ROWS_MAX = 50
SEARCHED_MAX = 20_000
_READ_AT_ONCE = 2_000
#: With a filter a page ends after this long, with what it has.
_PATIENCE_MS = 3_000
HISTORY_MAX = 20
_ROWS_OF_KEY_MAX = 20


@dataclass(frozen=True)
class TextTable:
    """Rows as text."""

    name: str  #: Of the state table
    columns: list[tuple[str, bool]]  #: Name, and whether it is a number, aligned right
    rows: list[list[str | None]]  #: None is a null


def shown_table(name: str, table: pa.Table) -> TextTable:
    """Return rows as text."""
    columns = [texts(column) for column in table.columns]
    are_numbers = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal
    kinds = [(field.name, any(one(field.type) for one in are_numbers)) for field in table.schema]
    return TextTable(name, kinds, [list(row) for row in zip(*columns, strict=True)] if columns else [])


def texts(column: pa.ChunkedArray | pa.Array) -> list[str | None]:
    """Return the values of a column as text; None for a null."""
    return [None if value is None else printable(cell_text(value)) for value in map(python_value, column)]


@dataclass(frozen=True)
class RowsRequest:
    """A reader's request."""

    batch_id: int | None = None  #: None for the last one that is committed
    table: str | None = None  #: None for the first one
    #: By grouping column what was typed; empty where no key is looked up
    key: Mapping[str, str] = field(default_factory=dict)
    shard: int | None = None  #: Where to begin; None for the first shard with state
    after: str | None = None  #: Behind which row of it
    contains: str = ""  #: Text that a row must contain, in any case


@dataclass(frozen=True)
class Step:
    """What a key held in a table from one micro-batch until the next newer step."""

    #: The micro-batch, and when it was planned
    batch_id: int
    batch_ms: int
    is_oldest: bool  #: Whether nothing older is retained
    #: Cells without the key's, and whether each has changed
    rows: list[list[tuple[str | None, bool]]]
    more: int  #: Rows that are not shown


@dataclass(frozen=True)
class KeyTable:
    """A key's changes in a table, newest first."""

    name: str
    columns: list[tuple[str, bool]]
    steps: list[Step]


@dataclass(frozen=True)
class RowsView:
    """What the view shows."""

    asked: RowsRequest
    batches: list[int]  #: The readable micro-batches, ascending
    #: The one that is shown, and when it was planned
    batch_id: int
    batch_ms: int
    tables: list[str]
    table: str
    grouping: tuple[str, ...]  #: The columns by which a key is looked up; none where that is not known
    found: list[KeyTable] | None = None  #: The rows of the key, by table; None where none is looked up
    is_whole: bool = True  #: Whether all that is retained of the key is shown
    rows: TextTable | None = None  #: The shard's; None if a key is looked up, or no shard has rows
    shard: int | None = None  #: The shard of these rows
    searched: int = 0  #: How many rows the filter has seen
    next: tuple[int, str | None] | None = None  #: Shard and row with which the next page begins


def rows_view(query: StoredQuery, operator: str, asked: RowsRequest, monotonic_ms: Callable[[], int]) -> RowsView:
    """Answer a reader's request."""
    now = query.operator(operator, asked.batch_id)
    tables = sorted(now.tables)
    table = asked.table if asked.table is not None else next(iter(tables), "")
    if asked.table is not None and asked.table not in tables:
        raise InvalidArgumentError("the operator has no such table", table=asked.table[:40], tables=", ".join(tables))
    planned = max((row.batch_ms for rows in now.pointers.values() for row in rows), default=0)
    view = RowsView(asked, query.batches(), now.batch_id, planned, tables, table, now.grouping)
    if asked.key:
        found, is_whole = _of_key(query, now, asked)
        return replace(view, found=found, is_whole=is_whole)
    return _of_shards(query, now, view, monotonic_ms) if table else view


def _of_key(query: StoredQuery, now: StoredOperator, asked: RowsRequest) -> tuple[list[KeyTable], bool]:
    """Return a key's values, and whether they are all that is retained."""
    key = {name: asked.key.get(name, "") for name in now.grouping}
    versions = list(islice(query.history(now.name, key, batch_id=now.batch_id), HISTORY_MAX))
    tables = [_key_table(name, len(now.grouping), versions) for name in versions[0].tables]
    return [table for table in tables if any(step.rows for step in table.steps)], versions[-1].is_oldest


def _key_table(name: str, key_columns: int, versions: list[KeyVersion]) -> KeyTable:
    shown = [shown_table(name, one.tables[name].slice(0, _ROWS_OF_KEY_MAX)) for one in versions]
    rows = [[row[key_columns:] for row in table.rows] for table in shown]
    steps = [
        Step(one.batch_id, one.batch_ms, one.is_oldest, _marked(own, before), len(one.tables[name]) - len(own))
        for one, own, before in zip(versions, rows, [*rows[1:], None], strict=True)
        # Another table may be what changed; the last step says how far back all this is known.
        if own != before or one.is_oldest
    ]
    return KeyTable(name, shown[0].columns[key_columns:], steps)


def _marked(rows: list[list[str | None]], before: list[list[str | None]] | None) -> list[list[tuple[str | None, bool]]]:
    """Return cells, each with whether it differs from its predecessor."""
    if before is None or len(before) != len(rows):
        return [[(cell, False) for cell in row] for row in rows]
    return [
        [(cell, cell != old) for cell, old in zip(row, older, strict=True)]
        for row, older in zip(rows, before, strict=True)
    ]


def _of_shards(query: StoredQuery, now: StoredOperator, view: RowsView, monotonic_ms: Callable[[], int]) -> RowsView:
    """Return the view with a page of rows from the requested place, across as many shards as fill it."""
    asked, table = view.asked, view.table
    with_state = sorted({row.shard for rows in now.pointers.values() for row in rows if row.pointer is not None})
    waiting = [shard for shard in with_state if asked.shard is None or shard >= asked.shard]
    until_ms, searched = monotonic_ms() + _PATIENCE_MS, 0
    shown: TextTable | None = None
    after = asked.after if waiting and waiting[0] == asked.shard else None
    begun = waiting[0] if waiting else None
    while waiting:
        rows = shown.rows if shown else []
        part, after, seen = _of_shard(query, now, asked, table, (waiting[0], after), ROWS_MAX - len(rows))
        searched += seen
        shown = TextTable(table, part.columns, [*rows, *part.rows])
        if after is None:
            del waiting[0]
        is_enough = len(shown.rows) >= ROWS_MAX or searched >= SEARCHED_MAX or monotonic_ms() >= until_ms
        if is_enough or (not asked.contains and shown.rows):
            break
    following = (waiting[0], after) if waiting else None
    return replace(view, rows=shown, shard=begun, searched=searched, next=following)


def _of_shard(
    query: StoredQuery, now: StoredOperator, asked: RowsRequest, table: str, place: tuple[int, str | None], room: int
) -> tuple[TextTable, str | None, int]:
    """Return a shard's next rows that fit, the last row before its next page or None, and how many were seen."""
    wanted, limit = asked.contains.casefold(), _READ_AT_ONCE if asked.contains else ROWS_MAX
    while True:
        page = query.page(now.name, table, place[0], batch_id=now.batch_id, after=place[1], limit=limit)
        part = shown_table(table, page.rows)
        found = [n for n, row in enumerate(part.rows) if any(wanted in (cell or "").casefold() for cell in row)]
        if len(found) <= room:
            return TextTable(table, part.columns, [part.rows[n] for n in found]), page.after, len(part.rows)
        limit = found[room - 1] + 1  # read again, as only the end of what is read says where to go on
