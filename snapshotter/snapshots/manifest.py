"""The manifest of a snapshot: which files make up one version of a shard, and the objects that hold their bytes.

::

    <operator>/shard-0003/
        snapshots/20-aa…-7c1e…     manifest of version 20-aa…
        files/5f0c1d…-0            parts of a file, at most `PART_BYTES` of it in each; kind "part"
        files/5f0c1d…-1
        files/91be07…-0

The files are those that the backend froze: RocksDB's table files, run files of the others. A file that an earlier
snapshot stored is not stored again: the new manifest names the same parts. Parts are separate objects, so they are
transferred in parallel and none exceeds the size of a single request.

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
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.snapshotter.fields import DIGEST, Fields
from holdfast.snapshotter.lineage import Chain, ChainEntry, read_chain

KIND, PART_KIND = "snapshot", "part"
#: Bytes of a file in one part; a reader goes by the manifest.
PART_BYTES = 8 << 20
#: The largest value that a manifest may give.
PART_BYTES_MAX = 64 << 20
#: The size of the largest object that holds a part.
PART_OBJECT_BYTES_MAX = PART_BYTES_MAX + stored_file.END_BYTES_MAX
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
PART_NAME = re.compile(r"files/[0-9a-z]{8,40}-[0-9]{1,9}")
_BACKEND = re.compile(r"[^\x00-\x1f\x7f]{1,255}")


@dataclass(frozen=True)
class Part:
    """An object that holds a stretch of a file."""

    key: str  #: Below the shard
    size_bytes: int  #: Of the object
    digest: str  #: Of the object; see `holdfast.backends.stored_file`

    FIELDS = ("key", "size_bytes", "digest")


@dataclass(frozen=True)
class SnapshotFile:
    """One file of a snapshot."""

    name: str  #: Its name in the folder that the backend takes over
    size_bytes: int  #: Of the file as it lies there
    modified_ns: int  #: When it was modified; a restored file gets that time again
    parts: tuple[Part, ...]  #: In the order of their bytes

    FIELDS = ("name", "size_bytes", "modified_ns", "parts")

    @classmethod
    def read(cls, fields: Fields, part_bytes: int) -> SnapshotFile:
        """Return the file that the fields describe; raises `CorruptionError`."""
        parts = tuple(
            Part(
                part.text("key", PART_NAME),
                part.number("size_bytes", 0, PART_OBJECT_BYTES_MAX + 1),
                part.text("digest", DIGEST),
            )
            for part in fields.each("parts", *Part.FIELDS)
        )
        file = cls(fields.text("name", _FILE_NAME), fields.number("size_bytes"), fields.number("modified_ns"), parts)
        if len(parts) != number_of_parts(file.size_bytes, part_bytes):
            fields.refuse(f"names a file of {file.size_bytes} bytes that cannot lie in {len(parts)} parts")
        for part, size_bytes in file.sizes_of_parts(part_bytes):
            if size_bytes > part.size_bytes * stored_file.EXPANSION_MAX:
                fields.refuse("names a part that holds more bytes than it can", part=part.key, size_bytes=size_bytes)
        return file

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
class CleanedUp:
    """What a snapshot's lineage knows of clean-ups, so that no process needs to remember it."""

    below: int = 0  #: All commits and snapshots of lower version numbers were deleted; 0 where nothing ever was
    snapshots_since: int = 1  #: Snapshots of the lineage since the last clean-up, this one included

    FIELDS = ("below", "snapshots_since")

    @classmethod
    def read(cls, fields: Fields) -> CleanedUp:
        """Return what the fields say; raises `CorruptionError`."""
        return cls(fields.number("below"), fields.number("snapshots_since"))


#: Of a first snapshot.
NEVER_CLEANED_UP = CleanedUp()


