"""Requests to an S3 server, counted on their way by a proxy on the loopback, which delays them if it is told to.

::

    client ──▶ RequestCounts.url ──▶ server        {"PUT commits": 12, "GET files": 3, "bytes up": 48123, …}

Host and headers pass unchanged, so that signatures stay valid. What is counted is what was sent, so a request that a
client repeats counts twice. Each connection waits for its own requests alone, as if the server were that far away;
opening a connection takes no longer. Bodies are held in memory.
"""

from __future__ import annotations

import asyncio
import re
import threading
from asyncio import StreamReader, StreamWriter
from collections import Counter
from typing import Self
from urllib.parse import urlsplit

# /bucket/…/<operator>/shard-0003/commits/17-9f3c
_KIND = re.compile(r"/(?:shard-\d+/)(\w+)/|/(probes|claims)/")


class RequestCounts:
    """See the module; a context manager, which serves until its end.

    Parameters
    ----------
    server : str
        URL of the S3 server: ``http://127.0.0.1:9000``.
    latency_ms : float
        How long each request waits before it goes on.
    """

    def __init__(self, server: str, latency_ms: float = 0.0) -> None:
        parts = urlsplit(server)
        assert parts.hostname is not None
        self._server = (parts.hostname, parts.port or 80)
        self._latency_s = latency_ms / 1000
        self._counts: Counter[str] = Counter()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="request counts", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event
        self.url: str

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def so_far(self) -> dict[str, float]:
        """Return requests by method and kind of object, and the bytes of all bodies each way."""
        return dict(self._counts)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._converse, "127.0.0.1", 0)
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        self._ready.set()
        await self._end.wait()
        server.close()

    async def _converse(self, client: StreamReader, to_client: StreamWriter) -> None:
        """Pass one client's requests on, over a connection of its own, until either side leaves."""
        server, to_server = await asyncio.open_connection(*self._server)
        try:
            while True:
                head = await client.readuntil(b"\r\n\r\n")
                method, target, _ = head.split(b" ", 2)
                self._counts[_name(method.decode(), target.decode())] += 1
                if b"\r\nexpect:" in head.lower():
                    to_client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    head = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", head)
                if self._latency_s:
                    await asyncio.sleep(self._latency_s)
                self._counts["bytes up"] += await _pass_on(head, client, to_server)
                answer = await server.readuntil(b"\r\n\r\n")
                no_body = method == b"HEAD" or answer.split(b" ", 2)[1] in (b"204", b"304")
                self._counts["bytes down"] += await _pass_on(answer, server, to_client, no_body=no_body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # one of them left
        finally:
            to_client.close()
            to_server.close()


async def _pass_on(head: bytes, reader: StreamReader, writer: StreamWriter, *, no_body: bool = False) -> int:
    """Send a head, which was read, and its body, which was not; return the body's size."""
    chunks = [head]
    lower = head.lower()
    length = re.search(rb"\r\ncontent-length: *(\d+)", lower)
    if no_body:
        pass
    elif b"\r\ntransfer-encoding: chunked" in lower:
        size = 1
        while size:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            chunks += [line, await reader.readexactly(size + 2)]
    elif length:
        chunks.append(await reader.readexactly(int(length[1])))
    writer.writelines(chunks)
    await writer.drain()
    return sum(map(len, chunks[1:]))


def _name(method: str, target: str) -> str:
    path, _, query = target.partition("?")
    if method == "GET" and "list-type=" in query:
        return "LIST"
    if method == "POST" and query.startswith("delete"):
        return "DELETE many"
    found = _KIND.search(path)
    return f"{method} {(found[1] or found[2]) if found else 'others'}"
