"""An S3 server for benches, and a proxy that delays and counts its requests.

::

    client ──▶ RequestCounts(latency_ms) ──▶ object_store(), or a running server
                {"PUT commits": 12, …}       python -m holdfast.benches.instruments.object_store, which prints its URL

    with delayed_store(20) as counts:
        subprocess.run(…, env={**os.environ, **counts.environment})    # finds s3://bucket
        counts.so_far()

The server is moto in a separate process on the loopback interface, with objects in memory and without access control.
Its time per request and MiB is part of all measured times, so compare with a latency of 0.

The proxy keeps hosts and headers unchanged, so that signatures stay valid. Requests that clients repeat count twice.
Connections are delayed independently, and opening one is not delayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import re
import subprocess
import sys
import threading
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self
from urllib.parse import urlsplit

from holdfast.errors import UnavailableError

BUCKET = "bucket"
# /bucket/…/<operator>/shard-0003/commits/17-9f3c
_KIND = re.compile(r"/(?:shard-\d+/)(\w+)/|/(probes|claims)/")


@contextmanager
def object_store() -> Iterator[dict[str, str]]:
    """Serve the bucket `BUCKET`; yield the environment variables for S3 clients."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise UnavailableError("the bench's S3 server did not start; see its log above")
            _make_bucket(url)
            yield {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "bench",
                "AWS_SECRET_ACCESS_KEY": "opens-nothing",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        finally:
            process.stdin.close()


def _make_bucket(url: str) -> None:
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("PUT", f"/{BUCKET}")
        status = connection.getresponse().status
        if status != http.HTTPStatus.OK:
            raise UnavailableError("the bench's S3 server did not create its bucket", status=status)


@contextmanager
def delayed_store(latency_ms: float = 0.0, server: str = "") -> Iterator[RequestCounts]:
    """Yield a proxy of the `server`, or of a new one if empty; its `environment` directs clients to the proxy."""
    with ExitStack() as stack:
        credentials: dict[str, str] = {}
        if not server:
            credentials = stack.enter_context(object_store())
            server = credentials["AWS_ENDPOINT_URL"]
        counts = stack.enter_context(RequestCounts(server, latency_ms))
        # The variable of the service overrides the general one; the user's would bypass the proxy.
        counts.environment = {**credentials, "AWS_ENDPOINT_URL": counts.url, "AWS_ENDPOINT_URL_S3": counts.url}
        yield counts


class RequestCounts:
    """The proxy, a context manager that serves at `url`. Bodies are kept in memory."""

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
        self.environment: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def so_far(self) -> dict[str, float]:
        """Return requests by method and kind of object, and the bytes of all bodies in each direction."""
        return dict(self._counts)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._converse, "127.0.0.1", 0)
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        self._ready.set()
        await self._end.wait()
        server.close()

    async def _converse(self, client: StreamReader, to_client: StreamWriter) -> None:
        """Forward a client's requests over a dedicated connection until either side disconnects."""
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
            pass  # one side disconnected
        finally:
            to_client.close()
            to_server.close()


async def _pass_on(head: bytes, reader: StreamReader, writer: StreamWriter, *, no_body: bool = False) -> int:
    """Send a head and its body, which is still to be read; return the body's size."""
    chunks = [head]
    if not no_body and b"\r\ntransfer-encoding: chunked" in head.lower():
        size = 1
        while size:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            chunks += [line, await reader.readexactly(size + 2)]
    elif not no_body and (length := re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)):
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


def main() -> None:
    """Serve on a free port and print the URL, until standard input closes."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
