"""Opens run files: maps them, checks them against their version file, and keeps them open for the next micro-batch.

A Spark worker serves many shards, with one call per shard and micro-batch, and a file that stays mapped avoids page
faults. So a process keeps files open.

Invariants
----------
* **the same file**: a kept run is found by its inode, which cannot be reused while the file is open. It is returned
  only if the file's size and modification time and the digest at its end are as recorded: a kept run is trusted no
  more than a newly mapped run.
* **released**: a mapping keeps the disk space of an unlinked file, or RAM for `memory`. So each call closes unlinked
  files, and a forked process begins with no kept files.
* **bounded**: a process keeps the most recently used files: at most `MOST_KEPT`, and at most a quarter of its limits on
  descriptors and address space. If mapping a file fails nevertheless, all kept files are closed before a retry.

A damaged run file is damaged wherever it is linked, so every version and merge that holds it is set aside, and the next
attempt restores the version.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast.backends import local_files, stored_file
from holdfast.backends.local.page_cache import MappedFile
from holdfast.backends.local_files import FileNote, map_stored_file, reading
from holdfast.backends.run import read_stretches
from holdfast.backends.run_files.version_file import MERGE, VERSION, MergeFile, RunFile, VersionFile
from holdfast.backends.run_stack import Stacked
from holdfast.backends.schema import TableSchema
from holdfast.backends.stretched_run import StretchedRun
from holdfast.errors import CorruptionError, NotFoundError, SchemaMismatchError, UnavailableError

_log = logging.getLogger(__name__)
#: About the runs of 60 shards; each file takes two descriptors.
MOST_KEPT = 256
# Kept files use at most 1/4 of the process's limits on descriptors and address space.
_SHARE = 4


class DamagedRuns:
    """Checks a shard's folders, and moves those with a damaged file to `set_aside`."""

    def __init__(self, versions: Path, merges: Path, set_aside: Path, new_id: Callable[[], str]) -> None:
        self._versions, self._merges, self._set_aside = versions, merges, set_aside
        self._new_id = new_id

    def check(self, path: Path, file: RunFile) -> None:
        """Read a whole run file. Raises `NotFoundError`, `CorruptionError`."""
        try:
            local_files.map_stored_file(path, "run", file.note, verify=True)
        except CorruptionError:
            self.set_aside_holders(file)
            raise

    def set_aside_holders(self, file: RunFile) -> None:
        """Move every version and merge that links a run out of the way."""
        folders = [p / name for p in (self._versions, self._merges) for name in local_files.list_folder(p)]
        self.set_aside(folder for folder in folders if (folder / file.name).exists())

    def set_aside(self, folders: Iterable[Path]) -> list[Path]:
        """Move folders out of the way; return those that were still there."""
        moved = []
        for folder in folders:
            if local_files.move_folder(folder, self._set_aside / f"{self._new_id()}-{folder.name}"):
                _log.warning("set aside %s, which holds a damaged file", folder)
                moved.append(folder)
        return moved

    def verify(self) -> list[Path]:
        """Read every file of the shard, set aside folders with a damaged one, and return the damaged files."""
        damaged: list[Path] = []
        checked: set[str] = set()
        for parent, read in ((self._versions, _files_of_version), (self._merges, _files_of_merge)):
            for name in local_files.list_folder(parent):
                damaged += self._verify_folder(parent / name, read, checked)
        return damaged

    def _verify_folder(self, folder: Path, read: Callable[[Path], list[RunFile]], checked: set[str]) -> list[Path]:
        try:
            files = read(folder)
        except (NotFoundError, CorruptionError):
            # Already moved if its damaged run was found in a different folder.
            note = folder / (VERSION if folder.parent == self._versions else MERGE)
            return [note] if self.set_aside([folder]) else []
        damaged = []
        for file in files:
            path = folder / file.name
            if not path.exists():
                damaged += [path] if self.set_aside([folder]) else []
            elif file.id not in checked:
                checked.add(file.id)
                try:
                    self.check(path, file)
                except CorruptionError:
                    damaged.append(path)
        return damaged


def _files_of_version(folder: Path) -> list[RunFile]:
    return VersionFile.read(folder, folder.name).files


def _files_of_merge(folder: Path) -> list[RunFile]:
    return [MergeFile.read(folder).output]


class KeptRun(NamedTuple):
    """One run file: mapped, checked, and held open."""

    file: MappedFile
    schema: TableSchema  #: The schema that the run was read with
    run: Stacked

    @property
    def size_bytes(self) -> int:
        return int(self.file.data.size)

    @property
    def stat(self) -> os.stat_result:
        """Status of the file, whether or not it still has a name."""
        return os.fstat(self.file.descriptor)

    def has_end_of(self, note: FileNote) -> bool:
        """Return whether the digest stored at the file's end is the one in `note`."""
        return stored_file.digest_at_end(memoryview(self.file.data)) == note.digest

    def is_whole(self, note: FileNote) -> bool:
        """Return whether the digest of the file's bytes is the one in `note`; reads the whole file."""
        self.file.expect_scans()
        return stored_file.digest_of(memoryview(self.file.data)) == note.digest


