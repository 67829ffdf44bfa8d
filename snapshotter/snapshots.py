"""Snapshots of one shard: the files that a backend froze, each stored once, and a manifest that names them.

::

    backend.freeze(17-9f3c) ─▶ links in uploading/<id>/ ─▶ parts that are not stored yet ─▶ manifest ─▶ note
    manifest ─▶ parts ─▶ restoring/<id>/, verified ─▶ backend.thaw(17-9f3c)

    <operator>/shard-0003/
        snapshots/20-aa…-7c1e…     manifest of version 20-aa…
        files/5f0c1d…-0            parts of a file, of at most `PART_BYTES` each; kind "part"
        files/5f0c1d…-1
        files/91be07…-0

A file that an earlier snapshot stored is not stored again: the new manifest names the same parts, which are separate
objects so that they are transferred in parallel.

Both local folders lie in the shard's directory. Links keep the files while they are uploaded, even if the version is
dropped. A process locks the folder it uses; `Snapshots.remove_leftovers` removes leftovers of killed processes.

The note ``<shard directory>/snapshots/<version>-<commit id>`` tells every process of the executor that the version has
a snapshot, on which later commits can build, and which local files it stored, which the next snapshot need not upload
again. A lost note only costs work.

A chain of commits is limited in objects and in bytes. By default the limit in bytes follows the size of the state, so a
restore reads at most about twice the snapshot.

Invariants
----------
* **last**: a manifest is stored after all parts that it names.
* **contained**: names and keys are checked when a manifest is read: no file lands outside its folder, and no part
  is taken from another shard.
* **bounded**: a part never decodes to more than `PART_BYTES_MAX`, whatever a manifest declares.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import lz4.frame
import pyarrow as pa

from holdfast import clock
from holdfast.backends import local_files, stored_file
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.block_io import read_at, write_at
from holdfast.backends.local.errors import out_of_space
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.fields import Digest, Fields, Stored, refuse_stray
from holdfast.snapshotter.lineage import Chain, ChainEntry, Lineage, require_chain
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND, PART_KIND = "snapshot", "part"
#: Bytes of a file per part; readers use the manifest's value.
PART_BYTES = 8 << 20
#: The largest value that a manifest may have.
PART_BYTES_MAX = 64 << 20
#: The largest size of an object that holds a part.
PART_OBJECT_BYTES_MAX = PART_BYTES_MAX + stored_file.END_BYTES_MAX
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
PART_NAME = re.compile(r"files/[0-9a-z]{8,40}-[0-9]{1,9}")
#: Bytes of a file in each of its parts except the last.
PartBytes = Annotated[int, range(1, PART_BYTES_MAX + 1)]


@dataclass(frozen=True)
class Part(Stored):
    """An object that holds a stretch of a file."""

    key: Annotated[str, PART_NAME]  #: The object's key below the shard's folder
    size_bytes: Annotated[int, range(PART_OBJECT_BYTES_MAX + 1)]  #: Size of the object
    digest: Digest  #: Digest of the object; see `holdfast.backends.stored_file`


@dataclass(frozen=True)
class _PartHeader(Stored):
    shard: str
    name: str
    offset: int


@dataclass(frozen=True)
class SnapshotFile(Stored):
    """One file of a snapshot."""

    name: Annotated[str, _FILE_NAME]  #: The file's name in the folder that the backend takes over
    size_bytes: int  #: Size of the file
    modified_ns: int  #: Modification time, which a restore preserves
    parts: tuple[Part, ...]  #: In file order

    def require_parts(self, part_bytes: int, header: Fields) -> None:
        """Refuse a file whose size does not match its parts of `part_bytes` each."""
        if len(self.parts) != number_of_parts(self.size_bytes, part_bytes):
            header.refuse(f"names a file of {self.size_bytes} bytes, which does not match its {len(self.parts)} parts")
        for part, size_bytes in self.sizes_of_parts(part_bytes):
            if size_bytes > part.size_bytes * stored_file.EXPANSION_MAX:
                header.refuse("names a part of an impossible size", part=part.key, size_bytes=size_bytes)

    @property
    def stored_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def sizes_of_parts(self, part_bytes: int) -> Iterator[tuple[Part, int]]:
        """Yield each part, and how many bytes of the file it holds."""
        for index, part in enumerate(self.parts):
            yield part, min(part_bytes, self.size_bytes - index * part_bytes)

    def missing(self, size_of: Callable[[str], int | None]) -> Iterator[Part]:
        """Yield the parts that are missing or have the wrong size; `size_of` returns the size of a key, or None."""
        return (part for part in self.parts if size_of(part.key) != part.size_bytes)


@dataclass(frozen=True)
class CleanedUp(Stored):
    """A lineage's record of clean-ups, which must outlive every process."""

    below: int = 0  #: All commits and snapshots with lower version numbers were deleted; 0 if none were
    snapshots_since: int = 1  #: Snapshots of the lineage since the last clean-up, this one included


