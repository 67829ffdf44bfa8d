"""Our own requests to Kafka: what a broker may answer, and nothing of it does harm."""

from __future__ import annotations

import ssl
import struct
from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis import given

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.sinks.kafka import protocol
from holdfast.spark_integration.sinks.kafka.brokers import Cluster, Connection, Security
from holdfast.spark_integration.sinks.kafka.protocol import Answer, MalformedAnswerError, Request, encoded
from tests.unit.spark_integration.sinks.kafka.hostile_broker import Replies, broker, packet, versions

_REQUESTS: list[Request[object]] = [
    protocol.api_versions(),
    protocol.sasl_handshake("PLAIN"),
    protocol.sasl_authenticate(b"token"),
    protocol.metadata(["topic"]),
    protocol.find_coordinators(["id"]),
    protocol.init_producer_id("id", 1000),
    protocol.end_txn("id", 1, 0, commit=True),
    protocol.describe_transactions(["id"]),
    protocol.list_transactions(["Ongoing"]),
    protocol.broker_setting("1", "transaction.max.timeout.ms"),
    protocol.commit_offset("group", protocol.CommittedOffset("topic", 1, "text")),
    protocol.fetch_offsets("group"),
]


def ask(replies: Replies, patience_ms: int = 300) -> int:
    """Ask a server for the end of a transaction."""
    with (
        broker(replies) as address,
        Cluster([address], Security(), patience_ms=patience_ms) as cluster,
    ):
        return cluster.ask_any(protocol.end_txn("id", 1, 0, commit=True), lambda code: code)


@pytest.mark.parametrize("request_", _REQUESTS, ids=lambda one: one.name)
@given(body=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(request_: Request[object], body: bytes) -> None:
    with suppress(MalformedAnswerError):
        request_.read(Answer(body, flexible=request_.flexible))


@pytest.mark.slow(2)
@given(texts=st.lists(st.text(max_size=300), max_size=5), flexible=st.booleans())
def test_fields_are_read_as_they_were_written(texts: list[str], flexible: bool) -> None:
    structs = [(text, [number, -number]) for number, text in enumerate(texts)]
    values = (texts, -5, 7, True, b"x" * 200, structs, None, "ab" * 16)
    body = encoded("[s] q h ? y [(s [i])] [q] u", *values, flexible=flexible)
    answer = Answer(body, flexible=flexible)
    assert answer.read("[s] qh") == (texts, -5, 7)
    assert answer.read("? y [(s[i])] [q] u") == (1, b"x" * 200, structs, [], "ab" * 16)


@pytest.mark.parametrize("count", [2**31 - 1, 1_000_000])
def test_a_count_that_cannot_be_is_not_allocated(count: int) -> None:
    with pytest.raises(MalformedAnswerError):
        protocol.api_versions().read(Answer(struct.pack(">hi", 0, count)))


@pytest.mark.parametrize(
    "reply",
    [
        struct.pack(">i", 2**31 - 1),  # a size that nobody allocates
        struct.pack(">i", -1),
        struct.pack(">i", 3),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x15\x03\x03\x00\x02\x02\x28",  # an alert of TLS
        packet(77, b"\0" * 6),  # an answer to another request
        packet(1, b"\0" * 5),  # ends too early
    ],
)
def test_what_is_no_answer_of_kafka_is_said_at_once(reply: bytes) -> None:
    with pytest.raises(UnavailableError, match="does not answer as Kafka does"):
        ask(lambda _key, _number: reply, patience_ms=60_000)


@pytest.mark.slow(0.5)
@pytest.mark.parametrize("silence", [None, b""], ids=["closes", "says nothing"])
def test_a_broker_that_goes_away_or_says_nothing_is_waited_for_a_limited_time(silence: bytes | None) -> None:
    with pytest.raises(UnavailableError, match="did not answer in time"):
        ask(lambda key, number: versions(number) if key == 18 else silence)


def test_a_broker_that_sends_byte_by_byte_is_waited_for_a_limited_time() -> None:
    clock = iter(range(0, 100_000, 100))
    with (
        broker(lambda _key, number: versions(number)[:-1]) as address,
        pytest.raises(TimeoutError),
    ):
        Connection(address, Security(), limit_ms=500, monotonic_ms=lambda: next(clock))


@pytest.mark.parametrize("code", [14, 15, 16, 51])
def test_what_goes_away_by_itself_is_asked_again(code: int) -> None:
    answers = iter([code, code, 0])

    def replies(key: int, number: int) -> bytes:
        return versions(number) if key == 18 else packet(number, struct.pack(">ih", 0, next(answers)))

    assert ask(replies, patience_ms=5000) == 0
    assert next(answers, None) is None


def test_what_does_not_go_away_is_asked_for_a_limited_time() -> None:
    def replies(key: int, number: int) -> bytes:
        return versions(number) if key == 18 else packet(number, struct.pack(">ih", 0, 51))

    with pytest.raises(UnavailableError, match="CONCURRENT_TRANSACTIONS"):
        ask(replies)


@pytest.mark.parametrize("address", [("127.0.0.1", -1), ("a" * 64, 9092), ("a..b", 9092), ("a\0b", 9092), ("", 9092)])
@pytest.mark.parametrize("tls", [None, ssl.create_default_context()], ids=["plain", "TLS"])
def test_an_address_that_can_be_none_is_an_error_of_its_own(
    address: tuple[str, int], tls: ssl.SSLContext | None
) -> None:
    """A broker says where others are: what no resolver can be asked for ends the wait like any other."""
    with (
        Cluster([address], Security(tls), patience_ms=100) as cluster,
        pytest.raises(UnavailableError, match="did not answer in time"),
    ):
        cluster.ask_any(protocol.metadata([]))


def test_an_old_broker_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Kafka 3\.0"):
        ask(lambda _key, number: packet(number, struct.pack(">hihhh", 0, 1, 18, 0, 3)))
