"""Stored files on the local disk that are not written to again, and how a change is noticed without reading them.

A file is **sealed** when it has been written: its time of modification is set back by one second, and whoever notes its
size and digest notes that time too. A file that was written to since has another time; so a reader computes the
digest of that file, and of no other: a digest costs a full read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.backends import stored_file
from holdfast.backends.local.errors import reading, writing
from holdfast.backends.local.page_cache import MappedFile
from holdfast.errors import CorruptionError

_SEALED_BEFORE_NS = 1_000_000_000


class FileNote(NamedTuple):
    """What tells whether a file is still what was written."""

    size_bytes: int
    digest: str  #: See `holdfast.backends.stored_file`
    modified_ns: int  #: When it was modified, as sealed

    def is_of(self, found: os.stat_result) -> bool:
        """Tell whether nobody has written to a file since it was sealed."""
        return (found.st_size, found.st_mtime_ns) == (self.size_bytes, self.modified_ns)


def write_sealed(
    path: Path,
    kind: str,
    header: Mapping[str, Any],
    sections: Mapping[str, stored_file.SectionWriter] | None = None,
    *,
    fsync: bool,
) -> FileNote:
    """Write a stored file under a new name and seal it.

    Raises `UnavailableError` if local storage is full or failing.
    """
    with writing(path), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        size_bytes, digest = stored_file.write_to(file, kind, header, sections)
        file.flush()
        modified_ns = seal(file.fileno(), os.fstat(file.fileno()).st_mtime_ns - _SEALED_BEFORE_NS)
        if fsync:
            os.fsync(file.fileno())
    return FileNote(size_bytes, digest, modified_ns)


def seal(file: int | Path, modified_ns: int) -> int:
    """Set a file's time of modification; return it as the file system keeps it."""
    os.utime(file, ns=(modified_ns, modified_ns))
    return os.stat(file).st_mtime_ns


def read_header(path: Path, kind: str) -> Mapping[str, Any]:
    """Return the header of a small stored file, whose digest is checked.

    Raises `NotFoundError` or `CorruptionError`.
    """
    with reading(path):
        size_bytes = os.stat(path).st_size
        if size_bytes > stored_file.NOTICE_BYTES_MAX:
            raise CorruptionError(f"{path} is larger than a file without sections can be", size_bytes=size_bytes)
        data = path.read_bytes()
    return stored_file.decode(data, source=str(path), kind=kind).header


class MappedStoredFile(NamedTuple):
    """A stored file in memory."""

    file: MappedFile
    stored: stored_file.StoredFile


def map_stored_file(path: Path, kind: str, note: FileNote, *, verify: bool = False) -> MappedStoredFile:
    """Map a whole file into memory; the mapping outlives the file.

    Raises `NotFoundError` if it is not there; `CorruptionError` if it is not what was written.

    `note`: what was noted when it was written; `verify`: compute the digest of a file that looks untouched, too.
    """
    with reading(path):
        found = os.stat(path)
        if found.st_size != note.size_bytes or not found.st_size:
            raise CorruptionError(f"{path} was cut or altered", size_bytes=found.st_size, expected=note.size_bytes)
        file = MappedFile(path)
    touched = found.st_mtime_ns != note.modified_ns
    if not (verify or touched or file.is_cached()):
        file.expect_look_ups()
    stored = stored_file.decode(file.data, source=str(path), kind=kind, verify=verify or touched)
    if stored.digest != note.digest:
        raise CorruptionError(f"{path} was replaced by another file", digest=stored.digest, expected=note.digest)
    if touched and verify:
        with writing(path):
            seal(path, note.modified_ns)
    return MappedStoredFile(file, stored)


def sealed_inode(path: Path, note: FileNote) -> int | None:
    """Return the inode of a sealed file; None if it was written to since.

    Raises `NotFoundError` if it is not there.
    """
    with reading(path):
        found = os.stat(path)
    return found.st_ino if note.is_of(found) else None
