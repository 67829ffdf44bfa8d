"""Local folders of immutable files that appear whole or not at all, and the mapping of local errors.

::

    staging/<name>/ ── write, link ──▶ one rename ──▶ versions/17-9f3c/
                                                           │
    staging/<name>/ ◀──────────── one rename ──────────────┘  then removed, file by file

A folder is filled below ``staging`` and renamed into place; it is taken away by the opposite rename. So a
process that is killed at any moment leaves whole folders and, below ``staging``, leftovers. Who fills a folder holds
it (`holdfast.backends.folder_locks`), and the folder above ``staging`` too, as long as it is at work: so a leftover is
a folder that nobody holds, however old it is. A file that two
folders hold is one file with two hard links: each folder owns its link, and the file system frees the file
with the last one. Nobody has to count who else needs it.

Every file is **sealed** when it has been written: its time of modification is moved one second back, and
whoever notes its size and digest notes that time too. A file that was written to since has another time, so
a reader computes the digest of that one, and of no other: digests cost a full read.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.folder_locks import HeldFolder, alone, hold
from holdfast.errors import ConflictError, CorruptionError, HoldfastError, NotFoundError, UnavailableError

_SEALED_BEFORE_NS = 1_000_000_000
# Each try is lost only where somebody takes the folder away between two of its steps.
_TRIES = 20


class FileNote(NamedTuple):
    """What tells whether a file is still what was written.

    Attributes
    ----------
    size_bytes : int
    digest : str
        See `holdfast.backends.stored_file`.
    modified_ns : int
        When it was modified, as sealed.
    """

    size_bytes: int
    digest: str
    modified_ns: int


class StagedFolder:
    """A folder on its way into place; made by `staged_folder`.

    Parameters
    ----------
    path : pathlib.Path
    fsync : bool
        Whether what is published must survive the machine's power, not only the process.
    """

    def __init__(self, path: Path, *, fsync: bool) -> None:
        self.path = path
        self._fsync = fsync

    def write(
        self,
        name: str,
        kind: str,
        header: Mapping[str, Any],
        sections: Mapping[str, stored_file.SectionWriter] | None = None,
    ) -> FileNote:
        """Write one stored file and seal it.

        Raises
        ------
        UnavailableError
            Local storage is full or failing.
        """
        path = self.path / name
        with writing(path), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            size_bytes, digest = stored_file.write_to(file, kind, header, sections)
            file.flush()
            modified_ns = _seal(file.fileno(), os.fstat(file.fileno()).st_mtime_ns - _SEALED_BEFORE_NS)
            if self._fsync:
                os.fsync(file.fileno())
        return FileNote(size_bytes, digest, modified_ns)

    def link(self, source: Path) -> None:
        """Take a file of another folder in, under its own name; a link, not a copy.

        Raises
        ------
        NotFoundError
            There is no such file, or no longer.
        """
        with reading(source):
            try:
                os.link(source, self.path / source.name)
            except FileExistsError:
                return  # the same name is the same file
            except FileNotFoundError:
                if not self.path.exists():
                    raise _vanished(self.path) from None
                raise

    def adopt(self, name: str, modified_ns: int | None = None) -> None:
        """Make a file of the folder, which somebody else has written, as `write` would have left it.

        Parameters
        ----------
        modified_ns : int, optional
            Its time of modification as it is noted somewhere.

        Raises
        ------
        NotFoundError
            There is no such file.
        """
        path = self.path / name
        with reading(path):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fchmod(file, 0o600)
                if modified_ns is not None:
                    _seal(file, modified_ns)
                if self._fsync:
                    os.fsync(file)
            finally:
                os.close(file)

    def keep_only(self, names: set[str]) -> None:
        """Remove every other file."""
        with writing(self.path):
            for name in os.listdir(self.path):
                if name not in names:
                    (self.path / name).unlink()

    def publish(self, target: Path) -> None:
        """Rename the folder to `target`.

        Raises
        ------
        ConflictError
            `target` exists already.
        UnavailableError
            Local storage is failing, or the folder was removed meanwhile.
        """
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
    """Make a folder below `staging`; what is not published by the end of the context is removed.

    Until then nobody takes it away, nor the folder above `staging`.
    """
    path = staging / name
    home, own = _made(path)
    with home, own:
        try:
            yield StagedFolder(path, fsync=fsync)
        finally:
            _remove(path)


def _made(path: Path) -> tuple[HeldFolder, HeldFolder]:
    """Make a folder below a ``staging``; return it and the one above that, both held."""
    for _ in range(_TRIES):
        with writing(path), suppress(NotFoundError):
            home = held_folder(path.parent.parent)
            try:
                make_private_folder(path.parent)
                path.mkdir(mode=0o700)
                return home, hold(path)
            except BaseException:
                home.close()
                raise
    raise _vanished(path)


def held_folder(path: Path) -> HeldFolder:
    """Make a folder where it is missing, and hold it: nobody takes it away before that is closed.

    Raises
    ------
    UnavailableError
        Local storage is failing, or the folder is removed again and again.
    """
    for _ in range(_TRIES):
        with writing(path), suppress(NotFoundError, FileNotFoundError):
            make_private_folder(path)
            return hold(path)
    raise _vanished(path)


@contextmanager
def taken_folder(folder: Path, staging: Path, name: str, *, fsync: bool) -> Iterator[StagedFolder]:
    """Move a folder that somebody else has filled below `staging`; see `staged_folder`.

    Raises
    ------
    UnavailableError
        It cannot be moved: it is not there, or on another file system.
    """
    path = staging / name
    with held_folder(staging.parent), _held(folder):
        if not move_folder(folder, path):
            raise _vanished(folder)
        try:
            with writing(path):
                path.chmod(0o700)
            yield StagedFolder(path, fsync=fsync)
        finally:
            _remove(path)


def _held(folder: Path) -> HeldFolder:
    with writing(folder):
        try:
            return hold(folder)
        except NotFoundError as exc:
            raise _vanished(folder) from exc


@contextmanager
def requiring_whole(folder: Path) -> Iterator[None]:
    """Map what is missing or damaged in a folder that somebody else has filled: both are `CorruptionError`."""
    try:
        yield
    except (NotFoundError, CorruptionError) as exc:
        raise CorruptionError(f"{folder} does not hold what it should: {exc}") from exc


def retire_folder(path: Path, staging: Path, name: str) -> bool:
    """Take a published folder away; tell whether it was there. Open mappings of its files stay good."""
    moved = move_folder(path, staging / name)
    _remove(staging / name)
    return moved


def move_folder(path: Path, target: Path) -> bool:
    """Rename a published folder; tell whether it was there. Open mappings of its files stay good."""
    with writing(path):
        make_private_folder(target.parent)
        try:
            os.rename(path, target)
        except FileNotFoundError:
            return False
        os.utime(target)  # its age, as `remove_stale_folders` sees it, begins now
    return True


def remove_stale_folders(staging: Path, before_ns: int) -> int:
    """Remove the folders below `staging` that nobody holds, and in which nothing was written since `before_ns`.

    Parameters
    ----------
    before_ns : int
        For people who want to look at what was left, or set aside. Whether a folder is in use, its lock tells.

    Returns
    -------
    int
        How many were removed.
    """
    removed = 0
    for name in list_folder(staging):
        path = staging / name
        with reading(path), suppress(FileNotFoundError, NotADirectoryError), alone(path) as is_left:
            if is_left and max(p.stat().st_mtime_ns for p in (path, *path.iterdir())) < before_ns:
                _remove(path)
                removed += not path.exists()
    return removed


def _remove(path: Path) -> None:
    # What cannot be removed now is a leftover below staging, and removed later.
    shutil.rmtree(path, ignore_errors=True)


def list_folder(folder: Path) -> list[str]:
    """Return the names in a folder, sorted, without hidden ones; none where the folder is not there."""
    with reading(folder):
        try:
            return sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder, each file once however often it is linked."""
    sizes: dict[int, int] = {}
    with reading(folder):
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(FileNotFoundError):
                    found = os.stat(os.path.join(parent, name))
                    sizes[found.st_ino] = found.st_size
    return sum(sizes.values())


