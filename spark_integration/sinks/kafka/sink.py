"""`KafkaSink`: writes a query's results as messages to Kafka exactly once.

    transactional id   holdfast.<sink>.<query>.<batch>.<partition>.<attempt>     of the attempt that first used it
                       holdfast.<sink>.check                                     used by `open` to check permissions
    consumer group     holdfast.<sink>     an offset at partition 0              the mark, see below
    handle             transactional_id, producer_id, epoch                      assigned by Kafka; no secrets

Names of sinks and queries contain no dots, so no id starts with a different query's prefix.

The mark records which query writes under a sink's name, and its newest completely visible micro-batch:

    consumer group   holdfast.<sink>     topic, partition 0
    offset           micro-batch + 1; 0 if the query has committed nothing yet
    metadata         the ids of the query and of the topic

The driver commits this offset after a micro-batch: the mark may lag by one, but is never ahead. An overtaken driver may
write it late and set it back, so a start assumes that everything before the last decision was visible. The group has no
members. Brokers drop such offsets after a week unless a commit sets their retention, as OffsetCommit could until
version 4. The mark is deleted with its topic, but with a short delay: until then, the topic id reveals a recreated
topic. Brokers upgraded from before 2.8 report all-zero ids until `inter.broker.protocol.version` is raised.

Each attempt of a worker writes its rows through its own producer, and the transaction outlives the producer:

    Producer(transactional.id of this attempt) ─ init_transactions ─ begin ─ produce … ─ flush ─ describe ─ gone
                                                                                          │
                              handle: transactional id, producer id, epoch  ◀─────────────┘

Kafka's clients have no "prepare". However, once all its messages are acknowledged, a transaction is durable but
invisible, and any client that presents its transactional id, producer id and epoch can end it; DescribeTransactions
returns the latter two. A destroyed producer leaves its transaction unchanged.

Rows have the columns of Spark's Kafka sink, and ``timestamp``: docs/kafka-sink.md.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, ClassVar

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
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.sink_log import checked_sink
from holdfast.spark_integration.sinks.kafka import brokers, protocol
from holdfast.spark_integration.sinks.kafka.brokers import Cluster, PreparedTransaction, refused
from holdfast.spark_integration.sinks.kafka.options import CREDENTIALS, SERVERS, TIMEOUT, ClientOptions
from holdfast.spark_integration.sinks.kafka.protocol import CommittedOffset, TransactionDescription
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    ReusingSink,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    another_query,
    warn_of_another_driver,
)
from holdfast.spark_integration.spark_types import require_utf8

_log = logging.getLogger("holdfast.kafka")
_NO_ID = "0" * 32
_KAFKAS_TIMEOUT_MS = 900_000  # the default of transaction.max.timeout.ms
_MAY_WRITE = 1 << 4
# The brokers' limits by ``bootstrap.servers``, read once per process.
_limits_ms: dict[str, int] = {}


class Mark:
    """The mark of a sink at a topic; the module describes it."""

    def __init__(self, cluster: Cluster, sink: str, topic: str) -> None:
        self._cluster, self._sink, self._topic = cluster, sink, topic
        self._group = f"holdfast.{sink}"
        self._known_id: str | None = None

    def claim(self, query: SinkQuery) -> int:
        """Make this query the sink's writer; return its newest visible micro-batch, -1 if there is none.

        Raises `ConflictError` if a query that is not replaced owns the mark, `StateLostError` if the mark is gone.
        """
        mark, was_shown = self._read(), -1 if query.was_shown is None else query.was_shown
        if mark is None and query.was_shown is not None:
            # A new mark would look as if it lagged behind the first micro-batch, although its messages are gone.
            raise self._gone()
        if mark is not None and mark.text == query.query_id:
            return max(mark.offset - 1, was_shown)
        if mark is not None and mark.text != query.replaces:
            raise another_query(query, mark.text)
        self._write(query, 0)
        return was_shown

    def require(self, query: SinkQuery, batch_id: int) -> bool:
        """Return whether the micro-batch is marked as visible. Raises `StateLostError` if the mark is gone."""
        mark = self._read()
        if mark is None:
            raise self._gone(batch=batch_id)
        return mark.text == query.query_id and mark.offset > batch_id

    def put(self, query: SinkQuery, batch_id: int) -> None:
        """Mark a micro-batch as visible, unless the query was replaced or a later micro-batch is marked."""
        mark = self._read()
        if mark is not None and mark.text == query.query_id and mark.offset <= batch_id:
            self._write(query, batch_id + 1)

    def _gone(self, **facts: object) -> StateLostError:
        return StateLostError(
            "the topic lacks the sink's mark: it is not the original topic, or was deleted or recreated, so results "
            "are gone; or someone deleted the consumer group. Name the original topic, or give the sink another name "
            "to start over",
            sink=self._sink, topic=self._topic, group=self._group, **facts,
        )  # fmt: skip

    def _read(self) -> CommittedOffset | None:
        request = protocol.fetch_offsets(self._group)
        code, marks = self._cluster.ask_coordinator(self._group, request, lambda answer: answer[0], group=True)
        if code:
            raise refused(code, f"read the consumer group {self._group}")
        for mark in marks:
            query_id, _, topic_id = mark.text.partition(" ")
            is_here = mark.topic == self._topic and mark.offset >= 0
            if is_here and (topic_id == self._topic_id() or _NO_ID in (topic_id, self._topic_id())):
                return CommittedOffset(mark.topic, mark.offset, query_id)
        return None

    def _write(self, query: SinkQuery, offset: int) -> None:
        mark = CommittedOffset(self._topic, offset, f"{query.query_id} {self._topic_id()}")
        request = protocol.commit_offset(self._group, mark)
        code = self._cluster.ask_coordinator(self._group, request, lambda answer: answer, group=True)
        if code:
            raise refused(code, f"store an offset of the consumer group {self._group} at the topic {self._topic}")

    def _topic_id(self) -> str:
        """Return the topic's id; for a missing topic, a text that matches no mark."""
        if self._known_id is None:
            found = brokers.find_topic(self._cluster, self._topic)
            self._known_id = found.topic_id if found else "gone"
        return self._known_id


