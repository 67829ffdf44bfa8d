"""The requests themselves: what is asked, in one fixed version each, and what the answer says.

::

    request                key  version   why this version
    Metadata                 3  10        the first that tells a topic from one that was made anew: Kafka 2.8
    OffsetCommit             8  2         until 4 it may say how long to keep the offset
    OffsetFetch              9  2         plain; the first that can ask for all topics of a group
    FindCoordinator         10  4         the first that asks for many at once: Kafka 3.0
    SaslHandshake           17  1         the tokens follow in requests of their own
    ApiVersions             18  0         any broker answers it
    InitProducerId          22  1         plain: a new epoch, without naming the old one
    EndTxn                  26  2         ends a transaction without moving its epoch: a repeat is told from a stranger
    DescribeConfigs         32  1         plain
    SaslAuthenticate        36  0         plain
    DescribeTransactions    65  0         the only one: Kafka 3.0
    ListTransactions        66  0         the first: Kafka 3.0

From version 5 on, EndTxn is of "transactions v2" (Kafka 4): the broker moves the epoch when a transaction ends, so that
a repeated commit would find another epoch than its handle names. librdkafka's producers speak older versions, too, and
brokers tell the two by this version alone.

Source: https://kafka.apache.org/protocol
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from holdfast.spark_integration.sinks.kafka.wire.fields import Answer, Fields, MalformedAnswerError

T = TypeVar("T")

_GROUP, _TRANSACTION = 0, 1
_BROKER = 4
_KEEP_MS = 100 * 365 * 24 * 3600 * 1000


@dataclass(frozen=True)
class Request(Generic[T]):
    """One request: where it is in the protocol, its body, and how its answer is read."""

    name: str
    key: int
    version: int
    body: bytes = field(repr=False)
    read: Callable[[Answer], T]
    flexible: bool = False


@dataclass(frozen=True)
class Node:
    """A broker: its number and address."""

    number: int
    host: str
    port: int


@dataclass(frozen=True)
class Coordinator:
    """Which broker looks after a key."""

    code: int
    key: str
    node: Node


@dataclass(frozen=True)
class Topic:
    """What Metadata says of a topic; `operations` are bits of what the user may do with it."""

    code: int
    name: str
    topic_id: str
    partitions: int
    operations: int


@dataclass(frozen=True)
class Transaction:
    """What DescribeTransactions says of a transactional id."""

    code: int
    transactional_id: str
    state: str
    timeout_ms: int
    started_ms: int
    producer_id: int
    epoch: int


@dataclass(frozen=True)
class Mark:
    """An offset that a group has committed, and the text with it."""

    topic: str
    offset: int
    text: str


def api_versions() -> Request[tuple[int, dict[int, tuple[int, int]]]]:
    """Ask what a broker knows: the code, and by request its lowest and highest version."""

    def read(answer: Answer) -> tuple[int, dict[int, tuple[int, int]]]:
        code = answer.number("h")
        known = answer.array(lambda: (answer.number("h"), (answer.number("h"), answer.number("h"))))
        return code, dict(known)

    return Request("ApiVersions", 18, 0, b"", read)


def sasl_handshake(mechanism: str) -> Request[int]:
    """Ask for a mechanism: the code."""
    return Request("SaslHandshake", 17, 1, bytes(Fields().text(mechanism)), lambda answer: answer.number("h"))


def sasl_authenticate(token: bytes) -> Request[tuple[int, bytes]]:
    """Send a token of the mechanism: the code, and the server's token."""

    def read(answer: Answer) -> tuple[int, bytes]:
        code = answer.number("h")
        answer.text()
        return code, answer.blob()

    return Request("SaslAuthenticate", 36, 0, bytes(Fields().blob(token)), read)


def metadata(topics: Sequence[str]) -> Request[tuple[list[Node], list[Topic]]]:
    """Ask for all brokers, and for topics by name."""
    body = Fields(flexible=True)
    # By name, not by id; make none, and say of topics what the user may do.
    body.array(topics, lambda name: body.number("16x").text(name).tags()).number("???", False, False, True).tags()

    def read_topic(answer: Answer) -> Topic:
        code, name, topic_id = answer.number("h"), answer.text() or "", answer.uuid()
        answer.number("?")
        partitions = answer.array(lambda: _skip_partition(answer))
        topic = Topic(code, name, topic_id, len(partitions), answer.number("i"))
        answer.tags()
        return topic

    def read(answer: Answer) -> tuple[list[Node], list[Topic]]:
        answer.number("i")
        nodes = answer.array(lambda: _node_with_rack(answer))
        answer.text()
        answer.number("i")
        return nodes, answer.array(lambda: read_topic(answer))

    return Request("Metadata", 3, 10, bytes(body), read, flexible=True)


def find_coordinators(keys: Sequence[str], *, group: bool = False) -> Request[list[Coordinator]]:
    """Ask which brokers look after transactional ids, or groups."""
    body = Fields(flexible=True).number("b", _GROUP if group else _TRANSACTION)
    body.array(keys, body.text).tags()

    def read_one(answer: Answer) -> Coordinator:
        key, node = answer.text() or "", _node(answer)
        code = answer.number("h")
        answer.text()
        answer.tags()
        return Coordinator(code, key, node)

    def read(answer: Answer) -> list[Coordinator]:
        answer.number("i")
        return answer.array(lambda: read_one(answer))

    return Request("FindCoordinator", 10, 4, bytes(body), read, flexible=True)


def init_producer_id(transactional_id: str, timeout_ms: int) -> Request[int]:
    """Ask for a new epoch of a transactional id, which ends what an older one has open: the code."""

    def read(answer: Answer) -> int:
        answer.number("i")
        return answer.number("h")

    return Request("InitProducerId", 22, 1, bytes(Fields().text(transactional_id).number("i", timeout_ms)), read)


