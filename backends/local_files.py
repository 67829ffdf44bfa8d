"""Local folders of immutable files, published atomically; for built-in backends and plug-ins.

::

    staging/<name>/ ── write, link ──▶ one rename ──▶ versions/17-9f3c/
                                                           │
    staging/<name>/ ◀──────────── one rename ──────────────┘  then removed, file by file

A process killed at any moment leaves whole folders, and leftovers only below ``staging``. A process that fills a folder
locks it and the parent of ``staging`` (`holdfast.backends.local.folder_locks`), so an unlocked folder below ``staging``
is a leftover.

A file in two folders is one file with two hard links, and the file system frees it with its last link. So no code
counts references.

A file is **sealed** after it is written: its modification time is set back by one second, and recorded with its size
and digest. Reads verify the digest only if the modification time differs.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.backends import stored_file
from holdfast.backends.local.errors import reading, vanished, writing
from holdfast.backends.local.folder_locks import FolderLock, lock_shared, try_lock_alone
from holdfast.backends.local.page_cache import MappedFile
from holdfast.backends.stored_file import SectionWriter
from holdfast.errors import ConflictError, CorruptionError, NotFoundError

_SEALED_BEFORE_NS = 1_000_000_000
#: Marker file in a shard's directory: its commits are durable elsewhere, so the local files are only a copy.
DURABLE = "durable"
# A try fails only if another process removes the folder between two steps.
_TRIES = 20


class FileNote(NamedTuple):
    """What is recorded of a sealed file to detect changes."""

    size_bytes: int
    digest: str  #: See `holdfast.backends.stored_file`
    modified_ns: int  #: The modification time that sealing set

    def is_of(self, found: os.stat_result) -> bool:
        """Return whether a file is unchanged since it was sealed."""
        return (found.st_size, found.st_mtime_ns) == (self.size_bytes, self.modified_ns)


def write_sealed(
    path: Path,
    kind: str,
    header: Mapping[str, Any],
    sections: Mapping[str, stored_file.SectionWriter] | None = None,
    *,
    fsync: bool,
) -> FileNote:
    """Write and seal a new stored file. Raises `UnavailableError` if local storage is full or failing."""
    with writing(path), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        size_bytes, digest = stored_file.write_to(file, kind, header, sections)
        file.flush()
        modified_ns = seal(file.fileno(), os.fstat(file.fileno()).st_mtime_ns - _SEALED_BEFORE_NS)
        if fsync:
            os.fsync(file.fileno())
    return FileNote(size_bytes, digest, modified_ns)


def seal(file: int | Path, modified_ns: int) -> int:
    """Set a file's modification time; return the time that the file system stored."""
    os.utime(file, ns=(modified_ns, modified_ns))
    return os.stat(file).st_mtime_ns


def read_header(path: Path, kind: str) -> Mapping[str, Any]:
    """Return the verified header of a small stored file. Raises `NotFoundError`, `CorruptionError`."""
    with reading(path):
        size_bytes = os.stat(path).st_size
        if size_bytes > stored_file.NOTICE_BYTES_MAX:
            raise CorruptionError(f"{path} is too large for a file without sections", size_bytes=size_bytes)
        data = path.read_bytes()
    return stored_file.decode(data, source=str(path), kind=kind).header


class MappedStoredFile(NamedTuple):
    """A stored file and its memory mapping."""

    file: MappedFile
    stored: stored_file.StoredFile


def map_stored_file(path: Path, kind: str, note: FileNote, *, verify: bool = False) -> MappedStoredFile:
    """Map a whole file; verify its digest if `verify`, or if its time changed. The mapping outlives the file."""
    with reading(path):
        found = os.stat(path)
        if found.st_size != note.size_bytes or not found.st_size:
            raise CorruptionError(f"{path} has the wrong size", size_bytes=found.st_size, expected=note.size_bytes)
        file = MappedFile(path)
    touched = found.st_mtime_ns != note.modified_ns
    if not (verify or touched or file.is_cached()):
        file.expect_look_ups()
    stored = stored_file.decode(file.data, source=str(path), kind=kind, verify=verify or touched)
    if stored.digest != note.digest:
        raise CorruptionError(f"{path} was replaced by a different file", digest=stored.digest, expected=note.digest)
    if touched and verify:
        with writing(path):
            seal(path, note.modified_ns)
    return MappedStoredFile(file, stored)


def sealed_inode(path: Path, note: FileNote) -> int | None:
    """Return the inode of a sealed file; None if the file has changed. Raises `NotFoundError` if it is missing."""
    with reading(path):
        found = os.stat(path)
    return found.st_ino if note.is_of(found) else None


__all__ = [
    "DURABLE",
    "FileNote",
    "StagedFolder",
    "folder_bytes",
    "list_folder",
    "lock_folder",
    "make_private_folder",
    "map_stored_file",
    "move_folder",
    "read_header",
    "reading",
    "remove_stale_folders",
    "requiring_whole",
    "retire_folder",
    "sealed_inode",
    "staged_folder",
    "taken_folder",
    "writing",
]


