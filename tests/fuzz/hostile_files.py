"""Hostile stored files, each with a right digest: ``python -m tests.fuzz.hostile_files SEED FILES``.

Runs in a process of its own with little memory: a crash or a claim that is believed shows at once. What is expected
is only this: an answer that can be read, or an error of holdfast. The last line that is printed names the file.
"""

from __future__ import annotations

import copy
import faulthandler
import logging
import random
import re
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast import clock
from holdfast.backends import local_files
from holdfast.backends.base import Pointer
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.rocksdb.generation_file import GENERATION, DatabaseFile, GenerationFile
from holdfast.backends.run import Run, TableSchema
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import HoldfastError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator, read_operator
from holdfast.snapshotter.ownership.stored_tables import declare_tables, stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import list_shard, read_header
from holdfast.snapshotter.upkeep.verification import verify_shard
from holdfast.testing import state_rows
from holdfast.testing.state_rows import COUNTS, PAIRS, TYPES, VALUE_TYPES, keys_of, values_of
from tests.fuzz.arrow_columns import exact
from tests.fuzz.forge import digest_of, put_together, resealed, spoil_bytes, spoil_json, take_apart

SHARD = "totals/shard-0003"
_KINDS = [*TYPES, *VALUE_TYPES]
THINGS = TableSchema.of(
    "things", pa.schema([("id", pa.int64())]), pa.schema([(f"v{i}", kind) for i, (kind, _, _) in enumerate(_KINDS)])
)
"""A table with a column of each type."""
TABLES = {**state_rows.TABLES, "things": THINGS}
ROOM_BYTES = 1 << 30
"""More than all of this needs, and less than any claim that is believed."""


class Shard:
    """A shard with a snapshot and commits on it, whose objects can be replaced by others."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.folder, self.threads = folder, threads
        self.storage: ObjectStorage = open_storage(f"memory://hostile/{folder.name}")
        declare_operator(self.storage, OperatorRecord("totals", "query", "definition", "run", 4, TABLES, 100))
        self.backend = MemoryBackend(folder / "here", TABLES, clock.new_id)
        log = ObjectCommitLog(self.storage, SHARD, TABLES, threads, folder / "here", "memory")
        store, self.pointer = VersionedStore(self.backend, log), Pointer(0, "none")
        for step in range(5):
            with store.begin(self.pointer if step else None) as attempt:
                users = [(f"user {i}" * (i % 3),) for i in range(step, 40)]
                attempt.put("counts", keys_of(COUNTS, users), values_of(COUNTS, [(i,) for i in range(len(users))]))
                pairs = [(i, float(i), f"ü{i}") for i in range(30)]
                attempt.put("pairs", keys_of(PAIRS, pairs), values_of(PAIRS, [("note" * i, None) for i in range(30)]))
                ids = [(i,) for i in range(10)]
                things = [tuple(kind[1 + (i + step) % 2] for kind in _KINDS) for i in range(9)]
                attempt.put("things", keys_of(THINGS, ids), values_of(THINGS, [*things, None]))
                pointer = attempt.commit()
            assert pointer is not None
            self.pointer = pointer
            if step == 2:
                log.write_snapshot(self.backend, pointer)
        later = {**TABLES, "added": TableSchema.of("added", COUNTS.key, THINGS.value)}
        record = read_operator(self.storage, "totals")
        dropped = {"pairs": ColumnChanges(frozenset(PAIRS.value.names[:1]))}
        planned = stored_tables(self.storage, record).with_changes(dropped).with_declared(later)
        declare_tables(self.storage, record, planned)
        infos = [info.key for info in self.storage.list("totals/")]
        self.objects = {key: bytes(self.storage.get(key)) for key in infos}
        self.newest = f"{SHARD}/commits/{self.pointer}"

    def restored(self, key: str, data: bytes) -> str:
        """Restore the newest version with one object replaced; what names that object is made to name the new one."""
        self._store(dict(self._linked(key, data)))
        fresh = Path(tempfile.mkdtemp(dir=self.folder))
        log = ObjectCommitLog(self.storage, SHARD, TABLES, self.threads, fresh, "memory", step_bytes=4096)
        backend = MemoryBackend(fresh, TABLES, clock.new_id)
        with VersionedStore(backend, log).read_at(self.pointer) as view:
            for table in TABLES:
                for run in view.scan(table):
                    read_through(run)
        return "restored"

    def _linked(self, spoiled_key: str, spoiled_data: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield all objects: what names another one by size and digest names it as it is now."""
        now: dict[str, tuple[str, int]] = {}
        for key in sorted(self.objects, key=_age):
            before = self.objects[key]
            data = spoiled_data if key == spoiled_key else before
            body, footer = take_apart(before)
            if key != spoiled_key and _rename(footer, now):
                data = put_together(body, footer)
            if data != before:
                now[digest_of(before)] = digest_of(data), len(data)
            yield named_after(data, before, key), data

    def store_with(self, key: str, data: bytes) -> str:
        """Store all objects, one of them replaced; return its name, which goes with what it is now."""
        named = named_after(data, self.objects[key], key)
        self._store({other: stored for other, stored in self.objects.items() if other != key} | {named: data})
        return named

    def _store(self, objects: dict[str, bytes]) -> None:
        self.storage.delete([info.key for info in self.storage.list("totals/")])
        for key, data in objects.items():
            self.storage.put(key, data)

    def catalogued(self, key: str, data: bytes) -> str:
        """Look at the object as the commands and clean-ups do."""
        named = self.store_with(key, data)
        stored_tables(self.storage, read_operator(self.storage, "totals"))
        shard = PrefixedStorage(self.storage, SHARD)
        listing = list_shard(shard)
        verify_shard(shard, self.threads, 100)
        stored = listing.objects.get(named.removeprefix(f"{SHARD}/"))
        if stored is not None and stored.kind in ("commit", "snapshot"):
            read_header(shard, stored)
        return "read"


