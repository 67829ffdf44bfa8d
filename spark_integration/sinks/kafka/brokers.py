"""Client for a cluster's brokers: TLS and SASL connections, request routing, retries and transactions.

    request   size int32 │ key int16 │ version int16 │ number int32 │ client id │ (tags) │ body
    response  size int32 │ number int32 │ (tags) │ body

The codes of permanent errors are returned to the caller. Requests that meet transient errors, such as moving or loading
coordinators, unfinished markers and restarting brokers, are retried, and finally raise `UnavailableError`.

Each new producer of a transactional id gets a new epoch or a new producer id, so the three values in a handle identify
one attempt. The state of a transactional id determines the state of the handle:

    Ongoing                             prepared
    PrepareCommit, CompleteCommit       committed
    any other state, or not found       aborted by the sink or by its timeout, or forgotten
    different producer id or epoch      the same, or committed long ago and the id reused since
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import socket
import ssl
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Self, TypeVar

from confluent_kafka import KafkaError

from holdfast import clock
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.snapshotter.fields import NUMBER_LIMIT, Stored, refuse
from holdfast.spark_integration.sinks.kafka import protocol
from holdfast.spark_integration.sinks.kafka.protocol import (
    MalformedAnswerError,
    Node,
    Request,
    Response,
    Topic,
    TransactionDescription,
    encoded,
    name_of,
)
from holdfast.spark_integration.sinks.two_phase_sink import Handle

T = TypeVar("T")
C = TypeVar("C", bound=tuple[Any, ...])  # a result whose first item is the code
Address = tuple[str, int]

_CLIENT_ID = "holdfast"
_ANSWER_MAX_BYTES = 64 << 20
#: Responses are read in pieces, so a broker's claimed size does not drive allocation.
_PIECE_BYTES = 64 << 10
_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 2, 500
_ANSWER_LIMIT_MS = 10_000
_HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MECHANISMS = ("PLAIN", *_HASHES)
_ITERATIONS_MIN, _ITERATIONS_MAX = 1_000, 1_000_000
#: States of a transaction.
ONGOING, _EMPTY, _COMMITTING, _COMMITTED = "Ongoing", "Empty", "PrepareCommit", "CompleteCommit"
#: Prefix of the states in which markers are still being written.
_ENDING = "Prepare"
#: Marks fenced ids: attempts never use this timeout, since users cannot set less than a second.
_FENCED_TIMEOUT_MS = 999
# With ids of 250 characters, a request has 250 KB.
_IDS_PER_REQUEST = 1000
_RIGHT = "write transactional ids that begin with holdfast.<name of the sink>."


@dataclass(frozen=True)
class Login:
    """A SASL mechanism and its credentials."""

    mechanism: str
    user: str = field(repr=False)
    password: str = field(repr=False)


@dataclass(frozen=True)
class Security:
    """TLS and login for broker connections; None disables either."""

    tls: ssl.SSLContext | None = None
    login: Login | None = None


def authenticate(login: Login, send: Callable[[bytes], bytes], nonce: str) -> None:
    """Log in by PLAIN or SCRAM (RFC 5802). Raises `MalformedAnswerError` if the server fails to authenticate itself."""
    if login.mechanism == "PLAIN":
        send(f"\0{login.user}\0{login.password}".encode())
        return
    digest = _HASHES[login.mechanism]
    first = f"n={login.user.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
    challenge = send(f"n,,{first}".encode())
    facts = _attributes(challenge)
    salt, iterations = _from_base64(facts.get("s", "")), facts.get("i", "")
    if not facts.get("r", "").startswith(nonce) or len(facts["r"]) == len(nonce):
        raise MalformedAnswerError("the server's nonce does not extend the client's")
    if not iterations.isdecimal() or not _ITERATIONS_MIN <= int(iterations[:9]) <= _ITERATIONS_MAX:
        raise MalformedAnswerError("the server demands too few or too many iterations")
    salted = hashlib.pbkdf2_hmac(digest, login.password.encode(), salt, int(iterations[:9]))
    last = f"c=biws,r={facts['r']}"
    signed = f"{first},{challenge.decode()},{last}".encode()
    client_key = hmac.digest(salted, b"Client Key", digest)
    signature = hmac.digest(hashlib.new(digest, client_key).digest(), signed, digest)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    final = _attributes(send(f"{last},p={base64.b64encode(proof).decode()}".encode()))
    expected = hmac.digest(hmac.digest(salted, b"Server Key", digest), signed, digest)
    if not hmac.compare_digest(_from_base64(final.get("v", "")), expected):
        raise MalformedAnswerError("the server's signature does not match the password")


def _attributes(message: bytes) -> dict[str, str]:
    try:
        return {part[:1]: part[2:] for part in message.decode().split(",")}
    except UnicodeDecodeError as exc:
        raise MalformedAnswerError("a token is not text") from exc


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise MalformedAnswerError("a token is not base64") from exc


class BrokerConnection:
    """A connection to one broker, unusable after a call raises `OSError` or `MalformedAnswerError`."""

    def __init__(
        self,
        address: Address,
        security: Security,
        *,
        limit_ms: int,
        monotonic_ms: Callable[[], int] = clock.monotonic_ms,
    ) -> None:
        self._limit_ms, self._monotonic_ms = limit_ms, monotonic_ms
        self._number = 0
        self._known: dict[int, tuple[int, int]] = {}
        self._socket = _connected(address, limit_ms)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if security.tls is not None:
                self._socket = security.tls.wrap_socket(self._socket, server_hostname=address[0])
            code, self._known = self.ask(protocol.api_versions())
            if code or not self._known:
                raise MalformedAnswerError(f"the broker lists no API versions: {name_of(code)}")
            if security.login is not None:
                self._log_in(security.login, clock.new_id() + clock.new_id())
        except BaseException:
            self.close()
            raise

    def ask(self, request: Request[T]) -> T:
        """Send a request and return the parsed response."""
        low, high = self._known.get(request.key, (0, -1)) if self._known else (0, request.version)
        if not low <= request.version <= high:
            raise InvalidArgumentError(
                "the broker does not support a request of this sink; use Kafka 3.0 or newer",
                request=request.name,
                version=request.version,
                broker_knows=f"{low}..{high}",
            )
        self._number += 1
        header = encoded("hhis", request.key, request.version, self._number, _CLIENT_ID)
        packet = header + (b"\0" if request.flexible else b"") + request.body
        end_ms = self._monotonic_ms() + self._limit_ms
        self._wait_at_most(end_ms)
        self._socket.sendall(struct.pack(">i", len(packet)) + packet)
        (size,) = struct.unpack(">i", self._read(4, end_ms))
        if not 4 <= size <= _ANSWER_MAX_BYTES:
            raise MalformedAnswerError(f"a response has an invalid size: {size} bytes")
        answer = Response(self._read(size, end_ms), flexible=request.flexible)
        if answer.read("i") != (self._number,):
            raise MalformedAnswerError("a response belongs to another request")
        answer.skip_tags()
        return request.read(answer)

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int, end_ms: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            self._wait_at_most(end_ms)
            piece = self._socket.recv(min(size - len(received), _PIECE_BYTES))
            if not piece:
                raise ConnectionError("the broker closed the connection")
            received += piece
        return bytes(received)

    def _wait_at_most(self, end_ms: int) -> None:
        left_ms = end_ms - self._monotonic_ms()
        if left_ms <= 0:
            raise TimeoutError("the broker did not respond in time")
        self._socket.settimeout(left_ms / 1000)

    def _log_in(self, login: Login, nonce: str) -> None:
        def require(code: int, problem: str) -> None:
            if code:
                raise InvalidArgumentError(problem, mechanism=login.mechanism, answer=name_of(code))

        def send(token: bytes) -> bytes:
            code, answer = self.ask(protocol.sasl_authenticate(token))
            require(code, "the brokers refused the credentials; check sasl.username and sasl.password")
            return answer

        code = self.ask(protocol.sasl_handshake(login.mechanism))
        require(code, "the brokers do not offer this SASL mechanism; set sasl.mechanism to one that they offer")
        authenticate(login, send, nonce)


def _connected(address: Address, limit_ms: int) -> socket.socket:
    problem = f"not a broker's address: {address[0]!r}, port {address[1]}"
    if not address[0]:  # the resolver takes an empty name for this machine
        raise ConnectionError(problem)
    try:
        return socket.create_connection(address, limit_ms / 1000)
    except (ValueError, OverflowError) as exc:  # an invalid name, as with a label of 64 characters
        raise ConnectionError(problem) from exc


def _retriable_code(found: Sequence[tuple[Any, ...]]) -> int:
    # Each result begins with its code. One transient code repeats the whole request.
    return next((int(code) for code, *_ in found if code in protocol.RETRIABLE), 0)


class Cluster:
    """Routes requests to a cluster's brokers, for one thread. `patience_ms`: time limit per request with retries."""

    def __init__(self, servers: Sequence[Address], security: Security, *, patience_ms: int) -> None:
        self._servers, self._security, self._patience_ms = list(servers), security, patience_ms
        self._connections: dict[Address, BrokerConnection] = {}
        self._coordinators: dict[tuple[str, bool], Address] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()

    def ask_any(self, request: Request[T], code_of: Callable[[T], int] = lambda _: 0) -> T:
        """Send a request to the first broker that answers."""
        return self._patiently(request.name, lambda: self._ask_some(request), code_of)

    def ask_nodes(self, name: str, request_of: Callable[[Node], Request[C]], most: int | None = None) -> list[C]:
        """Query all brokers, or the first `most`; repeat all if one fails: dead brokers stay listed for seconds."""

        def ask() -> list[C]:
            nodes, _ = self._ask_some(protocol.metadata([]))
            if not nodes:
                raise ConnectionError("the cluster reports no brokers")
            return [self._ask((node.host, node.port), request_of(node)) for node in nodes[:most]]

        return self._patiently(name, ask, _retriable_code)

    def ask_coordinator(self, key: str, request: Request[T], code_of: Callable[[T], int], *, group: bool = False) -> T:
        """Send a request to the coordinator of a transactional id or group; follow it if it moves."""

        def ask() -> T:
            return self._ask(self._addresses([key], group=group)[key], request)

        return self._patiently(request.name, ask, code_of)

    def describe(
        self, ids: Sequence[str], code_of: Callable[[Sequence[TransactionDescription]], int] = _retriable_code
    ) -> dict[str, TransactionDescription]:
        """Describe transactions, by transactional id; omit ids that their coordinator does not know."""
        found: list[TransactionDescription] = []
        for start in range(0, len(ids), _IDS_PER_REQUEST):
            ask = partial(self._describe, ids[start : start + _IDS_PER_REQUEST])
            described = self._patiently("DescribeTransactions", ask, code_of)
            found += described
        for one in found:
            if one.code not in (KafkaError.NO_ERROR, protocol.TRANSACTIONAL_ID_NOT_FOUND):
                raise refused(one.code, _RIGHT)
        return {one.transactional_id: one for one in found if not one.code}

    def _describe(self, ids: Sequence[str]) -> list[TransactionDescription]:
        by_address: dict[Address, list[str]] = defaultdict(list)
        for key, address in self._addresses(ids).items():
            by_address[address].append(key)
        requests = [(address, protocol.describe_transactions(its)) for address, its in by_address.items()]
        found = [one for address, request in requests for one in self._ask(address, request)]
        if {one.transactional_id for one in found} != {*ids}:  # a coordinator also answers for unknown ids
            raise MalformedAnswerError("a response describes other transactions")
        return found

    def _addresses(self, keys: Sequence[str], *, group: bool = False) -> dict[str, Address]:
        """Return the addresses of the coordinators of transactional ids or groups."""
        missing = [key for key in keys if (key, group) not in self._coordinators]
        found = self.ask_any(protocol.find_coordinators(missing, group=group), _retriable_code) if missing else []
        for code, key, node in found:
            if code:
                raise refused(code, f"use the {'consumer group' if group else 'transactional id'}", name=key)
            self._coordinators[key, group] = (node.host, node.port)
        if any((key, group) not in self._coordinators for key in keys):
            raise MalformedAnswerError("a response lacks the coordinator")
        return {key: self._coordinators[key, group] for key in keys}

    def _patiently(self, name: str, ask: Callable[[], T], code_of: Callable[[T], int]) -> T:
        end_ms = clock.monotonic_ms() + self._patience_ms
        pause_ms = _FIRST_PAUSE_MS
        while True:
            try:
                answer = ask()
                code = code_of(answer)
                if code not in protocol.RETRIABLE:
                    return answer
                reason = name_of(code)
                if code != KafkaError.CONCURRENT_TRANSACTIONS:
                    self._coordinators.clear()
            except ssl.SSLCertVerificationError as exc:
                raise InvalidArgumentError(
                    "the broker's certificate is not trusted; set ssl.ca.location to the authority that signed it",
                    reason=exc.verify_message,
                ) from exc
            except MalformedAnswerError as exc:
                self._forget()
                raise UnavailableError(
                    "this is no Kafka broker: check that security.protocol and the port match the listener",
                    request=name,
                    reason=str(exc),
                    servers=self._shown(),
                ) from exc
            except OSError as exc:
                reason = str(exc)
                self._forget()
            if clock.monotonic_ms() + pause_ms > end_ms:
                raise UnavailableError(
                    "the brokers did not respond in time", request=name, reason=reason, servers=self._shown()
                )
            clock.sleep_ms(pause_ms)
            pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)

    def _ask_some(self, request: Request[T]) -> T:
        # Prefer open connections: one may suffice for all requests.
        addresses = [*self._connections, *self._servers]
        for address in addresses[:-1]:
            try:
                return self._ask(address, request)
            except OSError:
                continue
        return self._ask(addresses[-1], request)

    def _ask(self, address: Address, request: Request[T]) -> T:
        connection = self._connections.get(address)
        if connection is None:
            limit_ms = min(_ANSWER_LIMIT_MS, self._patience_ms)
            connection = self._connections[address] = BrokerConnection(address, self._security, limit_ms=limit_ms)
        try:
            return connection.ask(request)
        except BaseException:
            self._connections.pop(address).close()
            raise

    def _forget(self) -> None:
        while self._connections:
            self._connections.popitem()[1].close()
        self._coordinators.clear()

    def _shown(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self._servers)


