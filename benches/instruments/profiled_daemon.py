"""PySpark's worker daemon with `holdfast.benches.instruments.spans` in its workers: ``spark.python.daemon.module``."""

from __future__ import annotations

import socket

from pyspark import daemon

from holdfast.benches.instruments import spans


def main() -> None:
    """Run the daemon; each worker is instrumented after its fork, since Arrow must not start threads before it."""
    run_task = daemon.worker

    def worker(sock: socket.socket, authenticated: bool) -> int:
        spans.install_once()
        return run_task(sock, authenticated)

    daemon.worker = worker
    daemon.manager()


if __name__ == "__main__":
    main()
