"""The Kafka sink without Kafka: rows as messages, our own requests, logins, options, and hostile brokers."""

from __future__ import annotations

import base64
import datetime as dt
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

from holdfast.errors import CorruptionError, InvalidArgumentError, SchemaMismatchError, UnavailableError
from holdfast.spark_integration.sinks.kafka import brokers, protocol
from holdfast.spark_integration.sinks.kafka.brokers import BrokerConnection, Cluster, Login, Security, authenticate
from holdfast.spark_integration.sinks.kafka.options import ClientOptions
from holdfast.spark_integration.sinks.kafka.protocol import MalformedAnswerError, Request, Response, encoded
from holdfast.spark_integration.sinks.kafka.sink import KafkaSink, check_schema, messages
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery

#: Takes the key of a request and its number; returns the packet to send, or None to close the connection.
Replies = Callable[[int, int], bytes | None]

VERSIONS = (3, 8, 9, 10, 17, 18, 22, 26, 32, 36, 65, 66)


def packet(number: int, body: bytes) -> bytes:
    """Return an answer with a size and a number."""
    return struct.pack(">ii", len(body) + 4, number) + body


def versions(number: int) -> bytes:
    """Return the answer to ApiVersions of a broker that knows everything."""
    known = b"".join(struct.pack(">hhh", key, 0, 99) for key in VERSIONS)
    return packet(number, struct.pack(">hi", 0, len(VERSIONS)) + known)