class KafkaSink(ReusingSink):
    """The sink that `holdfast.sinks.kafka` returns."""

    credentials: ClassVar[Sequence[str]] = CREDENTIALS

    def __init__(
        self, name: str, topic: str | None = None, *, servers: str | None = None, timeout_s: float = 30
    ) -> None:
        if topic is not None and (not re.fullmatch(r"[A-Za-z0-9_.-]{1,249}", topic) or topic in (".", "..")):
            raise InvalidArgumentError("not a valid topic name", topic=topic)
        if not 0.001 <= timeout_s <= 3600:
            raise InvalidArgumentError("timeout_s must be from 0.001 to 3600", sink=name, timeout_s=timeout_s)
        self.name, self.topic, self.servers = checked_sink(name), topic, servers
        self._patience_ms = round(timeout_s * 1000)

    def __repr__(self) -> str:
        return f"KafkaSink({self.name!r}, topic={self.topic!r}, servers={self.servers!r})"

    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        check_schema(schema, self.topic)
        options = self._options(query)
        # Check the options before contacting brokers: creating a producer rejects unknown options.
        timeout_ms = options.timeout_ms
        producer_of(options, options.for_producer(self._check_id, timeout_ms or _KAFKAS_TIMEOUT_MS))
        with options.cluster(self._patience_ms) as cluster:
            if self.topic is not None:
                found = brokers.find_topic(cluster, self.topic)
                if found is None:
                    raise InvalidArgumentError(
                        "there is no such topic, or it is hidden from the user; create it", topic=self.topic
                    )
                if not found.operations & _MAY_WRITE:
                    raise InvalidArgumentError("the user has no right to write to the topic", topic=self.topic)
            self._check_rights(cluster, timeout_ms or _longest_ms(cluster, options))
            return None if self.topic is None else Mark(cluster, self.name, self.topic).claim(query)

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        return self.begin_reusing(attempt, schema, None)

    def begin_reusing(self, attempt: SinkAttempt, schema: pa.Schema, spare: Handle | None) -> SinkTransaction:
        check_schema(schema, self.topic)
        options = self._options(attempt.query)
        with options.cluster(self._patience_ms) as cluster:
            timeout_ms = options.timeout_ms or _limits_ms.get(options.values[SERVERS]) or _longest_ms(cluster, options)
            transactional_id = self._id(cluster, attempt, spare)
        return KafkaTransaction(
            options, transactional_id, self.topic, timeout_ms=timeout_ms, patience_ms=self._patience_ms
        )

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        wanted = brokers.with_rows(handles, self._prefix(query.query_id))
        with self._cluster(query) as cluster:
            if self.topic is not None:
                Mark(cluster, self.name, self.topic).require(query, batch_id)
            known = _described(cluster, wanted)
        gone = [one for one in wanted if not one.is_open(known)]
        if gone:
            raise UnavailableError(
                "transactions ended before their decision: they exceeded transaction.timeout.ms, or someone aborted "
                "them; the micro-batch is written again",
                batch=batch_id, gone=len(gone), of=len(wanted), first=gone[0].transactional_id,
            )  # fmt: skip

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        wanted = brokers.with_rows(handles, self._prefix(query.query_id))
        with self._cluster(query) as cluster:
            mark = None if self.topic is None else Mark(cluster, self.name, self.topic)
            is_shown = mark is not None and mark.require(query, batch_id)
            known = _described(cluster, wanted)
            committed = [one for one in wanted if one.is_committed(known)]
            waiting = [one for one in wanted if one.is_open(known)]
            if is_shown and waiting:
                # The mark is written last, so these belong to another driver: committing them would duplicate rows.
                warn_of_another_driver(query, batch_id)
                for one in waiting:
                    brokers.fence(cluster, one.transactional_id)
                return
            alive = committed + waiting
            # If some transactions are lost and none is committed, commit none: no part may become visible.
            if len(alive) == len(wanted) or committed:
                alive = [one for one in alive if brokers.commit(cluster, one)]
            if len(alive) == len(wanted):
                brokers.ended(cluster, [one.transactional_id for one in wanted])
                brokers.fence_others(cluster, self._prefix(query.query_id), batch_id, wanted)
                if mark is not None:
                    mark.put(query, batch_id)
                return
            # Coordinators forget even committed transactions' ids after days; the mark persists.
            are_forgotten = all(one in alive or one.transactional_id not in known for one in wanted)
            if not (are_forgotten and is_shown):
                raise self._lost(batch_id, len(wanted) - len(alive), len(wanted), len(committed))

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        wanted = brokers.with_rows(handles, self._prefix(query.query_id))
        with self._cluster(query) as cluster:
            known = _described(cluster, wanted)
            for one in wanted:
                if one.is_open(known):
                    brokers.fence(cluster, one.transactional_id)

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        with self._cluster(query) as cluster:
            return [one.to_json() for one in brokers.left_open(cluster, self._prefix(query.query_id))]

    def _id(self, cluster: Cluster, attempt: SinkAttempt, spare: Handle | None) -> str:
        """Return the spare id if it is usable, else a new id: coordinators retain every id for a week."""
        prefix = self._prefix(attempt.query.query_id)
        for one in brokers.with_rows([spare] if spare else []):
            if one.transactional_id.startswith(prefix) and brokers.is_spare(cluster, one):
                return one.transactional_id
        return f"{prefix}{attempt.batch_id}.{attempt.partition}.{attempt.attempt_id}"

    @property
    def _check_id(self) -> str:
        return f"holdfast.{self.name}.check"

    def _prefix(self, query_id: str) -> str:
        return f"holdfast.{self.name}.{query_id}."

    def _options(self, query: SinkQuery) -> ClientOptions:
        return ClientOptions.of(query.options, self.servers)

    def _cluster(self, query: SinkQuery) -> Cluster:
        return self._options(query).cluster(self._patience_ms)

    def _check_rights(self, cluster: Cluster, timeout_ms: int) -> None:
        request = protocol.init_producer_id(self._check_id, timeout_ms)
        code = cluster.ask_coordinator(self._check_id, request, lambda answer: answer)
        if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
            raise InvalidArgumentError(
                "the brokers do not allow so long a transaction timeout; lower transaction.timeout.ms to their "
                "transaction.max.timeout.ms, or raise that",
                timeout_ms=timeout_ms,
            )
        if code:
            raise refused(code, f"write transactional ids that begin with holdfast.{self.name}.")

    def _lost(self, batch_id: int, lost: int, partitions: int, visible: int) -> StateLostError:
        return StateLostError(
            "Kafka has ended prepared transactions of a decided micro-batch: the query was down for longer than "
            f"{TIMEOUT}, or someone aborted them; see 'When a decided micro-batch is lost' in docs/kafka-sink.md",
            sink=self.name, batch=batch_id, lost=lost, of=partitions, visible=visible,
        )  # fmt: skip


