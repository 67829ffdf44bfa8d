"""A server that is connected and says nothing, as behind a proxy whose other side has hung, is given up."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Self

import pytest

from holdfast import clock
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.sinks.postgres import connecting
from holdfast.spark_integration.sinks.postgres.marks import driver_application
from tests.servers.postgres import Postgres
from tests.servers.programs import wait_until
from tests.sinks.postgres.attempts import Case, batch

pytestmark = [pytest.mark.postgres]


class SilentProxy:
    """Hands bytes on between clients and a server, until it is told to be silent; it keeps all connections."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.is_silent = False
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._ended = False
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join(10)
        for one in (self._listener, *self._pairs):
            one.close()

    def _serve(self) -> None:
        while not self._ended:
            watched = [] if self.is_silent else [self._listener, *self._pairs]
            for ready in select.select(watched, [], [], 0.05)[0]:
                if ready is self._listener:
                    self._accept()
                elif ready in self._pairs:
                    self._hand_on(ready)

    def _accept(self) -> None:
        client, server = self._listener.accept()[0], socket.create_connection(self._server)
        self._pairs |= {client: server, server: client}

    def _hand_on(self, source: socket.socket) -> None:
        other, data = self._pairs[source], b""
        with suppress(OSError):
            if data := source.recv(1 << 16):
                other.sendall(data)
        if not data:
            for one in (source, other):
                self._pairs.pop(one).close()


@pytest.fixture
def proxy(postgres: Postgres) -> Iterator[SilentProxy]:
    with SilentProxy(("127.0.0.1", postgres.port)) as running:
        yield running


def through(proxy: SilentProxy, case: Case, **options: str) -> Case:
    """Return the same sink and query, by way of the proxy."""
    there = {"host": "127.0.0.1", "port": str(proxy.port), "sslmode": "disable", "answer_timeout": "1"}
    return replace(case, options={**there, **options})


@pytest.mark.timeout(60)
def test_a_server_that_falls_silent_is_given_up_and_nothing_is_lost(either: Case, proxy: SilentProxy) -> None:
    """At each step, of workers and of the driver; what was decided is committed when the server is back."""
    slow = through(proxy, either)
    slow.open()
    handle = slow.prepared(("a", 1))
    half = slow.begun(("b", 2), partition=1)
    lost = slow.begun(("c", 3), partition=2)
    proxy.is_silent = True
    began_s = time.monotonic()
    with pytest.raises(UnavailableError, match=r"sent nothing for 1 s; see answer_timeout"):
        slow.commit(handle)
    with pytest.raises(UnavailableError, match=r"sent nothing for 1 s"):
        half.prepare()
    half.abort()
    many = batch(*[("x" * 1000, i) for i in range(1000)])
    with pytest.raises(UnavailableError, match=r"sent nothing for 1 s"):  # noqa: PT012  when buffers are full
        for _ in range(100):
            lost.write(many)
    lost.abort()
    assert time.monotonic() - began_s < 20
    connecting.close_idle()
    proxy.is_silent = False
    either.open()
    left = [one for one in either.leftovers() if one != handle]
    either.abort(*left)
    either.commit(handle)
    assert either.rows() == [("a", 1)]
    assert either.leftovers() == []


@pytest.mark.timeout(60)
def test_a_server_that_lets_nobody_in_is_given_up(appending: Case, proxy: SilentProxy) -> None:
    """By libpq's own limit, which the user may set."""
    proxy.is_silent = True
    slow = through(proxy, appending, connect_timeout="2")
    began_s = time.monotonic()
    with pytest.raises(UnavailableError, match="did not answer"):
        slow.open()
    assert time.monotonic() - began_s < 10


def test_connections_have_limits_unless_the_user_sets_others(appending: Case) -> None:
    """Also where TCP itself would wait for two hours."""
    found = connecting.parameters("s", "keepalives_count=9", {"tcp_user_timeout": "5000"})
    wanted = {"connect_timeout": "10", "tcp_user_timeout": "5000", "keepalives_idle": "30", "keepalives_count": "9"}
    assert wanted.items() <= found.items()
    session = connecting.connect({**found, **appending.query.options}, "holdfast test")
    try:
        assert session.connection.answer_timeout_s == 600
        assert session.connection.info.get_parameters()["keepalives_interval"] == "10"
    finally:
        session.close()


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "long", "86401", ""])
def test_a_limit_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"spark\.holdfast\.sink\.s\.answer_timeout"):
        connecting.parameters("s", "", {"answer_timeout": given})


def test_sessions_that_nobody_takes_up_are_closed(either: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may live for months, and its queries end, or get other passwords."""

    def sessions() -> int:
        return len(either.sql(f"SELECT pid FROM pg_stat_activity WHERE application_name = '{application}'"))

    application = driver_application(either.query)
    either.open()
    assert sessions() == 1
    later_ms = clock.monotonic_ms() + 3_700_000
    monkeypatch.setattr(clock, "monotonic_ms", lambda: later_ms)
    replace(either, sink=replace(either.sink, name="another")).open()
    wait_until(lambda: sessions() == 0, list, limit_s=20)
