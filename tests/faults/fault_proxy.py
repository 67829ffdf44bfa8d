"""An HTTP proxy on the loopback that damages what passes through it, for tests against a real S3 server.

::

    with FaultProxy(("127.0.0.1", 5000)) as proxy:           # proxy.url is the client's endpoint
        lost = proxy.rule("drop_reply", method="PUT", path="/key$", times=1)
        ...
        assert lost.hits == 1

    kind          what happens to a request that a rule matches
    status        answered with `code` and `s3_code`, or with `body`; the server never sees it
    status_after  performed, but answered with `code` and `s3_code`
    drop_reply    performed; the connection closes without an answer
    cut_reply     performed; the answer announces its size, and ends after `at` bytes of its body
    short_reply   performed; the answer is `at` bytes of its body, and says that this is all
    chunked_reply performed; the answer's body comes in chunks, and its size is not announced
    gzip          performed; the answer's body is compressed, as a helpful proxy would
    flip_byte     performed; one byte of the answer's body, at `at`, is another
    flip_request  performed with another byte at `at` of the request's body
    cut_request   the server gets `at` bytes of the body and then nothing more; the client's connection is reset
    delay         performed after `seconds`
    hang          read, and never answered
    reset         the connection is reset before the request is read

The first rule that matches acts. Host and signed headers pass unchanged, so signatures stay valid. Connections to
the client are kept alive as a real server's are, because clients treat a reused connection that breaks in a way
of their own. Requests and answers are held in memory.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, Self

Kind = Literal[
    "status",
    "status_after",
    "drop_reply",
    "cut_reply",
    "short_reply",
    "chunked_reply",
    "gzip",
    "flip_byte",
    "flip_request",
    "cut_request",
    "delay",
    "hang",
    "reset",
]

_HOP_BY_HOP = {b"connection", b"content-length", b"expect", b"keep-alive", b"server", b"transfer-encoding"}


@dataclass
class Rule:
    """What to do to which requests; `path` is searched in path and query."""

    kind: Kind
    method: str = ".*"
    path: str = ""
    times: int | None = None
    skip: int = 0
    code: int = 503
    s3_code: str = "SlowDown"
    body: str = ""
    at: int = 0
    seconds: float = 0.0
    hits: int = field(default=0, init=False)

    def claims(self, method: str, path: str) -> bool:
        if not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        self.hits += 1
        return True


@dataclass
class Message:
    """A request or an answer: first line, headers as they came, body."""

    start: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key.lower() == name), b"")

    def encoded(self, *extra: tuple[bytes, bytes]) -> bytes:
        kept = [(key, value) for key, value in self.headers if key.lower() not in _HOP_BY_HOP]
        lines = [self.start, *(key + b": " + value for key, value in [*kept, *extra])]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class FaultProxy:
    """See the module; use as a context manager."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.rules: list[Rule] = []
        self.log: list[tuple[str, str, Kind | None]] = []
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fault proxy", daemon=True)
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def rule(self, kind: Kind, **facts: object) -> Rule:
        rule = Rule(kind, **facts)  # type: ignore[arg-type]
        self.rules.append(rule)
        return rule

    def reset(self) -> None:
        self.rules.clear()
        self.log.clear()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        clients: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._converse(reader, writer))
            clients.add(task)
            task.add_done_callback(clients.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        self._ready.set()
        await self._stop.wait()
        server.close()
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client's requests until it leaves or a rule ends the connection."""
        try:
            while await self._exchange(reader, writer):
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; tells whether the connection stays."""
        request = _parse(await reader.readuntil(b"\r\n\r\n"))
        method, path, _ = request.start.decode().split(" ", 2)
        rule = next((rule for rule in self.rules if rule.claims(method, path)), None)
        self.log.append((method, path, rule.kind if rule else None))
        if rule and rule.kind == "reset":
            _reset(writer)
            return False
        if request.header(b"expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.body = await _body(reader, request)
        if rule and rule.kind == "hang":
            await reader.read(1)  # until the client leaves
            return False
        if rule and rule.kind == "status":
            writer.write(_error(rule, method))
            return True
        if rule and rule.kind == "cut_request":
            await self._forward_half(request, rule.at)
            _reset(writer)
            return False
        if rule and rule.kind == "delay":
            await asyncio.sleep(rule.seconds)
        if rule and rule.kind == "flip_request":
            request.body = _flipped(request.body, rule.at)
        answer = await self._forward(request)
        if rule and rule.kind == "drop_reply":
            return False
        if rule and rule.kind == "status_after":
            writer.write(_error(rule, method))
            return True
        if rule:
            _change(answer, rule)
        # The answer to a HEAD announces a body that does not follow.
        announced = answer.header(b"content-length") if method == "HEAD" else b"%d" % len(answer.body)
        cut = rule is not None and rule.kind == "cut_reply"
        body = answer.body[: rule.at] if rule and cut else answer.body
        if rule and rule.kind == "chunked_reply":
            chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            writer.write(answer.encoded((b"Transfer-Encoding", b"chunked")) + chunks)
            return True
        writer.write(answer.encoded((b"Content-Length", announced)) + body)
        return not cut

    async def _forward_half(self, request: Message, size: int) -> None:
        """Send what a client sends that dies in the middle of a body."""
        async with _connection(self.upstream) as (_, writer):
            writer.write(request.encoded(*_framing(request)) + request.body[:size])
            await writer.drain()

    async def _forward(self, request: Message) -> Message:
        async with _connection(self.upstream) as (reader, writer):
            writer.write(request.encoded(*_framing(request)) + request.body)
            await writer.drain()
            while True:
                answer = _parse(await reader.readuntil(b"\r\n\r\n"))
                if not answer.start.split(b" ", 2)[1].startswith(b"1"):
                    break
            assert not answer.header(b"transfer-encoding"), "an answer in chunks is not supported"
            answer.body = await reader.read()
            answer.start = b"HTTP/1.1 " + answer.start.split(b" ", 1)[1]
            return answer


@asynccontextmanager
async def _connection(to: tuple[str, int]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*to)
    try:
        yield reader, writer
    finally:
        writer.close()


def _framing(request: Message) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    return (b"Content-Length", b"%d" % len(request.body)), (b"Connection", b"close")


def _parse(head: bytes) -> Message:
    start, *lines = head.rstrip(b"\r\n").split(b"\r\n")
    pairs = (line.split(b":", 1) for line in lines)
    return Message(start, [(key, value.strip()) for key, value in pairs])


async def _body(reader: asyncio.StreamReader, request: Message) -> bytes:
    if request.header(b"transfer-encoding").lower() != b"chunked":
        return await reader.readexactly(int(request.header(b"content-length") or 0))
    chunks = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return b"".join(chunks)


def _change(answer: Message, rule: Rule) -> None:
    if rule.kind == "flip_byte":
        answer.body = _flipped(answer.body, rule.at)
    elif rule.kind == "short_reply":
        answer.body = answer.body[: rule.at]
    elif rule.kind == "gzip":
        answer.body = gzip.compress(answer.body)
        answer.headers.append((b"Content-Encoding", b"gzip"))


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def _error(rule: Rule, method: str) -> bytes:
    text = rule.body or f"<Error><Code>{rule.s3_code}</Code><Message>injected</Message></Error>"
    body = b'<?xml version="1.0"?>' + text.encode() if method != "HEAD" else b""
    head = f"HTTP/1.1 {rule.code} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
