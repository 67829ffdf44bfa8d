"""A worker's side: rows become messages of one producer for one attempt, whose transaction outlives it.

    Producer(transactional.id of this attempt) ─ init_transactions ─ begin ─ produce … ─ flush ─ describe ─ gone
                                                                                          │
                              handle: transactional id, producer id, epoch  ◀─────────────┘

Kafka's clients have no "prepare". But a transaction whose messages have all been acknowledged is durable and invisible,
and its coordinator lets anyone end it who gives its id, producer id and epoch; the coordinator tells the latter two. A
destroyed producer leaves its transaction unchanged.

Rows have the columns that Spark's Kafka sink takes, and ``timestamp``:

    value       string or binary; null deletes the key in a compacted topic    required
    key         string or binary                                               optional
    topic       string                                                         where the sink has no topic of its own
    partition   int                                                            optional; null: by the key
    headers     array<struct<key: string, value: binary>>                      optional
    timestamp   timestamp, kept in milliseconds                                optional; null: now
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import confluent_kafka as client
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError

from holdfast import clock
from holdfast.errors import (
    ClosedError,
    FencedError,
    HoldfastError,
    InvalidArgumentError,
    SchemaMismatchError,
    UnavailableError,
)
from holdfast.spark_integration.sinks.kafka.brokers import ONGOING, PreparedTransaction, describe
from holdfast.spark_integration.sinks.kafka.options import ClientOptions
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkTransaction
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
        raise InvalidArgumentError("no topic is given: pass one to sinks.kafka, or add a column topic")
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
        _refuse_below(ms, 1, "Kafka takes no timestamp of 1970-01-01 or before; put it into value")
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


# ruff: noqa: SLF001  librdkafka's own codes begin with _, but are public.

_log = logging.getLogger("holdfast.kafka")

_SLICE_ROWS = 10_000
_FULL_S, _FLUSH_S, _STEP_S = 0.01, 0.05, 0.5
_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
#: What the user must correct.
_WRONG = {
    KafkaError.MSG_SIZE_TOO_LARGE: "a message is larger than the client or the topic allows; raise message.max.bytes "
    "and the topic's max.message.bytes, or write less",
    KafkaError.RECORD_LIST_TOO_LARGE: "messages are larger than the topic allows; raise its max.message.bytes",
    KafkaError._UNKNOWN_TOPIC: "there is no such topic; create it",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "there is no such topic or partition; create it",
    KafkaError._UNKNOWN_PARTITION: "the topic has no such partition; correct the column partition",
    KafkaError.TOPIC_EXCEPTION: "this is not a topic name; correct it",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the user has no right to write to the topic",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "the user has no right to write transactional ids that begin "
    "with holdfast.<name of the sink>.",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "the user has no right to write in transactions",
    KafkaError._AUTHENTICATION: "the brokers refused the credentials; check sasl.username and sasl.password",
    KafkaError.SASL_AUTHENTICATION_FAILED: "the brokers refused the credentials; check sasl.username and sasl.password",
    KafkaError._SSL: "no TLS connection to the brokers; check security.protocol and the ssl options",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "the brokers do not allow transactions of this length; lower "
    "transaction.timeout.ms to their transaction.max.timeout.ms",
    KafkaError._INVALID_ARG: "librdkafka does not take an option or a value",
}


class KafkaTransaction(SinkTransaction):
    """See the module."""

    def __init__(
        self, options: ClientOptions, transactional_id: str, topic: str | None, *, timeout_ms: int, patience_ms: int
    ) -> None:
        self._options, self._id, self._topic = options, transactional_id, topic
        self._patience_ms = patience_ms
        self._failed: HoldfastError | None = None
        self._noticed_last: KafkaError | None = None
        self._count = 0
        self._producer: client.Producer | None = None
        settings = options.for_producer(transactional_id, timeout_ms)
        callbacks = {"on_delivery": self._delivered, "error_cb": self._noticed}
        producer = producer_of(options, settings | callbacks)
        self._begin(producer)
        self._producer = producer

    def write(self, rows: pa.RecordBatch) -> None:
        producer = self._open()
        for start in range(0, len(rows), _SLICE_ROWS):
            self._produce(producer, messages(rows.slice(start, _SLICE_ROWS), self._topic))
            self._serve(producer)
        self._count += len(rows)

    def prepare(self) -> Handle:
        producer = self._open()
        if not self._count:
            # The coordinator has seen no partition: there is nothing to end.
            self._producer = None
            return PreparedTransaction(self._id, -1, -1).handle()
        try:
            while producer.flush(_FLUSH_S):
                self._serve(producer)
        except client.KafkaException as exc:
            raise self._error(exc.args[0]) from None
        self._serve(producer)
        handle = self._described()
        self._producer = None
        return handle

    def abort(self) -> None:
        producer, self._producer = self._producer, None
        if producer is None:
            return
        try:
            producer.purge()
            producer.abort_transaction(self._patience_ms / 1000)
        except client.KafkaException as exc:
            # The broker ends it when its time is up, and the next run's leftovers name it before that.
            _log.info("not aborted: %s", self._options.without_secrets(exc.args[0].str()))

    def _begin(self, producer: client.Producer) -> None:
        end_ms = clock.monotonic_ms() + self._patience_ms
        while True:
            try:
                producer.init_transactions(_STEP_S)
                producer.begin_transaction()
                return
            except client.KafkaException as exc:
                # Why a connection fails is told to a callback only, and the client goes on trying.
                self._serve(producer)
                if self._noticed_last is not None and self._noticed_last.code() in _WRONG:
                    raise self._error(self._noticed_last) from None
                if not exc.args[0].retriable() or clock.monotonic_ms() > end_ms:
                    raise self._error(exc.args[0]) from None

    def _produce(self, producer: client.Producer, found: Iterable[Message]) -> None:
        produce = producer.produce
        for topic, value, key, partition, time_ms, headers in found:
            while True:
                try:
                    produce(topic, value, key, partition, None, None, time_ms, headers)
                    break
                except BufferError:
                    self._serve(producer, _FULL_S)
                except client.KafkaException as exc:
                    self._serve(producer)  # the error that ended the producer before, if there is one
                    raise self._error(exc.args[0], topic=topic) from None

    def _serve(self, producer: client.Producer, wait_s: float = 0) -> None:
        """Run callbacks, and raise the errors that they received."""
        try:
            producer.poll(wait_s)
        except client.KafkaException as exc:
            raise self._error(exc.args[0]) from None
        if self._failed is not None:
            raise self._failed

    def _error(self, error: KafkaError, **facts: object) -> HoldfastError:
        code, facts = error.code(), {"transactional_id": self._id, **facts}
        facts["reason"] = self._options.without_secrets(error.str())
        if code in _FENCED:
            return FencedError("another attempt or the driver has ended this transaction", **facts)
        if code in _WRONG:
            return InvalidArgumentError(_WRONG[code], **facts)
        return UnavailableError("the brokers did not accept the messages", **facts)

    def _open(self) -> client.Producer:
        if self._producer is None:
            raise ClosedError("the transaction has been prepared or aborted", transactional_id=self._id)
        return self._producer

    def _described(self) -> Handle:
        """Return the handle with the coordinator's numbers."""
        with self._options.cluster(self._patience_ms) as cluster:
            known = describe(cluster, [self._id]).get(self._id)
        if known is None or known.state != ONGOING:
            state = None if known is None else known.state
            raise UnavailableError("the transaction was not kept", state=state, transactional_id=self._id)
        return PreparedTransaction(self._id, known.producer_id, known.epoch).handle()

    def _noticed(self, error: KafkaError) -> None:
        self._noticed_last = error

    def _delivered(self, error: KafkaError | None, message: client.Message) -> None:
        if error is not None and self._failed is None:
            self._failed = self._error(error, topic=message.topic(), partition=message.partition())


def producer_of(options: ClientOptions, settings: dict[str, Any]) -> client.Producer:
    """Return a producer that logs to ``holdfast.kafka``. Raises `InvalidArgumentError` for an invalid option."""
    try:
        return client.Producer(settings, logger=_log)
    except client.KafkaException as exc:
        raise InvalidArgumentError(
            "librdkafka rejects the options of the Kafka sink", reason=options.without_secrets(exc.args[0].str())
        ) from None
