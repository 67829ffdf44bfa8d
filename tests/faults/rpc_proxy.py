"""A proxy before a NameNode that loses the answers of single calls, for tests against a real HDFS.

::

    with RpcProxy(("127.0.0.1", 8020)) as proxy:             # proxy.url is the client's address
        lost = proxy.rule("drop_reply", "rename2", times=1)
        ...
        assert lost.hits == 1

    kind          what happens to a call of the method
    reset         the connection breaks before the NameNode sees it
    drop_reply    performed; the connection breaks before its answer
    hang          performed; the answer waits for `Rule.release`

A call is recognised by its method's name, which stands as plain text in the header of a request. Data goes to the
DataNode directly. A connection carries one call at a time in these tests; calls in between share the fate of theirs.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Self


@dataclass
class Rule:
    kind: Literal["reset", "drop_reply", "hang"]
    method: str
    times: int | None = None
    hits: int = field(default=0, init=False)
    release: threading.Event = field(default_factory=threading.Event, init=False)

    def claims(self, request: bytes) -> bool:
        name = self.method.encode()
        if bytes([len(name)]) + name not in request or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True


class RpcProxy:
    """See the module; use as a context manager."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.rules: list[Rule] = []
        self.url = "hdfs://{}:{}".format(*self._listener.getsockname())

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="rpc proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            _close(one)

    def rule(self, kind: Literal["reset", "drop_reply", "hang"], method: str, times: int | None = None) -> Rule:
        self.rules.append(Rule(kind, method, times))
        return self.rules[-1]

    def reset(self) -> None:
        for rule in self.rules:
            rule.release.set()
        self.rules.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._upstream)
                except OSError:
                    client.close()
                    continue
                self._open += [client, server]
                _Connection(client, server, self.rules)


class _Connection:
    """The two directions of one connection, each a thread."""

    def __init__(self, client: socket.socket, server: socket.socket, rules: list[Rule]) -> None:
        self._client, self._server, self._rules = client, server, rules
        self._rule: Rule | None = None
        for direction in (self._requests, self._answers):
            threading.Thread(target=self._until_closed, args=(direction,), name="rpc proxy", daemon=True).start()

    def _until_closed(self, direction: object) -> None:
        with suppress(OSError):
            direction()  # type: ignore[operator]
        _close(self._client)
        _close(self._server)

    def _requests(self) -> None:
        while data := self._client.recv(1 << 16):
            rule = next((rule for rule in list(self._rules) if rule.claims(data)), None)
            if rule and rule.kind == "reset":
                return
            self._rule = rule
            self._server.sendall(data)

    def _answers(self) -> None:
        while data := self._server.recv(1 << 16):
            if self._rule and self._rule.kind == "drop_reply":
                return
            if self._rule:
                self._rule.release.wait()
            self._client.sendall(data)


def _close(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