@contextmanager
def broker(replies: Replies) -> Iterator[tuple[str, int]]:
    """Serve on the loopback; yields the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_answer, args=(connection, replies), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _answer(connection: socket.socket, replies: Replies) -> None:
    with connection:
        try:
            while size := connection.recv(4, socket.MSG_WAITALL):
                request = connection.recv(struct.unpack(">i", size)[0], socket.MSG_WAITALL)
                key, _, number = struct.unpack(">hhi", request[:8])
                reply = replies(key, number)
                if reply is None:
                    return
                connection.sendall(reply)
        except (OSError, struct.error):
            return


_HEADERS = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
_ALL = pa.schema(
    {"value": pa.binary(), "key": pa.string(), "topic": pa.string(), "partition": pa.int32()}
    | {"headers": _HEADERS, "timestamp": pa.timestamp("us", "UTC")}
)


def test_all_columns() -> None:
    moment = dt.datetime(2026, 11, 24, 1, 2, 3, 456_789, dt.UTC)
    row = [[b"v"], ["k"], ["t"], [3], [[{"key": "h", "value": b"x"}, {"key": "h", "value": None}]], [moment]]
    found = list(messages(pa.record_batch(row, schema=_ALL), None))
    assert found == [("t", b"v", b"k", 3, 1795482123456, [("h", b"x"), ("h", None)])]


def test_nulls_mean_a_tombstone_no_key_by_the_key_no_headers_and_now() -> None:
    row = [[None], [None], ["t"], [None], [None], [None]]
    assert list(messages(pa.record_batch(row, schema=_ALL), None)) == [("t", None, None, -1, 0, None)]


def test_value_alone_goes_to_the_sinks_topic() -> None:
    rows = pa.record_batch({"value": pa.array(["ä", "b"])})
    assert list(messages(rows, "t")) == [("t", "ä".encode(), None, -1, 0, None), ("t", b"b", None, -1, 0, None)]


@pytest.mark.parametrize(
    ("values", "column", "of_column", "topic", "said"),
    [
        (["v"], "topic", pa.array([None], pa.string()), None, "no topic"),
        (["v"], "headers", pa.array([[{"key": None, "value": b"x"}]], _HEADERS), "t", "no key"),
        (["a", "v"], "partition", pa.array([None, -1], pa.int32()), "t", "negative partition"),
        *(
            (["a", "v"], "timestamp", pa.array([None, moment], pa.timestamp("us", "UTC")), "t", "after 1970")
            for moment in (dt.datetime(1970, 1, 1, tzinfo=dt.UTC), dt.datetime(1969, 1, 1, tzinfo=dt.UTC))
        ),
    ],
)
def test_rows_that_are_no_message_are_refused(
    values: list[str], column: str, of_column: pa.Array, topic: str | None, said: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        list(messages(pa.record_batch({"value": pa.array(values), column: of_column}), topic))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("value", pa.int64()),
        ("key", pa.float64()),
        ("partition", pa.int64()),
        ("timestamp", pa.date32()),
        ("topic", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.binary())),
        ("headers", pa.list_(pa.struct({"key": pa.binary(), "value": pa.binary()}))),
    ],
)
def test_other_types_are_refused_by_name_and_type(name: str, kind: pa.DataType) -> None:
    schema = _ALL.set(_ALL.get_field_index(name), pa.field(name, kind))
    with pytest.raises(SchemaMismatchError, match=f"column={name}"):
        check_schema(schema, None)


def test_a_missing_value_and_columns_of_no_message_are_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="needs the column value"):
        check_schema(pa.schema({"key": pa.string()}), "t")
    with pytest.raises(SchemaMismatchError, match="column=user"):
        check_schema(pa.schema({"value": pa.string(), "user": pa.string()}), "t")


OUR_HANDLE: dict[str, Any] = {"transactional_id": "holdfast.alerts.query.0.0.0", "producer_id": 1, "epoch": 0}


@pytest.mark.parametrize(
    "handle",
    [
        *(OUR_HANDLE | {"transactional_id": whose} for whose in ("somebody's", "holdfast.alerts.another.0.0.0")),
        *(OUR_HANDLE | wrong for wrong in ({"epoch": 1 << 20}, {"producer_id": "1"})),
        {"transactional_id": OUR_HANDLE["transactional_id"]},
    ],
)
def test_a_handle_of_anything_else_is_refused_before_the_brokers_are_asked(handle: Handle) -> None:
    """Who can write to the state directory must end nobody's transactions but the query's."""
    sink, query = KafkaSink("alerts", "alerts", servers="127.0.0.1:1", timeout_s=0.1), SinkQuery("alerts", "query")
    with pytest.raises(CorruptionError, match="a handle"):
        sink.commit(query, 0, [handle])
    with pytest.raises(CorruptionError, match="a handle"):
        sink.abort(query, [handle])


def test_one_topic_from_one_place() -> None:
    for schema, topic in ((pa.schema({"value": pa.string()}), None), (_ALL, "t")):
        with pytest.raises(InvalidArgumentError, match="topic"):
            check_schema(schema, topic)


@pytest.mark.parametrize("column", ["topic", "headers"])
def test_names_that_are_not_utf8_are_refused(column: str) -> None:
    broken = pa.array([b"\xff"]).cast(pa.string(), safe=False)
    header = pa.StructArray.from_arrays([broken, pa.array([b"x"])], ["key", "value"])
    columns = {"topic": broken, "headers": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), header)}
    rows = pa.record_batch({"value": pa.array(["v"]), column: columns[column]})
    with pytest.raises(InvalidArgumentError, match=f"column '{column}' of the messages has text that is not UTF-8"):
        list(messages(rows, None if column == "topic" else "t"))


_REQUESTS: list[Request[object]] = [
    protocol.api_versions(),
    protocol.sasl_handshake("PLAIN"),
    protocol.sasl_authenticate(b"token"),
    protocol.metadata(["topic"]),
    protocol.find_coordinators(["id"]),
    protocol.init_producer_id("id", 1000),
    protocol.end_txn("id", 1, 0),
    protocol.describe_transactions(["id"]),
    protocol.list_transactions(["Ongoing"]),
    protocol.broker_setting("1", "transaction.max.timeout.ms"),
    protocol.commit_offset("group", protocol.CommittedOffset("topic", 1, "text")),
    protocol.fetch_offsets("group"),
]


def ask(replies: Replies, patience_ms: int = 300) -> int:
    """Ask a server for the end of a transaction."""
    with broker(replies) as address, Cluster([address], Security(), patience_ms=patience_ms) as cluster:
        return cluster.ask_any(protocol.end_txn("id", 1, 0), lambda code: code)


@pytest.mark.parametrize("request_", _REQUESTS, ids=lambda one: one.name)
@given(body=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(request_: Request[object], body: bytes) -> None:
    with suppress(MalformedAnswerError):
        request_.read(Response(body, flexible=request_.flexible))


@pytest.mark.slow(2)
@given(texts=st.lists(st.text(max_size=300), max_size=5), flexible=st.booleans())
def test_fields_are_read_as_they_were_written(texts: list[str], flexible: bool) -> None:
    structs = [(text, [number, -number]) for number, text in enumerate(texts)]
    values = (texts, -5, 7, True, b"x" * 200, structs, None, "ab" * 16)
    body = encoded("[s] q h ? y [(s [i])] [q] u", *values, flexible=flexible)
    answer = Response(body, flexible=flexible)
    assert answer.read("[s] qh") == (texts, -5, 7)
    assert answer.read("? y [(s[i])] [q] u") == (1, b"x" * 200, structs, [], "ab" * 16)


@pytest.mark.parametrize("count", [2**31 - 1, 1_000_000])
def test_a_count_that_cannot_be_is_not_allocated(count: int) -> None:
    with pytest.raises(MalformedAnswerError):
        protocol.api_versions().read(Response(struct.pack(">hi", 0, count)))


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
    with pytest.raises(UnavailableError, match="this is no Kafka broker"):
        ask(lambda _key, _number: reply, patience_ms=60_000)


@pytest.mark.slow(0.5)
@pytest.mark.parametrize("silence", [None, b""], ids=["closes", "says nothing"])
def test_a_broker_that_goes_away_or_says_nothing_is_waited_for_a_limited_time(silence: bytes | None) -> None:
    with pytest.raises(UnavailableError, match="did not respond in time"):
        ask(lambda key, number: versions(number) if key == 18 else silence)


def test_a_broker_that_sends_byte_by_byte_is_waited_for_a_limited_time() -> None:
    clock = iter(range(0, 100_000, 100))
    with broker(lambda _key, number: versions(number)[:-1]) as address, pytest.raises(TimeoutError):
        BrokerConnection(address, Security(), limit_ms=500, monotonic_ms=lambda: next(clock))


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
def test_an_address_that_is_none_is_its_own_error(address: tuple[str, int], tls: ssl.SSLContext | None) -> None:
    """A broker says where others are: what no resolver can be asked for ends the wait like any other."""
    with (
        Cluster([address], Security(tls), patience_ms=100) as cluster,
        pytest.raises(UnavailableError, match="did not respond in time"),
    ):
        cluster.ask_any(protocol.metadata([]))


def test_an_old_broker_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Kafka 3\.0"):
        ask(lambda _key, number: packet(number, struct.pack(">hihhh", 0, 1, 18, 0, 3)))


_SECRET = "not-to-be-seen"


def options(**values: str) -> ClientOptions:
    """Return options with servers; ``__`` stands for a dot."""
    return ClientOptions.of({name.replace("__", "."): value for name, value in values.items()}, "here:1")


def test_the_option_goes_before_the_argument() -> None:
    several = options(bootstrap__servers="there:2, [::1]:3,PLAINTEXT://far")
    assert several.servers() == [("there", 2), ("::1", 3), ("far", 9092)]


_SASL = {"security.protocol": "SASL_SSL", "sasl.password": _SECRET}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({"bootstrap.servers": servers}, "servers") for servers in ("", " , ", "host:port", ":9092", "host:0")),
        ({"bootstrap.servers": "host:70000"}, "servers"),
        # What makes results exactly once is not the user's.
        *(({name: "1"}, name) for name in ("transactional.id", "enable.idempotence", "acks")),
        ({"delivery.report.only.error": "1"}, "delivery.report.only.error"),
        # confluent_kafka raises a bare TypeError, ValueError or AttributeError, or ignores the text.
        *(
            ({name: "print"}, f"takes a Python object.*option={name}")
            for name in ("error_cb", "throttle_cb", "oauth_cb", "logger", "default.topic.config")
        ),
        # Logins that our requests do not know, and half a login.
        *((_SASL | {"sasl.mechanism": one}, "SCRAM-SHA-512") for one in ("GSSAPI", "OAUTHBEARER", "SCRAM-SHA-1")),
        (_SASL | {"sasl.mechanism": "PLAIN"}, r"sasl\.username"),
        ({"security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN", "sasl.username": "me"}, r"sasl\.password"),
        ({"security.protocol": "ssl", "ssl.ca.pem": _SECRET}, "certificates cannot be read"),
        *(
            ({"security.protocol": "ssl", name: _SECRET}, name)
            for name in ("ssl.keystore.location", "ssl.key.pem", "ssl.crl.location")
        ),
        *(({"transaction.timeout.ms": ms}, r"transaction\.timeout\.ms") for ms in ("", "soon", "-1", "10", "9" * 11)),
    ],
)
def test_options_that_cannot_be_are_refused_without_what_is_secret(given: dict[str, str], said: str) -> None:
    def use() -> object:
        made = ClientOptions.of(given, "here:1")
        return made.servers(), made.security(), made.timeout_ms

    with pytest.raises(InvalidArgumentError, match=said) as raised:
        use()
    assert _SECRET not in repr(raised.getrepr(chain=True))


def test_checks_of_certificates_are_on_unless_they_are_switched_off() -> None:
    usual = options(security__protocol="ssl").security().tls
    loose = options(security__protocol="ssl", enable__ssl__certificate__verification="false").security().tls
    unnamed = options(security__protocol="ssl", ssl__endpoint__identification__algorithm="none").security().tls
    found = [(tls.check_hostname, tls.verify_mode) for tls in (usual, loose, unnamed) if tls is not None]
    assert found == [(True, ssl.CERT_REQUIRED), (False, ssl.CERT_NONE), (False, ssl.CERT_REQUIRED)]


def test_secrets_are_taken_out_of_texts_and_shown_nowhere() -> None:
    given = options(sasl__password=_SECRET, ssl__key__password="other")
    assert given.without_secrets(f"wrong value {_SECRET}, other") == "wrong value ***, ***"
    assert _SECRET not in repr(given)


def test_credentials_are_named_to_those_who_must_not_carry_them() -> None:
    """A data source leaves them behind when it travels; Spark Connect is asked for them by name."""
    assert {"sasl.password", "ssl.key.password", "ssl.key.pem"} <= {*KafkaSink("alerts", "topic").credentials}


# Of RFC 7677, section 3.
_LOGIN = Login("SCRAM-SHA-256", "user", "pencil")
_NONCE = "rOprNGfwEbeRWgbNEkqO"
_CHALLENGE = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
_PROOF = "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
_VERIFIER = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def server(sent: list[bytes], *answers: str) -> Callable[[bytes], bytes]:
    """Return a server that keeps what it is sent and answers so."""
    left = iter(answers)

    def send(token: bytes) -> bytes:
        sent.append(token)
        return next(left).encode()

    return send


def test_scram_as_the_rfc_shows_it() -> None:
    sent: list[bytes] = []
    authenticate(_LOGIN, server(sent, _CHALLENGE, _VERIFIER), _NONCE)
    assert sent == [b"n,,n=user,r=" + _NONCE.encode(), _PROOF.encode()]


def test_plain_sends_user_and_password() -> None:
    sent: list[bytes] = []
    authenticate(Login("PLAIN", "user", "pencil"), server(sent, ""), _NONCE)
    assert sent == [b"\0user\0pencil"]


@pytest.mark.parametrize(
    "answers",
    [
        (_CHALLENGE, "v=" + base64.b64encode(b"x" * 32).decode()),
        (_CHALLENGE, "e=other-error"),
        (_CHALLENGE, "v=*"),
        (_CHALLENGE.replace("i=4096", "i=2000000000"),),
        (_CHALLENGE.replace("i=4096", "i=1"),),
        (_CHALLENGE.replace("r=rOpr", "r=other"),),
        (f"r={_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",),
        ("",),
    ],
)
def test_a_server_that_does_not_keep_to_scram_is_refused(answers: tuple[str, ...]) -> None:
    with pytest.raises(MalformedAnswerError):
        authenticate(_LOGIN, server([], *answers), _NONCE)


def test_a_login_shows_nothing() -> None:
    assert "pencil" not in repr(_LOGIN)


_METADATA, _FIND, _CONFIGS, _DESCRIBE, _LIST = 3, 10, 32, 65, 66
Address = tuple[str, int]


@pytest.fixture
def dead() -> Iterator[Address]:
    """Return an address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()