#: The record in a shard's first snapshot.
NEVER_CLEANED_UP = CleanedUp()


@dataclass(frozen=True)
class Manifest(Stored):
    """The manifest of one snapshot."""

    pointer: Pointer  #: The snapshot's version
    shard: str  #: The shard's folder in the storage: ``totals/shard-0003``
    #: The name of the backend that froze the files, and can open them
    backend: Annotated[str, re.compile(r"[^\x00-\x1f\x7f]{1,255}")]
    part_bytes: PartBytes
    files: tuple[SnapshotFile, ...]
    replaced: Chain  #: The chain that the snapshot replaces; see `holdfast.snapshotter.lineage`
    new_bytes: int  #: Bytes uploaded for this snapshot; earlier snapshots had stored the rest
    #: Time of writing, by the writer's clock, in ms since 1970; for display and for ``snapshot.intervalSeconds``
    written_ms: int
    cleaned: CleanedUp = NEVER_CLEANED_UP

    def require(self, header: Fields) -> None:
        for file in self.files:
            file.require_parts(self.part_bytes, header)
        require_chain(self.replaced, header)
        if len({file.name for file in self.files}) != len(self.files):
            header.refuse("names a file twice")
        if self.replaced and self.replaced[-1].version > self.pointer.version:
            header.refuse("replaces a newer version", newer=self.replaced[-1].pointer)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects that the snapshot needs besides the manifest."""
        return sum(file.stored_bytes for file in self.files)

    def encoded(self) -> tuple[pa.Buffer, ChainEntry]:
        """Return the stored manifest and its chain entry."""
        data, digest = stored_file.encode(KIND, self.to_json())
        return data, ChainEntry(KIND, self.pointer, data.size, digest, self.stored_bytes)


def read_manifest(data: Any, shard: str, source: str, key: str) -> tuple[Manifest, ChainEntry]:
    """Decode a manifest, and check its shard and key; return it and its chain entry. Raises `CorruptionError`."""
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=0)
    manifest = Manifest.read(stored.header, source)
    entry = ChainEntry(KIND, manifest.pointer, stored.size_bytes, stored.digest, manifest.stored_bytes)
    if (manifest.shard, entry.key) != (shard, key):
        refuse_stray(source, key=entry.key, shard=manifest.shard)
    return manifest, entry


def read_part(data: Any, shard: str, source: str, *, plain_bytes: int | None = None) -> stored_file.StoredFile:
    """Decode a part, whose section ``data`` must have `plain_bytes` if given. Raises `CorruptionError`."""
    stored = stored_file.decode(
        data, source=source, kind=PART_KIND, plain_bytes=plain_bytes, plain_bytes_max=PART_BYTES_MAX
    )
    if (own := _PartHeader.read(stored.header, source).shard) != shard:
        refuse_stray(source, shard=own)
    stored.section("data", source)
    return stored


def number_of_parts(size_bytes: int, part_bytes: int) -> int:
    """Return how many parts a file has, at least one."""
    return max(1, -(-size_bytes // part_bytes))


_SAMPLE_BYTES = 64 << 10
# Compressing RocksDB's tables, which are compressed already, would save 5 % and take half of an upload's CPU time.
_WORTH_FRAMING = 0.8
#: Notes to keep: a running attempt can build only on one of the newest snapshots.
_KEPT = 4
#: Identifies a local file: inode, size in bytes and modification time in ns. A different file with the same name and
#: size has a different identity; a hard link, or the file in a renamed folder, has the same.
Identity = tuple[int, ...]
#: Half the grace period of clean-ups for objects that no manifest names; see `holdfast.snapshotter.upkeep.retention`.
SURE_FOR_MS = 30 * 60_000
# Multiples of the wanted chain length: above the first, a micro-batch waits for a snapshot; above the second, it fails.
_OVERDUE, _FULL = 4, 16
#: Fewer bytes of commits never make a snapshot due: reading them is cheaper than a snapshot.
MIN_BYTES = 64 << 20


def upload_files(
    paths: Iterable[Path], part_bytes: int, shard: PrefixedStorage, executor: Executor, new_id: Callable[[], str]
) -> list[SnapshotFile]:
    """Store local files in parts of at most `part_bytes`; return the files with their parts."""
    # Buffers are reused: allocating memory costs more than all other work on a part.
    buffers: list[bytearray] = []

    def send(piece: tuple[Path, str, int, int]) -> Part:
        path, key, offset, size_bytes = piece
        try:
            buffer = buffers.pop()
        except IndexError:  # all buffers are in use
            buffer = bytearray(part_bytes + stored_file.END_BYTES_MAX)
        data, digest = _encode_part(path, offset, size_bytes, shard.prefix, buffer)
        shard.put(key, data)
        buffers.append(buffer)
        return Part(key, len(data), digest)

    stats = {}
    pieces = []
    for path in paths:
        with local_files.reading(path):
            stats[path] = os.stat(path)
        file_id, size_bytes = new_id(), stats[path].st_size
        for index in range(number_of_parts(size_bytes, part_bytes)):
            offset = index * part_bytes
            pieces.append((path, f"files/{file_id}-{index}", offset, min(part_bytes, size_bytes - offset)))
    parts: dict[Path, list[Part]] = {path: [] for path in stats}
    for piece, part in zip(pieces, ahead(executor, send, pieces, window=len(pieces)), strict=True):
        parts[piece[0]].append(part)
    return [SnapshotFile(path.name, stat.st_size, stat.st_mtime_ns, tuple(parts[path])) for path, stat in stats.items()]


def _encode_part(path: Path, offset: int, plain_bytes: int, shard: str, buffer: bytearray) -> tuple[memoryview, str]:
    """Read a part of a file into a buffer, and encode it there as a stored file."""
    data = memoryview(buffer)[:plain_bytes]
    with local_files.reading(path), path.open("rb", buffering=0) as file:
        found_bytes = read_at(file.fileno(), data, offset)
    if found_bytes < plain_bytes:
        raise UnavailableError(
            f"{path} was truncated while it was uploaded: keep other programs from writing to that directory",
            end_bytes=offset + found_bytes,
        )
    size_bytes, encoding = plain_bytes, "plain"
    sample = data[:_SAMPLE_BYTES]
    if len(lz4.frame.compress(sample)) < _WORTH_FRAMING * len(sample):
        framed = lz4.frame.compress(data)
        if len(framed) < size_bytes:
            size_bytes, encoding = len(framed), "lz4"
            data[:size_bytes] = framed
    header = _PartHeader(shard, path.name, offset).to_json()
    return stored_file.encode_in_place(buffer, size_bytes, PART_KIND, header, "data", encoding, plain_bytes)


def download_files(
    files: Iterable[SnapshotFile], part_bytes: int, shard: PrefixedStorage, folder: Path, executor: Executor
) -> None:
    """Download and verify files into an empty folder. Raises `CorruptionError`, `UnavailableError`."""

    def receive(piece: tuple[Path, Part, int, int]) -> None:
        path, part, at, size_bytes = piece
        data = fetch_part(shard, part, size_bytes)
        with local_files.writing(path), path.open("r+b") as out:
            write_at(out.fileno(), data, at)

    files = list(files)
    _require_room(files, shard, folder)
    pieces = []
    for file in files:
        path = make_empty(folder, file)
        for index, (part, size_bytes) in enumerate(file.sizes_of_parts(part_bytes)):
            pieces.append((path, part, index * part_bytes, size_bytes))
    list(ahead(executor, receive, pieces, window=len(pieces)))
    for file in files:
        with local_files.writing(folder / file.name):
            os.utime(folder / file.name, ns=(file.modified_ns, file.modified_ns))


def make_empty(folder: Path, file: SnapshotFile) -> Path:
    """Create a snapshot's file at full size, filled with zeros; return its path."""
    path = folder / file.name
    with local_files.writing(path), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.truncate(file.size_bytes)
    return path


