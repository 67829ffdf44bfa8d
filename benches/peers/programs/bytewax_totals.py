"""Bytewax: stateful logic per key, in a process per worker, since workers of one process share the GIL."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from datetime import timedelta
from io import BufferedReader
from pathlib import Path
from typing import Any

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.run import cli_main

_LINES = 1000
_Position = tuple[int, int]
_Row = tuple[str, int]
_Total = tuple[int, int]


class Files(StatefulSourcePartition[_Row, _Position]):
    """A sequence of files; the position is the number of a file and an offset in it."""

    def __init__(self, paths: list[str], position: _Position) -> None:
        self._paths = paths
        self._number, offset = position
        self._file: BufferedReader | None = None
        self._open(offset)

    def _open(self, offset: int) -> None:
        self.close()
        if self._number < len(self._paths):
            self._file = Path(self._paths[self._number]).open("rb")  # noqa: SIM115 - `close` closes it
            self._file.seek(offset)

    def next_batch(self) -> list[_Row]:
        if self._file is None:
            raise StopIteration
        lines = [self._file.readline() for _ in range(_LINES)]
        if not lines[-1]:
            self._number += 1
            self._open(0)
        rows = [line.decode().split(",") for line in lines if line and line[:1] != b"#"]
        return [(key, int(v)) for key, v in rows]

    def snapshot(self) -> _Position:
        return self._number, self._file.tell() if self._file is not None else 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


class Rows(FixedPartitionedSource[_Row, _Position]):
    """All files; partition i has file i of each micro-batch."""

    def __init__(self, batches: list[list[str]]) -> None:
        self._batches = batches

    def list_parts(self) -> list[str]:
        return [str(i) for i in range(len(self._batches[0]))]

    def build_part(self, _step_id: str, for_part: str, resume_state: _Position | None) -> Files:
        return Files([batch[int(for_part)] for batch in self._batches], resume_state or (0, 0))


class Printed(StatelessSinkPartition[tuple[str, _Total]]):
    """Prints the results of sampled keys, and drops all others."""

    def __init__(self, every: int) -> None:
        self._every = every

    def write_batch(self, items: list[tuple[str, _Total]]) -> None:
        every = self._every
        found = [f"+U[{key}, {n}, {s}]\n" for key, (n, s) in items if int(key) % every == 0]
        if found:
            sys.stdout.write("".join(found))
            sys.stdout.flush()


class Sink(DynamicSink[tuple[str, _Total]]):
    """Creates a `Printed` per worker."""

    def __init__(self, every: int) -> None:
        self._every = every

    def build(self, _step_id: str, _worker_index: int, _worker_count: int) -> Printed:
        return Printed(self._every)


def add(total: _Total | None, v: int) -> tuple[_Total, _Total]:
    """Return a key's new state, and the result to emit."""
    n, s = total or (0, 0)
    total = (n + 1, s + v)
    return total, total


def run(order: dict[str, Any], process: int, ports: list[int]) -> None:
    flow = Dataflow("totals")
    rows = op.input("rows", flow, Rows(order["batches"]))
    totals = op.stateful_map("total", rows, add)
    op.output("printed", totals, Sink(order["every"]))
    if process == 0:
        print("ready", flush=True)
    cli_main(
        flow,
        process_id=process,
        addresses=[f"127.0.0.1:{port}" for port in ports],
        epoch_interval=timedelta(milliseconds=order["commit_ms"]),
        recovery_config=RecoveryConfig(order["durable"]) if order["durable"] else None,
    )


def main(file: str, process: int = 0, *ports: int) -> None:
    """Run one process of the cluster; the first starts the others."""
    order = json.loads(Path(file).read_text())
    count = order["parallelism"]
    if process > 0:
        run(order, process, list(ports))
        return
    if order["durable"] and not Path(order["durable"]).exists():
        Path(order["durable"]).mkdir(parents=True)
        init_db_dir(Path(order["durable"]), count)
    ports = free_ports(count)
    command = [sys.executable, __file__, file]
    others = [subprocess.Popen([*command, *map(str, (i, *ports))]) for i in range(1, count)]
    run(order, 0, list(ports))
    failed = [other.returncode for other in others if other.wait() != 0]
    if failed:
        sys.exit(f"processes of the cluster failed: {failed}")


def free_ports(count: int) -> tuple[int, ...]:
    """Return free ports of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return tuple(one.getsockname()[1] for one in sockets)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
