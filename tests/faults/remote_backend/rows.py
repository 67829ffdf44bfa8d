"""Rows, and the process of a server, for the tests of this folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from holdfast.backends.run import Keys, Run
from holdfast.spark_integration.client import streams as state_streams
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.exchange import Exchange
from holdfast.testing.state_rows import COUNTS

TABLES = {"counts": COUNTS}


def many(n: int, text: str = "user") -> tuple[Keys, Run]:
    hashes = np.linspace(0, 2**64 - 2**12, n).astype(np.uint64)
    names = pa.array([f"{text}{i}" for i in range(n)], pa.large_string())
    keys = Keys(hashes, pa.RecordBatch.from_arrays([names], schema=COUNTS.key))
    return keys, Run.build(COUNTS, keys, pa.RecordBatch.from_arrays([pa.array(range(n))], schema=COUNTS.value))


def encoded(run: Run) -> pa.Buffer:
    return pa.py_buffer(b"".join(state_streams.encode_run(run)))


def server_of(client: StateClient) -> int:
    pid = client.call("statistics")["pid"]
    assert isinstance(pid, int)
    return pid


def kill(client: StateClient) -> None:
    pid = server_of(client)
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)


def exchanged(
    client: StateClient, message: dict[str, Any], batches: Iterable[pa.RecordBatch], schema: pa.Schema
) -> None:
    with Exchange(client, message, 10) as exchange:
        exchange.send(batches, schema)
        exchange.answer()