def _longest_ms(cluster: Cluster, options: ClientOptions) -> int:
    limit_ms = brokers.longest_timeout_ms(cluster)
    if limit_ms is None:
        _log.info("transaction.max.timeout.ms cannot be read; assuming %s", _KAFKAS_TIMEOUT_MS)
        limit_ms = _KAFKAS_TIMEOUT_MS
    _limits_ms[options.values[SERVERS]] = limit_ms
    return limit_ms


def _described(cluster: Cluster, wanted: Sequence[PreparedTransaction]) -> dict[str, TransactionDescription]:
    return cluster.describe([one.transactional_id for one in wanted])


#: librdkafka's values for a partition chosen by key, and for the current time.
_BY_KEY, _NOW = -1, 0

Message = tuple[str, Any, Any, int, int, Any]


def _is_payload(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.binary())


def _is_headers(kind: pa.DataType) -> bool:
    if not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return fields.keys() == {"key", "value"} and fields["key"] == pa.string() and _is_payload(fields["value"])


_EXPECTED: dict[str, tuple[str, Callable[[pa.DataType], bool]]] = {
    "value": ("string or binary", _is_payload),
    "key": ("string or binary", _is_payload),
    "topic": ("string", pa.types.is_string),
    "partition": ("int", pa.types.is_int32),
    "headers": ("array<struct<key: string, value: binary>>", _is_headers),
    "timestamp": ("timestamp", pa.types.is_timestamp),
}


