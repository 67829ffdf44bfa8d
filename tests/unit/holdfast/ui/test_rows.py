"""Pages of rows: each is bounded, and together they have every row once."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.run import TableSchema
from holdfast.spark_integration.lookup.query_pointers import Page, StoredOperator
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.ui.views.rows import ROWS_MAX, SEARCHED_MAX, Asked, RowsView, rows_view

STATE = TableSchema.of("state", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64())]))
USERS = 5_000


class Query:
    """A query with users in two shards, half of whom are called ann."""

    def operator(self, *_: object) -> StoredOperator:
        rows = tuple(PointerRow("q", "op", shard, 2, Pointer(1, "a" * 16), None, None, 0) for shard in (0, 1))
        return StoredOperator("op", 3, 0, "host", 2, {"state": STATE}, {"op": rows})

    def batches(self) -> list[int]:
        return [3]

    def page(self, _: str, __: str, shard: int, *, after: str | None, limit: int, **___: object) -> Page:
        first = int(after or 0)
        users = range(first, min(first + limit, USERS))
        names = [f"{'ann' if user % 2 else 'bob'}-{shard}-{user}" for user in users]
        rows = pa.table({"user": names, "n": pa.array(users, pa.int64())})
        return Page(rows, str(first + limit) if first + limit < USERS else None)


def view(**asked: Any) -> RowsView:
    query: Any = Query()
    return rows_view(query, "op", Asked(**asked), lambda: 0)


@pytest.mark.slow(1)
@pytest.mark.parametrize(("text", "rows"), [("", 2 * USERS), ("ANN-", USERS), ("-1-7", 111)])
def test_each_row_stands_on_one_page(text: str, rows: int) -> None:
    """Whatever share of the rows a filter keeps, a page has no more than its rows."""
    found: list[str | None] = []
    place: tuple[int | None, str | None] | None = (None, None)
    searched = 0
    while place is not None:
        page = view(contains=text, shard=place[0], after=place[1])
        assert page.rows is not None
        assert len(page.rows.rows) <= ROWS_MAX
        assert page.searched < SEARCHED_MAX + 2_000
        found += [row[0] for row in page.rows.rows]
        searched += page.searched
        place = page.next
    assert len(set(found)) == len(found) == rows
    assert searched == 2 * USERS
