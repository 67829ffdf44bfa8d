"""A shard that is many times larger than what its process may have: look-ups, commits, merges and moves fit.

``HOLDFAST_TEST_KEYS=10000000`` says how large; the last line that is printed, with ``-s``, has the figures.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast import clock
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.benches.jobs.rows import TABLE, keys_of, table_of, values_of
from holdfast.mvcc import VersionedStore

KEYS = int(os.environ.get("HOLDFAST_TEST_KEYS", "2000000"))
#: What the process may have for data besides what it has with its libraries: merges take a few times 64 MiB.
ROOM_BYTES = 640 << 20
#: Of a thread: RocksDB opens tables in 16 at once, whose stacks count as data whole, with 8 MiB each by default.
STACK_BYTES = 1 << 20
VALUE_BYTES, BATCH_ROWS, TOUCHED = 92, 250_000, 50_000


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_shard_fits_into_a_process_with_little_memory(tmp_path: Path) -> None:
    """What is not in the page cache lies on disk: the size of a shard asks for no memory."""
    command = [sys.executable, "-m", __name__, str(tmp_path / "shard"), str(KEYS)]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, preexec_fn=_limit_stacks)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)


def _limit_stacks() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, most))


def main(directory: Path, keys: int) -> None:
    """Fill a shard, and read, write and maintain it, within the limit."""
    table, chance = table_of(VALUE_BYTES), np.random.default_rng(0)
    before_bytes = _data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (before_bytes + ROOM_BYTES,) * 2)
    with RocksDBBackend(directory, {TABLE: table}, clock.new_id, {"memory": "64m"}) as backend:
        store, pointer, moved = VersionedStore(backend), None, 0
        batches = [np.arange(first, min(keys, first + BATCH_ROWS)) for first in range(0, keys, BATCH_ROWS)]
        for numbers in [*batches, *(np.unique(chance.integers(0, keys, TOUCHED)) for _ in range(10))]:
            with store.begin(pointer) as transaction:
                if pointer is not None:
                    store.prune(pointer)
                is_known = transaction.get(TABLE, keys_of(table, numbers)).exists
                assert is_known.all() == (numbers is not batches[0] and len(numbers) <= TOUCHED)
                transaction.put(TABLE, keys_of(table, numbers), values_of(table, len(numbers), VALUE_BYTES, chance))
                pointer = transaction.commit()
            assert pointer is not None
            moved += backend.maintain(pointer)
        rows = sum(backend.statistics().rows.values())
        assert rows > 0.9 * keys
    print(f"{keys:,} keys, {directory_bytes(directory) >> 20} MiB on disk, {moved} moves and merges")
    print(f"data {before_bytes >> 20} MiB with libraries, at most {_peak_bytes() >> 20} MiB resident, files included")


def directory_bytes(directory: Path) -> int:
    return sum({path.stat().st_ino: path.stat().st_size for path in directory.rglob("*") if path.is_file()}.values())


def _data_bytes() -> int:
    return _status("VmData")


def _peak_bytes() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
