"""The storage at a file sink's URL, the queries that write to it, and the columns of their rows.

    _holdfast/queries/00000000000000000002    `Writers`, in a fence whose newest object is complete: FORMAT.md section 9

The last query in a sink's list owns the sink's name until another query permanently replaces it. A sink that has the
URL to itself keeps the first query's columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

import pyarrow as pa
import pyarrow.types as pt

from holdfast.backends.schema import decode_schema, encode_schema
from holdfast.errors import ConflictError, CorruptionError, NotFoundError, SchemaMismatchError, StateLostError
from holdfast.snapshotter.fence import Fence, key_of, looks
from holdfast.snapshotter.fields import QUERY_ID, Coding, Fields, Stored, refuse_stray
from holdfast.snapshotter.sink_log import SINK
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.probe import probe_storage
from holdfast.spark_integration.shard.task import io_executor, kept_storage
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery, another_query

_PLAIN = {
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    *(pa.string(), pa.binary(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")),
}


def check_columns(schema: pa.Schema) -> None:
    """Raise `SchemaMismatchError` for a type that readers would change, or equal names, ignoring case."""
    names = [field.name.lower() for field in schema]
    for column in schema:
        if names.count(column.name.lower()) > 1:
            raise SchemaMismatchError("two columns have the same name, ignoring case: rename one", column=column.name)
        problem = _problem(column.type)
        if problem:
            raise SchemaMismatchError(f"a column has a type that {problem}", column=column.name, type=str(column.type))


def _problem(t: pa.DataType) -> str | None:
    """Return why a type is unsupported, as the end of a sentence; None if it is supported."""
    if pt.is_decimal128(t):
        return None if 0 <= t.scale <= t.precision else "Spark's decimals cannot represent: cast it"
    if pt.is_duration(t):
        return "Parquet does not support: cast it to bigint"
    if pt.is_null(t):
        return "holds only nulls: cast it to the intended type"
    if pt.is_list(t):
        return _problem(t.value_type)
    if pt.is_map(t):
        return _problem(t.key_type) or _problem(t.item_type)
    if pt.is_struct(t):
        names = [t.field(i).name.lower() for i in range(t.num_fields)]
        if len(set(names)) < len(names):
            return "has two fields with the same name, ignoring case: rename one"
        problems: Iterable[str | None] = (_problem(t.field(i).type) for i in range(t.num_fields))
        return next(filter(None, problems), None) if t.num_fields else "has no fields: drop it"
    return None if t in _PLAIN else "not every Parquet reader supports: cast it to a Spark type"


def _plain_type(t: pa.DataType) -> str:
    """Return a type as text, without element names and nullability."""
    if pt.is_list(t):
        return f"list<{_plain_type(t.value_type)}>"
    if pt.is_map(t):
        return f"map<{_plain_type(t.key_type)}, {_plain_type(t.item_type)}>"
    if pt.is_struct(t):
        return f"struct<{', '.join(f'{t.field(i).name}: {_plain_type(t.field(i).type)}' for i in range(t.num_fields))}>"
    return str(t)


def columns_of(schema: pa.Schema) -> dict[str, str]:
    """Map column names to types as text, for handles."""
    return {field.name: _plain_type(field.type) for field in schema}


def compare(given: Mapping[str, str], there: Mapping[str, str], for_new: str, **facts: str) -> None:
    """Raise `SchemaMismatchError` unless the columns equal the target's; `for_new` says how to add a column."""
    if missing := sorted(there.keys() - given.keys()):
        raise SchemaMismatchError(
            "the rows lack a column of the target: select it, or null cast to its type",
            column=missing[0],
            **facts,
        )
    if new := sorted(given.keys() - there.keys()):
        raise SchemaMismatchError(
            f"the target has no such column: {for_new}, or drop it from the rows", column=new[0], **facts
        )
    for name, mine in given.items():
        if mine != there[name]:
            raise SchemaMismatchError(
                "a column has a different type than in the target: cast it",
                column=name, type=mine, there=there[name], **facts,
            )  # fmt: skip


#: The folder of holdfast's own files below a sink's URL; file readers skip names that begin with ``_``.
FOLDER = "_holdfast"
# A sink may have one of these names: its keys have more segments.
_QUERIES, _PROBES = f"{FOLDER}/queries", f"{FOLDER}/probes"
#: The newest object is complete; its predecessor may have been listed and still be read.
_KEPT = 2


