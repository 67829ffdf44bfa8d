"""A real S3 server in this process, for tests: moto on a free port of the loopback, with one bucket."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BUCKET = "bucket"
ACCESS_KEY = "AKIACANARYCANARY"
SECRET_KEY = "secret/CANARY+0123456789"


@dataclass(frozen=True)
class S3Server:
    address: tuple[str, int]
    url: str

    def options(self, endpoint: str = "", **more: object) -> dict[str, object]:
        """Return options for `open_storage`, through the proxy at `endpoint` if given."""
        client = {"endpoint_url": endpoint or self.url, "region_name": "us-east-1"}
        return {"key": ACCESS_KEY, "secret": SECRET_KEY, "client_kwargs": client, **more}

    @contextmanager
    def client(self, service: str = "s3") -> Iterator[Any]:
        """Open a plain boto3 client, for looking behind the storage's back."""
        import boto3

        client = boto3.client(
            service,
            endpoint_url=self.url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        )
        try:
            yield client
        finally:
            client.close()

    @contextmanager
    def checking_credentials(self) -> Iterator[None]:
        """Make the server check signatures, which it does not by itself."""
        self._check_after(b"0")
        try:
            yield
        finally:
            self._check_after(b"inf")

    def _check_after(self, requests: bytes) -> None:
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/moto-api/reset-auth", data=requests, headers=plain)
        urllib.request.urlopen(request).close()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        address = moto.get_host_and_port()
        server = S3Server(address, "http://{}:{}".format(*address))
        with server.client() as client:
            client.create_bucket(Bucket=BUCKET)
        yield server
    finally:
        moto.stop()
        if moto._server is not None:
            moto._server.server_close()
