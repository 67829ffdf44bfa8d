r"""One attempt in a worker: COPY into the target and PREPARE, or COPY into the attempt's staging table.

    prepared    BEGIN; mark; COPY target …; PREPARE TRANSACTION     invisible, holds its locks until the driver ends it
    staged      BEGIN; CREATE TABLE; COPY staging table …; COMMIT   unread; the driver applies and drops the table

Arrow columns are encoded as text for ``COPY … FROM STDIN``, column by column, without Python code per row: ``value TAB
value … LF``. A null is ``\N``; a backslash escapes backslash, tab, line feed and carriage return. Only columns that
become JSON need a Python call per value.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from holdfast.errors import ClosedError, SchemaMismatchError
from holdfast.spark_integration.sinks.postgres import target
from holdfast.spark_integration.sinks.postgres.connecting import Session, give_back, translated
from holdfast.spark_integration.sinks.postgres.marks import MarkTables, PreparedPart, table_name, transaction_name
from holdfast.spark_integration.sinks.postgres.target import Check, Target, require_room
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkTransaction

_TEXT = pa.large_string()
_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))
_HEX = np.array([f"{byte:02x}".encode() for byte in range(256)], dtype="S2")
#: Rows encoded at once, which limits the memory for their text.
SLICE_ROWS = 1 << 16


def encoded(rows: pa.RecordBatch, json_columns: frozenset[str]) -> Iterator[memoryview]:
    """Encode rows in COPY's format, `json_columns` as JSON. Raises `SchemaMismatchError` for a NUL byte in text."""
    for start in range(0, rows.num_rows, SLICE_ROWS):
        part = rows.slice(start, SLICE_ROWS)
        fields = [_field(part.column(i), part.schema.field(i).name, json_columns) for i in range(part.num_columns)]
        lines = pc.binary_join_element_wise(*fields, pa.scalar("\t", _TEXT))
        yield _bytes(_joined(lines, pa.scalar("\n", _TEXT)))


def _field(column: pa.Array, name: str, json_columns: frozenset[str]) -> pa.Array:
    text = _json(column) if name in json_columns and not pa.types.is_string(column.type) else _text(column)
    if _may_need_escapes(column.type):
        _refuse_nul(text, name)
        text = _escaped(text)
    return pc.fill_null(text, pa.scalar("\\N", _TEXT))


def _may_need_escapes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_nested(kind))


def _text(column: pa.Array) -> pa.Array:
    """Return a column's values as text in PostgreSQL's input format; nulls stay null."""
    kind = column.type
    if pa.types.is_binary(kind):
        return _hex(column)
    if pa.types.is_list(kind):
        return _array(column)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        # The stored values are UTC; formatting with a zone costs Arrow a 1 µs lookup per value.
        return _joined(column.view(pa.timestamp(kind.unit)).cast(_TEXT), pa.scalar("Z", _TEXT))
    if pa.types.is_duration(kind):
        return _joined(column.cast(pa.int64()).cast(_TEXT), pa.scalar(" microseconds", _TEXT))
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
            "a string contains a NUL byte, which PostgreSQL's text cannot hold; replace it in the query, or write the "
            "column as binary into bytea",
            column=name,
        )


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
    r"""Encode lists as array literals: ``{1,NULL,"a\"b"}``."""
    column = column.cast(pa.large_list(column.type.value_type))
    elements = column.flatten()
    kind = elements.type
    if pa.types.is_list(kind) and pc.any(pc.equal(pc.list_value_length(elements), 0)).as_py():
        raise SchemaMismatchError(
            "an array within an array is empty, which PostgreSQL cannot store: [[], []] would become {}; write the "
            "column into jsonb, or filter out such rows",
            type=column.type,
        )
    text, quote = _text(elements), pa.scalar('"', _TEXT)
    if _may_need_escapes(kind) and not pa.types.is_list(kind):
        for plain, escaped in (("\\", "\\\\"), ('"', '\\"')):
            text = pc.replace_substring(text, plain, escaped)
        text = _joined(quote, text, quote)
    elif pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        text = _joined(quote, text, quote)
    text = pc.fill_null(text, pa.scalar("NULL", _TEXT))
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))]).astype(np.int64))
    joined = pc.binary_join(pa.LargeListArray.from_arrays(offsets, text), pa.scalar(",", _TEXT))
    literal = _joined(pa.scalar("{", _TEXT), joined, pa.scalar("}", _TEXT))
    return pc.if_else(column.is_valid(), literal, pa.scalar(None, _TEXT))


def _json(column: pa.Array) -> pa.Array:
    try:
        written = partial(json.dumps, ensure_ascii=False, default=_json_value, allow_nan=False)
        values = column.to_pylist(maps_as_pydicts="strict")
        return pa.array([None if value is None else written(value) for value in values], _TEXT)
    except (ValueError, TypeError, KeyError, OverflowError):
        problem = (
            "JSON cannot hold NaN, infinity or years outside 1 to 9999, and a map's keys must be distinct strings or "
            "numbers; change the column in the query, or convert it to text with to_json"
        )
    # Not chained to the error, which quotes a value.
    raise SchemaMismatchError(problem, type=column.type)


def _json_value(value: Any) -> str:
    # Like Spark's to_json: base64 bytes, ISO times; decimals become text that keeps all digits.
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _bytes(lines: pa.Array) -> memoryview:
    offsets = np.frombuffer(lines.buffers()[1], np.int64)
    begin, end = offsets[lines.offset], offsets[lines.offset + len(lines)]
    return memoryview(lines.buffers()[2])[begin:end]