def end_txn(transactional_id: str, producer_id: int, epoch: int, *, commit: bool) -> Request[int]:
    """Ask to commit or abort: the code."""

    def read(answer: Answer) -> int:
        answer.number("i")
        return answer.number("h")

    body = Fields().text(transactional_id).number("qh?", producer_id, epoch, commit)
    return Request("EndTxn", 26, 2, bytes(body), read)


def describe_transactions(transactional_ids: Sequence[str]) -> Request[list[Transaction]]:
    """Ask a coordinator for the state of its transactional ids."""
    body = Fields(flexible=True)
    body.array(transactional_ids, body.text).tags()

    def read_topic(answer: Answer) -> None:
        answer.text()
        answer.array(lambda: answer.number("i"))
        answer.tags()

    def read_one(answer: Answer) -> Transaction:
        code, name, state = answer.number("h"), answer.text() or "", answer.text() or ""
        timeout_ms, started_ms = answer.number("i"), answer.number("q")
        producer_id, epoch = answer.number("q"), answer.number("h")
        answer.array(lambda: read_topic(answer))
        answer.tags()
        return Transaction(code, name, state, timeout_ms, started_ms, producer_id, epoch)

    def read(answer: Answer) -> list[Transaction]:
        answer.number("i")
        return answer.array(lambda: read_one(answer))

    return Request("DescribeTransactions", 65, 0, bytes(body), read, flexible=True)


def list_transactions(states: Sequence[str]) -> Request[tuple[int, list[tuple[str, str]]]]:
    """Ask a coordinator for all transactional ids in some states: the code, ids and states."""
    body = Fields(flexible=True)
    body.array(states, body.text).array([], body.text).tags()

    def read_one(answer: Answer) -> tuple[str, str]:
        name = answer.text() or ""
        answer.number("q")
        state = answer.text() or ""
        answer.tags()
        return name, state

    def read(answer: Answer) -> tuple[int, list[tuple[str, str]]]:
        answer.number("i")
        code = answer.number("h")
        answer.array(answer.text)
        return code, answer.array(lambda: read_one(answer))

    return Request("ListTransactions", 66, 0, bytes(body), read, flexible=True)


def broker_setting(node: str, setting: str) -> Request[tuple[int, str | None]]:
    """Ask a broker, by its number, for one of its settings: the code and the value."""
    body = Fields()
    body.array([node], lambda name: body.number("b", _BROKER).text(name).array([setting], body.text)).number("?", False)

    def read_entry(answer: Answer) -> str | None:
        answer.text()
        value = answer.text()
        answer.number("?"), answer.number("b"), answer.number("?")
        answer.array(lambda: (answer.text(), answer.text(), answer.number("b")))
        return value

    def read_one(answer: Answer) -> tuple[int, str | None]:
        code = answer.number("h")
        answer.text(), answer.number("b"), answer.text()
        values = answer.array(lambda: read_entry(answer))
        return code, values[0] if values else None

    def read(answer: Answer) -> tuple[int, str | None]:
        answer.number("i")
        found = answer.array(lambda: read_one(answer))
        return found[0] if found else (0, None)

    return Request("DescribeConfigs", 32, 1, bytes(body), read)


def commit_mark(group: str, mark: Mark) -> Request[int]:
    """Ask to keep an offset and a text for a group that nobody is a member of: the code."""
    body = Fields().text(group).number("i", -1).text("").number("q", _KEEP_MS)
    body.array([mark], lambda one: _write_mark(body, one))

    def read_topic(answer: Answer) -> list[int]:
        answer.text()
        return answer.array(lambda: (answer.number("i"), answer.number("h"))[1])

    def read(answer: Answer) -> int:
        return next((code for codes in answer.array(lambda: read_topic(answer)) for code in codes if code), 0)

    return Request("OffsetCommit", 8, 2, bytes(body), read)


def fetch_marks(group: str) -> Request[tuple[int, list[Mark]]]:
    """Ask for all offsets of a group: the code, and offsets with their texts."""
    body = Fields().text(group)
    body.array(None, body.text)

    def read_topic(answer: Answer) -> list[Mark]:
        topic = answer.text() or ""
        return answer.array(lambda: _read_mark(answer, topic))

    def read(answer: Answer) -> tuple[int, list[Mark]]:
        topics = answer.array(lambda: read_topic(answer))
        return answer.number("h"), [mark for marks in topics for mark in marks]

    return Request("OffsetFetch", 9, 2, bytes(body), read)


def _write_mark(body: Fields, mark: Mark) -> None:
    body.text(mark.topic).array([mark], lambda one: body.number("iq", 0, one.offset).text(one.text))


def _read_mark(answer: Answer, topic: str) -> Mark:
    answer.number("i")
    offset, text = answer.number("q"), answer.text() or ""
    answer.number("h")
    return Mark(topic, offset, text)


def _node(answer: Answer) -> Node:
    number, host, port = answer.number("i"), answer.text() or "", answer.number("i")
    # -1 with an empty host where there is an error instead.
    if not -1 <= port < 1 << 16:
        raise MalformedAnswerError("a broker has no such port")
    return Node(number, host, port)


def _node_with_rack(answer: Answer) -> Node:
    node = _node(answer)
    answer.text()
    answer.tags()
    return node


def _skip_partition(answer: Answer) -> None:
    for layout in "hiii":  # code, number, leader, the leader's epoch
        answer.number(layout)
    for _ in range(3):  # replicas, those in sync, those away
        answer.array(lambda: answer.number("i"))
    answer.tags()
