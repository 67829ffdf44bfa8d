"""The manifest of a snapshot: which files make up one version of a shard, and the objects that hold their bytes.

::

    <operator>/shard-0003/
        snapshots/20-aa…-7c1e…     manifest of version 20-aa…
        files/5f0c1d…-0            parts of a file, at most `PART_BYTES` of it in each; kind "part"
        files/5f0c1d…-1
        files/91be07…-0

The files are those that the backend froze: table files of RocksDB, run files of the others. A file that an earlier
snapshot has stored is not stored again: the new manifest names the same parts. Parts are objects of their own, so
that they travel side by side and none is ever larger than one request may be.

Invariants
----------
* **last**: a manifest is stored after all parts that it names.
* **contained**: names and keys are checked when a manifest is read: no file lands outside its folder, and no part
  is taken from another shard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, InvalidArgumentError

KIND, PART_KIND = "snapshot", "part"
#: How much of a file goes into one part; what a manifest says counts when it is read.
PART_BYTES = 8 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
PART_NAME = re.compile(r"files/[0-9a-z]{8,40}-[0-9]{1,9}")
DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Part:
    """An object that holds a stretch of a file.

    Attributes
    ----------
    key : str
        Below the shard.
    size_bytes : int
        Of the object.
    digest : str
        Of the object; see `holdfast.backends.stored_file`.
    """

    key: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class SnapshotFile:
    """One file of a snapshot.

    Attributes
    ----------
    name : str
        Its name in the folder that the backend takes over.
    size_bytes : int
        Of the file as it lies there.
    modified_ns : int
        When it was modified; a restored file gets that time again.
    parts : tuple of Part
        In the order of their bytes.
    """

    name: str
    size_bytes: int
    modified_ns: int
    parts: tuple[Part, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the objects that hold the file."""
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True)
class CleanedUp:
    """What a snapshot's lineage knows of clean-ups, so that no process needs to remember it.

    Attributes
    ----------
    below : int
        All commits and snapshots of lower version numbers were deleted; 0 where nothing ever was.
    snapshots_since : int
        Snapshots of the lineage since the last clean-up, this one included.
    """

    below: int = 0
    snapshots_since: int = 1

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> CleanedUp:
        """Return what a JSON value says.

        Raises
        ------
        KeyError, TypeError, ValueError
            It says nothing of the kind.
        """
        return cls(_size(values["below"]), _size(values["snapshots_since"]))


#: Of a first snapshot.
NEVER_CLEANED_UP = CleanedUp()


@dataclass(frozen=True)
class Manifest:
    """One snapshot.

    Attributes
    ----------
    pointer : Pointer
        The version.
    shard : str
        The shard's place in the storage: ``totals/shard-0003``.
    backend : str
        The name of the backend that froze the files, and can open them.
    part_bytes : int
        Bytes of a file in each of its parts but the last one.
    files : tuple of SnapshotFile
    replaced : list
        The chain that the snapshot stands for, as JSON; see `holdfast.snapshotter.commits`.
    new_bytes : int
        Stored for this snapshot; the other files were there.
    written_ms : int
        When, by the clock of who wrote it, in ms since 1970. To show, and for ``snapshot.intervalSeconds``.
    cleaned : CleanedUp
    """

    pointer: Pointer
    shard: str
    backend: str
    part_bytes: int
    files: tuple[SnapshotFile, ...]
    replaced: list[Any]
    new_bytes: int
    written_ms: int
    cleaned: CleanedUp = NEVER_CLEANED_UP

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects that the snapshot needs besides the manifest."""
        return sum(file.stored_bytes for file in self.files)

    def encode(self) -> tuple[Any, str]:
        """Return the stored file, and its digest."""
        return stored_file.encode(KIND, asdict(self) | {"pointer": str(self.pointer)})

    @classmethod
    def decode(cls, stored: stored_file.StoredFile, source: str) -> Manifest:
        """Return the manifest that a stored file holds.

        Raises
        ------
        CorruptionError
            It holds none, or one that names something outside of its shard.
        """
        header = stored.header
        try:
            part_bytes = _size(header["part_bytes"])
            if part_bytes == 0:
                raise ValueError("parts cannot be empty")
            files = tuple(decode_file(file, part_bytes) for file in header["files"])
            manifest = cls(
                Pointer.parse(header["pointer"]),
                str(header["shard"]),
                str(header["backend"]),
                part_bytes,
                files,
                list(header["replaced"]),
                _size(header["new_bytes"]),
                _size(header["written_ms"]),
                CleanedUp.decode(header["cleaned"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, InvalidArgumentError) as exc:
            raise CorruptionError(f"{source} is no manifest of a snapshot: {exc}") from exc
        if len({file.name for file in files}) != len(files):
            raise CorruptionError(f"{source} names a file twice")
        return manifest


def decode_file(file: Mapping[str, Any], part_bytes: int) -> SnapshotFile:
    """Return the file that a JSON value describes.

    Raises
    ------
    KeyError, TypeError, ValueError
        It describes none, or one with a name or size that cannot be.
    """
    parts = tuple(
        Part(_matching(PART_NAME, p["key"]), _size(p["size_bytes"]), _matching(DIGEST, p["digest"]))
        for p in file["parts"]
    )
    size_bytes = _size(file["size_bytes"])
    if len(parts) != number_of_parts(size_bytes, part_bytes):
        raise ValueError(f"{size_bytes} bytes cannot lie in {len(parts)} parts")
    return SnapshotFile(_matching(_FILE_NAME, file["name"]), size_bytes, _size(file["modified_ns"]), parts)


def number_of_parts(size_bytes: int, part_bytes: int) -> int:
    """Return how many parts a file has; an empty one has one."""
    return max(1, -(-size_bytes // part_bytes))


def _matching(pattern: re.Pattern[str], text: object) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ValueError(f"a name in it is not allowed: {ascii(text)[:80]}")
    return text


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"a size in it is not possible: {ascii(value)[:80]}")
    return value
