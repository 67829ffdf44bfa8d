"""Versions of a shard as folders of immutable run files, which any process of the machine maps.

::

    <shard directory, 0700>/
        versions/17-9f3c…/            one version
            version                   which runs make it up, by table, oldest first; its properties
            <run id>.arrow            those runs, as links: a run of many versions is one file
        merges/<id>/                  "these consecutive runs equal that one run"
            merge
            <run id>.arrow
        staging/<id>/                 what is being made or taken away

A worker that holds a pointer needs nothing else: it links the runs of that version into a staged folder,
writes one run and the version file, and renames the folder into place. There is no lock and no owner.

Invariants
----------
* **whole**: below ``versions`` and ``merges`` stand whole folders only; see `holdfast.backends.local_files`.
* **own links**: a folder holds links to all it names, so taking one away never breaks another, and a commit
  that has linked its base cannot lose it.
* **immutable**: no file is written after its folder was put in place; no name is used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.backends import local_files, stored_file
from holdfast.backends.base import MAX_HASH, NO_OPTIONS, Backend, BackendStatistics, Found, Pointer, View
from holdfast.backends.local_files import StagedFolder
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs
from holdfast.backends.run_stack import COMMIT_MERGE_LIMIT_BYTES, first_to_merge, look_up
from holdfast.errors import (
    ClosedError,
    ConflictError,
    CorruptionError,
    InvalidArgumentError,
    NotFoundError,
    SchemaMismatchError,
)

_VERSION, _MERGE = "version", "merge"


@dataclass(frozen=True)
class RunFile:
    """A version's note of one run: its file, size in the file, size in memory, rows."""

    id: str
    file_bytes: int
    size_bytes: int
    rows: int
    digest: str

    @property
    def name(self) -> str:
        """The file's name in every folder that holds it."""
        return f"{self.id}.arrow"


@dataclass(frozen=True)
class _Version:
    """The content of a version file."""

    stacks: Mapping[str, list[RunFile]]
    properties: Mapping[str, Any]


def _is_high(stack: list[RunFile]) -> bool:
    """Whether there is something to merge; where there is not, earlier merges leave nothing either."""
    return bool(stack) and first_to_merge([f.size_bytes for f in stack]) < len(stack) - 1


@dataclass(frozen=True)
class _Merge:
    """The content of a merge file, and where it stands."""

    folder: Path
    inputs: list[str]
    output: RunFile

    def place_in(self, stack: list[RunFile]) -> int | None:
        """Return where in `stack` the inputs stand, or None."""
        ids = [f.id for f in stack]
        if self.inputs[0] not in ids:
            return None
        start = ids.index(self.inputs[0])
        return start if ids[start : start + len(self.inputs)] == self.inputs else None


class RunFilesView(View):
    """A version on run files, mapped as a whole when the view is opened; so nothing can take it away."""

    def __init__(
        self,
        pointer: Pointer,
        tables: Mapping[str, TableSchema],
        stacks: Mapping[str, list[Run]],
        properties: Mapping[str, Any],
    ) -> None:
        self.pointer = pointer
        self._tables = tables
        self._stacks: Mapping[str, list[Run]] | None = stacks
        self._properties = properties

    @property
    def properties(self) -> Mapping[str, Any]:
        return self._properties

    def stack(self, table: str) -> list[Run]:
        """Return the runs of `table`, oldest first."""
        if self._stacks is None:
            raise ClosedError("the view was closed: open a new one", pointer=self.pointer)
        if table not in self._tables:
            raise NotFoundError("no such table", table=table, tables=sorted(self._tables))
        return self._stacks.get(table, [])

    def get(self, table: str, keys: Keys) -> Found:
        return look_up(self.stack(table), keys, self._tables[table])

    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        runs = [run.slice(first_hash, last_hash) for run in self.stack(table)]
        runs = [run for run in runs if len(run)]
        merged = merge_runs(runs, drop_deletes=True) if runs else None
        return iter([merged] if merged else [])

    def close(self) -> None:
        self._stacks = None


