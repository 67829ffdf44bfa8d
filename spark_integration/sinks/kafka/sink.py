"""`KafkaSink`: the results of a query as messages of a topic, each exactly once.

    transactional id   holdfast.<sink>.<query>.<batch>.<partition>.<attempt>     of the attempt that first had it
                       holdfast.<sink>.check                                     by which `open` tries its rights
    consumer group     holdfast.<sink>     an offset at partition 0              the mark, see below
    handle             transactional_id, producer_id, epoch                      Kafka's own numbers; no secrets

Names of sinks and queries have no dots, so no id begins with the prefix of another query.

The mark says which query writes under a sink's name, and its newest micro-batch that is wholly visible:

    consumer group   holdfast.<sink>     topic, partition 0
    offset           number of the micro-batch + 1; 0 if the query has begun and committed nothing
    metadata         the ids of the query and of the topic

The driver commits this offset after a micro-batch: the mark may be one behind, never ahead. An overtaken driver may
write it late, and so set it back: a start assumes that everything before the last decision was shown. There is no
member of the group. A broker drops such offsets after a week, but not where a commit says how long to keep it, as
OffsetCommit could until version 4. With its topic the mark goes, too, though some moments later: until then the topic's
id tells. Brokers that are upgraded from before 2.8 have no ids, all zeros, until `inter.broker.protocol.version` is
raised.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import ClassVar

import pyarrow as pa
from confluent_kafka import KafkaError

from holdfast.errors import InvalidArgumentError, StateLostError, UnavailableError
from holdfast.snapshotter.sink_log import checked_sink
from holdfast.spark_integration.sinks.kafka import brokers, protocol, transaction
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

_log = logging.getLogger("holdfast.kafka")
_NO_ID = "0" * 32
_KAFKAS_TIMEOUT_MS = 900_000  # transaction.max.timeout.ms where nobody has set it
_MAY_WRITE = 1 << 4
# By servers: asked once by each process.
_limits_ms: dict[str, int] = {}


class Mark:
    """The mark of one sink at one topic: see the module."""

    def __init__(self, cluster: Cluster, sink: str, topic: str) -> None:
        self._cluster, self._sink, self._topic = cluster, sink, topic
        self._group = f"holdfast.{sink}"
        self._known_id: str | None = None

    def claim(self, query: SinkQuery) -> int:
        """Make this query the writer here; return its newest micro-batch, -1 if there is none.

        Raises `ConflictError` if a query that is not replaced writes here, `StateLostError` if the mark is gone.
        """
        mark, was_shown = self._read(), -1 if query.was_shown is None else query.was_shown
        if mark is None and query.was_shown is not None:
            # A new one would show none, and be taken for one behind the first micro-batch, whose messages are gone.
            raise self._gone()
        if mark is not None and mark.text == query.query_id:
            return max(mark.offset - 1, was_shown)
        if mark is not None and mark.text != query.replaces:
            raise another_query(query, mark.text)
        self._write(query, 0)
        return was_shown

    def require(self, query: SinkQuery, batch_id: int) -> bool:
        """Return whether this micro-batch was ever wholly visible. Raises `StateLostError` if all marks are gone."""
        mark = self._read()
        if mark is None:
            raise self._gone(batch=batch_id)
        return mark.text == query.query_id and mark.offset > batch_id

    def put(self, query: SinkQuery, batch_id: int) -> None:
        """Mark a micro-batch as visible, unless the query was replaced meanwhile, or a later one is marked."""
        mark = self._read()
        if mark is not None and mark.text == query.query_id and mark.offset <= batch_id:
            self._write(query, batch_id + 1)

    def _gone(self, **facts: object) -> StateLostError:
        return StateLostError(
            "the topic lacks the sink's mark: it is not the original topic, or was deleted, and perhaps recreated, so "
            "results are gone; or somebody deleted the consumer group. Name the original topic, "
            "or give the sink another name to start afresh",
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
            raise refused(code, f"keep an offset of the consumer group {self._group} at the topic {self._topic}")

    def _topic_id(self) -> str:
        """Return the topic's id; for a missing topic, an id that no mark has."""
        if self._known_id is None:
            found = brokers.find_topic(self._cluster, self._topic)
            self._known_id = found.topic_id if found else "gone"
        return self._known_id


