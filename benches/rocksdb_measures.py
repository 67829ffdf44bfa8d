"""What is done to a database to measure its options: each function gives the figures of one row of a table.

Figures are microseconds of CPU time a key where their name has no other unit, of the calling thread or, where it says
``all``, of all threads.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rocksdict import Checkpoint, IngestExternalFileOptions, Rdict, SstFileWriter

from holdfast.benches.rocksdb_workload import CHUNK_KEYS, KEY_BYTES, MIB, Bench, Meter, resident_mib

Figures = dict[str, float]


def read_and_write(bench: Bench) -> Figures:
    """Micro-batches: read random keys, write them again; at last read keys half of which are new."""
    with Meter().running() as fill:
        bench.fill()
    got, written, both, held = Meter(), Meter(), Meter(), []
    with both.running():
        for _ in range(bench.commits):
            keys, values = bench.rows(np.unique(bench.chance.integers(0, bench.keys, bench.batch)))
            with got.running():
                bench.get(keys)
            before = written.wall_s
            with written.running():
                bench.write(keys, values)
            held.append(written.wall_s - before)
        bench.settle()
    rows = bench.commits * bench.batch
    return {
        "fill, all": fill.cpu_all_s / bench.keys * 1e6,
        "get": got.cpu_s / rows * 1e6,
        "get wall": got.wall_s / rows * 1e6,
        "get, half new": bench.us_per_key(bench.get, bench.random_keys(5 * CHUNK_KEYS, 2 * bench.keys)),
        "write": written.cpu_s / rows * 1e6,
        "batch, all": both.cpu_all_s / rows * 1e6,
        "longest write ms": max(held) * 1e3,
        "space MiB": bench.size_mib(),
        "RSS over cache MiB": resident_mib("VmHWM") - bench.resident_mib - bench.tuning.cache_mib,
    }


def commits(bench: Bench) -> Figures:
    """Commits back to back: for how long each is held back, and what is written for it in all."""
    bench.fill()
    held, level0, space = [], 0, 0.0
    with Meter().running() as meter:
        for _ in range(bench.commits):
            held.append(bench.commit())
            level0 = max(level0, int(bench.database.property_value("rocksdb.num-files-at-level0") or 0))
            space = max(space, bench.size_mib())
        bench.settle()
    rows = bench.commits * bench.batch
    return {
        "p50 ms": float(np.median(held)),
        "p99 ms": float(np.percentile(held, 99)),
        "max ms": max(held),
        "cpu, all": meter.cpu_all_s / rows * 1e6,
        "written/raw": meter.written_bytes / rows / (KEY_BYTES + bench.value_bytes),
        "level 0 files": level0,
        "space peak MiB": space,
        "space MiB": bench.size_mib(),
    }


def density(bench: Bench) -> Figures:
    """Point reads against one ordered scan of the range, in microseconds for each wanted key."""
    bench.fill()
    every = bench.sorted_keys(np.arange(bench.keys))
    shown = {}
    for share in (1.0, 0.5, 0.3, 0.2, 0.1, 0.02):
        count = int(min(20_000, bench.keys * share))
        reach = int(count / share)
        first = int(bench.chance.integers(0, bench.keys - reach + 1))
        wanted = [every[first + i] for i in np.sort(bench.chance.permutation(reach)[:count])]
        shown[f"get {share}"] = bench.us_per_key(bench.get, wanted)
        shown[f"scan {share}"] = bench.us_per_key(bench.scan, wanted)
    return shown


def reads(bench: Bench) -> Figures:
    """Read the same keys in all ways there are."""
    bench.fill()
    snapshot = bench.database.snapshot()
    bench.commit()
    keys = bench.random_keys(5 * CHUNK_KEYS)
    shuffled = [keys[i] for i in bench.chance.permutation(len(keys))]
    iterator = bench.database.iter()

    def seek(wanted: list[bytes]) -> None:
        for key in wanted:
            iterator.seek(key)
            iterator.value()

    def walk(wanted: list[bytes]) -> None:
        iterator.seek_to_first()
        for _ in wanted:
            iterator.key(), iterator.value()
            iterator.next()

    single: Callable[[bytes], Any] = snapshot.__getitem__
    shown = {f"get, {n} a call": bench.us_per_key(bench.reader(n), keys) for n in (1, 100, 1000, 8192, 65536)}
    shown |= {
        "get, unsorted": bench.us_per_key(bench.get, shuffled),
        "get, snapshot": bench.us_per_key(lambda wanted: deque(map(single, wanted), maxlen=0), keys),
        "seek": bench.us_per_key(seek, keys),
        "a row: items()": bench.us_per_row(bench.database.items()),
        "a row: RdictIter": bench.us_per_key(walk, keys),
        "a row: keys()": bench.us_per_row(bench.database.keys()),
        "a row: snapshot.items()": bench.us_per_row(snapshot.items()),
    }
    return shown


def load(bench: Bench, how: str, batch: int) -> Figures:
    """Fill an empty database."""
    order = np.arange(bench.keys) if how != "unsorted" else bench.chance.permutation(bench.keys)
    keys, values = bench.rows(order)
    if how == "unsorted":
        keys = [keys[i] for i in order]
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    with Meter().running() as meter:
        if how == "ingest":
            _ingest(bench, keys, values, batch)
        else:
            for start in range(0, bench.keys, batch):
                bench.write(keys[start : start + batch], values[start : start + batch])
        bench.database.flush()
        bench.settle()
    return {
        "cpu, all": meter.cpu_all_s / bench.keys * 1e6,
        "wall": meter.wall_s / bench.keys * 1e6,
        "written/raw": meter.written_bytes / bench.keys / (KEY_BYTES + bench.value_bytes),
        "RSS peak MiB": resident_mib("VmHWM") - before,
    }


def _ingest(bench: Bench, keys: list[bytes], values: list[bytes], batch: int) -> None:
    folder = Path(tempfile.mkdtemp(dir=bench.directory.parent))
    for start in range(0, len(keys), batch):
        writer = SstFileWriter(bench.options())
        writer.open(str(folder / f"{start}.sst"))
        deque(map(writer.__setitem__, keys[start : start + batch], values[start : start + batch]), maxlen=0)
        writer.finish()
    options = IngestExternalFileOptions()
    options.set_move_files(True)
    bench.database.ingest_external_file(sorted(map(str, folder.iterdir())), options)


def shards(bench: Bench, count: int, flush: bool) -> Figures:
    """Several databases that share one cache, written in turns; `flush`: each commit that ends above the limit."""
    databases = [bench.database]
    databases += [Rdict(f"{bench.directory}-{i}", bench.options()) for i in range(1, count)]
    cached = buffered = 0
    held = []
    for turn in range(max(bench.commits, 2 * bench.keys // bench.batch)):
        bench.database = databases[turn % count]
        held.append(bench.commit())
        if flush and bench.write_buffers.get_usage() > bench.write_buffers.get_buffer_size():
            bench.database.flush(wait=False)
        bench.get(bench.random_keys(bench.batch))
        cached = max(cached, bench.cache.get_usage())
        buffered = max(buffered, bench.write_buffers.get_usage())
    shown = {"cache MiB": cached / MIB, "write buffers MiB": buffered / MIB, "p50 ms": float(np.median(held))}
    shown["RSS over cache MiB"] = resident_mib("VmHWM") - bench.resident_mib - bench.tuning.cache_mib
    for database in databases[1:]:
        database.close()
    bench.database = databases[0]
    return shown


def life(bench: Bench) -> Figures:
    """Milliseconds for what happens once in a while."""
    shown: Figures = {}

    def timed(name: str, work: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        work()
        shown[f"{name} ms"] = (time.perf_counter() - begin) * 1e3

    bench.fill()
    bench.database.flush()
    timed("empty flush", bench.database.flush)
    timed("snapshot", bench.database.snapshot)
    timed("checkpoint", lambda: Checkpoint(bench.database).create_checkpoint(f"{bench.directory}-copy"))
    bench.commit()
    timed("flush", bench.database.flush)
    timed("close", bench.database.close)
    timed("open", bench.open)
    return shown