def check_schema(schema: pa.Schema, topic: str | None) -> None:
    """Raise `SchemaMismatchError` unless rows can be messages, `InvalidArgumentError` for no topic or two topics."""
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
        raise InvalidArgumentError("both sinks.kafka and the rows name a topic; drop the argument, or the column topic")


def messages(rows: pa.RecordBatch, topic: str | None) -> Iterator[Message]:
    """Return each row's topic, value, key, partition, timestamp and headers, in row order."""
    given = dict(zip(rows.schema.names, rows.columns, strict=True))
    require_utf8(rows.select([name for name in ("topic", "headers") if name in given]), "the messages")
    if topic is None and given["topic"].null_count:
        raise InvalidArgumentError("a row has no topic; fill the column topic, or pass one to sinks.kafka")
    for name in given.keys() & {"value", "key"}:
        # Spark's text may be invalid UTF-8; Spark's own sink sends the bytes unchanged, too.
        given[name] = given[name].cast(pa.binary())
    if "partition" in given:
        _refuse_below(given["partition"], 0, "a row has a negative partition; use null to choose by key")
        given["partition"] = pc.fill_null(given["partition"], _BY_KEY)
    if "timestamp" in given:
        ms = given["timestamp"].cast(pa.timestamp("ms", given["timestamp"].type.tz), safe=False).cast(pa.int64())
        # To the client, 0 means now; to the broker, -1 means no timestamp.
        _refuse_below(ms, 1, "Kafka accepts only timestamps after 1970-01-01; put others into value")
        given["timestamp"] = pc.fill_null(ms, _NOW)
    defaults = {"topic": topic, "value": None, "key": None, "partition": _BY_KEY, "timestamp": _NOW, "headers": None}
    columns: list[Any] = [
        given[name].to_pylist() if name in given else repeat(default, len(rows)) for name, default in defaults.items()
    ]
    if "headers" in given:
        columns[-1] = map(_headers, columns[-1])
    return zip(*columns, strict=False)


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