class RunFilesBackend(Backend):
    """A backend on run files; subclasses say where the directory lies and whether files are synced."""

    #: Whether files must survive the machine's power, not only the process.
    fsync = False

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
        for folder in (self._versions, self._merges, self._staging):
            with local_files.writing(folder):
                local_files.make_private_folder(folder)

    def view(self, pointer: Pointer) -> RunFilesView:
        folder = self._version_folder(pointer)
        version = self._read_version(pointer)
        unknown = sorted(version.stacks.keys() - self.tables.keys())
        if unknown:
            raise SchemaMismatchError(
                "the stored state has tables that the operator does not declare: declare them again, or begin "
                "with a new operator name",
                tables=unknown,
            )
        stacks = {t: [self._open_run(folder, f, t) for f in files] for t, files in version.stacks.items()}
        return RunFilesView(pointer, self.tables, stacks, version.properties)

    def apply(self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self._require_tables(runs)
        merges = self._read_merges()
        with self._stage() as staged:
            stacks = {} if base is None else self._link_version(base, staged)
            for table, run in runs.items():
                stack = self._use_merges(stacks.get(table, []), merges, staged)
                stacks[table] = self._push(table, stack, run, staged)
            self._write_version(staged, _Version(stacks, properties))
            staged.publish(self._version_folder(new))

    def _push(self, table: str, stack: list[RunFile], run: Run, staged: StagedFolder) -> list[RunFile]:
        """Return the stack with `run` on top, merged with those below where that is cheap."""
        sizes = [f.size_bytes for f in stack] + [run.size_bytes]
        start = first_to_merge(sizes, COMMIT_MERGE_LIMIT_BYTES)
        below = [self._open_run(staged.path, f, table) for f in stack[start:]]
        merged = merge_runs([*below, run], drop_deletes=start == 0)
        return stack[:start] + ([self._write_run(merged, staged)] if len(merged) else [])

    def load(self, pointer: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self._require_tables(runs)
        if self._is_whole(pointer):
            return
        with self._stage() as staged:
            stacks = {t: [self._write_run(run, staged)] for t, run in runs.items() if len(run)}
            self._write_version(staged, _Version(stacks, properties))
            while True:
                try:
                    staged.publish(self._version_folder(pointer))
                    return
                except ConflictError:
                    # Another process has restored it first, or what stands there has lost files.
                    if self._is_whole(pointer):
                        return
                    self._retire(self._version_folder(pointer))

    def _is_whole(self, pointer: Pointer) -> bool:
        try:
            self.view(pointer).close()
        except (NotFoundError, CorruptionError):
            return False
        return True

    def freeze(self, pointer: Pointer) -> list[Path]:
        folder = self._version_folder(pointer)
        stacks = self._read_version(pointer).stacks
        return [*(folder / f.name for files in stacks.values() for f in files), folder / _VERSION]

    def versions(self) -> list[Pointer]:
        found = []
        for name in local_files.list_folder(self._versions):
            with suppress(InvalidArgumentError):
                found.append(Pointer.parse(name))
        return sorted(found)

    def drop(self, pointers: Iterable[Pointer]) -> None:
        for pointer in set(pointers):
            self._retire(self._version_folder(pointer))
        held = self._held_runs()
        for merge in self._read_merges():
            if not set(merge.inputs) <= held:
                self._retire(merge.folder)

    def maintain(self, pointer: Pointer) -> int:
        """Merge the runs of a version that its commit left standing because they are large.

        The next commit finds the merged run and takes it into its version.

        Raises
        ------
        NotFoundError
            The version is not held here.
        """
        stacks = self._read_version(pointer).stacks
        return sum(self._merge_stack(pointer, table) for table, stack in stacks.items() if _is_high(stack))

    def _merge_stack(self, pointer: Pointer, table: str) -> bool:
        merges = self._read_merges()
        with self._stage() as staged:
            stack = self._use_merges(self._link_version(pointer, staged)[table], merges, staged)
            if not _is_high(stack):
                return False
            start = first_to_merge([f.size_bytes for f in stack])
            runs = [self._open_run(staged.path, f, table) for f in stack[start:]]
            output = self._write_run(merge_runs(runs, drop_deletes=start == 0), staged)
            staged.keep_only({output.name})
            staged.write(_MERGE, _MERGE, {"inputs": [f.id for f in stack[start:]], "output": asdict(output)})
            staged.publish(self._merges / self.new_id())
        return True

    def remove_leftovers(self, before_ns: int) -> int:
        """Remove what killed attempts left in ``staging`` and was last written before `before_ns`.

        The age protects an attempt that is being made.

        Returns
        -------
        int
            Attempts removed.
        """
        return local_files.remove_stale_folders(self._staging, before_ns)

    def statistics(self) -> BackendStatistics:
        versions = self.versions()
        stacks: Mapping[str, list[RunFile]] = {}
        for pointer in reversed(versions):
            with suppress(NotFoundError):  # dropped meanwhile
                stacks = self._read_version(pointer).stacks
                break
        return BackendStatistics(
            versions=len(versions),
            local_bytes=sum(local_files.folder_bytes(f) for f in (self._versions, self._merges, self._staging)),
            rows={table: sum(f.rows for f in files) for table, files in stacks.items()},
            runs={table: len(files) for table, files in stacks.items()},
        )

    def close(self) -> None:
        """Nothing is held open."""

    def _stage(self) -> AbstractContextManager[StagedFolder]:
        return local_files.staged_folder(self._staging, self.new_id(), fsync=self.fsync)

    def _retire(self, folder: Path) -> None:
        local_files.retire_folder(folder, self._staging, self.new_id())

    def _version_folder(self, pointer: Pointer) -> Path:
        return self._versions / str(Pointer.parse(str(pointer)))

    def _require_tables(self, runs: Mapping[str, Run]) -> None:
        for table in runs:
            if table not in self.tables:
                raise NotFoundError("no such table", table=table, tables=sorted(self.tables))

    def _link_version(self, pointer: Pointer, staged: StagedFolder) -> dict[str, list[RunFile]]:
        """Link the runs of a version into a staged folder; from here on nobody can take them away."""
        stacks = self._read_version(pointer).stacks
        for files in stacks.values():
            for file in files:
                staged.link(self._version_folder(pointer) / file.name)
        return dict(stacks)

    def _use_merges(self, stack: list[RunFile], merges: list[_Merge], staged: StagedFolder) -> list[RunFile]:
        """Return `stack` with every merged stretch of runs replaced by the run that equals it."""
        waiting = list(merges)
        while waiting:
            usable = [m for m in waiting if m.place_in(stack) is not None]
            waiting = [m for m in waiting if m not in usable]
            if not usable:
                break
            for merge in usable:
                start = merge.place_in(stack)
                with suppress(NotFoundError):  # dropped meanwhile: its inputs still do
                    if start is not None:
                        staged.link(merge.folder / merge.output.name)
                        output = [merge.output] if merge.output.rows else []
                        stack = [*stack[:start], *output, *stack[start + len(merge.inputs) :]]
        return stack

    def _read_merges(self) -> list[_Merge]:
        merges = []
        for name in local_files.list_folder(self._merges):
            folder = self._merges / name
            with suppress(NotFoundError):
                record = local_files.read_header(folder / _MERGE, _MERGE)
                merges.append(_Merge(folder, record["inputs"], RunFile(**record["output"])))
        return merges

    def _held_runs(self) -> set[str]:
        held = set()
        for pointer in self.versions():
            with suppress(NotFoundError):
                held |= {f.id for files in self._read_version(pointer).stacks.values() for f in files}
        return held

    def _read_version(self, pointer: Pointer) -> _Version:
        record = local_files.read_header(self._version_folder(pointer) / _VERSION, _VERSION)
        stacks = {table: [RunFile(**f) for f in files] for table, files in record["stacks"].items()}
        return _Version(stacks, record["properties"])

    def _write_version(self, staged: StagedFolder, version: _Version) -> None:
        staged.keep_only({f.name for files in version.stacks.values() for f in files})
        stacks = {table: [asdict(f) for f in files] for table, files in version.stacks.items()}
        staged.write(_VERSION, _VERSION, {"stacks": stacks, "properties": dict(version.properties)})

    def _write_run(self, run: Run, staged: StagedFolder) -> RunFile:
        run_id, table = self.new_id(), run.schema.name
        header = {"table": table, "rows": len(run)}
        size, digest = staged.write(f"{run_id}.arrow", "run", header, {table: run.write})
        return RunFile(run_id, size, run.size_bytes, len(run), digest)

    def _open_run(self, folder: Path, file: RunFile, table: str) -> Run:
        """Map one run.

        Raises
        ------
        NotFoundError
            Its file is gone: the version was dropped.
        CorruptionError
            Its file is not what was written.
        """
        path = folder / file.name
        data = local_files.map_file(path, file.file_bytes)
        stored = stored_file.decode(data, source=str(path), kind="run", verify=False)
        return Run.read(stored.section(table, str(path)), self.tables[table], source=str(path), trusted=True)
