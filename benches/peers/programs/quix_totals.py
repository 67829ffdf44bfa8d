"""Quix Streams without Kafka: its state store in this process, used as it would be for each message.

Measured: for each row a read and a write of the key's state through the store's transaction, which encodes values as
JSON, and a periodic flush of the transaction. Not measured: consumers, producers, (de)serialisation, and the changelog
topic that makes the state of a real application durable. A durable run instead writes its position in the files with
the state into the local RocksDB, which survives a kill of the process, but not the loss of the disk.

Kafka would route the rows of a key to one process; here each process reads all files and skips other keys.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from quixstreams.state.base import Store
from quixstreams.state.memory import MemoryStore
from quixstreams.state.rocksdb import RocksDBStore

_LINES = 1000
_POSITION = b"position"


def lines_of(order: dict[str, Any], position: int) -> Iterator[bytes]:
    """Yield the lines of all files, starting at `position`."""
    paths = [path for batch in order["batches"] for path in batch]

    def all_lines() -> Iterator[bytes]:
        for path in paths:
            with Path(path).open("rb") as file:
                yield from file

    return islice(all_lines(), position, None)


def run(order: dict[str, Any], process: int) -> None:
    store = store_of(order)
    store.assign_partition(process)
    transaction = store.start_partition_transaction(process)
    position = transaction.as_state(_POSITION).get("lines", 0)
    lines, count, every = lines_of(order, position), order["parallelism"], order["every"]
    due_s = time.monotonic() + order["commit_ms"] / 1000
    while some := list(islice(lines, _LINES)):
        printed = []
        for line in some:
            if line[:1] == b"#":
                continue
            name, _, value = line.partition(b",")
            key = int(name)
            if key % count != process:
                continue
            state = transaction.as_state(name)
            n, s = state.get("total", (0, 0))
            n, s = n + 1, s + int(value)
            state.set("total", (n, s))
            if key % every == 0:
                printed.append(f"+U[{key}, {n}, {s}]\n")
        position += len(some)
        sys.stdout.write("".join(printed))
        sys.stdout.flush()
        if time.monotonic() >= due_s:
            commit(transaction, position)
            transaction = store.start_partition_transaction(process)
            due_s = time.monotonic() + order["commit_ms"] / 1000
    commit(transaction, position)
    store.close()


def store_of(order: dict[str, Any]) -> Store:
    """Return RocksDB for a durable run, else memory."""
    if order["durable"]:
        return RocksDBStore("totals", "rows", order["durable"])
    return MemoryStore("totals", "rows")


def commit(transaction: Any, position: int) -> None:
    """Write all changes and the position in the files atomically."""
    transaction.as_state(_POSITION).set("lines", position)
    transaction.prepare(processed_offsets=None)
    transaction.flush()


def main(file: str, process: int = 0) -> None:
    """Run one of the processes; the first starts the others."""
    order = json.loads(Path(file).read_text())
    others = range(1, order["parallelism"]) if process == 0 else ()
    if process == 0:
        print("ready", flush=True)
    started = [subprocess.Popen([sys.executable, __file__, file, str(i)]) for i in others]
    run(order, process)
    failed = [other.returncode for other in started if other.wait() != 0]
    if failed:
        sys.exit(f"processes failed: {failed}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