_SLICE_ROWS = 10_000
_FULL_S, _FLUSH_S, _STEP_S = 0.01, 0.05, 0.5
_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
#: Errors that the user must fix.
_WRONG = {
    KafkaError.MSG_SIZE_TOO_LARGE: "a message is larger than the client or the topic allows; raise message.max.bytes "
    "and the topic's max.message.bytes, or write less",
    KafkaError.RECORD_LIST_TOO_LARGE: "messages are larger than the topic allows; raise its max.message.bytes",
    KafkaError._UNKNOWN_TOPIC: "there is no such topic; create it",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "there is no such topic or partition; create it",
    KafkaError._UNKNOWN_PARTITION: "the topic has no such partition; correct the column partition",
    KafkaError.TOPIC_EXCEPTION: "the topic name is invalid; correct it",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the user has no right to write to the topic",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "the user has no right to write transactional ids that begin "
    "with holdfast.<name of the sink>.",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "the user has no right to write in transactions",
    KafkaError._AUTHENTICATION: "the brokers refused the credentials; check sasl.username and sasl.password",
    KafkaError.SASL_AUTHENTICATION_FAILED: "the brokers refused the credentials; check sasl.username and sasl.password",
    KafkaError._SSL: "the TLS connection to the brokers failed; check security.protocol and the ssl options",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "the brokers do not allow so long a transaction timeout; lower "
    "transaction.timeout.ms to their transaction.max.timeout.ms",
    KafkaError._INVALID_ARG: "librdkafka rejects an option or a value",
}


class KafkaTransaction(SinkTransaction):
    """One attempt's producer and transaction; the module describes them."""

    def __init__(
        self, options: ClientOptions, transactional_id: str, topic: str | None, *, timeout_ms: int, patience_ms: int
    ) -> None:
        self._options, self._id, self._topic = options, transactional_id, topic
        self._patience_ms = patience_ms
        self._failed: HoldfastError | None = None
        self._last_error: KafkaError | None = None
        self._count = 0
        self._producer: client.Producer | None = None
        settings = options.for_producer(transactional_id, timeout_ms)
        callbacks = {"on_delivery": self._on_delivery, "error_cb": self._on_error}
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
            # No partition was added to the transaction, so there is nothing to end.
            self._producer = None
            return PreparedTransaction(self._id, -1, -1).to_json()
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
            # The next run's leftovers include it; otherwise, the broker aborts it at its timeout.
            _log.info("transaction not aborted: %s", self._options.without_secrets(exc.args[0].str()))

    def _begin(self, producer: client.Producer) -> None:
        end_ms = clock.monotonic_ms() + self._patience_ms
        while True:
            try:
                producer.init_transactions(_STEP_S)
                producer.begin_transaction()
                return
            except client.KafkaException as exc:
                # Only a callback receives the cause of a failed connection, and the client keeps retrying.
                self._serve(producer)
                if self._last_error is not None and self._last_error.code() in _WRONG:
                    raise self._error(self._last_error) from None
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
                    self._serve(producer)  # raises an earlier fatal error, if there is one
                    raise self._error(exc.args[0], topic=topic) from None

    def _serve(self, producer: client.Producer, wait_s: float = 0) -> None:
        """Run delivery callbacks, and raise the first error that they received."""
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
        with self._options.cluster(self._patience_ms) as cluster:
            known = cluster.describe([self._id]).get(self._id)
        if known is None or known.state != brokers.ONGOING:
            state = None if known is None else known.state
            raise UnavailableError("the transaction is no longer open", state=state, transactional_id=self._id)
        return PreparedTransaction(self._id, known.producer_id, known.epoch).to_json()

    def _on_error(self, error: KafkaError) -> None:
        self._last_error = error

    def _on_delivery(self, error: KafkaError | None, message: client.Message) -> None:
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
