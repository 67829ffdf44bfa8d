"""The manifest of a snapshot: which files make up one version of a shard, and the objects that hold their bytes.

::

    <operator>/shard-0003/
        snapshots/20-aa…-7c1e…     manifest of version 20-aa…
        files/5f0c1d…-0            parts of a file, at most `PART_BYTES` of it in each; kind "part"
        files/5f0c1d…-1
        files/91be07…-0

A file that an earlier snapshot stored is not stored again: the new manifest names the same parts, which are separate
objects so that they are transferred in parallel.

Invariants
----------
* **last**: a manifest is stored after all parts that it names.
* **contained**: names and keys are checked when a manifest is read: no file lands outside its folder, and no part
  is taken from another shard.
* **bounded**: a part never unpacks to more than `PART_BYTES_MAX`, whatever a manifest says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.snapshotter.fields import Digest, Fields, Stored, refuse_stray
from holdfast.snapshotter.lineage import Chain, ChainEntry, require_chain

KIND, PART_KIND = "snapshot", "part"
#: Bytes of a file in one part; a reader goes by the manifest.
PART_BYTES = 8 << 20
#: The largest value that a manifest may give.
PART_BYTES_MAX = 64 << 20
#: The size of the largest object that holds a part.
PART_OBJECT_BYTES_MAX = PART_BYTES_MAX + stored_file.END_BYTES_MAX
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
PART_NAME = re.compile(r"files/[0-9a-z]{8,40}-[0-9]{1,9}")
#: Bytes of a file in each of its parts but the last one.
PartBytes = Annotated[int, range(1, PART_BYTES_MAX + 1)]


@dataclass(frozen=True)
class Part(Stored):
    """An object that holds a stretch of a file."""

    key: Annotated[str, PART_NAME]  #: Below the shard
    size_bytes: Annotated[int, range(PART_OBJECT_BYTES_MAX + 1)]  #: Of the object
    digest: Digest  #: Of the object; see `holdfast.backends.stored_file`


@dataclass(frozen=True)
class _PartHeader(Stored):
    """Which stretch of which file a part's object holds."""

    shard: str
    name: str
    offset: int


@dataclass(frozen=True)
class SnapshotFile(Stored):
    """One file of a snapshot."""

    name: Annotated[str, _FILE_NAME]  #: Its name in the folder that the backend takes over
    size_bytes: int  #: Of the file
    modified_ns: int  #: When it was modified; a restored file gets that time again
    parts: tuple[Part, ...]  #: In the order of their bytes

    def require_parts(self, part_bytes: int, header: Fields) -> None:
        """Refuse a file whose size does not match its parts of `part_bytes` each."""
        if len(self.parts) != number_of_parts(self.size_bytes, part_bytes):
            header.refuse(f"names a file of {self.size_bytes} bytes that cannot lie in {len(self.parts)} parts")
        for part, size_bytes in self.sizes_of_parts(part_bytes):
            if size_bytes > part.size_bytes * stored_file.EXPANSION_MAX:
                header.refuse("names a part that holds more bytes than it can", part=part.key, size_bytes=size_bytes)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the objects that hold the file."""
        return sum(part.size_bytes for part in self.parts)

    def sizes_of_parts(self, part_bytes: int) -> Iterator[tuple[Part, int]]:
        """Yield each part, and how many bytes of the file it holds."""
        for index, part in enumerate(self.parts):
            yield part, min(part_bytes, self.size_bytes - index * part_bytes)

    def missing(self, size_of: Callable[[str], int | None]) -> Iterator[Part]:
        """Yield the parts that are missing or of a wrong size; `size_of` returns the bytes of a key, or None."""
        return (part for part in self.parts if size_of(part.key) != part.size_bytes)


@dataclass(frozen=True)
class CleanedUp(Stored):
    """A lineage's record of clean-ups, so that no process needs to remember it."""

    below: int = 0  #: All commits and snapshots of lower version numbers were deleted; 0 where nothing ever was
    snapshots_since: int = 1  #: Snapshots of the lineage since the last clean-up, this one included


#: Of a first snapshot.
NEVER_CLEANED_UP = CleanedUp()


@dataclass(frozen=True)
class Manifest(Stored):
    """One snapshot."""

    pointer: Pointer  #: The version
    shard: str  #: The shard's place in the storage: ``totals/shard-0003``
    #: The name of the backend that froze the files, and can open them
    backend: Annotated[str, re.compile(r"[^\x00-\x1f\x7f]{1,255}")]
    part_bytes: PartBytes
    files: tuple[SnapshotFile, ...]
    replaced: Chain  #: The chain that the snapshot stands for; see `holdfast.snapshotter.lineage`
    new_bytes: int  #: Stored for this snapshot; the other files were there
    #: When, by the clock of who wrote it, in ms since 1970. To show, and for ``snapshot.intervalSeconds``.
    written_ms: int
    cleaned: CleanedUp = NEVER_CLEANED_UP

    def require(self, header: Fields) -> None:
        for file in self.files:
            file.require_parts(self.part_bytes, header)
        require_chain(self.replaced, header)
        if len({file.name for file in self.files}) != len(self.files):
            header.refuse("names a file twice")
        if self.replaced and self.replaced[-1].version > self.pointer.version:
            header.refuse("stands for a version that is not older", newer=self.replaced[-1].pointer)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects that the snapshot needs besides the manifest."""
        return sum(file.stored_bytes for file in self.files)

    def encode(self) -> tuple[pa.Buffer, ChainEntry]:
        """Return the stored file, and its entry in a chain."""
        data, digest = stored_file.encode(KIND, self.to_json())
        return data, ChainEntry(KIND, self.pointer, data.size, digest, self.stored_bytes)


def read_manifest(data: Any, shard: str, source: str, key: str) -> tuple[Manifest, ChainEntry]:
    """Return a stored manifest and its chain entry, checked against shard and key. Raises `CorruptionError`."""
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=0)
    manifest = Manifest.read(stored.header, source)
    entry = ChainEntry(KIND, manifest.pointer, stored.size_bytes, stored.digest, manifest.stored_bytes)
    if (manifest.shard, entry.key) != (shard, key):
        refuse_stray(source, key=entry.key, shard=manifest.shard)
    return manifest, entry


def read_part(data: Any, shard: str, source: str, *, plain_bytes: int | None = None) -> stored_file.StoredFile:
    """Return a part with its section ``data``, of `plain_bytes` if known. Raises `CorruptionError`."""
    stored = stored_file.decode(
        data, source=source, kind=PART_KIND, plain_bytes=plain_bytes, plain_bytes_max=PART_BYTES_MAX
    )
    if (own := _PartHeader.read(stored.header, source).shard) != shard:
        refuse_stray(source, shard=own)
    stored.section("data", source)
    return stored


def number_of_parts(size_bytes: int, part_bytes: int) -> int:
    """Return how many parts a file has; an empty one has one."""
    return max(1, -(-size_bytes // part_bytes))