def refused(code: int, doing: str, **facts: object) -> InvalidArgumentError | UnavailableError:
    """Return the error for a permanent code: a missing permission, or the broker's reason."""
    if code in protocol.UNAUTHORISED:
        return InvalidArgumentError(
            f"the user has no right to {doing}; docs/kafka-sink.md lists the rights that the sink needs",
            answer=name_of(code),
            **facts,
        )
    return UnavailableError(f"the broker did not {doing}", answer=name_of(code), **facts)


@dataclass(frozen=True)
class PreparedTransaction(Stored):
    """A parsed handle; producer id and epoch are -1 if the attempt wrote no rows."""

    transactional_id: str
    producer_id: Annotated[int, range(-1, NUMBER_LIMIT)]
    epoch: Annotated[int, range(-1, 1 << 15)]

    def is_in(self, states: Collection[str], known: Mapping[str, TransactionDescription]) -> bool:
        """Return whether this transaction, not a different one with the same id, is in one of these states."""
        found = known.get(self.transactional_id)
        return found is not None and found.state in states and self == _identity(found)

    def is_open(self, known: Mapping[str, TransactionDescription]) -> bool:
        """Return whether the transaction can still be committed or aborted."""
        return self.is_in([ONGOING], known)

    def is_committed(self, known: Mapping[str, TransactionDescription]) -> bool:
        """Return whether the transaction was committed, perhaps not yet in all partitions."""
        return self.is_in([_COMMITTING, _COMMITTED], known)


