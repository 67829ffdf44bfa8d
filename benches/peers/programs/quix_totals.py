"""Quix Streams: its state store, in process, as an application uses it for a message; without Kafka.

Measured: a read and a write of a key's state for each row through the store's transaction, in which values become
JSON, and a flush of the transaction after so many rows or milliseconds. Not measured: consumers and producers,
(de)serialised messages, and the changelog topic, which is what makes the state of a real application durable. Here,
where a kill is to be survived, the place in the files is written with the state into the local RocksDB; that survives
the kill of the process, and not the loss of the disk.

Kafka would bring the rows of a key to one process; here each process reads all files and leaves the keys of others out.
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
    """Yield the lines of all files but the first ones."""
    paths = [path for batch in order["batches"] for path in batch]

    def all_lines() -> Iterator[bytes]:
        for path in paths:
            with Path(path).open("rb") as file:
                yield from file

    return islice(all_lines(), position, None)


def run(order: dict[str, Any], process: int) -> None:
    """Add up the keys of one process."""
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
    """Return the store: RocksDB, or memory where no kill need be survived."""
    if order["durable"]:
        return RocksDBStore("totals", "rows", order["durable"])
    return MemoryStore("totals", "rows")


def commit(transaction: Any, position: int) -> None:
    """Write what has changed, and the place in the files, at once."""
    transaction.as_state(_POSITION).set("lines", position)
    transaction.prepare(processed_offsets=None)
    transaction.flush()


def main(file: str, process: int = 0) -> None:
    """Be one of the processes; the first one starts the others."""
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