class StagedFolder:
    """A folder to fill and publish, from `staged_folder`; with `fsync`, its files survive a power failure."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        self.path = path
        self._fsync = fsync

    def write(
        self, name: str, kind: str, header: Mapping[str, Any], sections: Mapping[str, SectionWriter] | None = None
    ) -> FileNote:
        """Write one stored file and seal it. Raises `UnavailableError` if local storage is full or failing."""
        return write_sealed(self.path / name, kind, header, sections, fsync=self._fsync)

    def link(self, source: Path) -> None:
        """Hard-link a file from a different folder under the same name. Raises `NotFoundError` if it is missing."""
        with reading(source):
            try:
                os.link(source, self.path / source.name)
            except FileExistsError:
                return  # the same name is the same file
            except FileNotFoundError:
                if not self.path.exists():
                    raise vanished(self.path) from None
                raise

    def adopt(self, name: str, modified_ns: int | None = None) -> None:
        """Take over a file that other code wrote; seal it if `modified_ns` is given. Raises `NotFoundError`."""
        path = self.path / name
        with reading(path):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fchmod(file, 0o600)
                if modified_ns is not None:
                    seal(file, modified_ns)
                if self._fsync:
                    os.fsync(file)
            finally:
                os.close(file)

    def keep_only(self, names: set[str]) -> None:
        """Remove all files except `names`."""
        with writing(self.path):
            for name in os.listdir(self.path):
                if name not in names:
                    (self.path / name).unlink()

    def publish(self, target: Path) -> None:
        """Rename the folder to `target`. Raises `ConflictError` if it exists, `UnavailableError` if the disk fails."""
        with writing(target):
            make_private_folder(target.parent)
            if self._fsync:
                _sync_folder(self.path)
            try:
                os.rename(self.path, target)
            except OSError as exc:
                if exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise ConflictError(f"{target} exists already") from exc
                raise
            if self._fsync:
                _sync_folder(target.parent)


@contextmanager
def staged_folder(staging: Path, name: str, *, fsync: bool) -> Iterator[StagedFolder]:
    """Make a locked folder below `staging`; at the end of the context it is removed unless it was published."""
    path = staging / name
    home, own = _make(path)
    with home, own:
        try:
            yield StagedFolder(path, fsync=fsync)
        finally:
            _remove(path)


def _make(path: Path) -> tuple[FolderLock, FolderLock]:
    """Make a folder below ``staging``; return the locks on the parent of ``staging`` and on the folder."""
    for _ in range(_TRIES):
        with writing(path), suppress(NotFoundError):
            home = lock_folder(path.parent.parent)
            try:
                make_private_folder(path.parent)
                path.mkdir(mode=0o700)
                return home, lock_shared(path)
            except BaseException:
                home.close()
                raise
    raise vanished(path)


def lock_folder(path: Path) -> FolderLock:
    """Make a folder if missing, and lock it against removal. Raises `UnavailableError` if local storage fails."""
    for _ in range(_TRIES):
        with writing(path), suppress(NotFoundError, FileNotFoundError):
            make_private_folder(path)
            return lock_shared(path)
    raise vanished(path)


@contextmanager
def taken_folder(folder: Path, staging: Path, name: str, *, fsync: bool) -> Iterator[StagedFolder]:
    """Move a filled folder below `staging`; see `staged_folder`. Raises `UnavailableError` if it cannot be moved."""
    path = staging / name
    with lock_folder(staging.parent), _locked(folder):
        if not move_folder(folder, path):
            raise vanished(folder)
        try:
            with writing(path):
                path.chmod(0o700)
            yield StagedFolder(path, fsync=fsync)
        finally:
            _remove(path)


def _locked(folder: Path) -> FolderLock:
    with writing(folder):
        try:
            return lock_shared(folder)
        except NotFoundError as exc:
            raise vanished(folder) from exc


@contextmanager
def requiring_whole(folder: Path) -> Iterator[None]:
    """Raise `CorruptionError` for missing or damaged files in a folder that other code filled."""
    try:
        yield
    except (NotFoundError, CorruptionError) as exc:
        raise CorruptionError(f"{folder} is damaged: {exc}") from exc


def retire_folder(path: Path, staging: Path, name: str) -> bool:
    """Remove a published folder; return whether it existed. Open mappings of its files stay valid."""
    moved = move_folder(path, staging / name)
    _remove(staging / name)
    return moved


def move_folder(path: Path, target: Path) -> bool:
    """Rename a published folder; return whether it existed. Open mappings of its files stay valid."""
    with writing(path):
        make_private_folder(target.parent)
        try:
            os.rename(path, target)
        except FileNotFoundError:
            return False
        os.utime(target)  # resets its age for `remove_stale_folders`
    return True


def remove_stale_folders(staging: Path, before_ns: int) -> int:
    """Remove unlocked folders below `staging` that were last written before `before_ns`; return how many."""
    removed = 0
    for name in list_folder(staging):
        path = staging / name
        with reading(path), suppress(FileNotFoundError, NotADirectoryError), try_lock_alone(path) as is_left:
            if is_left and max(p.stat().st_mtime_ns for p in (path, *path.iterdir())) < before_ns:
                _remove(path)
                removed += not path.exists()
    return removed


def _remove(path: Path) -> None:
    # Files that cannot be removed now stay below staging until a later clean-up.
    shutil.rmtree(path, ignore_errors=True)


def list_folder(folder: Path) -> list[str]:
    """Return the names in a folder, sorted, without hidden files; empty if the folder is missing."""
    with reading(folder):
        try:
            return sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder; linked files count once, unreadable ones do not count."""
    sizes: dict[int, int] = {}
    folders = [os.fspath(folder)]
    for path in folders:
        with suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with suppress(OSError):
                    found = entry.stat()
                    sizes[found.st_ino] = found.st_size
    return sum(sizes.values())


def make_private_folder(path: Path) -> None:
    """Make a private folder and its missing parents, even if another process removes parents meanwhile."""
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            if not path.is_dir():
                for folder in reversed([path, *(p for p in path.parents if not p.exists())]):
                    folder.mkdir(mode=0o700, exist_ok=True)
            return
    path.mkdir(mode=0o700)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