@contextmanager
def cluster_of(*listings: list[Address], answers: Callable[[Address], dict[int, bytes]]) -> Iterator[Cluster]:
    """Serve one broker, which says in turn that these and itself are there; `answers` are given its address."""
    left = list(listings)

    def replies(key: int, number: int) -> bytes:
        if key == 18:
            return versions(number)
        if key == _METADATA:
            others = left.pop(0) if len(left) > 1 else left[0]
            return packet(number, b"\0" + metadata([*others, address]))
        return packet(number, answers(address)[key])

    with ExitStack() as ends:
        address = ends.enter_context(broker(replies))
        yield ends.enter_context(Cluster([address], Security(), patience_ms=3000))


def metadata(nodes: list[Address]) -> bytes:
    told = [(number, host, port, "") for number, (host, port) in enumerate(nodes)]
    return encoded("i [(i s i s)] s i [(h s u ? [] i)]", 0, told, "cluster", 0, [], flexible=True)


def listed(*ids: str) -> bytes:
    found = [(name, 1, "Ongoing") for name in ids]
    return b"\0" + encoded("i h [s] [(s q s)]", 0, 0, [], found, flexible=True)


def test_a_broker_that_has_gone_is_asked_no_more_once_the_cluster_says_so(dead: Address) -> None:
    """It stays listed for some seconds after its death, and a commit must not fail for that."""
    with cluster_of([dead], [dead], [], answers=lambda _: {_LIST: listed("other")}) as cluster:
        assert brokers.left_open(cluster, "holdfast.") == []