def named_after(data: bytes, before: bytes, key: str) -> str:
    """Return the name of an object that was changed: some have the beginning of their digest in it."""
    return key.replace(digest_of(before)[:16], digest_of(data)[:16])


def _age(key: str) -> tuple[int, str]:
    """Order objects such that each comes after those that it names."""
    found = re.search(r"/(commits|snapshots)/(\d+)-", key)
    return (int(found[2]), found[1]) if found else (0, key)


def _rename(value: Any, now: dict[str, tuple[str, int]]) -> bool:
    """Replace digests and sizes of objects that have others now; tell whether there were any."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = sum(_rename(child, now) for child in children) > 0  # all of them, not the first
    if isinstance(value, dict) and value.get("digest") in now:
        value["digest"], value["size_bytes"] = now[value["digest"]]
        return True
    return found


def read_through(run: Run) -> None:
    """Touch every value, bit by bit."""
    for column in run.batch.columns:
        exact(column)


def unpacked(body: bytes, footer: dict[str, Any]) -> bytes:
    """Return the sections of a commit with buffers that are not compressed: so each byte that is changed is a value."""
    new = b""
    for entry in footer["sections"]:
        section = body[entry["offset"] : entry["offset"] + entry["size_bytes"]]
        sink = pa.BufferOutputStream()
        with pa.ipc.open_stream(section) as reader, pa.ipc.new_stream(sink, reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
        plain = sink.getvalue().to_pybytes()
        entry |= {"offset": len(new), "size_bytes": len(plain), "plain_bytes": len(plain)}
        new += plain
    return new


def spoiled(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Return a file with something wrong and a right digest, and what is wrong."""
    body, footer = take_apart(data)
    way = chance.randrange(6 if body else 3)
    if way == 0:
        said = spoil_json(footer["header"], chance) if footer["header"] else "nothing"
    elif way == 1:
        said = spoil_json(footer, chance)
    elif way == 2:
        whole = bytearray(data)
        said = spoil_bytes(whole, chance, 0, len(whole) - 24)
        return resealed(bytes(whole)), said
    else:
        if footer["kind"] == "commit" and chance.random() < 0.7:
            body = unpacked(body, footer)
        changed = bytearray(body)
        said = spoil_bytes(changed, chance, 0, len(changed))
        body = bytes(changed)[: len(body)]
    return put_together(body, footer), said


def local_file(shard: Shard, chance: random.Random) -> str:
    """Spoil a small local file of a version or of a note, which are read with their digests."""
    backend, pointer = shard.backend, shard.pointer
    path = backend.directory / "versions" / str(pointer) / "version"
    good = path.read_bytes()
    data, said = spoiled(good, chance)
    path.write_bytes(data)
    try:
        with backend.view(pointer) as view:
            for table in TABLES:
                list(view.scan(table))
    finally:
        _put_back(backend.directory, pointer, good)
    return said


def _put_back(directory: Path, pointer: Pointer, good: bytes) -> None:
    for aside in (directory / "set-aside").glob(f"*-{pointer}"):
        aside.rename(directory / "versions" / str(pointer))
    (directory / "versions" / str(pointer) / "version").write_bytes(good)


def generation(shard: Shard, chance: random.Random) -> str:
    """Spoil what a generation says of itself."""
    files = {"CURRENT": DatabaseFile(16, "00" * 16)}
    good = GenerationFile({}, {"t": 1}, files, "aa", {"t": ["bb", "cc"]}).with_tables(TABLES.values())
    with local_files.staged_folder(shard.backend.directory / "staging", clock.new_id(), fsync=False) as staged:
        good.write(staged)
        data, said = spoiled((staged.path / GENERATION).read_bytes(), chance)
        (staged.path / GENERATION).write_bytes(data)
        GenerationFile.read(staged.path).require(TABLES, staged.path)
    return said


def durable(shard: Shard, chance: random.Random) -> str:
    """Spoil an object, and restore from it, or look at it as the commands do."""
    key = chance.choice([k for k in shard.objects if k.startswith(SHARD)] * 3 + list(shard.objects))
    data, said = spoiled(shard.objects[key], chance)
    print(f"  {key} {said}"[:300].encode("ascii", "backslashreplace").decode(), flush=True)
    (shard.restored if chance.random() < 0.6 else shard.catalogued)(key, data)
    return said


def main(seed: int, files: int) -> None:
    """Spoil so many files; anything but an answer or an error of holdfast ends the process."""
    faulthandler.enable()
    logging.disable()
    outcomes: Counter[str] = Counter()
    ways: list[Callable[[Shard, random.Random], str]] = [durable, durable, durable, local_file, generation]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:
        shard = Shard(Path(folder), threads)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
        for number in range(files):
            chance = random.Random(f"{seed}/{number}")
            way = copy.copy(chance.choice(ways))
            print(f"seed {seed} file {number} {way.__name__}", flush=True)
            try:
                way(shard, chance)
                outcomes["read"] += 1
            except HoldfastError as exc:
                str(exc).encode()  # can be shown
                outcomes[type(exc).__name__] += 1
    print(dict(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
