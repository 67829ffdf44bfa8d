"""Who writes below a URL, under which sink's name, whom that query replaced, and the columns of all that is written.

::

    _holdfast/queries/00000000000000000002    kind "sink-queries": number, queries: {"<sink>": ["<query>", …]}, columns:
                                              the Arrow schema as an IPC message, base64; null where a table has them

A fence (`holdfast.snapshotter.fence`) whose newest object says all: the last query of a list owns the sink's name,
until another one replaces it for good. Columns belong to a sink that has the URL for itself: the first query's stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.stored_schema import decode_schema, encode_schema
from holdfast.errors import ConflictError, StateLostError
from holdfast.snapshotter.fence import Fence, key_of, looks
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.sink_log import QUERY_ID, SINK
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.sinks.files.columns import columns_of, compare
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery, another_query

KIND = "sink-queries"
#: What holdfast keeps below a sink's URL; readers of files pass over names that begin so.
FOLDER = "_holdfast"
# A sink may be called queries, too: no key of what it keeps has as few parts.
_QUERIES = f"{FOLDER}/queries"
#: The newest object says all; one that was just listed may still be read.
_KEPT = 2


@dataclass(frozen=True)
class Claims:
    """The claims on a URL.

    Attributes
    ----------
    number : int
        0 if nothing is.
    queries : mapping of str to tuple of str
        By sink all queries that have written, each after the one that it replaced.
    columns : pyarrow.Schema or None
    """

    number: int = 0
    queries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: pa.Schema | None = None


def claim(storage: ObjectStorage, query: SinkQuery, columns: pa.Schema | None = None) -> None:
    """Claim a URL for a query and its sink's name, unless another has it.

    Parameters
    ----------
    storage : ObjectStorage
        The sink's URL.
    query : SinkQuery
    columns : pyarrow.Schema, optional
        Of the rows to come, for a sink that has the URL for itself.

    Raises
    ------
    ConflictError
        Another query, which this one does not replace, has written under this name; or under another one, below a URL
        that one sink has for itself.
    SchemaMismatchError
        The first query's columns are others.
    StateLostError
        The query has decided micro-batches, and has never written there.
    """
    fence = Fence(storage, _QUERIES)
    for _ in looks(storage.url):
        found = _newest(fence)
        _refuse_others(storage, query, found, is_alone=not (columns is None and found.columns is None))
        if columns is not None and found.columns is not None:
            there = columns_of(found.columns)
            compare(columns_of(columns), there, "write to another URL", sink=query.sink, storage=storage.url)
        mine = found.queries.get(query.sink, ())
        if mine[-1:] == (query.query_id,) and (columns is None or found.columns is not None):
            return
        if query.was_shown is not None:
            raise StateLostError(
                "the query has decided micro-batches and never written to this URL: it is another one than before, or "
                "was emptied. Set it back, or restore what was there; for a new URL give the sink another name",
                sink=query.sink,
                query=query.query_id,
                storage=storage.url,
            )
        others = [query_id for query_id in mine if query_id != query.query_id]
        after = {**found.queries, query.sink: (*others, query.query_id)}
        with suppress(ConflictError):  # another query began at the same moment: look what it says
            claims = Claims(found.number + 1, after, columns if found.columns is None else found.columns)
            fence.delete(fence.take(claims.number, _encoded(claims))[:-_KEPT])
            return


def read_claims(storage: ObjectStorage) -> Claims:
    """Return the current claims on a URL.

    Raises
    ------
    CorruptionError
        It is damaged.
    """
    return _newest(Fence(storage, _QUERIES))


def _newest(fence: Fence) -> Claims:
    number, data = fence.newest()
    if data is None:
        return Claims()
    source = f"{fence.url}/{key_of(number)}"
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=0)
    fields = Fields(stored.header, source, "number", "queries", "columns")
    of_sinks = fields.inner("queries", *fields.mapping("queries"))
    queries = {sink: tuple(of_sinks.all_texts(sink)) for sink in fields.mapping("queries")}
    if fields.number("number") != number:
        fields.refuse("is another one than its name says")
    wrong = [sink for sink in queries if not SINK.fullmatch(sink)]
    wrong += [query for there in queries.values() for query in there if not QUERY_ID.fullmatch(query)]
    if wrong or not all(queries.values()):
        fields.refuse("names an invalid sink or query", name=wrong[:1])
    columns = fields.text_or_none("columns")
    if columns is not None and len(queries) > 1:
        fields.refuse("has several sinks below a URL that one has for itself", sinks=", ".join(sorted(queries)))
    try:
        return Claims(number, queries, None if columns is None else decode_schema(columns))
    except (pa.ArrowException, OSError, ValueError, TypeError):
        fields.refuse("holds no schema")


def _encoded(claims: Claims) -> pa.Buffer:
    columns = None if claims.columns is None else encode_schema(claims.columns.remove_metadata())
    queries = {sink: list(claims.queries[sink]) for sink in sorted(claims.queries)}
    return stored_file.encode(KIND, {"number": claims.number, "queries": queries, "columns": columns})[0]


def _refuse_others(storage: ObjectStorage, query: SinkQuery, found: Claims, *, is_alone: bool) -> None:
    facts = {"sink": query.sink, "query": query.query_id, "storage": storage.url}
    if is_alone and (others := found.queries.keys() - {query.sink}):
        raise ConflictError(
            "a sink with another name writes to this URL: give each its own URL", **facts, other_sink=min(others)
        )
    mine = found.queries.get(query.sink, ())
    if query.query_id in mine[:-1]:
        raise ConflictError("another query has replaced this one for good", **facts, other_query=mine[-1])
    if mine and mine[-1] not in (query.query_id, query.replaces):
        raise another_query(query, mine[-1], storage=storage.url)