# The free slots, less the open transactions of other workers, which will also prepare. The query runs in a transaction,
# so concurrent workers count each other. In this order, a transaction that is being prepared may be counted twice.
_BEGIN = """
BEGIN; SELECT current_setting('max_prepared_transactions')::int
    - (SELECT count(*) FROM pg_stat_activity
       WHERE starts_with(application_name, 'hf_') AND xact_start IS NOT NULL AND pid <> pg_backend_pid())
    - (SELECT count(*) FROM pg_prepared_xacts)"""


class CopyTransaction(SinkTransaction):
    """One attempt's COPY; it owns the session of `marks` until it is prepared or aborted."""

    def __init__(self, attempt: SinkAttempt, marks: MarkTables, keys: Sequence[str], schema: pa.Schema) -> None:
        self._attempt, self._marks, self._target, self._keys = attempt, marks, marks.target, keys
        self._session: Session | None = marks.session
        index = self._target.key_index(keys)
        self._nulls_are_equal = index is not None and index.nulls_are_equal
        self._json = frozenset(
            name for name in schema.names if self._target.columns[name].kind.name in ("json", "jsonb")
        )
        self._facts = {"sink": attempt.query.sink, "partition": attempt.partition}
        with self._translated("beginning a transaction"):
            may_wait = self._target.why_staged(keys, schema.names) is None
            self.staged = not (may_wait and self._begin_with_room())
            if self.staged:
                into = self._begin_staged(schema, has_begun=may_wait)
            else:
                marks.session.run(marks.remember(attempt.batch_id, [attempt.attempt_id]))
                into = self._target.identifier
            named = sql.SQL(", ").join(map(sql.Identifier, schema.names))
            copying = sql.SQL("COPY {} ({}) FROM STDIN").format(into, named)
            self._copying = marks.session.connection.cursor().copy(copying)
            self._copy: psycopg.Copy = self._copying.__enter__()

    def write(self, rows: pa.RecordBatch) -> None:
        if not self._nulls_are_equal:
            self._refuse_null_keys(rows)
        for name in rows.schema.names:
            require_room(rows.column(name), name, self._target.columns[name].kind)
        rows = by_key(rows, self._keys)
        with self._translated("copying rows"):
            for text in encoded(rows, self._json):
                self._copy.write(text)

    def prepare(self) -> Handle:
        session, attempt = self._open_session(), self._attempt
        with self._translated("preparing a transaction"):
            self._copying.__exit__(None, None, None)
            if self.staged:
                session.run("COMMIT")
                part = PreparedPart(table_name(attempt), self._marks.schema)
            else:
                part = PreparedPart(transaction_name(attempt))
                session.run(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(part.name)))
        self._session = None
        give_back(session)
        return part.to_json()

    def abort(self) -> None:
        # Closing the connection rolls back its transaction, in any state.
        if self._session is not None:
            self._session.close()
            self._session = None
            with suppress(psycopg.Error):
                self._copying.__exit__(None, None, None)

    def _open_session(self) -> Session:
        if self._session is None:
            raise ClosedError("the transaction was already prepared or aborted", **self._facts)
        return self._session

    def _begin_with_room(self) -> bool:
        """Begin the transaction; return whether the server has a free slot to prepare it."""
        cursor = self._open_session().connection.execute(_BEGIN)
        cursor.nextset()
        return bool(cursor.fetchall()[0][0] > 0)

    def _begin_staged(self, schema: pa.Schema, *, has_begun: bool) -> sql.Identifier:
        session, attempt = self._open_session(), self._attempt
        table = sql.Identifier(self._marks.schema, table_name(attempt))
        comment = f"holdfast: sink {attempt.query.sink}, query {attempt.query.query_id}, batch {attempt.batch_id}"
        begin = sql.SQL("" if has_begun else "BEGIN; ")
        make = sql.SQL("{}CREATE TABLE {} ({}) WITH (autovacuum_enabled = off); COMMENT ON TABLE {} IS {}")
        columns = _staging_columns(self._target, schema, target.checks(session, self._target))
        session.connection.execute(make.format(begin, table, columns, table, sql.Literal(comment)))
        return table

    def _refuse_null_keys(self, rows: pa.RecordBatch) -> None:
        for key in self._keys:
            if rows.column(rows.schema.get_field_index(key)).null_count:
                raise SchemaMismatchError(
                    "a key is null, and null equals no key of the table; filter out such rows, replace the null, or "
                    "make the unique index NULLS NOT DISTINCT (PostgreSQL 15)",
                    column=key, **self._facts,
                )  # fmt: skip

    def _translated(self, doing: str) -> Any:
        return translated(doing, **self._facts)


def by_key(rows: pa.RecordBatch, keys: Sequence[str]) -> pa.RecordBatch:
    """Sort rows by key, stably: index lookups in key order save a quarter of the server's time."""
    if not keys or any(pa.types.is_nested(rows.schema.field(key).type) for key in keys):
        return rows
    return rows.take(pc.sort_indices(rows, [(key, "ascending") for key in keys]))


def _staging_columns(into: Target, schema: pa.Schema, checks: Sequence[Check]) -> sql.Composed:
    """Return staging columns with the target's NOT NULL and CHECK constraints, so that errors occur in the worker."""
    parts: list[sql.Composable] = []
    for name in schema.names:
        column = into.columns[name]
        null = sql.SQL(" NOT NULL" if column.not_null else "")
        parts.append(sql.SQL("{} {}{}").format(sql.Identifier(name), sql.SQL(column.declared + column.collation), null))
    parts += (
        sql.SQL("CONSTRAINT {} {}").format(sql.Identifier(check.name), sql.SQL(check.text))
        for check in checks
        if not check.of_whole_row and check.columns <= {*schema.names}
    )
    return sql.SQL(", ").join(parts)