def fetch_part(shard: PrefixedStorage, part: Part, size_bytes: int) -> pa.Buffer:
    """Fetch a part, and return the `size_bytes` of the file that it holds. Raises `CorruptionError`."""
    source = f"{shard.url}/{part.key}"
    try:
        data = shard.get(part.key, part.size_bytes)
    except NotFoundError as exc:
        raise CorruptionError(f"{source} is missing, and a snapshot needs it") from exc
    if len(data) != part.size_bytes:
        raise CorruptionError(f"{source} has the wrong size", size_bytes=len(data), expected=part.size_bytes)
    stored = read_part(data, shard.prefix, source, plain_bytes=size_bytes)
    if stored.digest != part.digest:
        raise CorruptionError(f"{source} is not the object that the snapshot names: it was replaced")
    return stored.section("data", source)


def _require_room(files: Iterable[SnapshotFile], shard: PrefixedStorage, folder: Path) -> None:
    """Raise if the local disk has no room for the files, or if a part is missing or has the wrong size."""
    wanted_bytes = sum(file.size_bytes for file in files)
    with local_files.writing(folder):
        free_bytes = shutil.disk_usage(folder).free
    if wanted_bytes <= free_bytes:
        return
    stored = {info.key: info.size_bytes for info in shard.list("files/")}
    for part in (part for file in files for part in file.missing(stored.get)):
        raise CorruptionError(
            f"{shard.url}/{part.key} is missing or has a different size than the snapshot declares",
            size_bytes=stored.get(part.key),
            expected=part.size_bytes,
        )
    raise out_of_space(folder, wanted_bytes=wanted_bytes, free_bytes=free_bytes)


