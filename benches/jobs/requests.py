"""Many shards and few rows: what one micro-batch asks of the storage, ours and Spark's own.

Job A on S3, each micro-batch of which touches nearly every shard. Requests are counted between the workers and the
server, by `holdfast.benches.instruments.request_counts`. Spark's own checkpoint is on local disk here: counted are the
files that a micro-batch adds to it, each of which would be one request or more on an object store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.benches.jobs.job import option
from holdfast.benches.jobs.job_a import JobA
from holdfast.errors import InvalidArgumentError

ENDPOINT = "AWS_ENDPOINT_URL"


@dataclass(frozen=True)
class Requests(JobA):
    """See the module."""

    name = "requests"

    rows: int = option(1_000, "rows of a micro-batch")
    # Counted are two times the 64 micro-batches that a carried commit covers at most.
    batches: int = option(138, "micro-batches of a run")
    warmup: int = option(10, "first of these, which are not counted")
    partitions: int = option(200, "shards")
    checkpoint: str = option("s3://bucket/bench", f"where state is durable; {ENDPOINT} names the server")


def server_of_environment() -> str:
    """Return the URL of the S3 server that clients find in the environment.

    Raises
    ------
    InvalidArgumentError
        There is none, or it wants TLS, through which requests cannot be counted.
    """
    server = os.environ.get(ENDPOINT, "")
    if not server.startswith("http://"):
        raise InvalidArgumentError(
            "requests are counted at a server without TLS: name it in the environment, as `make s3` shows",
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