def with_rows(handles: Iterable[Handle], prefix: str = "") -> list[PreparedTransaction]:
    """Parse handles; omit attempts without rows. Raises `CorruptionError` for an id without the prefix."""
    found = [PreparedTransaction.read(handle, "a handle") for handle in handles]
    for one in found:
        if not one.transactional_id.startswith(prefix):
            refuse("a handle", "names another query's transaction", transactional_id=one.transactional_id)
    return [one for one in found if one.producer_id >= 0]


def is_spare(cluster: Cluster, one: PreparedTransaction) -> bool:
    """Return whether an id is unused since its commit, so that a new attempt may reuse it."""
    return one.is_in([_COMMITTED], cluster.describe([one.transactional_id]))


def commit(cluster: Cluster, one: PreparedTransaction) -> bool:
    """Commit a transaction; return False if it was aborted or lost."""
    request = protocol.end_txn(one.transactional_id, one.producer_id, one.epoch)
    code = cluster.ask_coordinator(one.transactional_id, request, lambda answer: answer)
    if code and code not in protocol.ENDED_OTHERWISE:
        raise refused(code, "commit the transaction" if code not in protocol.UNAUTHORISED else _RIGHT)
    return not code


def ended(cluster: Cluster, ids: Sequence[str]) -> dict[str, TransactionDescription]:
    """Wait until transactions have ended in all partitions, which EndTxn does not; return their descriptions."""

    def code_of(found: Sequence[TransactionDescription]) -> int:
        under_way = any(one.state.startswith(_ENDING) for one in found)
        return KafkaError.CONCURRENT_TRANSACTIONS if under_way else _retriable_code(found)

    return cluster.describe(ids, code_of)


