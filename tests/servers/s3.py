"""Real S3 servers on the loopback, each with one bucket.

::

    moto        in this process, objects in memory; always there         accepts any credentials until told to check
    versitygw   a process of its own, objects as files in a folder       checks all that S3 checks, survives kill -9

Both can be asked for a user who may not do one action, as a bucket policy or a role would have it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers import downloads
from tests.servers.programs import Program, answer_of, free_ports, wait_until

BUCKET = "bucket"
ACCESS_KEY = "AKIACANARYCANARY"
SECRET_KEY = "secret/CANARY+0123456789"
LIMITED = "limited"


class S3Server(ABC):
    """A server that runs; `address` and `url` are where."""

    def __init__(self, address: tuple[str, int], key: str = ACCESS_KEY, secret: str = SECRET_KEY) -> None:
        self.address, self.key, self.secret = address, key, secret
        self.url = "http://{}:{}".format(*address)

    def options(self, endpoint: str = "", **more: object) -> dict[str, object]:
        """Return options for `open_storage`, through the proxy at `endpoint` if given."""
        client = {"endpoint_url": endpoint or self.url, "region_name": "us-east-1"}
        return {"key": self.key, "secret": self.secret, "client_kwargs": client, **more}

    def environment(self) -> dict[str, str]:
        """Return environment variables under which every client of S3 finds the server, and has its credentials."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @contextmanager
    def client(self, service: str = "s3") -> Iterator[Any]:
        """Open a plain boto3 client, for looking behind the storage's back."""
        import boto3

        client = boto3.client(
            service,
            endpoint_url=self.url,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )
        try:
            yield client
        finally:
            client.close()

    @contextmanager
    @abstractmethod
    def wrong_credentials(self) -> Iterator[dict[str, object]]:
        """Yield options of somebody whom the server does not know."""

    @contextmanager
    @abstractmethod
    def user_without(self, action: str) -> Iterator[dict[str, object]]:
        """Yield options of a user who may do all to the bucket but this action, as ``s3:PutObject``."""


class Moto(S3Server):
    @contextmanager
    def checking_credentials(self) -> Iterator[None]:
        """Make the server check credentials and permissions, which it does not by itself."""
        self._check_after(b"0")
        try:
            yield
        finally:
            self._check_after(b"inf")

    @contextmanager
    def wrong_credentials(self) -> Iterator[dict[str, object]]:
        with self.checking_credentials():
            yield self.options()

    @contextmanager
    def user_without(self, action: str) -> Iterator[dict[str, object]]:
        allow = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        deny = {"Effect": "Deny", "Action": action, "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allow, deny]})
        with self.client("iam") as iam:
            iam.create_user(UserName=LIMITED)
            iam.put_user_policy(UserName=LIMITED, PolicyName=LIMITED, PolicyDocument=policy)
            key = iam.create_access_key(UserName=LIMITED)["AccessKey"]
            try:
                with self.checking_credentials():
                    yield {**self.options(), "key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}
            finally:
                iam.delete_access_key(UserName=LIMITED, AccessKeyId=key["AccessKeyId"])
                iam.delete_user_policy(UserName=LIMITED, PolicyName=LIMITED)
                iam.delete_user(UserName=LIMITED)

    def _check_after(self, requests: bytes) -> None:
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/moto-api/reset-auth", data=requests, headers=plain)
        urllib.request.urlopen(request).close()


class Versitygw(S3Server):
    """See the module; `folder` keeps its objects over restarts on the same port."""

    def __init__(self, folder: Path, key: str, secret: str) -> None:
        super().__init__(("127.0.0.1", *free_ports(1)), key, secret)  # type: ignore[arg-type]
        self._folder = folder
        for name in ("data", "users"):
            (folder / name).mkdir(exist_ok=True)
        self._program = str(downloads.versitygw())
        self._users: set[str] = set()
        self.process: Program

    def start(self) -> None:
        """Start it, and return when it serves."""
        listen = ["--port", "{}:{}".format(*self.address), "--health", "/health", "--keep-alive", "--quiet"]
        # Never --sidecar: an overwrite would be torn.
        store = ["--iam-dir", str(self._folder / "users"), "posix", str(self._folder / "data")]
        environment = {**os.environ, "ROOT_ACCESS_KEY": self.key, "ROOT_SECRET_KEY": self.secret}
        command = [self._program, *listen, *store]
        self.process = Program(command, self._folder / "log", environment, self._folder)
        wait_until(self._is_ready, lambda: [self.process])

    def kill(self) -> None:
        """Kill it with SIGKILL; what it has acknowledged is in its folder."""
        self.process.kill()

    @contextmanager
    def wrong_credentials(self) -> Iterator[dict[str, object]]:
        yield {**self.options(), "secret": "not/the+secret"}

    @contextmanager
    def user_without(self, action: str) -> Iterator[dict[str, object]]:
        self._make_user()
        bucket, objects = f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"
        who = {"AWS": LIMITED}
        allow = {"Effect": "Allow", "Principal": who, "Action": "s3:*", "Resource": [bucket, objects]}
        on = bucket if "Bucket" in action else objects
        deny = {"Effect": "Deny", "Principal": who, "Action": action, "Resource": on}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allow, deny]})
        with self.client() as client:
            client.put_bucket_policy(Bucket=BUCKET, Policy=policy)
            try:
                yield {**self.options(), "key": LIMITED}
            finally:
                client.delete_bucket_policy(Bucket=BUCKET)

    def _make_user(self) -> None:
        if LIMITED not in self._users:
            admin = ["admin", "--access", self.key, "--secret", self.secret, "--endpoint-url", self.url]
            user = ["create-user", "--access", LIMITED, "--secret", self.secret, "--role", "user"]
            subprocess.run([self._program, *admin, *user], check=True, capture_output=True)
            self._users.add(LIMITED)

    def _is_ready(self) -> bool:
        return answer_of(f"{self.url}/health") is not None


@contextmanager
def moto() -> Iterator[Moto]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        running = Moto(server.get_host_and_port())
        _make_bucket(running)
        yield running
    finally:
        server.stop()
        if server._server is not None:
            server._server.server_close()


@contextmanager
def versitygw(folder: Path, key: str = ACCESS_KEY, secret: str = SECRET_KEY) -> Iterator[Versitygw]:
    server = Versitygw(folder, key, secret)
    server.start()
    try:
        _make_bucket(server)
        yield server
    finally:
        server.process.stop()


def _make_bucket(server: S3Server) -> None:
    with server.client() as client:
        client.create_bucket(Bucket=BUCKET)