def identity_of(path: Path) -> Identity:
    """Return the identity of a local file. Raises `NotFoundError` if it is missing."""
    with local_files.reading(path):
        found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class NotedFile(Stored):
    """A local file that a snapshot has stored."""

    identity: Annotated[tuple[Annotated[int, range(1 << 64)], ...], 3]
    file: SnapshotFile


@dataclass(frozen=True)
class SnapshotNote(Stored, kind="snapshot-note"):
    """An executor's local record of a snapshot, which saves requests to the storage."""

    entry: ChainEntry  #: The snapshot's entry in a chain
    files: tuple[NotedFile, ...]
    part_bytes: PartBytes
    written_ms: int  #: See `Manifest`
    cleaned: CleanedUp

    @property
    def stored(self) -> dict[Identity, SnapshotFile]:
        return {noted.identity: noted.file for noted in self.files}

    def require(self, header: Fields) -> None:
        for noted in self.files:
            noted.file.require_parts(self.part_bytes, header)


class SnapshotNotes:
    """The notes of one shard."""

    def __init__(self, folder: Path, new_id: Callable[[], str]) -> None:
        self._folder = folder
        self._new_id = new_id

    def leave(self, entry: ChainEntry, manifest: Manifest, files: Iterable[tuple[Identity, SnapshotFile]]) -> None:
        """Write a note of a snapshot and the local files that it stored; keep only the latest notes."""
        stored = tuple(NotedFile(identity, file) for identity, file in files)
        note = SnapshotNote(entry, stored, manifest.part_bytes, manifest.written_ms, manifest.cleaned)
        with local_files.lock_folder(self._folder.parent), local_files.writing(self._folder):
            local_files.make_private_folder(self._folder)
            older = self._left()
            temporary = self._folder / f".{self._new_id()}"
            try:
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(note.encode())
                # Later than all older notes, even if the clock was set back.
                left_ns = max(temporary.stat().st_mtime_ns, *(left_ns + 1 for left_ns, _ in older), 0)
                os.utime(temporary, ns=(left_ns, left_ns))
                temporary.rename(self._folder / str(entry.pointer))
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            for _, pointer in sorted(self._left())[:-_KEPT]:
                (self._folder / str(pointer)).unlink(missing_ok=True)

    def _left(self) -> list[tuple[int, Pointer]]:
        """Return each note's time, in ns, and version."""
        found = []
        for name in local_files.list_folder(self._folder):
            with suppress(InvalidArgumentError, FileNotFoundError):
                found.append((os.stat(self._folder / name).st_mtime_ns, Pointer.parse(name)))
        return found

    def apply_to(self, lineage: Lineage) -> Lineage:
        """Return a lineage that begins at the newest noted snapshot of its versions, if any."""
        there = {*local_files.list_folder(self._folder)}
        noted = [self._read(pointer) for pointer in lineage.versions if str(pointer) in there]
        entries = {note.entry.pointer: note.entry for note in noted if note is not None}
        return lineage.with_snapshots(entries) if entries else lineage

    def note_of(self, entry: ChainEntry) -> SnapshotNote | None:
        """Return the note of a snapshot; None if it is missing or belongs to a different snapshot."""
        note = self._read(entry.pointer)
        return note if note is not None and note.entry == entry else None

    def _read(self, pointer: Pointer) -> SnapshotNote | None:
        """Return the note of a version; None if it is missing or unreadable."""
        path = self._folder / str(pointer)
        try:
            note = SnapshotNote.read(local_files.read_header(path, SnapshotNote.KIND), str(path))
        except (NotFoundError, CorruptionError):
            return None
        return note if note.entry.kind == "snapshot" and note.entry.pointer == pointer else None


