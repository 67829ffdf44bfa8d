"""The twelve Kafka requests that the sink sends without librdkafka, in Kafka's wire format.

A layout string describes a request's or response's fields:

    b h i q ?   numbers, as in `struct`               u   a UUID, as 32 hexadecimal digits
    s           a string, or null                     y   bytes
    […]         an array of the inner item, or null   (…) a struct

    plain       string = int16 length, bytes          array = int32 count, items
    flexible    string = varint length + 1            array = varint count + 1      tags after each struct

Each request has one fixed version:

    Metadata                 3  10        the first with topic ids, to detect a recreated topic: Kafka 2.8
    OffsetCommit             8  2         up to version 4 it can set the offset's retention
    OffsetFetch              9  2         plain; the first that can fetch all topics of a group
    FindCoordinator         10  4         the first that takes several keys: Kafka 3.0
    SaslHandshake           17  1         the tokens follow in separate requests
    ApiVersions             18  0         accepted by every broker
    InitProducerId          22  1         plain; requests a new epoch without giving the old one
    EndTxn                  26  2         ends a transaction and keeps its epoch, so a repeat is recognised
    DescribeConfigs         32  1         plain
    SaslAuthenticate        36  0         plain
    DescribeTransactions    65  0         the only version: Kafka 3.0
    ListTransactions        66  0         the first: Kafka 3.0

EndTxn from version 5 uses "transactions v2" (Kafka 4): the broker bumps the epoch when a transaction ends, so that a
repeated commit would not match the epoch in its handle. librdkafka's producers use older versions too, and brokers
distinguish the protocols only by this version.

Source: https://kafka.apache.org/protocol
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

from confluent_kafka import KafkaError

T = TypeVar("T")

#: An error code that librdkafka does not name.
TRANSACTIONAL_ID_NOT_FOUND = 105
#: Transient errors: a coordinator is moving or loading, or has not finished writing its markers.
RETRIABLE = frozenset(
    {
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.CONCURRENT_TRANSACTIONS,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
    }
)
#: Errors for a missing permission.
UNAUTHORISED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
#: EndTxn errors for a transaction that was aborted, fenced or forgotten.
ENDED_OTHERWISE = frozenset(
    {
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_TXN_STATE,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
        KafkaError.PRODUCER_FENCED,
        TRANSACTIONAL_ID_NOT_FOUND,
    }
)

_GROUP, _TRANSACTION = 0, 1
_BROKER = 4
_KEEP_MS = 100 * 365 * 24 * 3600 * 1000
#: The all-zero topic id, for topics requested by name.
_NO_ID = "0" * 32


def name_of(code: int) -> str:
    """Return Kafka's name for an error code."""
    return "TRANSACTIONAL_ID_NOT_FOUND" if code == TRANSACTIONAL_ID_NOT_FOUND else KafkaError(code).name()


class MalformedAnswerError(Exception):
    """A broker's answer violates the protocol."""


@cache
def _parsed(layout: str) -> tuple[Any, ...]:
    """Parse a layout into letters and pairs of a closing bracket and the enclosed fields."""
    fields: list[Any] = []
    around: list[list[Any]] = []
    for letter in layout.replace(" ", ""):
        if letter in "[(":
            around.append(fields)
            fields = []
        elif letter in "])":
            inside, fields = tuple(fields), around.pop()
            fields.append((letter, inside))
        else:
            fields.append(letter)
    return tuple(fields)


def encoded(layout: str, *values: object, flexible: bool = False) -> bytes:
    out = bytearray()
    _write_struct(out, _parsed(layout), values, flexible=flexible)
    return bytes(out)


def _write_struct(out: bytearray, fields: Sequence[Any], values: Sequence[Any], *, flexible: bool) -> None:
    for each, value in zip(fields, values, strict=True):
        _write(out, each, value, flexible=flexible)
    if flexible:
        out += b"\0"  # no tagged fields


def _write(out: bytearray, each: Any, value: Any, *, flexible: bool) -> None:
    kind, inside = each if isinstance(each, tuple) else (each, ())
    if kind == ")":
        _write_struct(out, inside, value, flexible=flexible)
    elif kind in "]sy":
        data = value.encode() if kind == "s" else value
        length = -1 if data is None else len(data)
        out += _varint(length + 1) if flexible else struct.pack(">h" if kind == "s" else ">i", length)
        if kind != "]":
            out += data
        else:
            for item in data or ():
                _write(out, inside[0], item, flexible=flexible)
    else:
        out += bytes.fromhex(value) if kind == "u" else struct.pack(f">{kind}", value)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


