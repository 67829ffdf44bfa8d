"""The requests, each in one fixed version, and their answers.

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
from typing import Any, Generic, TypeVar

from holdfast.spark_integration.sinks.kafka.wire.fields import Answer, MalformedAnswerError, encoded

T = TypeVar("T")

_GROUP, _TRANSACTION = 0, 1
_BROKER = 4
_KEEP_MS = 100 * 365 * 24 * 3600 * 1000
#: A topic that is named and not told by its id.
_NO_ID = "0" * 32


@dataclass(frozen=True)
class Request(Generic[T]):
    """One request: its API key and version, its body, the layout of its answer and how to read it.

    An answer may go on after what its layout says, which nobody needs.
    """

    name: str
    key: int
    version: int
    body: bytes = field(repr=False)
    layout: str
    result: Callable[..., T]
    flexible: bool = False

    def read(self, answer: Answer) -> T:
        """Return what an answer says. Raises `MalformedAnswerError` if it is none to this request."""
        return self.result(*answer.read(self.layout))


@dataclass(frozen=True)
class Node:
    """A broker: its number and address."""

    number: int
    host: str
    port: int


@dataclass(frozen=True)
class Coordinator:
    """The coordinator of a key."""

    code: int
    key: str
    node: Node


@dataclass(frozen=True)
class Topic:
    """A topic's metadata; `operations` are the bits of the user's rights."""

    code: int
    name: str
    topic_id: str
    partitions: int
    operations: int


@dataclass(frozen=True)
class Transaction:
    """The state of a transactional id, from DescribeTransactions."""

    code: int
    transactional_id: str
    state: str
    timeout_ms: int
    started_ms: int
    producer_id: int
    epoch: int


@dataclass(frozen=True)
class Mark:
    """A group's committed offset, and its metadata text."""

    topic: str
    offset: int
    text: str


def api_versions() -> Request[tuple[int, dict[int, tuple[int, int]]]]:
    """Ask for a broker's API versions: the code, and by request the lowest and highest version."""

    def result(code: int, known: list[tuple[int, int, int]]) -> tuple[int, dict[int, tuple[int, int]]]:
        return code, {key: (low, high) for key, low, high in known}

    return Request("ApiVersions", 18, 0, b"", "h [(hhh)]", result)


def sasl_handshake(mechanism: str) -> Request[int]:
    """Ask for a mechanism: the code."""
    return Request("SaslHandshake", 17, 1, encoded("s", mechanism), "h", lambda code: code)


def sasl_authenticate(token: bytes) -> Request[tuple[int, bytes]]:
    """Send a token of the mechanism: the code, and the server's token."""
    return Request("SaslAuthenticate", 36, 0, encoded("y", token), "hsy", lambda code, _, theirs: (code, theirs))


def metadata(topics: Sequence[str]) -> Request[tuple[list[Node], list[Topic]]]:
    """Ask for all brokers, and for topics by name."""
    # Make none, and say of topics what the user may do.
    named = [(_NO_ID, name) for name in topics]
    body = encoded("[(us)] ???", named, False, False, True, flexible=True)

    def result(_: int, nodes: list[Any], _cluster: str, _leader: int, found: list[Any]) -> Any:
        told = [
            Topic(code, name or "", topic_id, len(partitions), operations)
            for code, name, topic_id, _, partitions, operations in found
        ]
        return [_node(*node[:3]) for node in nodes], told

    layout = "i [(i s i s)] s i [(h s u ? [(h i i i [i] [i] [i])] i)]"
    return Request("Metadata", 3, 10, body, layout, result, flexible=True)


def find_coordinators(keys: Sequence[str], *, group: bool = False) -> Request[list[Coordinator]]:
    """Ask for the coordinators of transactional ids, or groups."""
    body = encoded("b [s]", _GROUP if group else _TRANSACTION, keys, flexible=True)

    def result(_: int, found: list[Any]) -> list[Coordinator]:
        return [Coordinator(code, key or "", _node(*node)) for key, *node, code, _ in found]

    return Request("FindCoordinator", 10, 4, body, "i [(s isi h s)]", result, flexible=True)


def init_producer_id(transactional_id: str, timeout_ms: int) -> Request[int]:
    """Ask for a new epoch of a transactional id, which ends what an older one has open: the code."""
    return Request("InitProducerId", 22, 1, encoded("si", transactional_id, timeout_ms), "ih", lambda _, code: code)


def end_txn(transactional_id: str, producer_id: int, epoch: int, *, commit: bool) -> Request[int]:
    """Ask to commit or abort: the code."""
    body = encoded("sqh?", transactional_id, producer_id, epoch, commit)
    return Request("EndTxn", 26, 2, body, "ih", lambda _, code: code)


def describe_transactions(transactional_ids: Sequence[str]) -> Request[list[Transaction]]:
    """Ask a coordinator for the state of its transactional ids."""
    body = encoded("[s]", transactional_ids, flexible=True)

    def result(_: int, found: list[Any]) -> list[Transaction]:
        return [Transaction(code, name or "", state or "", *rest) for code, name, state, *rest, _ in found]

    return Request("DescribeTransactions", 65, 0, body, "i [(h s s i q q h [(s [i])])]", result, flexible=True)


def list_transactions(states: Sequence[str]) -> Request[tuple[int, list[tuple[str, str]]]]:
    """Ask a coordinator for all transactional ids in some states: the code, ids and states."""
    body = encoded("[s] [q]", states, [], flexible=True)

    def result(_: int, code: int, _unknown: list[str], found: list[Any]) -> tuple[int, list[tuple[str, str]]]:
        return code, [(name or "", state or "") for name, _, state in found]

    return Request("ListTransactions", 66, 0, body, "i h [s] [(s q s)]", result, flexible=True)


def broker_setting(node: str, setting: str) -> Request[tuple[int, str | None]]:
    """Ask a broker, by its number, for one of its settings: the code and the value."""
    body = encoded("[(b s [s])] ?", [(_BROKER, node, [setting])], False)

    def result(_: int, found: list[Any]) -> tuple[int, str | None]:
        code, *_, settings = found[0] if found else (0, [])
        return code, settings[0][1] if settings else None

    return Request("DescribeConfigs", 32, 1, body, "i [(h s b s [(s s ? b ? [(s s b)])])]", result)


def commit_mark(group: str, mark: Mark) -> Request[int]:
    """Ask to store an offset and a text for a group without members; return the error code."""
    topics = [(mark.topic, [(0, mark.offset, mark.text)])]
    body = encoded("s i s q [(s [(i q s)])]", group, -1, "", _KEEP_MS, topics)

    def result(found: list[Any]) -> int:
        return next((code for _, partitions in found for _, code in partitions if code), 0)

    return Request("OffsetCommit", 8, 2, body, "[(s [(i h)])]", result)


def fetch_marks(group: str) -> Request[tuple[int, list[Mark]]]:
    """Ask for all offsets of a group: the code, and offsets with their texts."""

    def result(found: list[Any], code: int) -> tuple[int, list[Mark]]:
        return code, [
            Mark(topic or "", offset, text or "") for topic, partitions in found for _, offset, text, _ in partitions
        ]

    return Request("OffsetFetch", 9, 2, encoded("s [s]", group, None), "[(s [(i q s h)])] h", result)


def _node(number: int, host: str | None, port: int) -> Node:
    # -1 with an empty host where there is an error instead.
    if not -1 <= port < 1 << 16:
        raise MalformedAnswerError("a broker has no such port")
    return Node(number, host or "", port)