def test_the_limit_of_transactions_is_told_by_a_broker_that_is_there(dead: Address) -> None:
    setting = ("transaction.max.timeout.ms", "60000", False, 0, False, [])
    told = encoded("i [(h s b s [(s s ? b ? [(s s b)])])]", 0, [(0, "", 4, "0", [setting])])
    with cluster_of([dead], [], answers=lambda _: {_CONFIGS: told}) as cluster:
        assert brokers.longest_timeout_ms(cluster) == 60_000


@pytest.mark.parametrize("leaves_out", ["coordinator", "state"])
def test_an_id_that_an_answer_leaves_out_is_not_taken_for_a_forgotten_one(leaves_out: str) -> None:
    """A forgotten transaction may be given up; one of which nothing was said may not."""

    def answers(address: Address) -> dict[int, bytes]:
        there = [] if leaves_out == "coordinator" else [("id", 0, *address, 0, "")]
        return {
            _FIND: b"\0" + encoded("i [(s isi h s)]", 0, there, flexible=True),
            _DESCRIBE: b"\0" + encoded("i [(h s s i q q h [(s [i])])]", 0, [], flexible=True),
        }

    with cluster_of([], answers=answers) as cluster, pytest.raises(UnavailableError, match="this is no Kafka broker"):
        cluster.describe(["id"])
