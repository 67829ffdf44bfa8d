"""The `rocksdb` backend: runs as on `filesystem`, above a database of cold rows.

::

    <shard directory, 0700>/
        versions/17-9f3c…/            see `holdfast.backends.run_files.backend`, also for merges/, staging/, …
            version                   its runs, and the generation below them
        generations/<id>/             immutable databases: `holdfast.backends.rocksdb.generation`
        database-read                 empty; marks that block caches get half of the shard's memory

    version 17     [aa bb cc]                                 no generation yet
    moved          [aa bb] = generation 7c                    in the background: both hold the same rows
    version 18                [cc dd] above 7c                the next commit uses it

A commit writes a run, as on `filesystem`; it calls no server and writes to no database. `maintain` moves the runs that
all versions share into a new generation, which records the runs and the generation below them that it replaces. So a
version on an older generation stays valid until it is dropped.

Invariants
----------
* **whole**: a single rename publishes a generation. A kill before the rename leaves a folder below ``staging``.
* **kept**: readers lock a generation, and a commit locks it until its version is published. `drop` removes a generation
  if it is not locked, no version names it, and it replaces nothing in any version.
* **honest**: RocksDB verifies each block that it reads; every byte is verified when a directory is taken over, and when
  a file is first frozen. A damaged generation is set aside with all versions that name it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rocksdict import Rdict

from holdfast import clock
from holdfast.backends import local_files
from holdfast.backends.base import NO_OPTIONS, Pointer, View
from holdfast.backends.frozen_files import FrozenFiles
from holdfast.backends.local.folder_locks import FolderLock, lock_shared, try_lock_alone
from holdfast.backends.local_files import StagedFolder
from holdfast.backends.rocksdb.errors import damaged
from holdfast.backends.rocksdb.frozen import FrozenGeneration
from holdfast.backends.rocksdb.generation import (
    NOT_WHOLE,
    OPEN,
    GenerationView,
    OpenGeneration,
    broken_file,
    keep_unwritten,
    require_whole,
)
from holdfast.backends.rocksdb.generation_file import GENERATION, GenerationFile, known_generation
from holdfast.backends.rocksdb.moving import make_generation
from holdfast.backends.rocksdb.options import RocksDBOptions
from holdfast.backends.run import Run
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.backends.run_files.version_file import RunFile, VersionFile
from holdfast.backends.run_files.view import FrozenRuns
from holdfast.backends.run_stack import parts_of
from holdfast.backends.schema import TableSchema
from holdfast.errors import ConflictError, CorruptionError, HoldfastError, NotFoundError

_T = TypeVar("_T")
_VERSIONS, _READ = "versions", "database-read"


class _ShardCounts(NamedTuple):
    """How many shards an executor has, and how many of their databases were ever read."""

    number: int
    read: int


#: Counts by executor directory and depth of its shards, with the modification times of the folders above the shards.
_COUNTED: dict[tuple[Path, int], tuple[_ShardCounts, dict[str, int]]] = {}
#: A second change within this time may leave a folder's modification time unchanged.
_TICK_MS = 2_000


class RocksDBBackend(FilesystemBackend):
    """Runs above an immutable database of cold rows; `holdfast.backends.rocksdb.options` lists the options."""

    contract_version = 2

    def __init__(
        self,
        directory: Path,
        tables: Mapping[str, TableSchema],
        new_id: Callable[[], str],
        options: Mapping[str, str] = NO_OPTIONS,
        executor_directory: Path | None = None,
    ) -> None:
        super().__init__(directory, tables, new_id, options, executor_directory)
        self._rocksdb = RocksDBOptions.of("rocksdb", options)
        self._generations = directory / "generations"
        # Database files that were intact when this process last froze a version: name, inode, modification time.
        self._whole: set[tuple[str, int, int]] = set()

    @classmethod
    def parse_options(cls, name: str, options: Mapping[str, str]) -> Mapping[str, Any]:
        return vars(RocksDBOptions.of(name, options))

    def _open_floor(self, version: VersionFile) -> View | None:
        OPEN.close_removed()
        if version.generation is None:
            return None
        folder = self._generations / version.generation
        with ExitStack() as undo, local_files.reading(folder):
            lock = undo.enter_context(lock_shared(folder))
            self._note_reading()
            try:
                opened = OPEN.open(folder, self.executor_directory, self._cache_bytes(), self.new_id)
                floor = _LockedView(opened, self.tables, lock, self._set_aside_generation)
            except CorruptionError as exc:
                raise self._set_aside_generation(version.generation, exc) from exc
            except NotFoundError as exc:  # damage: a locked folder is never removed
                raise self._set_aside_generation(version.generation, damaged(folder / GENERATION, str(exc))) from exc
            undo.pop_all()
        return floor

    def _set_aside_generation(self, name: str, found: CorruptionError) -> CorruptionError:
        """Set aside a damaged generation and all versions that name it; return an error that names the damaged file."""
        folder = self._generations / name
        file = Path(str(found.facts.get("file", folder)))
        with suppress(HoldfastError):
            if file == folder:
                file = broken_file(folder, GenerationFile.read(folder).files) or folder
        OPEN.close(folder)
        for pointer in self.versions():
            with suppress(NotFoundError, CorruptionError):
                if self._read_version(pointer).generation == name:
                    self._damaged.set_aside([self._version_folder(pointer)])
        self._damaged.set_aside([folder])
        return damaged(file, str(found.facts.get("cause", found)))

    @classmethod
    @contextmanager
    def open_frozen(
        cls, pointer: Pointer, tables: Mapping[str, TableSchema], files: FrozenFiles, new_id: Callable[[], str]
    ) -> Iterator[View]:
        with FrozenRuns(pointer, tables, files, FrozenGeneration) as view:
            yield view

    @contextmanager
    def _floored(self, version: VersionFile) -> Iterator[VersionFile]:
        """Yield a version on the newest generation that replaces its bottom runs, locked during the context."""
        with ExitStack() as held:
            if version.generation is not None:
                held.enter_context(lock_shared(self._generations / version.generation))
            names = local_files.list_folder(self._generations)
            while names:
                found = self._next_generation(version, names)
                if found is None:
                    break
                name, file = found
                names.remove(name)
                with suppress(NotFoundError):  # dropped meanwhile: the replaced runs remain usable
                    held.enter_context(lock_shared(self._generations / name))
                    version = file.below(version, name)
            yield version

    def _next_generation(self, version: VersionFile, names: Iterable[str]) -> tuple[str, GenerationFile] | None:
        for name in names:
            with suppress(NotFoundError, CorruptionError):
                file = known_generation(self._generations / name)
                if file.moved and file.replaces(version):
                    return name, file
        return None

    def drop(self, pointers: Iterable[Pointer]) -> None:
        super().drop(pointers)
        self._remove_unused()

    def _remove_unused(self) -> int:
        """Remove the generations that no version needs, now or later; return how many were removed."""
        removed = 0
        names = local_files.list_folder(self._generations)
        versions = self._read_versions() if names else []
        for name in names:
            folder = self._generations / name
            if not self._is_needed(name, versions):
                with try_lock_alone(folder) as is_left:
                    # Check again, now that no commit can start to use it.
                    if is_left and not self._is_needed(name, self._read_versions()):
                        self._retire(folder)
                        removed += 1
        OPEN.close_removed()
        return removed

    def _read_versions(self) -> list[VersionFile]:
        found = []
        for pointer in self.versions():
            with suppress(NotFoundError, CorruptionError):
                found.append(self._read_version(pointer))
        return found

    def _is_needed(self, name: str, versions: Iterable[VersionFile]) -> bool:
        if any(version.generation == name for version in versions):
            return True
        try:
            file = known_generation(self._generations / name)
        except (NotFoundError, CorruptionError):
            return False
        return any(file.moved and file.replaces(version) for version in versions)

    def _commit_merge_limit_bytes(self) -> int:
        # Runs that commits keep merging never settle, so they are never moved.
        return min(super()._commit_merge_limit_bytes(), self.share_bytes() // 2)

    def share_bytes(self) -> int:
        """Return the shard's limit for runs in bytes: an equal share of memory, halved once it has a database."""
        part_bytes = self._rocksdb.memory_bytes // self._shards().number
        return part_bytes // 2 if local_files.list_folder(self._generations) else part_bytes

    def _cache_bytes(self) -> int:
        """Return the size limit of block caches: the other half of the share of each shard whose database is read."""
        shards = self._shards()
        return self._rocksdb.memory_bytes // shards.number // 2 * shards.read

    def _shards(self) -> _ShardCounts:
        if not self.directory.is_relative_to(self.executor_directory):  # being taken over
            return _ShardCounts(1, 1)
        return _shards_below(self.executor_directory, len(self.directory.relative_to(self.executor_directory).parts))

    def _note_reading(self) -> None:
        mark = self.directory / _READ
        if not os.path.lexists(mark):
            with local_files.writing(mark):
                mark.touch(mode=0o600)
            with suppress(OSError):
                os.utime(self.directory.parent)  # makes all processes count again

    def maintain(self, pointer: Pointer) -> int:
        """Move the runs that all versions share into a new generation if they exceed the limit; else merge runs.

        The next commit uses the generation. Raises `NotFoundError` if the backend does not hold the version.
        """
        return self._move(pointer) or super().maintain(pointer)

    def _move(self, pointer: Pointer) -> int:
        with self._floored(self._read_version(pointer)) as version:
            if sum(file.size_bytes for file in version.files) <= self.share_bytes():
                return 0
            settled = self._settled(version)
            if not settled:
                return 0
            folder = self._version_folder(pointer)
            runs = {t: parts_of(self._reader.open_all(folder, files, t, verify=True)) for t, files in settled.items()}
            file = GenerationFile()
            if version.generation is not None:
                file = self._read_generation(version.generation)
            moved = {table: [f.id for f in files] for table, files in settled.items()}
            with self._stage() as staged:
                self._make_generation(staged, replace(file, base=version.generation, moved=moved), runs)
                staged.publish(self._generations / self.new_id())
        return 1

    def _make_generation(self, staged: StagedFolder, file: GenerationFile, runs: Mapping[str, list[Run]]) -> None:
        base = None if file.base is None else self._generations / file.base
        try:
            make_generation(staged, base, file, runs, self.tables, self._rocksdb.compression)
        except (CorruptionError, NotFoundError) as exc:
            broken = None if base is None else broken_file(base, file.files)
            if broken is None:
                raise
            raise self._set_aside_generation(str(file.base), damaged(broken, str(exc))) from exc

    def _settled(self, version: VersionFile) -> dict[str, list[RunFile]]:
        """Return, by table, the bottom runs that all versions share; no commit merges them."""
        held = [{file.id for file in other.files} for other in self._read_versions()]
        settled: dict[str, list[RunFile]] = {}
        for table, files in version.stacks.items():
            for file in files:
                if not all(file.id in ids for ids in held):
                    break
                settled.setdefault(table, []).append(file)
        return settled

    def freeze(self, pointer: Pointer) -> list[Path]:
        paths = super().freeze(pointer)
        name = self._read_version(pointer).generation
        if name is None:
            return paths
        folder, file = self._generations / name, self._read_generation(name)
        with local_files.reading(folder):
            stats = {each: (folder / each).stat() for each in file.files}
        found = {(each, stat.st_ino, stat.st_mtime_ns) for each, stat in stats.items()}
        new = {each for each, *_ in found - self._whole}
        broken = broken_file(folder, {each: noted for each, noted in file.files.items() if each in new})
        if broken is not None:
            raise self._set_aside_generation(name, damaged(broken, NOT_WHOLE))
        self._whole = found
        return [*paths, folder / GENERATION, *(folder / each for each in file.files)]

    def _adopt_floor(self, version: VersionFile, staged: StagedFolder, held: ExitStack) -> None:
        if version.generation is None:
            return
        file = GenerationFile.read(staged.path)
        file.require(self.tables, staged.path)
        names = [GENERATION, *file.files]
        for name in names:
            staged.adopt(name)
        require_whole(staged.path, file.files)
        target = self._generations / version.generation
        while True:
            with self._stage() as database, suppress(ConflictError):
                for name in names:
                    database.link(staged.path / name)
                keep_unwritten(database.path)
                held.enter_context(lock_shared(database.path))  # the lock follows the folder
                database.publish(target)
                return
            # Another process has already restored it, or the existing copy is damaged.
            with suppress(NotFoundError):
                held.enter_context(lock_shared(target))
                if self._find_damage(version.generation) is None:
                    return

    def verify(self) -> list[Path]:
        """Verify runs like `RunFilesBackend.verify`, and read every generation file."""
        found = super().verify()
        for name in local_files.list_folder(self._generations):
            broken = self._find_damage(name)
            found += [] if broken is None else [broken]
        for version in self._read_versions():
            if version.generation is not None and not (self._generations / version.generation).is_dir():
                self._damaged.set_aside([self._versions / version.pointer])
                found.append(self._generations / version.generation)
        return found

    def _find_damage(self, name: str) -> Path | None:
        """Read a generation's files; if one is damaged, set the generation aside and return that file."""
        folder = self._generations / name
        try:
            broken = broken_file(folder, self._read_generation(name).files)
        except CorruptionError as exc:
            return Path(str(exc.facts["file"]))
        except NotFoundError:
            return None
        if broken is not None:
            self._set_aside_generation(name, damaged(broken, NOT_WHOLE))
        return broken

    def _read_generation(self, name: str) -> GenerationFile:
        folder = self._generations / name
        try:
            return GenerationFile.read(folder)
        except (CorruptionError, NotFoundError) as exc:
            if not folder.is_dir():  # dropped meanwhile
                raise
            raise self._set_aside_generation(name, damaged(folder / GENERATION, str(exc))) from exc

    def remove_leftovers(self, before_ns: int) -> int:
        return super().remove_leftovers(before_ns) + self._remove_unused()

    def _rows_below(self, version: VersionFile) -> Mapping[str, int]:
        if version.generation is None:
            return {}
        with suppress(NotFoundError, CorruptionError):
            return known_generation(self._generations / version.generation).counts
        return {}