def fence(cluster: Cluster, transactional_id: str) -> None:
    """Abort a transactional id's open transaction and permanently fence its producer.

    CONCURRENT_TRANSACTIONS means that the abort is in progress: a retry would register a new producer needlessly.
    """

    def code_of(answer: int) -> int:
        if answer != KafkaError.CONCURRENT_TRANSACTIONS:
            return answer
        known = ended(cluster, [transactional_id]).get(transactional_id)
        return answer if known is not None and known.state in (ONGOING, _EMPTY) else 0

    request = protocol.init_producer_id(transactional_id, _FENCED_TIMEOUT_MS)
    code = cluster.ask_coordinator(transactional_id, request, code_of)
    if code not in (KafkaError.NO_ERROR, KafkaError.CONCURRENT_TRANSACTIONS):
        raise refused(code, _RIGHT)


def left_open(cluster: Cluster, prefix: str) -> list[PreparedTransaction]:
    """Return the open transactions of ids with a prefix; fence idle producers of such ids."""
    ids = _listed(cluster, prefix, [ONGOING, _EMPTY])
    # A producer fenced before its first message stays Empty for days.
    for name, known in cluster.describe(ids[_EMPTY]).items():
        if known.state == _EMPTY and known.timeout_ms != _FENCED_TIMEOUT_MS:
            fence(cluster, name)
    return [_identity(known) for known in cluster.describe(ids[ONGOING]).values() if known.state == ONGOING]


