"""The brokers as one: picks whom to ask, and retries for a limited time.

What a request is answered is its caller's: a code that does not go away is returned. What does go away, coordinators
that move or load, markers still being written, brokers that start again, is waited for; then `UnavailableError`.
"""

from __future__ import annotations

import ssl
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from holdfast import clock
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.sinks.kafka.wire import error_codes, requests
from holdfast.spark_integration.sinks.kafka.wire.connection import Connection, Security
from holdfast.spark_integration.sinks.kafka.wire.fields import MalformedAnswerError
from holdfast.spark_integration.sinks.kafka.wire.requests import Coordinator, Node, Request, Transaction

T = TypeVar("T")
K = TypeVar("K", bound=Transaction)
Address = tuple[str, int]

_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 2, 500
_ANSWER_LIMIT_MS = 10_000


class Cluster:
    """Connections to brokers, made when they are needed; use it in a ``with`` statement, in one thread.

    `servers`: where to begin; `patience_ms`: how long one request is tried, in all.
    """

    def __init__(
        self,
        servers: Sequence[Address],
        security: Security,
        *,
        patience_ms: int,
        monotonic_ms: Callable[[], int] = clock.monotonic_ms,
        sleep_ms: Callable[[int], None] = clock.sleep_ms,
    ) -> None:
        self._servers = list(servers)
        self._security = security
        self._patience_ms = patience_ms
        self._monotonic_ms = monotonic_ms
        self._sleep_ms = sleep_ms
        self._connections: dict[Address, Connection] = {}
        self._coordinators: dict[tuple[str, bool], Address] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        while self._connections:
            self._connections.popitem()[1].close()

    def ask_any(self, request: Request[T], code_of: Callable[[T], int] = lambda _: 0) -> T:
        """Ask the first broker that answers."""
        return self._patiently(request.name, lambda: self._ask_some(request), code_of)

    def ask_node(self, node: Node, request: Request[T], code_of: Callable[[T], int] = lambda _: 0) -> T:
        """Ask one broker."""
        return self._patiently(request.name, lambda: self._ask((node.host, node.port), request), code_of)

    def coordinators(self, keys: Sequence[str], *, group: bool = False) -> dict[str, Address]:
        """Return the coordinator's address by transactional id, or by group."""
        missing = [key for key in keys if (key, group) not in self._coordinators]
        if missing:
            found = self.ask_any(requests.find_coordinators(missing, group=group), _worst_code)
            for one in found:
                if one.code:
                    raise refused(
                        one.code, f"use the {'consumer group' if group else 'transactional id'}", name=one.key
                    )
                self._coordinators[one.key, group] = (one.node.host, one.node.port)
        return {key: self._coordinators[key, group] for key in keys if (key, group) in self._coordinators}

    def ask_coordinator(self, key: str, request: Request[T], code_of: Callable[[T], int], *, group: bool = False) -> T:
        """Ask the coordinator of a transactional id or a group, even if it moves meanwhile."""

        def ask() -> T:
            address = self.coordinators([key], group=group).get(key)
            if address is None:
                raise MalformedAnswerError("no coordinator for what was asked")
            return self._ask(address, request)

        return self._patiently(request.name, ask, code_of)

    def ask_coordinators(
        self,
        keys: Sequence[str],
        request_for: Callable[[Sequence[str]], Request[list[K]]],
        code_of: Callable[[list[K]], int],
    ) -> dict[str, K]:
        """Ask each coordinator for its transactional ids; return the answers by id."""

        def ask() -> list[K]:
            by_address: dict[Address, list[str]] = defaultdict(list)
            for key, address in self.coordinators(keys).items():
                by_address[address].append(key)
            return [one for address, its in by_address.items() for one in self._ask(address, request_for(its))]

        found = self._patiently("coordinators", ask, code_of) if keys else []
        return {one.transactional_id: one for one in found}

    def _patiently(self, name: str, ask: Callable[[], T], code_of: Callable[[T], int]) -> T:
        end_ms = self._monotonic_ms() + self._patience_ms
        pause_ms = _FIRST_PAUSE_MS
        while True:
            try:
                answer = ask()
                code = code_of(answer)
                if code not in error_codes.RETRIABLE:
                    return answer
                reason = error_codes.name_of(code)
                if code != error_codes.CONCURRENT_TRANSACTIONS:
                    self._coordinators.clear()
            except ssl.SSLCertVerificationError as exc:
                raise InvalidArgumentError(
                    "the broker's certificate is not accepted; set ssl.ca.location to the authority that signed it",
                    reason=exc.verify_message,
                ) from exc
            except MalformedAnswerError as exc:
                self._forget()
                raise UnavailableError(
                    "the broker does not answer as Kafka does: do security.protocol and the port match the listener's?",
                    request=name,
                    reason=str(exc),
                    servers=self._shown(),
                ) from exc
            except OSError as exc:
                reason = str(exc)
                self._forget()
            if self._monotonic_ms() + pause_ms > end_ms:
                raise UnavailableError(
                    "the brokers did not answer in time", request=name, reason=reason, servers=self._shown()
                )
            self._sleep_ms(pause_ms)
            pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)

    def _ask_some(self, request: Request[T]) -> T:
        # A connection that is there first, so that one is enough where one broker does all.
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
            connection = Connection(address, self._security, limit_ms=limit_ms, monotonic_ms=self._monotonic_ms)
            self._connections[address] = connection
        try:
            return connection.ask(request)
        except BaseException:
            self._connections.pop(address).close()
            raise

    def _forget(self) -> None:
        self.close()
        self._coordinators.clear()

    def _shown(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self._servers)


def _worst_code(found: Sequence[Coordinator]) -> int:
    # One that goes away by itself, if there is one: then all are asked for again.
    return next((one.code for one in found if one.code in error_codes.RETRIABLE), 0)


def refused(code: int, doing: str, **facts: object) -> InvalidArgumentError | UnavailableError:
    """Return the error for a permanent code: a missing right, or the broker's own reason."""
    shown = {name: value for name, value in facts.items() if value is not None}
    if code in error_codes.UNAUTHORISED:
        return InvalidArgumentError(
            f"the user has no right to {doing}; docs/kafka-sink.md lists the rights that the sink needs",
            answer=error_codes.name_of(code),
            **shown,
        )
    return UnavailableError(f"the broker did not {doing}", answer=error_codes.name_of(code), **shown)
