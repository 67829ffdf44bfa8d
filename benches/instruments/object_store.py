"""An S3 server for benches, in a process of its own on the loopback: moto, objects in memory.

::

    ObjectStore ──starts──▶ python -m holdfast.benches.instruments.object_store ──prints──▶ its URL
                ◀─────────────────── ends with its standard input ──────────────────────

Every client may do everything, whatever its credentials are. What moto itself takes for a request and for each MiB is
part of every time that is measured on it, so compare with the same at a latency of 0.
"""

from __future__ import annotations

import http.client
import logging
import subprocess
import sys
from contextlib import ExitStack
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from holdfast.errors import UnavailableError

BUCKET = "bucket"


class ObjectStore:
    """See the module; a context manager, which serves until its end.

    Attributes
    ----------
    url : str
        Of the server, which has one bucket: `BUCKET`.
    """

    def __init__(self) -> None:
        self._end = ExitStack()
        self.url: str

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            process = undo.enter_context(
                subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            assert process.stdin is not None
            assert process.stdout is not None
            undo.callback(process.stdin.close)
            self.url = process.stdout.readline().decode().strip()
            if not self.url:
                raise UnavailableError("the S3 server of the bench did not start: its log stands above")
            _make_bucket(self.url)
            self._end = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.__exit__(kind, exc, trace)

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which every client of S3 finds the server, with credentials that open nothing else."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "opens-nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def _make_bucket(url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    try:
        connection.request("PUT", f"/{BUCKET}")
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise UnavailableError("the S3 server of the bench made no bucket", status=answer.status)
    finally:
        connection.close()


def main() -> None:
    """Serve on a free port, print the URL, and end with the standard input."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