class _LockedView(GenerationView):
    """A view of a generation, which stays locked until the view is closed."""

    def __init__(
        self,
        opened: OpenGeneration,
        tables: Mapping[str, TableSchema],
        lock: FolderLock,
        set_aside: Callable[[str, CorruptionError], CorruptionError],
    ) -> None:
        super().__init__(opened.folder, opened.database, opened.file, tables, opened.crowds)
        self._lock, self._set_aside = lock, set_aside

    def _read(self, read: Callable[[Rdict], _T]) -> _T:
        try:
            return super()._read(read)
        except CorruptionError as exc:
            raise self._set_aside(self._folder.name, exc) from exc

    def close(self) -> None:
        super().close()
        self._lock.close()


def _shards_below(root: Path, depth: int) -> _ShardCounts:
    """Count the shards at a depth below `root`; every call needs the count, so it is cached until a folder changes."""
    known = _COUNTED.pop((root, depth), None)
    if known is not None:
        found, folders = known
        if all(_modified_ns(folder) == known_ns for folder, known_ns in folders.items()):
            _COUNTED[root, depth] = found, folders
            return found
    now_ms, folders, level = clock.now_ms(), dict[str, int](), [os.fspath(root)]
    for _ in range(depth):
        below = []
        for folder in level:
            modified_ns = _modified_ns(folder)
            with suppress(OSError):  # a file, or removed meanwhile
                below += [f"{folder}/{name}" for name in os.listdir(folder) if name[0] != "."]
                folders[folder] = modified_ns
        level = below
    shards = [folder for folder in level if os.path.lexists(f"{folder}/{_VERSIONS}")]
    found = _ShardCounts(max(1, len(shards)), sum(os.path.lexists(f"{folder}/{_READ}") for folder in shards))
    if folders and max(folders.values()) // 1_000_000 < now_ms - _TICK_MS:
        _COUNTED[root, depth] = found, folders
    return found


def _modified_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:  # removed meanwhile
        return -1
