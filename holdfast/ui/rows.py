"""An operator's rows after any retained micro-batch: page by page, filtered, or of one key.

A page holds `ROWS_MAX` rows, or `HISTORY_MAX` versions of a key. A filter searches at most `SEARCHED_MAX` rows per
page, and the next page continues after them, so that each answer is bounded, whatever the size of the state.

Values are shown in the form that look-ups accept. Long values are cut, control characters are escaped, and the page's
templates escape markup.
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
#: The longest time to search for a page of filtered rows.
_PATIENCE_MS = 3_000
HISTORY_MAX = 20
_ROWS_OF_KEY_MAX = 20


@dataclass(frozen=True)
class TextTable:
    name: str  #: The name of the state table
    columns: list[tuple[str, bool]]  #: Name, and whether it is a number, aligned right
    rows: list[list[str | None]]  #: None is a null


def shown_table(name: str, table: pa.Table) -> TextTable:
    columns = [texts(column) for column in table.columns]
    are_numbers = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal
    kinds = [(field.name, any(one(field.type) for one in are_numbers)) for field in table.schema]
    return TextTable(name, kinds, [list(row) for row in zip(*columns, strict=True)] if columns else [])


def texts(column: pa.ChunkedArray | pa.Array) -> list[str | None]:
    """Return a column's values as text; None for a null."""
    return [None if value is None else printable(cell_text(value)) for value in map(python_value, column)]


@dataclass(frozen=True)
class RowsRequest:
    batch_id: int | None = None  #: None for the last committed
    table: str | None = None  #: None for the first table
    #: Typed values by grouping column; empty without a key
    key: Mapping[str, str] = field(default_factory=dict)
    shard: int | None = None  #: The first shard to read; None for the first with state
    after: str | None = None  #: `Page.after` of the previous page
    contains: str = ""  #: Text that a row must contain, ignoring case


@dataclass(frozen=True)
class Step:
    """A key's rows in a table, from a micro-batch until the next step."""

    #: The micro-batch, and when it was planned
    batch_id: int
    batch_ms: int
    is_oldest: bool  #: Whether nothing older is retained
    #: The value cells, and whether each has changed
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
    request: RowsRequest
    batches: list[int]  #: The readable micro-batches, ascending
    #: The shown micro-batch, and when it was planned
    batch_id: int
    batch_ms: int
    tables: list[str]
    table: str
    grouping: tuple[str, ...]  #: The columns of a key; empty if unknown
    found: list[KeyTable] | None = None  #: The key's rows, by table; None without a key
    is_whole: bool = True  #: Whether the key's whole retained history is shown
    rows: TextTable | None = None  #: The shard's; None if a key is looked up, or no shard has rows
    shard: int | None = None  #: The shard of these rows
    searched: int = 0  #: The number of rows searched
    next: tuple[int, str | None] | None = None  #: The shard and `RowsRequest.after` of the next page


def rows_view(query: StoredQuery, operator: str, request: RowsRequest, monotonic_ms: Callable[[], int]) -> RowsView:
    """Return the rows or, if the request has a key, the key's history."""
    now = query.operator(operator, request.batch_id)
    tables = sorted(now.tables)
    table = request.table if request.table is not None else next(iter(tables), "")
    if request.table is not None and request.table not in tables:
        raise InvalidArgumentError("the operator has no such table", table=request.table[:40], tables=", ".join(tables))
    planned = max((row.batch_ms for rows in now.pointers.values() for row in rows), default=0)
    view = RowsView(request, query.batches(), now.batch_id, planned, tables, table, now.grouping)
    if request.key:
        found, is_whole = _of_key(query, now, request)
        return replace(view, found=found, is_whole=is_whole)
    return _of_shards(query, now, view, monotonic_ms) if table else view


def _of_key(query: StoredQuery, now: StoredOperator, request: RowsRequest) -> tuple[list[KeyTable], bool]:
    """Return a key's history by table, and whether that is its whole retained history."""
    key = {name: request.key.get(name, "") for name in now.grouping}
    versions = list(islice(query.history(now.name, key, batch_id=now.batch_id), HISTORY_MAX))
    tables = [_key_table(name, len(now.grouping), versions) for name in versions[0].tables]
    return [table for table in tables if any(step.rows for step in table.steps)], versions[-1].is_oldest


def _key_table(name: str, key_columns: int, versions: list[KeyVersion]) -> KeyTable:
    shown = [shown_table(name, one.tables[name].slice(0, _ROWS_OF_KEY_MAX)) for one in versions]
    rows = [[row[key_columns:] for row in table.rows] for table in shown]
    steps = [
        Step(one.batch_id, one.batch_ms, one.is_oldest, _marked(own, before), len(one.tables[name]) - len(own))
        for one, own, before in zip(versions, rows, [*rows[1:], None], strict=True)
        # A version may differ only in other tables; the oldest shows how far back the history goes.
        if own != before or one.is_oldest
    ]
    return KeyTable(name, shown[0].columns[key_columns:], steps)


def _marked(rows: list[list[str | None]], before: list[list[str | None]] | None) -> list[list[tuple[str | None, bool]]]:
    """Return cells, each with whether it differs from the older one."""
    if before is None or len(before) != len(rows):
        return [[(cell, False) for cell in row] for row in rows]
    return [
        [(cell, cell != old) for cell, old in zip(row, older, strict=True)]
        for row, older in zip(rows, before, strict=True)
    ]


def _of_shards(query: StoredQuery, now: StoredOperator, view: RowsView, monotonic_ms: Callable[[], int]) -> RowsView:
    """Return the view with a page of rows from the requested place, read from as many shards as necessary."""
    request, table = view.request, view.table
    with_state = sorted({row.shard for rows in now.pointers.values() for row in rows if row.pointer is not None})
    waiting = [shard for shard in with_state if request.shard is None or shard >= request.shard]
    until_ms, searched = monotonic_ms() + _PATIENCE_MS, 0
    shown: TextTable | None = None
    after = request.after if waiting and waiting[0] == request.shard else None
    begun = waiting[0] if waiting else None
    while waiting:
        rows = shown.rows if shown else []
        part, after, seen = _of_shard(query, now, request, table, (waiting[0], after), ROWS_MAX - len(rows))
        searched += seen
        shown = TextTable(table, part.columns, [*rows, *part.rows])
        if after is None:
            del waiting[0]
        is_enough = len(shown.rows) >= ROWS_MAX or searched >= SEARCHED_MAX or monotonic_ms() >= until_ms
        if is_enough or (not request.contains and shown.rows):
            break
    following = (waiting[0], after) if waiting else None
    return replace(view, rows=shown, shard=begun, searched=searched, next=following)


def _of_shard(
    query: StoredQuery, now: StoredOperator, request: RowsRequest, table: str, place: tuple[int, str | None], room: int
) -> tuple[TextTable, str | None, int]:
    """Return a shard's next rows, at most `room`; `Page.after`; and how many rows were searched."""
    wanted, limit = request.contains.casefold(), _READ_AT_ONCE if request.contains else ROWS_MAX
    while True:
        page = query.page(now.name, table, place[0], batch_id=now.batch_id, after=place[1], limit=limit)
        part = shown_table(table, page.rows)
        found = [n for n, row in enumerate(part.rows) if any(wanted in (cell or "").casefold() for cell in row)]
        if len(found) <= room:
            return TextTable(table, part.columns, [part.rows[n] for n in found]), page.after, len(part.rows)
        limit = found[room - 1] + 1  # read again, since only the end of a page is known as a place to continue