class Response:
    """A broker's response. It is untrusted: every length and count is checked before use."""

    def __init__(self, body: bytes, *, flexible: bool = False) -> None:
        self._body, self._at, self._flexible = body, 0, flexible

    def read(self, layout: str) -> tuple[Any, ...]:
        """Decode the next fields: structs as tuples, arrays as lists. Raises `MalformedAnswerError`."""
        return tuple(map(self._field, _parsed(layout)))

    def skip_tags(self) -> None:
        """Skip the tagged fields at the end of a flexible struct."""
        if self._flexible:
            for _ in range(self._varint()):
                self._varint()
                self._take(self._varint())

    def _field(self, each: Any) -> Any:
        kind, inside = each if isinstance(each, tuple) else (each, ())
        if kind == ")":
            values = tuple(map(self._field, inside))
            self.skip_tags()
            return values
        if kind == "]":
            return self._array(inside[0])
        if kind == "u":
            return self._take(16).hex()
        if kind in "sy":
            return self._text() if kind == "s" else self._take(max(self._length("i"), 0))
        (number,) = struct.unpack(f">{kind}", self._take(struct.calcsize(f">{kind}")))
        return int(number)

    def _array(self, item: Any) -> list[Any]:
        count = self._length("i")
        # Each item takes at least one byte: never allocate more items than remaining bytes.
        if count > len(self._body) - self._at:
            raise MalformedAnswerError("an array extends beyond the response")
        return [self._field(item) for _ in range(max(count, 0))]

    def _text(self) -> str | None:
        length = self._length("h")
        try:
            return None if length < 0 else self._take(length).decode()
        except UnicodeDecodeError as exc:
            raise MalformedAnswerError("a string is not text") from exc

    def _length(self, plain: str) -> int:
        return self._varint() - 1 if self._flexible else int(self._field(plain))

    def _take(self, size: int) -> bytes:
        if size > len(self._body) - self._at:
            raise MalformedAnswerError("the response ends too early")
        self._at += size
        return self._body[self._at - size : self._at]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            (byte,) = self._take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise MalformedAnswerError("a number has too many digits")


@dataclass(frozen=True)
class Request(Generic[T]):
    """A request and the parser of its response, which may be longer than `layout`."""

    name: str
    key: int
    version: int
    body: bytes = field(repr=False)
    layout: str
    result: Callable[..., T]
    flexible: bool = False

    def read(self, answer: Response) -> T:
        """Parse a response. Raises `MalformedAnswerError` if it does not match the layout."""
        return self.result(*answer.read(self.layout))


class Node(NamedTuple):
    """A broker's id and address."""

    number: int
    host: str
    port: int


class Topic(NamedTuple):
    """A topic's metadata; `operations` is the bit set of the user's permitted operations."""

    code: int
    name: str
    topic_id: str
    operations: int


class TransactionDescription(NamedTuple):
    """The DescribeTransactions result for a transactional id."""

    code: int
    transactional_id: str
    state: str
    timeout_ms: int
    started_ms: int
    producer_id: int
    epoch: int


class CommittedOffset(NamedTuple):
    """A consumer group's offset at partition 0 of a topic, and the text stored with it."""

    topic: str
    offset: int
    text: str


def api_versions() -> Request[tuple[int, dict[int, tuple[int, int]]]]:
    """Request a broker's API versions; the result is the code and the (lowest, highest) version by request key."""

    def result(code: int, known: list[tuple[int, int, int]]) -> tuple[int, dict[int, tuple[int, int]]]:
        return code, {key: (low, high) for key, low, high in known}

    return Request("ApiVersions", 18, 0, b"", "h [(hhh)]", result)


def sasl_handshake(mechanism: str) -> Request[int]:
    """Select a SASL mechanism; the result is the code."""
    return Request("SaslHandshake", 17, 1, encoded("s", mechanism), "h", lambda code: code)


def sasl_authenticate(token: bytes) -> Request[tuple[int, bytes]]:
    """Send a SASL token; the result is the code and the server's token."""
    return Request("SaslAuthenticate", 36, 0, encoded("y", token), "hsy", lambda code, _, theirs: (code, theirs))


