"""A shard's durable history in small: what executors store as a query commits, drops, goes back and moves.

It stores objects with the real encoders under the real names, by the rules of FORMAT.md, without any state in them:
what retention and ``verify`` decide depends on names, headers and times only. Time is the store's, set by the test.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.errors import NotFoundError
from holdfast.snapshotter.lineage import Chain, ChainEntry, Lineage
from holdfast.snapshotter.snapshots import PART_BYTES, Manifest, Part, SnapshotFile
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage, check_folder, check_key
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

PREFIX = "totals/shard-0003"


class TimedStorage(ObjectStorage):
    """Objects in memory, stamped with a clock that the test sets."""

    url = "timed://test"

    def __init__(self) -> None:
        self.now_ms = 1_000_000_000_000
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.ever: set[str] = set()

    def put(self, key: str, data: object) -> None:
        self.now_ms += 1
        self.objects[check_key(key)] = (bytes(data), self.now_ms)  # type: ignore[call-overload]
        self.ever.add(key)

    def put_if_absent(self, key: str, data: object) -> None:
        if self.objects.get(check_key(key), (bytes(data), 0))[0] != bytes(data):  # type: ignore[call-overload]
            raise self._taken(key)
        self.put(key, data)

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        if check_key(key) not in self.objects:
            raise NotFoundError("no such object", key=key)
        data = self.objects[key][0]
        self._require_size(len(data), limit_bytes, key)
        return memoryview(data)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        check_folder(prefix)
        found = [(key, *self.objects[key]) for key in self.objects if key.startswith(prefix)]
        return [ObjectInfo(key, len(data), ms) for key, data, ms in sorted(found)]

    def delete(self, keys: Iterable[str]) -> None:
        for key in [check_key(key) for key in keys]:
            self.objects.pop(key, None)


@dataclass(frozen=True)
class Version:
    """A version as its query knows it: what its commit says, and what later ones build on."""

    pointer: Pointer
    parent: Version | None
    header: Lineage
    properties: Lineage

    @property
    def chain(self) -> Chain:
        """The stored objects that it is made of, its own too."""
        return self.properties.chain

    def lineage(self) -> list[Version]:
        """Return this version and all it descends from, newest first."""
        return [self, *(self.parent.lineage() if self.parent else [])]


@dataclass
class ShardHistory:
    """Stores objects of one shard; every executor has its own notes of the snapshots that it wrote."""

    storage: ObjectStorage
    prefix: str = PREFIX
    notes: dict[int, dict[Pointer, ChainEntry]] = field(default_factory=dict)
    committed: dict[ChainEntry, Version] = field(default_factory=dict)
    manifests: dict[ChainEntry, Manifest] = field(default_factory=dict)
    ids: int = 0

    @property
    def objects(self) -> PrefixedStorage:
        return PrefixedStorage(self.storage, self.prefix)

    def commit(
        self, parent: Version | None, *, step: int = 1, carried: bool = False, executor: int = 0, rows: int = 1
    ) -> Version:
        """Commit a version after `parent` that says it has so many rows; where it is carried, nothing is stored."""
        pointer = Pointer((parent.pointer.version if parent else 0) + step, self._new_id())
        below = self._standing(parent, executor)
        covered = Lineage(below.chain, (*below.since, pointer), below.last)
        if carried:
            return Version(pointer, parent, covered, covered)
        tables = ["totals"] if rows else []
        header: dict[str, object] = {"pointer": str(pointer), "shard": self.prefix}
        header |= {"rows": dict.fromkeys(tables, rows), "plain_bytes": dict.fromkeys(tables, 0)}
        sections = {table: lambda sink: sink.write(b"") for table in tables}
        own = self._store("commit", pointer, *stored_file.encode("commit", header | covered.to_json(), sections))
        version = Version(pointer, parent, covered, Lineage((*below.chain, own), (), own))
        self.committed[own] = version
        return version

    def begin_snapshot(self, version: Version, executor: int = 0, files: int = 2) -> Manifest:
        """Store the parts of a snapshot, some taken over from the one before; its manifest is not stored yet."""
        below = self._standing(version, executor)
        older = self.manifests[below.snapshot].files if below.snapshot else ()
        new = [self._file() for _ in range(files)]
        kept = [file for i, file in enumerate(older) if (i + version.pointer.version) % 3]
        return Manifest(
            version.pointer,
            self.prefix,
            "memory",
            PART_BYTES,
            (*kept, *new),
            below.chain,
            sum(file.stored_bytes for file in new),
            0,
        )

    def finish_snapshot(self, manifest: Manifest, executor: int = 0) -> ChainEntry:
        data, entry = manifest.encoded()
        self.storage.put(f"{self.prefix}/{entry.key}", data)
        self.manifests[entry] = manifest
        notes = self.notes.setdefault(executor, {})
        notes[manifest.pointer] = entry
        for old in sorted(notes, key=lambda pointer: pointer.version)[:-4]:
            del notes[old]
        return entry

    def snapshot(self, version: Version, executor: int = 0) -> ChainEntry:
        return self.finish_snapshot(self.begin_snapshot(version, executor), executor)

    def grow(self, parent: Version | None, versions: int, snapshot_every: int = 0) -> list[Version]:
        """Commit so many versions, with a snapshot after every so many of them."""
        made: list[Version] = []
        for _ in range(versions):
            parent = self.commit(parent)
            made.append(parent)
            if snapshot_every and parent.pointer.version % snapshot_every == 0:
                self.snapshot(parent)
        return made

    def stored(self) -> set[str]:
        return {info.key.removeprefix(f"{self.prefix}/") for info in self.storage.list(f"{self.prefix}/")}

    def missing(self, version: Version, there: Collection[str]) -> list[str]:
        """Return the keys that restoring a version by its own chain needs, and that are not `there`."""
        files = [file for e in version.chain if e.kind == "snapshot" for file in self.manifests[e].files]
        needed = [*(e.key for e in version.chain), *(part.key for file in files for part in file.parts)]
        return [key for key in needed if key not in there]

    def restores_without(self, version: Version, damaged: ChainEntry, there: Collection[str]) -> bool:
        """Tell whether a version comes out of an older snapshot and the commits since, all of which are `there`."""
        if damaged not in version.chain and not self.missing(version, there):
            return True
        commits = [e for e in version.chain if e.kind == "commit"]
        before = self.committed[commits[0]].header.last if commits else version.header.last
        if not {e.key for e in commits} <= set(there):
            return False
        return before is None or self.restores_without(self.committed[before], damaged, there)

    def _standing(self, version: Version | None, executor: int) -> Lineage:
        """Return the lineage of what comes after a version, on the newest snapshot that the executor knows of."""
        return version.properties.with_snapshots(self.notes.get(executor, {})) if version else Lineage()

    def _file(self) -> SnapshotFile:
        name = f"{self._new_id()}-0"
        data, digest = stored_file.encode(
            "part", {"shard": self.prefix, "name": name, "offset": 0}, {"data": lambda sink: sink.write(b"x" * 100)}
        )
        self.storage.put(f"{self.prefix}/files/{name}", data)
        return SnapshotFile(name, 100, 0, (Part(f"files/{name}", data.size, digest),))

    def _store(self, kind: str, pointer: Pointer, data: object, digest: str) -> ChainEntry:
        entry = ChainEntry(kind, pointer, memoryview(data).nbytes, digest)  # type: ignore[arg-type]
        self.storage.put(f"{self.prefix}/{entry.key}", data)  # type: ignore[arg-type]
        return entry

    def _new_id(self) -> str:
        self.ids += 1
        return xxhash.xxh3_64_hexdigest(str(self.ids).encode())