def _decoded_columns(text: str | None) -> pa.Schema | None:
    try:
        return None if text is None else decode_schema(text)
    except (pa.ArrowException, OSError, ValueError, TypeError) as exc:
        raise CorruptionError("its schema cannot be decoded") from exc


def _encoded_columns(columns: pa.Schema | None) -> str | None:
    return None if columns is None else encode_schema(columns.remove_metadata())


@dataclass(frozen=True)
class Writers(Stored, kind="sink-queries"):
    """The sinks and queries that write to a URL."""

    number: int = 0  #: 0 if no query has written
    #: Sink name to queries, each after the query that it replaced
    queries: Mapping[str, tuple[Annotated[str, QUERY_ID], ...]] = field(default_factory=dict)
    columns: Annotated[pa.Schema | None, Coding(str | None, _decoded_columns, _encoded_columns)] = None

    def require(self, header: Fields) -> None:
        if not all(SINK.fullmatch(sink) and queries for sink, queries in self.queries.items()):
            header.refuse("names an invalid sink, or one without queries", sinks=", ".join(self.queries))
        if self.columns is not None and len(self.queries) > 1:
            header.refuse("lists several sinks at a URL that belongs to one", sinks=", ".join(self.queries))


def claim(storage: ObjectStorage, query: SinkQuery, columns: pa.Schema | None = None) -> None:
    """Claim a sink's name at the storage's URL for a query; `columns` if the sink needs the URL to itself.

    Raises `ConflictError` if a query that is not replaced owns the name, `SchemaMismatchError` for different columns,
    `StateLostError` if the query has decided micro-batches but never wrote to this URL.
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
                "the query has decided micro-batches but never written to this URL: the URL has changed, or was "
                "emptied. Set it back, or restore its contents; for a new URL give the sink another name",
                sink=query.sink,
                query=query.query_id,
                storage=storage.url,
            )
        if not found.number:  # after a decision it would be too late to refuse
            probe_storage(storage, _PROBES, checked="the sink's URL failed the check at its first start")
        others = [query_id for query_id in mine if query_id != query.query_id]
        after = dict(sorted({**found.queries, query.sink: (*others, query.query_id)}.items()))
        with suppress(ConflictError):  # another query claimed the URL concurrently: look again
            writers = Writers(found.number + 1, after, columns if found.columns is None else found.columns)
            fence.delete(fence.take(writers.number, writers.encode())[:-_KEPT])
            return


def writers_at(storage: ObjectStorage) -> Writers:
    """Return the writers of a storage's URL."""
    return _newest(Fence(storage, _QUERIES))


def _newest(fence: Fence) -> Writers:
    number, data = fence.newest()
    if data is None:
        return Writers()
    source = f"{fence.url}/{key_of(number)}"
    writers = Writers.decode(data, source)
    if writers.number != number:
        refuse_stray(source, number=writers.number)
    return writers


def _refuse_others(storage: ObjectStorage, query: SinkQuery, found: Writers, *, is_alone: bool) -> None:
    facts = {"sink": query.sink, "query": query.query_id, "storage": storage.url}
    if is_alone and (others := found.queries.keys() - {query.sink}):
        raise ConflictError(
            "a sink with another name writes to this URL: give each its own URL", **facts, other_sink=min(others)
        )
    mine = found.queries.get(query.sink, ())
    if query.query_id in mine[:-1]:
        raise ConflictError("another query has permanently replaced this one", **facts, other_query=mine[-1])
    if mine and mine[-1] not in (query.query_id, query.replaces):
        raise another_query(query, mine[-1], storage=storage.url)


#: Prefix of options for the `deltalake` package alone.
DELTA_PREFIX = "delta."


def storage_of(url: str, options: Mapping[str, str]) -> ObjectStorage:
    """Return the process's storage for a URL and a query's options; see `kept_storage`."""
    return kept_storage(url, tuple(sorted(one for one in options.items() if not one[0].startswith(DELTA_PREFIX))))


def sizes_of(storage: ObjectStorage, keys: Iterable[str]) -> list[int]:
    """Return the sizes of objects without reading them; -1 for a missing object."""
    return list(io_executor().map(lambda key: _size_of(storage, key), keys))


def _size_of(storage: ObjectStorage, key: str) -> int:
    try:
        return len(storage.get(key, limit_bytes=0))
    except NotFoundError:
        return -1
    except CorruptionError as exc:
        # The error contains the size; the object was not read.
        size = exc.facts.get("size_bytes")
        if not isinstance(size, int):
            raise
        return size