class KafkaSink(ReusingSink):
    """See the module and `holdfast.sinks.kafka`."""

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
        transaction.check_schema(schema, self.topic)
        options = self._options(query)
        # Before the brokers are asked: it names an option that does not exist.
        timeout_ms = options.timeout_ms
        transaction.producer_of(options, options.for_producer(self._check_id, timeout_ms or _KAFKAS_TIMEOUT_MS))
        with options.cluster(self._patience_ms) as cluster:
            if self.topic is not None:
                _check_topic(cluster, self.topic)
            self._check_rights(cluster, timeout_ms or _longest_ms(cluster, options))
            return None if self.topic is None else Mark(cluster, self.name, self.topic).claim(query)

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        return self.begin_reusing(attempt, schema, None)

    def begin_reusing(self, attempt: SinkAttempt, schema: pa.Schema, spare: Handle | None) -> SinkTransaction:
        transaction.check_schema(schema, self.topic)
        options = self._options(attempt.query)
        with options.cluster(self._patience_ms) as cluster:
            timeout_ms = options.timeout_ms or _limits_ms.get(options.values[SERVERS]) or _longest_ms(cluster, options)
            transactional_id = self._id(cluster, attempt, spare)
        return transaction.KafkaTransaction(
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
                "transactions ended before they were decided: they took longer than transaction.timeout.ms allows, "
                "or somebody aborted them; the micro-batch is written again",
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
                # The mark comes last: these are another driver's, whose messages would be there beside the others.
                warn_of_another_driver(query, batch_id)
                for one in waiting:
                    brokers.fence(cluster, one.transactional_id)
                return
            alive = committed + waiting
            # If nothing is visible yet, no part of the micro-batch may become visible.
            if len(alive) == len(wanted) or committed:
                alive = [one for one in alive if brokers.commit(cluster, one)]
            if len(alive) == len(wanted):
                brokers.ended(cluster, [one.transactional_id for one in wanted])
                brokers.fence_others(cluster, self._prefix(query.query_id), batch_id, wanted)
                if mark is not None:
                    mark.put(query, batch_id)
                return
            # Coordinators forget ids after some days, those of committed transactions as well: the mark does not.
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
            return [one.handle() for one in brokers.left_open(cluster, self._prefix(query.query_id))]

    def _id(self, cluster: Cluster, attempt: SinkAttempt, spare: Handle | None) -> str:
        """Return a spare id if there is one: coordinators keep all that they have seen for a week."""
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
                "the brokers do not allow transactions of this length; lower transaction.timeout.ms to their "
                "transaction.max.timeout.ms, or raise that",
                timeout_ms=timeout_ms,
            )
        if code:
            raise refused(code, f"write transactional ids that begin with holdfast.{self.name}.")

    def _lost(self, batch_id: int, lost: int, partitions: int, visible: int) -> StateLostError:
        return StateLostError(
            "Kafka has ended prepared transactions of a decided micro-batch: the query was away for longer than "
            f"{TIMEOUT}, or somebody aborted them; see 'When a decided micro-batch is lost' in docs/kafka-sink.md",
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
    return brokers.describe(cluster, [one.transactional_id for one in wanted])


def _check_topic(cluster: Cluster, topic: str) -> None:
    found = brokers.find_topic(cluster, topic)
    if found is None:
        raise InvalidArgumentError("there is no such topic, or the user may not see it; create it", topic=topic)
    if not found.operations & _MAY_WRITE:
        raise InvalidArgumentError("the user has no right to write to the topic", topic=topic)