@dataclass(frozen=True)
class Frozen:
    """A version whose files are kept for an upload."""

    pointer: Pointer
    folder: Path  #: Holds hard links to the files
    names: tuple[str, ...]  #: Names of all files, sorted
    lineage: Lineage  #: The version's lineage
    since_ms: int  #: Monotonic time at which the lineage was read, in ms


class Snapshots:
    """Writes and reads the snapshots of one shard; for any thread and process."""

    def __init__(
        self,
        shard: PrefixedStorage,
        executor: Executor,
        directory: Path,
        new_id: Callable[[], str] = clock.new_id,
        now_ms: Callable[[], int] = clock.now_ms,
    ) -> None:
        self._shard = shard
        self._executor = executor
        self._uploading, self._restoring = directory / "uploading", directory / "restoring"
        self._new_id = new_id
        self._now_ms = now_ms
        self.notes = SnapshotNotes(directory / "snapshots", new_id)

    @contextmanager
    def frozen(self, backend: Backend, pointer: Pointer) -> Iterator[Frozen]:
        """Keep a version's files within the context, even if the version is dropped or the backend closed."""
        since_ms = clock.monotonic_ms()
        lineage = self.notes.apply_to(Lineage.of(backend.properties(pointer)))
        with local_files.staged_folder(self._uploading, self._new_id(), fsync=False) as staged:
            paths = backend.freeze(pointer)
            for path in paths:
                staged.link(path)
            yield Frozen(pointer, staged.path, tuple(sorted(path.name for path in paths)), lineage, since_ms)

    def store(
        self, frozen: Frozen, backend_name: str, cleaned: CleanedUp = NEVER_CLEANED_UP, *, is_sure: bool = True
    ) -> tuple[ChainEntry, Manifest]:
        """Store a snapshot, and note it for later commits; unless `is_sure`, check which parts to reuse still exist."""
        folder, names, lineage = frozen.folder, frozen.names, frozen.lineage
        # Only the version's own base is safe from a concurrent clean-up.
        note = None if lineage.snapshot is None else self.notes.note_of(lineage.snapshot)
        stored = note.stored if note is not None and note.part_bytes == PART_BYTES else {}
        if not is_sure:
            sizes = {info.key: info.size_bytes for info in self._shard.list("files/")}
            stored = {identity: file for identity, file in stored.items() if not any(file.missing(sizes.get))}
        try:
            identities = {name: identity_of(folder / name) for name in names}
            known = {name: stored[i] for name, i in identities.items() if i in stored and stored[i].name == name}
            missing = [folder / name for name in names if name not in known]
            new = upload_files(missing, PART_BYTES, self._shard, self._executor, self._new_id)
        except NotFoundError as exc:  # only a foreign program removes files from a locked folder
            raise UnavailableError(
                f"files of a snapshot vanished during its upload ({exc.message}): keep other programs from cleaning "
                "that directory, or set a different spark.holdfast.local.dir",
                folder=folder,
            ) from exc
        files = known | {file.name: file for file in new}
        manifest = Manifest(
            pointer=frozen.pointer,
            shard=self._shard.prefix,
            backend=backend_name,
            part_bytes=PART_BYTES,
            files=tuple(files[name] for name in names),
            replaced=lineage.chain,
            new_bytes=sum(file.stored_bytes for file in new),
            written_ms=self._now_ms(),
            cleaned=cleaned,
        )
        if clock.monotonic_ms() - frozen.since_ms >= SURE_FOR_MS:
            self._require_parts(manifest)
        data, entry = manifest.encoded()
        self._shard.put(entry.key, data)
        self.notes.leave(entry, manifest, [(identities[name], files[name]) for name in names])
        return entry, manifest

    def _require_parts(self, manifest: Manifest) -> None:
        """Raise if a part was deleted: the shard has moved, and its new executor has cleaned up."""
        there = {info.key for info in self._shard.list("files/")}
        for part in (part for file in manifest.files for part in file.parts):
            if part.key not in there:
                raise UnavailableError(
                    "the snapshot's upload took so long that a clean-up deleted parts of it: the upload is abandoned",
                    key=part.key,
                    shard=self._shard.prefix,
                )

    def discover(self, lineage: Lineage) -> None:
        """Write a note of the newest snapshot in a version's lineage, which a different executor may have stored."""
        wanted = {str(pointer) for pointer in lineage.versions}
        keys = [info.key for info in self._shard.list("snapshots/")]
        names = {key: key.rpartition("/")[2].rpartition("-")[0] for key in keys}
        found = [(Pointer.parse(name), key) for key, name in names.items() if name in wanted]
        if not found:
            return
        key = max(found)[1]
        try:
            manifest, entry = self._read(key)
        except (NotFoundError, CorruptionError):  # ignored: a note only saves work
            return
        self.notes.leave(entry, manifest, [])

    def cleaned_at(self, lineage: Lineage) -> CleanedUp:
        """Return the clean-up record of a version's snapshot. Raises `CorruptionError`, `UnavailableError`."""
        if lineage.snapshot is None:
            return CleanedUp(snapshots_since=0)
        note = self.notes.note_of(lineage.snapshot)
        return self.read_manifest(lineage.snapshot).cleaned if note is None else note.cleaned

    def age_ms(self, lineage: Lineage) -> int | None:
        """Return the age of a version's snapshot; None without a note."""
        note = None if lineage.snapshot is None else self.notes.note_of(lineage.snapshot)
        return None if note is None else max(0, self._now_ms() - note.written_ms)

    def read_manifest(self, entry: ChainEntry) -> Manifest:
        """Return the manifest that a chain names. Raises `CorruptionError`, `UnavailableError`."""
        try:
            manifest, found = self._read(entry.key)
        except NotFoundError as exc:
            raise CorruptionError(f"{self._shard.url}/{entry.key} is missing, and a commit builds on it") from exc
        if found != entry:
            raise CorruptionError(
                f"{self._shard.url}/{entry.key} is not the object that a commit builds on: it was replaced"
            )
        return manifest

    def _read(self, key: str) -> tuple[Manifest, ChainEntry]:
        return read_manifest(self._shard.get(key), self._shard.prefix, f"{self._shard.url}/{key}", key)

    @contextmanager
    def downloaded(self, entry: ChainEntry) -> Iterator[tuple[Manifest, Path]]:
        """Download and verify a snapshot's files into a folder; the context removes it unless the caller moves it."""
        manifest = self.read_manifest(entry)
        with local_files.staged_folder(self._restoring, self._new_id(), fsync=False) as staged:
            download_files(manifest.files, manifest.part_bytes, self._shard, staged.path, self._executor)
            identities = [identity_of(staged.path / file.name) for file in manifest.files]
            yield manifest, staged.path
        # The identities stay valid if the backend has renamed the files into place.
        self.notes.leave(entry, manifest, zip(identities, manifest.files, strict=True))

    def remove_leftovers(self, before_ns: int) -> int:
        """Remove the folders of ended processes that were last written before `before_ns`; return their number."""
        return sum(local_files.remove_stale_folders(folder, before_ns) for folder in (self._uploading, self._restoring))


