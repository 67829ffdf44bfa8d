"""Rows become messages: the columns that Spark's Kafka sink takes, and ``timestamp``.

value       string or binary; null deletes the key in a compacted topic    required
key         string or binary                                               optional
topic       string                                                         where the sink has no topic of its own
partition   int                                                            optional; null: by the key
headers     array<struct<key: string, value: binary>>                      optional
timestamp   timestamp, kept in milliseconds                                optional; null: now
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.spark_types import require_utf8

#: Of librdkafka: the partition follows from the key; the time is now.
_BY_KEY, _NOW = -1, 0

Message = tuple[str, Any, Any, int, int, Any]


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_payload(kind: pa.DataType) -> bool:
    binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return binary or _is_text(kind)


def _is_headers(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return fields.keys() == {"key", "value"} and _is_text(fields["key"]) and _is_payload(fields["value"])


_EXPECTED: dict[str, tuple[str, Callable[[pa.DataType], bool]]] = {
    "value": ("string or binary", _is_payload),
    "key": ("string or binary", _is_payload),
    "topic": ("string", _is_text),
    "partition": ("int", pa.types.is_int32),
    "headers": ("array<struct<key: string, value: binary>>", _is_headers),
    "timestamp": ("timestamp", pa.types.is_timestamp),
}


def check_schema(schema: pa.Schema, topic: str | None) -> None:
    """Raise SchemaMismatchError unless rows of this schema are messages; InvalidArgumentError for no topic, or two."""
    for field in schema:
        if field.name not in _EXPECTED:
            raise SchemaMismatchError(
                f"a Kafka message has no such column; it has {', '.join(_EXPECTED)}: put the rest into value, as with "
                "to_json(struct(*)), or drop it",
                column=field.name,
            )
        wanted, fits = _EXPECTED[field.name]
        if not fits(field.type):
            raise SchemaMismatchError(
                "a column has a different type than Spark's Kafka sink expects; cast it",
                column=field.name, type=field.type, expected=wanted,
            )  # fmt: skip
    names = schema.names
    if len(set(names)) < len(names):
        raise SchemaMismatchError("two columns have the same name", columns=", ".join(names))
    if "value" not in names:
        raise SchemaMismatchError("a Kafka message needs the column value", columns=", ".join(names))
    if topic is None and "topic" not in names:
        raise InvalidArgumentError("which topic? pass one to sinks.kafka, or add a column topic")
    if topic is not None and "topic" in names:
        raise InvalidArgumentError("sink and rows both have a topic; drop the column, or the argument of sinks.kafka")


def messages(rows: pa.RecordBatch, topic: str | None) -> Iterator[Message]:
    """Return topic, value, key, partition, timestamp and headers of each row, in order."""

    def column(name: str, default: object) -> Any:
        return rows.column(name).to_pylist() if name in rows.schema.names else repeat(default, len(rows))

    def payload(name: str) -> Any:
        if name not in rows.schema.names:
            return repeat(None, len(rows))
        given = rows.column(name)
        # Spark's text may be no UTF-8, and its own sink sends the bytes as well.
        return (given.cast(pa.large_binary()) if _is_text(given.type) else given).to_pylist()

    require_utf8(rows.select([name for name in ("topic", "headers") if name in rows.schema.names]), "the messages")
    if topic is None and rows.column("topic").null_count:
        raise InvalidArgumentError("a row has no topic; fill the column topic, or pass one to sinks.kafka")
    partitions, times = column("partition", _BY_KEY), repeat(_NOW, len(rows))
    if "partition" in rows.schema.names:
        numbers = rows.column("partition")
        _refuse_below(numbers, 0, "a row has a negative partition; null lets the key choose")
        partitions = pc.fill_null(numbers, _BY_KEY).to_pylist()
    if "timestamp" in rows.schema.names:
        ms = rows.column("timestamp").cast(pa.timestamp("ms", rows.column("timestamp").type.tz), safe=False)
        ms = ms.cast(pa.int64())
        # For the client 0 is now, and for the broker -1 no time at all.
        _refuse_below(ms, 1, "a row has a timestamp that Kafka has not, of 1970-01-01 or before; put it into value")
        times = pc.fill_null(ms, _NOW).to_pylist()
    headers: Any = repeat(None, len(rows))
    if "headers" in rows.schema.names:
        headers = (_headers(one) for one in rows.column("headers").to_pylist())
    return zip(column("topic", topic), payload("value"), payload("key"), partitions, times, headers, strict=False)


def _refuse_below(numbers: pa.Array, least: int, problem: str) -> None:
    lowest = pc.min(numbers).as_py()
    if lowest is not None and lowest < least:
        raise InvalidArgumentError(problem, lowest=lowest)


def _headers(found: list[dict[str, Any] | None] | None) -> list[tuple[str, Any]] | None:
    if not found:
        return None
    if any(one is None or one["key"] is None for one in found):
        raise InvalidArgumentError("a header of a Kafka message has no key; filter it out")
    return [(one["key"], one["value"]) for one in found if one is not None]