def read_header(path: Path, kind: str) -> Mapping[str, Any]:
    """Return the header of a small stored file, whose digest is checked.

    Raises
    ------
    NotFoundError, CorruptionError
    """
    with reading(path):
        data = path.read_bytes()
    return stored_file.decode(data, source=str(path), kind=kind).header


def map_stored_file(path: Path, kind: str, note: FileNote, *, verify: bool = False) -> stored_file.StoredFile:
    """Map a whole file into memory; the mapping outlives the file.

    Parameters
    ----------
    note : FileNote
        What was noted when it was written.
    verify : bool, default False
        Compute the digest of a file that looks untouched, too.

    Raises
    ------
    NotFoundError
        It is not there.
    CorruptionError
        It is not what was written.
    """
    with reading(path):
        found = os.stat(path)
        if found.st_size != note.size_bytes:
            raise CorruptionError(f"{path} was cut or altered", size_bytes=found.st_size, expected=note.size_bytes)
        with pa.memory_map(str(path)) as mapped:
            data = mapped.read_buffer()
    touched = found.st_mtime_ns != note.modified_ns
    stored = stored_file.decode(data, source=str(path), kind=kind, verify=verify or touched)
    if stored.digest != note.digest:
        raise CorruptionError(f"{path} was replaced by another file", digest=stored.digest, expected=note.digest)
    if touched and verify:
        with writing(path):
            _seal(path, note.modified_ns)
    return stored


def sealed_inode(path: Path, note: FileNote) -> int | None:
    """Return the inode of a file that nobody has written to since it was sealed; None where somebody has.

    Raises
    ------
    NotFoundError
        It is not there.
    """
    with reading(path):
        found = os.stat(path)
    is_sealed = (found.st_size, found.st_mtime_ns) == (note.size_bytes, note.modified_ns)
    return found.st_ino if is_sealed else None


def _seal(file: int | Path, modified_ns: int) -> int:
    """Set a file's time of modification; return it as the file system keeps it."""
    os.utime(file, ns=(modified_ns, modified_ns))
    return os.stat(file).st_mtime_ns


def make_private_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for this user only.

    Those above may be taken away meanwhile: a shard comes back at the moment when it is let go.
    """
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


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Map the operating system's errors while something at `path` is read: absent is `NotFoundError`."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise NotFoundError(f"{path} is not there") from exc
    except OSError as exc:
        raise _unusable(exc, path) from exc


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Map the operating system's errors while something at `path` is made: all are `UnavailableError`."""
    try:
        yield
    except OSError as exc:
        raise _unusable(exc, path) from exc


def _unusable(exc: OSError, path: Path) -> HoldfastError:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnavailableError(
            f"no space left for local state at {path}: free space there, or name a larger directory in "
            "spark.holdfast.local.dir"
        )
    if isinstance(exc, FileNotFoundError):
        return _vanished(path)
    return UnavailableError(
        f"local state at {path} cannot be used ({exc.strerror}): check that the directory exists and is "
        "writable, or name another in spark.holdfast.local.dir"
    )


def _vanished(path: Path) -> HoldfastError:
    return UnavailableError(
        f"{path} vanished while it was written: keep other programs from cleaning that directory, or name "
        "another in spark.holdfast.local.dir"
    )