def fence_others(cluster: Cluster, prefix: str, batch_id: int, committed: Iterable[PreparedTransaction]) -> None:
    """Abort open transactions of other attempts at this or an earlier micro-batch.

    Until its timeout, a dead attempt's transaction would block ``read_committed`` consumers.
    """
    ours = {one.transactional_id for one in committed}
    for name in _listed(cluster, prefix, [ONGOING])[ONGOING]:
        batch = name.removeprefix(prefix).partition(".")[0]
        if name not in ours and batch.isdecimal() and int(batch) <= batch_id:
            fence(cluster, name)


def _listed(cluster: Cluster, prefix: str, states: Sequence[str]) -> dict[str, list[str]]:
    """Return the transactional ids with a prefix, grouped by state."""
    request = protocol.list_transactions(states)
    ids: dict[str, list[str]] = defaultdict(list)
    for code, listed in cluster.ask_nodes(request.name, lambda _: request):
        if code:
            raise refused(code, _RIGHT)
        for name, state in listed:
            if name.startswith(prefix):
                ids[state].append(name)
    return ids


def find_topic(cluster: Cluster, name: str) -> Topic | None:
    """Return a topic's metadata; None if the topic is absent or invisible to the user."""
    _, topics = cluster.ask_any(protocol.metadata([name]), lambda answer: _retriable_code(answer[1]))
    found = next((one for one in topics if one.name == name), None)
    if found is None or found.code == KafkaError.UNKNOWN_TOPIC_OR_PART:
        return None
    if found.code:
        raise refused(found.code, "write to the topic", topic=name)
    return found


def longest_timeout_ms(cluster: Cluster) -> int | None:
    """Return the brokers' limit on transaction timeouts; None if unknown, as without permission to read it."""

    def request_of(node: Node) -> Request[tuple[int, str | None]]:
        return protocol.broker_setting(str(node.number), "transaction.max.timeout.ms")

    ((code, value),) = cluster.ask_nodes("DescribeConfigs", request_of, most=1)
    if code or value is None or not value.isdecimal():
        return None
    return min(int(value), (1 << 31) - 1)


def _identity(known: TransactionDescription) -> PreparedTransaction:
    return PreparedTransaction(known.transactional_id, known.producer_id, known.epoch)