@dataclass(frozen=True)
class Manifest:
    """One snapshot."""

    pointer: Pointer  #: The version
    shard: str  #: The shard's place in the storage: ``totals/shard-0003``
    backend: str  #: The name of the backend that froze the files, and can open them
    part_bytes: int  #: Bytes of a file in each of its parts but the last one
    files: tuple[SnapshotFile, ...]
    replaced: Chain  #: The chain that the snapshot stands for; see `holdfast.snapshotter.lineage`
    new_bytes: int  #: Stored for this snapshot; the other files were there
    #: When, by the clock of who wrote it, in ms since 1970. To show, and for ``snapshot.intervalSeconds``.
    written_ms: int
    cleaned: CleanedUp = NEVER_CLEANED_UP

    FIELDS = ("pointer", "shard", "backend", "part_bytes", "files", "replaced", "new_bytes", "written_ms", "cleaned")

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects that the snapshot needs besides the manifest."""
        return sum(file.stored_bytes for file in self.files)

    def encode(self) -> tuple[pa.Buffer, ChainEntry]:
        """Return the stored file, and its entry in a chain."""
        typed = {"pointer": str(self.pointer), "replaced": [entry.to_json() for entry in self.replaced]}
        data, digest = stored_file.encode(KIND, asdict(self) | typed)
        return data, ChainEntry(KIND, self.pointer, data.size, digest, self.stored_bytes)


def read_manifest(data: Any, shard: str, source: str, key: str) -> tuple[Manifest, ChainEntry]:
    """Return the manifest in a stored file, and its entry in a chain.

    Raises `CorruptionError` if it is damaged, no manifest, belongs elsewhere, or says what cannot be.

    Parameters
    ----------
    shard : str
        The shard that it must belong to.
    source : str
        What to call it in an error.
    key : str
        Under which it was found, below the shard.
    """
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=0)
    fields = Fields(stored.header, source, *Manifest.FIELDS)
    part_bytes = fields.number("part_bytes", 1, PART_BYTES_MAX + 1)
    manifest = Manifest(
        fields.pointer("pointer"),
        fields.text("shard"),
        fields.text("backend", _BACKEND),
        part_bytes,
        tuple(SnapshotFile.read(file, part_bytes) for file in fields.each("files", *SnapshotFile.FIELDS)),
        read_chain(fields, "replaced"),
        fields.number("new_bytes"),
        fields.number("written_ms"),
        CleanedUp.read(fields.inner("cleaned", *CleanedUp.FIELDS)),
    )
    entry = ChainEntry(KIND, manifest.pointer, stored.size_bytes, stored.digest, manifest.stored_bytes)
    if (manifest.shard, entry.key) != (shard, key):
        fields.refuse("belongs elsewhere: it was moved or copied", key=entry.key, shard=manifest.shard)
    if len({file.name for file in manifest.files}) != len(manifest.files):
        fields.refuse("names a file twice")
    if manifest.replaced and manifest.replaced[-1].version > manifest.pointer.version:
        fields.refuse("stands for a version that is not older", newer=manifest.replaced[-1].pointer)
    return manifest, entry


def read_part(
    data: Any, shard: str, source: str, *, plain_bytes: int | None = None, plain_bytes_max: int = PART_BYTES_MAX
) -> stored_file.StoredFile:
    """Return a part; its bytes are in the section ``data``.

    Raises `CorruptionError` if it is damaged, no part, belongs to another shard, or is not as large.

    `plain_bytes`: how many bytes of a file it must hold; `plain_bytes_max`: how many it may hold where that is not
    known.
    """
    stored = stored_file.decode(
        data, source=source, kind=PART_KIND, plain_bytes=plain_bytes, plain_bytes_max=plain_bytes_max
    )
    fields = Fields(stored.header, source, "shard", "name", "offset")
    fields.text("name"), fields.number("offset")
    if (own := fields.text("shard")) != shard:
        fields.refuse("belongs elsewhere: it was moved or copied", shard=own)
    stored.section("data", source)
    return stored


def number_of_parts(size_bytes: int, part_bytes: int) -> int:
    """Return how many parts a file has; an empty one has one."""
    return max(1, -(-size_bytes // part_bytes))