@dataclass(frozen=True)
class SnapshotPolicy:
    """Decides when a shard's next snapshot is due: as soon as one limit is reached."""

    max_commits: int = 20  #: Commit objects since the last snapshot
    #: Bytes of these commits; None: the size of the last snapshot, but at least `MIN_BYTES`
    max_bytes: int | None = None
    interval_seconds: int | None = None  #: Time since the last snapshot, if anything was written since

    def is_due(self, lineage: Lineage, age_seconds: float = 0.0) -> bool:
        """Return whether a snapshot is due; `age_seconds` counts from the last snapshot or the shard's first call."""
        snapshot = lineage.snapshot
        # Carried commits stay in the lineage even if a snapshot includes the newest.
        is_carried = bool(lineage.since) and (snapshot is None or lineage.since[-1] != snapshot.pointer)
        if not lineage.commits and not is_carried:  # nothing was written since the snapshot
            return False
        return self._is_longer(lineage, 1, self.max_bytes or _bytes_of_state(lineage)) or (
            self.interval_seconds is not None and age_seconds >= self.interval_seconds
        )

    def is_overdue(self, lineage: Lineage) -> bool:
        """Return whether the chain is so long that the next commit should wait for a snapshot."""
        return self._is_longer(lineage, _OVERDUE, self._limit_bytes(lineage))

    def is_full(self, lineage: Lineage) -> bool:
        """Return whether the chain is so long that commits must fail until there is a snapshot."""
        return self._is_longer(lineage, _FULL, self._limit_bytes(lineage))

    def _limit_bytes(self, lineage: Lineage) -> int:
        """Return the size whose multiples delay or fail commits: the size of the state, or a larger `max_bytes`."""
        return max(self.max_bytes or 0, _bytes_of_state(lineage))

    def _is_longer(self, lineage: Lineage, times: int, wanted_bytes: int) -> bool:
        """Return whether the commits since the snapshot reach a multiple of the limits, in number or in bytes."""
        commits = lineage.commits
        stored_bytes = sum(entry.stored_bytes for entry in commits)
        # At least this many commits: even large commits must leave time for a snapshot.
        by_bytes = len(commits) >= times and stored_bytes >= times * wanted_bytes
        return len(commits) >= times * self.max_commits or by_bytes


def _bytes_of_state(lineage: Lineage) -> int:
    """Estimate the size of the state by the snapshot or, before the first snapshot, by the largest commit."""
    largest = max((entry.stored_bytes for entry in lineage.commits), default=0)
    return max(MIN_BYTES, lineage.snapshot.stored_bytes if lineage.snapshot else largest)
