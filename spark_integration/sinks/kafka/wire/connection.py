"""One connection to a broker: TCP, TLS and SASL as asked for, then one request and its answer at a time.

::

    request   size int32 │ key int16 │ version int16 │ number int32 │ client id │ (tags) │ body
    answer    size int32 │ number int32 │ (tags) │ body

An answer is read as it comes, up to a limit: a broker's word on its size allocates nothing.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from holdfast import clock
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.sinks.kafka.wire import error_codes, requests, sasl
from holdfast.spark_integration.sinks.kafka.wire.fields import Answer, MalformedAnswerError, encoded
from holdfast.spark_integration.sinks.kafka.wire.requests import Request

T = TypeVar("T")

CLIENT_ID = "holdfast"
_ANSWER_MAX_BYTES = 64 << 20
_PIECE_BYTES = 64 << 10


@dataclass(frozen=True)
class Security:
    """TLS and login for brokers; neither if both are None."""

    tls: ssl.SSLContext | None = None
    login: sasl.Login | None = None


class Connection:
    """An open connection; `OSError` and `MalformedAnswerError` of any call leave it unusable."""

    def __init__(
        self,
        address: tuple[str, int],
        security: Security,
        *,
        limit_ms: int,
        monotonic_ms: Callable[[], int] = clock.monotonic_ms,
        new_id: Callable[[], str] = clock.new_id,
    ) -> None:
        self._limit_ms = limit_ms
        self._monotonic_ms = monotonic_ms
        self._number = 0
        self._known: dict[int, tuple[int, int]] = {}
        self._socket = _connected(address, limit_ms)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if security.tls is not None:
                self._socket = security.tls.wrap_socket(self._socket, server_hostname=address[0])
            self._learn_versions()
            if security.login is not None:
                self._authenticate(security.login, new_id() + new_id())
        except BaseException:
            self.close()
            raise

    def ask(self, request: Request[T]) -> T:
        """Send a request and return its parsed answer."""
        low, high = self._known.get(request.key, (0, -1)) if self._known else (0, request.version)
        if not low <= request.version <= high:
            raise InvalidArgumentError(
                "the broker does not know a request that this sink needs; it needs Kafka 3.0 or newer",
                request=request.name,
                version=request.version,
                broker_knows=f"{low}..{high}",
            )
        self._number += 1
        header = encoded("hhis", request.key, request.version, self._number, CLIENT_ID)
        packet = header + (b"\0" if request.flexible else b"") + request.body
        end_ms = self._monotonic_ms() + self._limit_ms
        self._wait_at_most(end_ms)
        self._socket.sendall(struct.pack(">i", len(packet)) + packet)
        return self._read_answer(request, end_ms)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read_answer(self, request: Request[T], end_ms: int) -> T:
        (size,) = struct.unpack(">i", self._read(4, end_ms))
        if not 4 <= size <= _ANSWER_MAX_BYTES:
            raise MalformedAnswerError(f"an answer of {size} bytes")
        answer = Answer(self._read(size, end_ms), flexible=request.flexible)
        if answer.read("i") != (self._number,):
            raise MalformedAnswerError("an answer to another request")
        answer.skip_tags()
        return request.read(answer)

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
            raise TimeoutError("the broker did not answer in time")
        self._socket.settimeout(left_ms / 1000)

    def _learn_versions(self) -> None:
        code, known = self.ask(requests.api_versions())
        if code or not known:
            raise MalformedAnswerError(f"no versions: {error_codes.name_of(code)}")
        self._known = known

    def _authenticate(self, login: sasl.Login, nonce: str) -> None:
        code = self.ask(requests.sasl_handshake(login.mechanism))
        if code:
            raise InvalidArgumentError(
                "the brokers do not offer this SASL mechanism; set sasl.mechanism to one that they have",
                mechanism=login.mechanism,
                answer=error_codes.name_of(code),
            )

        def send(token: bytes) -> bytes:
            code, answer = self.ask(requests.sasl_authenticate(token))
            if code:
                raise InvalidArgumentError(
                    "the brokers refused the credentials; check sasl.username and sasl.password",
                    mechanism=login.mechanism,
                    answer=error_codes.name_of(code),
                )
            return answer

        sasl.authenticate(login, send, nonce)


def _connected(address: tuple[str, int], limit_ms: int) -> socket.socket:
    problem = f"no address of a broker: {address[0]!r}, port {address[1]}"
    if not address[0]:  # this machine, to the resolver
        raise ConnectionError(problem)
    try:
        return socket.create_connection(address, limit_ms / 1000)
    except (ValueError, OverflowError) as exc:  # what no resolver is asked for: a label of 64 characters
        raise ConnectionError(problem) from exc
