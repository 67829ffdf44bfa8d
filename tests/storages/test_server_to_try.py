"""What ``make s3`` starts."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.snapshotter.storage.opening import open_storage
from tests.servers.s3 import BUCKET

pytestmark = pytest.mark.s3


def test_its_secret_can_be_typed() -> None:
    """The tests' own looks like one that got out."""
    command = [sys.executable, "-m", "tests.servers", "s3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as server:
        try:
            assert server.stdout is not None
            given = dict(pair.split("=", 1) for pair in shlex.split(server.stdout.readline())[1:])
            assert (given["AWS_ACCESS_KEY_ID"], given["AWS_SECRET_ACCESS_KEY"]) == ("holdfast", "holdfast")
            client = {"endpoint_url": given["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
            options = {"key": "holdfast", "secret": "holdfast", "client_kwargs": client}
            with open_storage(f"s3://{BUCKET}/app", options) as storage:
                storage.put("one", b"1")
                assert bytes(storage.get("one")) == b"1"
        finally:
            server.terminate()