class KeptRuns:
    """The run files that this process keeps open; safe for many threads."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Close all kept files."""
        # Replaces the lock, too: a forked process may inherit it while a thread of its parent holds it.
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], KeptRun] = OrderedDict()

    def find(self, path: Path, note: FileNote, schema: TableSchema) -> KeptRun | None:
        """Return a file's kept run; None if the file has changed or is not kept. Raises `NotFoundError`."""
        with reading(path):
            found = os.stat(path)
        with self._lock:
            kept = self._kept.get((found.st_dev, found.st_ino))
            if kept is None:
                return None
            self._kept.move_to_end((found.st_dev, found.st_ino))
        return kept if note.is_of(found) and kept.schema == schema and kept.has_end_of(note) else None

    def keep(self, kept: KeptRun, note: FileNote) -> None:
        """Keep a run that was just mapped and checked, unless its file has changed since."""
        found = kept.stat
        if note.is_of(found):
            kept.file.touch()
            with self._lock:
                self._kept[found.st_dev, found.st_ino] = kept
                most, size_bytes = _limits(), sum(kept.size_bytes for kept in self._kept.values())
                while len(self._kept) > most.files or size_bytes > most.size_bytes:
                    size_bytes -= self._kept.popitem(last=False)[1].size_bytes

    def close_unlinked(self) -> None:
        """Close files that are no longer linked; costs a system call per kept file."""
        with self._lock:
            gone = [inode for inode, kept in self._kept.items() if not kept.stat.st_nlink]
            unused = [self._kept.pop(inode) for inode in gone]
        del unused  # outside the lock, since freeing the space may take a while


class _Limits(NamedTuple):
    files: int
    size_bytes: float


def _limits() -> _Limits:
    (descriptors, _), (addresses, _) = map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_AS))
    files = MOST_KEPT if descriptors == resource.RLIM_INFINITY else min(MOST_KEPT, descriptors // (2 * _SHARE))
    return _Limits(files, math.inf if addresses == resource.RLIM_INFINITY else addresses // _SHARE)


#: The kept runs of this process.
KEPT = KeptRuns()


os.register_at_fork(after_in_child=KEPT.forget)


class RunReader:
    """Opens the run files of one shard."""

    def __init__(self, tables: Mapping[str, TableSchema], damaged: DamagedRuns) -> None:
        self._tables = tables
        self._damaged = damaged

    def open_all(self, folder: Path, files: Iterable[RunFile], table: str, *, verify: bool = False) -> list[Stacked]:
        """Open the files of a stack as `open` does; return their runs in the same order."""
        return [self.open(folder / file.name, file, table, verify=verify) for file in files]

    def open(self, path: Path, file: RunFile, table: str, *, verify: bool = False) -> Stacked:
        """Map one run file, or return the kept run; a merge must `verify` it, or damage would get a new digest."""
        kept = KEPT.find(path, file.note, self._tables[table])
        if kept is not None and (not verify or kept.is_whole(file.note)):
            return kept.run
        try:
            kept = self._read_in_room(path, file, table, verify=verify)
        except CorruptionError:
            self._damaged.set_aside_holders(file)
            raise
        except SchemaMismatchError:
            self._damaged.check(path, file)  # damage may look like a different schema
            raise
        if not verify:  # merged runs are not read again
            KEPT.keep(kept, file.note)
        return kept.run

    def _read_in_room(self, path: Path, file: RunFile, table: str, *, verify: bool) -> KeptRun:
        try:
            return self.read(path, file, table, verify=verify, trusted=True)
        except UnavailableError:  # for example, out of descriptors or address space
            KEPT.forget()
            return self.read(path, file, table, verify=verify, trusted=True)

    def read(self, path: Path, file: RunFile, table: str, *, verify: bool, trusted: bool) -> KeptRun:
        """Map one run file anew; unless `trusted`, check its columns as `Run.read` does."""
        mapped, stored = map_stored_file(path, "run", file.note, verify=verify)
        section = stored.section(table, str(path))
        runs = read_stretches(
            section,
            self._tables[table],
            source=str(path),
            trusted=trusted,
            plain_bytes=section.size,  # uncompressed, so its decoded size is its own
        )
        if sum(len(run) for run in runs) != file.rows:
            raise CorruptionError(f"{path} has a different number of rows than was written", expected=file.rows)
        stretches = [run for run in runs if len(run)]
        if len(stretches) > 1:
            return KeptRun(mapped, self._tables[table], StretchedRun(stretches, section, mapped))
        mapped.expect_scans()
        return KeptRun(mapped, self._tables[table], [*stretches, runs[0]][0])
