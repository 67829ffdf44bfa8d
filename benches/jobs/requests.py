"""Jobs whose commits go to S3, at any distance: what a micro-batch asks of the storage, and how long it waits for it.

`Requests`: many shards and few rows; each micro-batch touches nearly every shard. `DurableA`, `DurableB`: jobs A and B,
whose tasks wait for commits that are large.

Requests are counted, and delayed, between the workers and the server (`holdfast.benches.instruments.delayed_store`).
Spark's own checkpoint is on local disk here: counted are the files that a micro-batch adds to it, each of which would
be one request or more on an object store.
"""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.benches.finite import FiniteRange
from holdfast.benches.jobs.job import SparkJob, option
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.errors import InvalidArgumentError

ENDPOINT = "AWS_ENDPOINT_URL"


@dataclass(frozen=True)
class DurableJob(SparkJob, ABC):
    """A query whose commits an engine may keep on S3; others keep them where they do."""

    state_dir: str = option("s3://bucket/bench", f"where state is durable; {ENDPOINT} may name the server")
    latency_ms: float = option(0.0, "ms that the server takes longer for each request", FiniteRange(min=0))


@dataclass(frozen=True)
class Requests(JobA, DurableJob):
    """See the module."""

    name = "requests"

    rows: int = option(1_000, "rows of a micro-batch")
    # Counted are two times the 64 micro-batches that a carried commit covers at most.
    batches: int = option(138, "micro-batches of a run")
    warmup: int = option(10, "first of these, which are not counted")
    partitions: int = option(200, "shards")


@dataclass(frozen=True)
class DurableA(JobA, DurableJob):
    """See the module."""

    name = "durable-a"


@dataclass(frozen=True)
class DurableB(JobB, DurableJob):
    """See the module."""

    name = "durable-b"


def server_of_environment() -> str:
    """Return the URL of the S3 server that clients find in the environment; empty where it names none.

    Raises
    ------
    InvalidArgumentError
        It wants TLS, through which requests cannot be counted.
    """
    server = os.environ.get(ENDPOINT, "")
    if server and not server.startswith("http://"):
        raise InvalidArgumentError(
            "requests are counted at a server without TLS: name one in the environment, as `make s3` shows, or none: "
            "the bench then starts its own",
            variable=ENDPOINT,
        )
    return server


def files_of_spark(checkpoint: Path) -> dict[str, float]:
    """Return how many files Spark has put into a checkpoint location, and their bytes."""
    # Checksums are of the local file system alone.
    sizes = [
        os.lstat(os.path.join(parent, name)).st_size
        for parent, _, names in os.walk(checkpoint)
        for name in names
        if not name.startswith(".")
    ]
    return {"Spark: files": len(sizes), "Spark: bytes": sum(sizes)}


def requests_of(counts: Mapping[str, float]) -> float:
    """Return how many requests of ours these counts hold."""
    return sum(number for what, number in counts.items() if "bytes" not in what and not what.startswith("Spark"))
