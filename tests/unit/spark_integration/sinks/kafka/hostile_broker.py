"""A server that answers requests of Kafka's protocol with what a test says."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