def metadata(topics: Sequence[str]) -> Request[tuple[list[Node], list[Topic]]]:
    """Request all brokers, and topics by name with the user's permissions; never creates a topic."""
    body = encoded("[(us)] ???", [(_NO_ID, name) for name in topics], False, False, True, flexible=True)

    def result(_: int, nodes: list[Any], _cluster: str, _leader: int, found: list[Any]) -> Any:
        topics_found = [Topic(code, name or "", topic_id, operations) for code, name, topic_id, *_, operations in found]
        return [_node(*node[:3]) for node in nodes], topics_found

    layout = "i [(i s i s)] s i [(h s u ? [(h i i i [i] [i] [i])] i)]"
    return Request("Metadata", 3, 10, body, layout, result, flexible=True)


def find_coordinators(keys: Sequence[str], *, group: bool = False) -> Request[list[tuple[int, str, Node]]]:
    """Find the coordinators of transactional ids or groups; the result has each key's code, key and broker."""
    body = encoded("b [s]", _GROUP if group else _TRANSACTION, keys, flexible=True)

    def result(_: int, found: list[Any]) -> list[tuple[int, str, Node]]:
        return [(code, key or "", _node(*node)) for key, *node, code, _ in found]

    return Request("FindCoordinator", 10, 4, body, "i [(s isi h s)]", result, flexible=True)


def init_producer_id(transactional_id: str, timeout_ms: int) -> Request[int]:
    """Request a new epoch of a transactional id, which aborts its open transaction; the result is the code."""
    return Request("InitProducerId", 22, 1, encoded("si", transactional_id, timeout_ms), "ih", lambda _, code: code)


def end_txn(transactional_id: str, producer_id: int, epoch: int) -> Request[int]:
    """Commit a transaction; the result is the code."""
    body = encoded("sqh?", transactional_id, producer_id, epoch, True)
    return Request("EndTxn", 26, 2, body, "ih", lambda _, code: code)


def describe_transactions(transactional_ids: Sequence[str]) -> Request[list[TransactionDescription]]:
    """Request the state of transactional ids from their coordinator."""

    def result(_: int, found: list[Any]) -> list[TransactionDescription]:
        return [TransactionDescription(code, name or "", state or "", *rest) for code, name, state, *rest, _ in found]

    body = encoded("[s]", transactional_ids, flexible=True)
    return Request("DescribeTransactions", 65, 0, body, "i [(h s s i q q h [(s [i])])]", result, flexible=True)


def list_transactions(states: Sequence[str]) -> Request[tuple[int, list[tuple[str, str]]]]:
    """List a broker's transactional ids in the given states; the result is the code and (id, state) pairs."""

    def result(_: int, code: int, _unknown: list[str], found: list[Any]) -> tuple[int, list[tuple[str, str]]]:
        return code, [(name or "", state or "") for name, _, state in found]

    body = encoded("[s] [q]", states, [], flexible=True)
    return Request("ListTransactions", 66, 0, body, "i h [s] [(s q s)]", result, flexible=True)


def broker_setting(node: str, setting: str) -> Request[tuple[int, str | None]]:
    """Request a setting of the broker with the id `node`; the result is the code and the value."""

    def result(_: int, found: list[Any]) -> tuple[int, str | None]:
        code, *_, settings = found[0] if found else (0, [])
        return code, settings[0][1] if settings else None

    body = encoded("[(b s [s])] ?", [(_BROKER, node, [setting])], False)
    return Request("DescribeConfigs", 32, 1, body, "i [(h s b s [(s s ? b ? [(s s b)])])]", result)


def commit_offset(group: str, committed: CommittedOffset) -> Request[int]:
    """Store an offset and a text for a group without members; the result is the code."""

    def result(found: list[Any]) -> int:
        return next((code for _, partitions in found for _, code in partitions if code), 0)

    topics = [(committed.topic, [(0, committed.offset, committed.text)])]
    body = encoded("s i s q [(s [(i q s)])]", group, -1, "", _KEEP_MS, topics)
    return Request("OffsetCommit", 8, 2, body, "[(s [(i h)])]", result)


def fetch_offsets(group: str) -> Request[tuple[int, list[CommittedOffset]]]:
    """Fetch all offsets of a group; the result is the code and the offsets with their texts."""

    def result(found: list[Any], code: int) -> tuple[int, list[CommittedOffset]]:
        parts = [(topic or "", *part) for topic, partitions in found for part in partitions]
        return code, [CommittedOffset(topic, offset, text or "") for topic, _, offset, text, _ in parts]

    return Request("OffsetFetch", 9, 2, encoded("s [s]", group, None), "[(s [(i q s h)])] h", result)


def _node(number: int, host: str | None, port: int) -> Node:
    # On an error, the port is -1 and the host empty.
    if not -1 <= port < 1 << 16:
        raise MalformedAnswerError("a broker's port is invalid")
    return Node(number, host or "", port)
