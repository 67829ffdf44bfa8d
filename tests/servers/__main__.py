"""A local S3, HDFS, Kafka or PostgreSQL to try things on, as the tests have it: ``make s3``, ``make hdfs`` and so on.

It says how to reach it, and runs until Ctrl-C; its data goes with it. With ``--outage-every`` it is killed with SIGKILL
now and then, and started again on the same data.
"""

from __future__ import annotations

import itertools
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from tests.servers import downloads, hdfs, kafka, postgres, s3

_outage_every = click.option("--outage-every", type=click.FloatRange(min=1), metavar="S", help="Seconds between kills.")
_outage = click.option("--outage", default=5.0, show_default=True, metavar="S", help="Seconds until it is back.")


@click.group()
def main() -> None:
    """Start a server on a free port of this machine."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


@main.command("s3")
@_outage_every
@_outage
def serve_s3(outage_every: float | None, outage: float) -> None:
    """versitygw with one bucket."""
    # Ones to type; the tests' look like a secret that got out.
    with _folder() as folder, s3.versitygw(folder, key="holdfast", secret="holdfast") as server:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in server.environment().items())
        print(f"export {variables}\nmake demo STATE_DIR=s3://{s3.BUCKET}/demo", flush=True)
        _serve(server.kill, server.start, outage_every, outage)


@main.command("hdfs")
@_outage_every
@_outage
def serve_hdfs(outage_every: float | None, outage: float) -> None:
    """One NameNode and one DataNode, which are killed in turns."""
    from holdfast.spark_integration.java import ensure_java

    with _folder() as folder, hdfs.hdfs(folder, ensure_java()) as server:
        print(f"make demo STATE_DIR={server.url}/demo", flush=True)
        victims = itertools.cycle(["namenode", "datanode"])
        _serve(lambda: getattr(server, next(victims)).kill(), server.revive, outage_every, outage)


@main.command("kafka")
@_outage_every
@_outage
def serve_kafka(outage_every: float | None, outage: float) -> None:
    """One broker with one topic."""
    from holdfast.spark_integration.java import ensure_java

    with _folder() as folder, kafka.kafka(folder, ensure_java()) as server:
        topic = server.add_topic(partitions=3)
        print(f"export KAFKA_SERVERS={server.servers} KAFKA_TOPIC={topic}", flush=True)
        print("make demo ARGS='--sink kafka'", flush=True)
        _serve(server.broker.kill, server.start, outage_every, outage)


@main.command("postgres")
@_outage_every
@_outage
def serve_postgres(outage_every: float | None, outage: float) -> None:
    """PostgreSQL with one database, which allows prepared transactions."""
    # One to type; the tests' looks like a secret that got out.
    with postgres.postgres(settings={"fsync": "on"}, password=postgres.USER) as server:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in server.environment().items())
        print(f"export {variables}\nmake demo ARGS='--sink postgres'", flush=True)
        _serve(server.kill, server.start, outage_every, outage)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="holdfast-server-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _serve(kill: Callable[[], None], start: Callable[[], None], outage_every_s: float | None, outage_s: float) -> None:
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(outage_every_s or 3600)
            if outage_every_s is not None:
                kill()
                print(f"{time.strftime('%H:%M:%S')} killed", flush=True)
                time.sleep(outage_s)
                start()
                print(f"{time.strftime('%H:%M:%S')} serves again", flush=True)


if __name__ == "__main__":
    try:
        main()
    except downloads.MissingServerError as exc:
        sys.exit(str(exc))
