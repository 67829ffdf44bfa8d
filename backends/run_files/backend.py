"""Versions of a shard as folders of immutable run files that any process on the machine can map.

::

    <shard directory, 0700>/
        versions/17-9f3c…/            one version
            version                   its runs by table, oldest first, and its properties
            <run id>.arrow            the runs, as hard links: versions share a run's file
        merges/<id>/                  a merged run that equals several consecutive runs
            merge
            <run id>.arrow
        staging/<id>/                 a folder being made or removed
        set-aside/<id>-<name>/        versions and merges that hold a damaged file, until the next clean-up

A worker links the runs of the base version into a staged folder, writes a run for each changed table and the version
file, and renames the folder into place. There is no lock and no owner.

Invariants
----------
* **whole**: ``versions`` and ``merges`` hold only whole folders; see `holdfast.backends.local_files`.
* **own links**: a folder has its own link to every run it names, so removing a folder never breaks a different folder,
  and a commit that has linked its base's runs cannot lose them.
* **immutable**: no file is written after its folder is published; names are never reused.
* **honest**: mapping a file detects truncation, and writes since the file was sealed; every version and merge that
  links a damaged file is set aside. `RunFilesBackend.verify` reads every byte.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.backends import local_files
from holdfast.backends.base import NO_OPTIONS, Backend, BackendStatistics, Pointer, View
from holdfast.backends.frozen_files import FrozenFiles
from holdfast.backends.local.folder_locks import lock_shared
from holdfast.backends.local_files import DURABLE, StagedFolder, list_folder
from holdfast.backends.run import Run, merge_runs
from holdfast.backends.run_files.run_reader import KEPT, DamagedRuns, RunReader
from holdfast.backends.run_files.version_file import VERSION, MergeFile, RunFile, VersionFile
from holdfast.backends.run_files.view import FrozenRuns, RunFilesView
from holdfast.backends.run_files.written_run import WrittenRun
from holdfast.backends.run_stack import COMMIT_MERGE_LIMIT_BYTES, first_to_merge, merge_in_stretches, parts_of
from holdfast.backends.schema import TableSchema, require_declared
from holdfast.errors import ConflictError, CorruptionError, InvalidArgumentError, NotFoundError


class RunFilesBackend(Backend):
    """A backend on run files; subclasses define syncing, size limits and a floor below the runs."""

    def __init__(
        self,
        directory: Path,
        tables: Mapping[str, TableSchema],
        new_id: Callable[[], str],
        options: Mapping[str, str] = NO_OPTIONS,
        executor_directory: Path | None = None,
    ) -> None:
        super().__init__(directory, tables, new_id, options, executor_directory)
        self._versions, self._merges, self._staging = (directory / n for n in ("versions", "merges", "staging"))
        self._set_aside = directory / "set-aside"
        self._damaged = DamagedRuns(self._versions, self._merges, self._set_aside, new_id)
        self._reader = RunReader(self.tables, self._damaged)
        # Runs, with inodes, that were intact when this process last froze a version.
        self._frozen: set[tuple[str, int | None]] = set()
        # The last version that `apply` made, so that `statistics` need not read it.
        self._made: VersionFile | None = None
        for folder in (self._versions, self._merges, self._staging):
            with local_files.writing(folder):
                local_files.make_private_folder(folder)

    def view(self, pointer: Pointer) -> RunFilesView:
        folder = self._version_folder(pointer)
        KEPT.close_unlinked()
        with ExitStack() as undo:
            with local_files.reading(self.directory):
                lock = undo.enter_context(lock_shared(self.directory))
            version = self._read_version(pointer)
            require_declared(version.stacks, self.tables)
            floor = undo.enter_context(self._open_floor(version) or nullcontext())
            stacks = {t: self._reader.open_all(folder, files, t) for t, files in version.stacks.items()}
            undo.pop_all()
        return RunFilesView(pointer, self.tables, stacks, version.properties, lock, floor)

    def properties(self, pointer: Pointer) -> Mapping[str, Any]:
        return self._read_version(pointer).properties

    def _open_floor(self, version: VersionFile) -> View | None:
        """Open the floor below a version's runs; most backends have none."""
        if version.generation is not None:
            raise CorruptionError(f"{self._versions / version.pointer} is a version of a different backend")
        return None

    def apply(self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self.require_tables(runs)
        merges = read_merges(self._merges, self._damaged)
        with self._stage() as staged, self._floored(self._link_version(base, staged)) as below:
            stacks = dict(below.stacks)
            for table, run in runs.items():
                stack = use_merges(stacks.get(table, []), merges, staged)
                stacks[table] = self._push(table, stack, run, staged, has_floor=below.generation is not None)
            version = VersionFile(str(new), stacks, properties, below.generation)
            version.write(staged)
            staged.publish(self._version_folder(new))
        self._made = version

    @contextmanager
    def _floored(self, version: VersionFile) -> Iterator[VersionFile]:
        """Yield the base of a new version; its floor stays open during the context."""
        yield version

    def _push(
        self, table: str, stack: list[RunFile], run: Run, staged: StagedFolder, *, has_floor: bool
    ) -> list[RunFile]:
        """Return the stack with `run` on top, merged with the runs below it if that is cheap."""
        sizes = [f.size_bytes for f in stack] + [run.size_bytes]
        start = first_to_merge(sizes, self._commit_merge_limit_bytes())
        below = parts_of(self._reader.open_all(staged.path, stack[start:], table, verify=True))
        merged = merge_runs([*below, run], drop_deletes=start == 0 and not has_floor)
        return stack[:start] + ([self._write_run(table, merged.size_bytes, [merged], staged)] if len(merged) else [])

    def _commit_merge_limit_bytes(self) -> int:
        """Return how many bytes a commit may merge; larger merges are left to the background."""
        return COMMIT_MERGE_LIMIT_BYTES

    def load(self, pointer: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self.require_tables(runs)
        if self.is_whole(pointer):
            return
        with self._stage() as staged:
            stacks = {t: [self._write_run(t, run.size_bytes, [run], staged)] for t, run in runs.items() if len(run)}
            VersionFile(str(pointer), stacks, properties).write(staged)
            self._put_in_place(pointer, staged)

    def _put_in_place(self, pointer: Pointer, staged: StagedFolder) -> None:
        """Publish a restored version unless a whole copy already exists."""
        while True:
            try:
                staged.publish(self._version_folder(pointer))
                return
            except ConflictError:
                # Another process has already restored it, or the existing copy has lost files.
                if self.is_whole(pointer):
                    return
                self._retire(self._version_folder(pointer))

    def freeze(self, pointer: Pointer) -> list[Path]:
        """See `Backend.freeze`. Cost: one read of the runs that were not frozen before, or have changed since."""
        folder = self._version_folder(pointer)
        files = self._read_version(pointer).files
        paths = [folder / file.name for file in files]
        for path, file in zip(paths, files, strict=True):
            if (file.id, local_files.sealed_inode(path, file.note)) not in self._frozen:
                self._damaged.check(path, file)
        inodes = [local_files.sealed_inode(path, file.note) for path, file in zip(paths, files, strict=True)]
        self._frozen = {(file.id, inode) for file, inode in zip(files, inodes, strict=True) if inode is not None}
        return [*paths, folder / VERSION]

    def thaw(self, pointer: Pointer, folder: Path) -> None:
        """See `Backend.thaw`. Cost: one read; nothing is synced, since durable storage has the files."""
        with local_files.taken_folder(folder, self._staging, self.new_id(), fsync=False) as staged, ExitStack() as held:
            if self.is_whole(pointer):
                return
            self._require_room(0)  # the folder's bytes already count
            with local_files.requiring_whole(folder):
                version = VersionFile.read(staged.path, str(pointer))
                require_declared(version.stacks, self.tables)
                self._adopt_floor(version, staged, held)
                self._adopt(version, staged)
            self._put_in_place(pointer, staged)

    def _adopt_floor(self, version: VersionFile, staged: StagedFolder, held: ExitStack) -> None:
        """Adopt the floor of a frozen version, locked until `held` closes."""
        self._open_floor(version)

    def _adopt(self, version: VersionFile, staged: StagedFolder) -> None:
        """Check a version that another process made, and take ownership of its files."""
        staged.keep_only({VERSION, *(file.name for file in version.files)})
        staged.adopt(VERSION)
        for table, files in version.stacks.items():
            for file in files:
                staged.adopt(file.name, file.modified_ns)
                self._reader.read(staged.path / file.name, file, table, verify=True, trusted=False)

    @classmethod
    @contextmanager
    def open_frozen(
        cls, pointer: Pointer, tables: Mapping[str, TableSchema], files: FrozenFiles, new_id: Callable[[], str]
    ) -> Iterator[View]:
        with FrozenRuns(pointer, tables, files) as view:
            yield view

    def versions(self) -> list[Pointer]:
        found = []
        for name in local_files.list_folder(self._versions):
            with suppress(InvalidArgumentError):
                found.append(Pointer.parse(name))
        return sorted(found)

    def drop(self, pointers: Iterable[Pointer]) -> None:
        for pointer in set(pointers):
            self._retire(self._version_folder(pointer))
        merges = read_merges(self._merges, self._damaged)
        held = self._held_runs() if merges else set()  # reads every version
        for merge in merges:
            if not set(merge.inputs) <= held:
                self._retire(merge.folder)
        KEPT.close_unlinked()

    def maintain(self, pointer: Pointer) -> int:
        """Merge runs that were too large for a commit; the next commit uses the result. Raises `NotFoundError`."""
        stacks = self._read_version(pointer).stacks
        return sum(self._merge_stack(pointer, table) for table, stack in stacks.items() if needs_merge(stack))

    def _merge_stack(self, pointer: Pointer, table: str) -> bool:
        merges = read_merges(self._merges, self._damaged)
        with self._stage() as staged:
            version = self._link_version(pointer, staged)
            stack = use_merges(version.stacks[table], merges, staged)
            if not needs_merge(stack):
                return False
            start = first_to_merge([f.size_bytes for f in stack])
            inputs = stack[start:]
            wanted_bytes = sum(f.size_bytes for f in inputs)
            if not self._has_room(wanted_bytes):
                return False
            runs = parts_of(self._reader.open_all(staged.path, inputs, table, verify=True))
            merged = merge_in_stretches(runs, drop_deletes=start == 0 and version.generation is None)
            MergeFile.write(staged, [f.id for f in inputs], self._write_run(table, wanted_bytes, merged, staged))
            staged.publish(self._merges / self.new_id())
        return True

    def verify(self) -> list[Path]:
        """Read every file of the shard without copying it, and set aside folders that hold a damaged file."""
        return self._damaged.verify()

    def remove_leftovers(self, before_ns: int) -> int:
        """Remove leftovers of killed attempts and set-aside folders, last written before a time; return how many."""
        KEPT.close_unlinked()
        return sum(local_files.remove_stale_folders(f, before_ns) for f in (self._staging, self._set_aside))

    def statistics(self) -> BackendStatistics:
        versions = self.versions()
        newest = VersionFile("", {}, {})
        for pointer in reversed(versions):
            if self._made is not None and self._made.pointer == str(pointer):
                newest = self._made
                break
            with suppress(NotFoundError, CorruptionError):  # dropped meanwhile, or set aside just now
                newest = self._read_version(pointer)
                break
        below = self._rows_below(newest)
        rows, runs = Counter(below), Counter(dict.fromkeys(below, 1))
        for table, files in newest.stacks.items():
            rows[table] += sum(file.rows for file in files)
            runs[table] += len(files)
        return BackendStatistics(len(versions), local_files.folder_bytes(self.directory), dict(rows), dict(runs))

    def _rows_below(self, version: VersionFile) -> Mapping[str, int]:
        """Estimate the rows below the runs of a version, by table."""
        return {}

    def close(self) -> None:
        """Do nothing: the backend keeps nothing open."""

    def _stage(self) -> AbstractContextManager[StagedFolder]:
        return local_files.staged_folder(self._staging, self.new_id(), fsync=self._must_sync())

    def _must_sync(self) -> bool:
        """Return whether files must survive a power failure, not only a crash."""
        return False

    def _retire(self, folder: Path) -> None:
        local_files.retire_folder(folder, self._staging, self.new_id())

    def _version_folder(self, pointer: Pointer) -> Path:
        return self._versions / str(Pointer.parse(str(pointer)))

    def _link_version(self, pointer: Pointer | None, staged: StagedFolder) -> VersionFile:
        """Link a version's runs, if any, into a staged folder, so that nothing can remove them."""
        if pointer is None:
            return VersionFile("", {}, {})
        version = self._read_version(pointer)
        for file in version.files:
            staged.link(self._version_folder(pointer) / file.name)
        return version

    def _held_runs(self) -> set[str]:
        held = set()
        for pointer in self.versions():
            with suppress(NotFoundError, CorruptionError):
                held |= {f.id for f in self._read_version(pointer).files}
        return held

    def _read_version(self, pointer: Pointer) -> VersionFile:
        folder = self._version_folder(pointer)
        try:
            return VersionFile.read(folder, folder.name)
        except CorruptionError:
            self._damaged.set_aside([folder])
            raise

    def _write_run(self, table: str, wanted_bytes: int, runs: Iterable[Run], staged: StagedFolder) -> RunFile:
        """Write one run file of about `wanted_bytes` from runs of ascending hash ranges."""
        self._require_room(wanted_bytes)
        run_id, written = self.new_id(), WrittenRun(self.tables[table])
        note = staged.write(f"{run_id}.arrow", "run", written.header, {table: partial(written.write, runs)})
        return RunFile(run_id, note.size_bytes, written.size_bytes, written.rows, note.digest, note.modified_ns)

    def _require_room(self, wanted_bytes: int) -> None:
        """Raise `UnavailableError` if the shard may not write `wanted_bytes` more."""

    def _has_room(self, wanted_bytes: int) -> bool:
        """Return whether a merge may write `wanted_bytes` now; otherwise the merge waits."""
        return True


class FilesystemBackend(RunFilesBackend):
    """Run files on a local disk: state may be larger than memory and outlives the executor.

    Files are synced before a version appears, unless the directory is marked `DURABLE`: after a crash, a takeover then
    verifies every byte.
    """

    contract_version = 2

    def _must_sync(self) -> bool:
        return not os.path.exists(self.directory / DURABLE)


def needs_merge(stack: Sequence[RunFile]) -> bool:
    """Return whether runs should be merged; if not, no finished merge is waiting to be used, either."""
    return bool(stack) and first_to_merge([file.size_bytes for file in stack]) < len(stack) - 1


def read_merges(folder: Path, damaged: DamagedRuns) -> list[MergeFile]:
    """Return the merges below a folder; set damaged merges aside, so that their inputs are used instead."""
    merges = []
    for name in list_folder(folder):
        try:
            merges.append(MergeFile.read(folder / name))
        except NotFoundError:
            continue  # dropped meanwhile
        except CorruptionError:
            damaged.set_aside([folder / name])
    return merges


def use_merges(stack: list[RunFile], merges: Sequence[MergeFile], staged: StagedFolder) -> list[RunFile]:
    """Return `stack` with the inputs of every merge replaced by its output."""
    waiting = list(merges)
    while waiting:
        usable = [m for m in waiting if m.place_in(stack) is not None]
        waiting = [m for m in waiting if m not in usable]
        if not usable:
            break
        for merge in usable:
            start = merge.place_in(stack)
            with suppress(NotFoundError):  # dropped meanwhile: the inputs stay in the stack
                if start is not None:
                    staged.link(merge.folder / merge.output.name)
                    output = [merge.output] if merge.output.rows else []
                    stack = [*stack[:start], *output, *stack[start + len(merge.inputs) :]]
    return stack
