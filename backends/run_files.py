"""Versions of a shard as immutable files of runs, which any process of the machine maps.

::

    <shard directory, 0700>/
        runs/<id>.arrow                  one run, written once
        versions/<version>-<commit id>   the runs that make up this version, by table, oldest first
        merges/<id>                      "these consecutive runs equal that one run"

A worker that holds a pointer needs nothing else: it maps the runs, writes one run and one version file, and
is done. There is no lock and no owner. Every file is written under a temporary name and renamed, so a killed
process leaves whole files or temporary ones, never half of one.

Deleting takes a version's file first and then the runs that no other version names. A process that still
reads those runs keeps its mapping; one that would begin there finds no version, and restores it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.base import MAX_HASH, Backend, BackendStatistics, Found, Pointer, View
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs
from holdfast.backends.run_stack import COMMIT_MERGE_LIMIT_BYTES, first_to_merge, look_up
from holdfast.errors import ClosedError, CorruptionError, HoldfastError, NotFoundError, UnavailableError

_TEMPORARY = ".tmp"


@dataclass(frozen=True)
class RunFile:
    """A version's note of one run: its file, size in the file, size in memory, rows."""

    id: str
    file_bytes: int
    size_bytes: int
    rows: int
    digest: str


@dataclass(frozen=True)
class _Version:
    """The content of a version file."""

    stacks: Mapping[str, list[RunFile]]
    properties: Mapping[str, Any]


class RunFilesView(View):
    """A version on run files: maps each run on first use."""

    def __init__(self, backend: RunFilesBackend, pointer: Pointer, version: _Version) -> None:
        self._backend = backend
        self._version = version
        self.pointer = pointer
        self._stacks: dict[str, list[Run]] | None = {
            table: [backend.open_run(file, backend.tables[table]) for file in files]
            for table, files in version.stacks.items()
        }

    @property
    def properties(self) -> Mapping[str, Any]:
        return self._version.properties

    def stack(self, table: str) -> list[Run]:
        """Return the runs of `table`, oldest first."""
        if self._stacks is None:
            raise ClosedError("the view was closed: open a new one", pointer=str(self.pointer))
        if table not in self._backend.tables:
            raise NotFoundError("no such table", table=table, tables=sorted(self._backend.tables))
        return self._stacks.get(table, [])

    def get(self, table: str, keys: Keys) -> Found:
        return look_up(self.stack(table), keys, self._backend.tables[table])

    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        runs = [run.slice(first_hash, last_hash) for run in self.stack(table)]
        runs = [run for run in runs if len(run)]
        if runs:
            yield merge_runs(runs, drop_deletes=True)

    def close(self) -> None:
        self._stacks = None


class RunFilesBackend(Backend):
    """A backend on run files; subclasses say where the directory lies and whether files are synced."""

    #: Whether files must survive the machine's power, not only the process.
    fsync = False

    def __init__(
        self, directory: Path, tables: Mapping[str, TableSchema], new_id: Callable[[], str]
    ) -> None:
        super().__init__(directory, tables, new_id)
        self._runs, self._versions, self._merges = (directory / n for n in ("runs", "versions", "merges"))
        for folder in (self._runs, self._versions, self._merges):
            with _local_errors(folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def view(self, pointer: Pointer) -> RunFilesView:
        return RunFilesView(self, pointer, self._read_version(pointer))

    def apply(
        self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]
    ) -> None:
        stacks = {} if base is None else dict(self._read_version(base).stacks)
        for table, run in runs.items():
            stacks[table] = self._push(table, self._use_merges(stacks.get(table, [])), run)
        self._write_version(new, _Version(stacks, properties))

    def _push(self, table: str, stack: list[RunFile], run: Run) -> list[RunFile]:
        """Return the stack with `run` on top, merged with those below where that is cheap."""
        sizes = [f.size_bytes for f in stack] + [run.size_bytes]
        start = first_to_merge(sizes, COMMIT_MERGE_LIMIT_BYTES)
        below = [self.open_run(f, self.tables[table]) for f in stack[start:]]
        merged = merge_runs([*below, run], drop_deletes=start == 0)
        return stack[:start] + ([self._write_run(merged)] if len(merged) else [])

    def load(self, pointer: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        stacks = {table: [self._write_run(run)] for table, run in runs.items() if len(run)}
        self._write_version(pointer, _Version(stacks, properties))

    def freeze(self, pointer: Pointer) -> list[Path]:
        version = self._read_version(pointer)
        runs = [self._run_path(f.id) for stack in version.stacks.values() for f in stack]
        return [*runs, self._versions / str(pointer)]

    def versions(self) -> list[Pointer]:
        names = [p.name for p in self._versions.iterdir() if not p.name.endswith(_TEMPORARY)]
        return sorted(Pointer.parse(name) for name in names)

    def drop(self, pointers: Iterable[Pointer]) -> None:
        going = set(pointers)
        held = self.versions()
        lost = self._run_ids(p for p in held if p in going)
        for pointer in going:
            (self._versions / str(pointer)).unlink(missing_ok=True)
        kept = self._run_ids(p for p in held if p not in going)
        for path, inputs, output in self._read_merges():
            if not set(inputs) <= kept:
                path.unlink(missing_ok=True)
                lost.add(output.id)
        for run_id in lost - kept:
            self._run_path(run_id).unlink(missing_ok=True)

    def maintain(self, pointer: Pointer) -> int:
        """Merge the runs of a version that its commit left standing because they are large."""
        done = 0
        for table, files in self._read_version(pointer).stacks.items():
            stack = self._use_merges(files)
            start = first_to_merge([f.size_bytes for f in stack]) if stack else 0
            if start >= len(stack) - 1:
                continue
            runs = [self.open_run(f, self.tables[table]) for f in stack[start:]]
            merged = self._write_run(merge_runs(runs, drop_deletes=start == 0))
            record = {"inputs": [f.id for f in stack[start:]], "output": asdict(merged)}
            self._write(self._merges / self.new_id(), "merge", record)
            done += 1
        return done

    def remove_leftovers(self, before_ns: int) -> int:
        """Delete files that no version names and that were last written before `before_ns`.

        They are what killed or dropped attempts left. The age protects an attempt that has written its run
        and not yet its version.

        Returns
        -------
        int
            Files deleted.
        """
        kept = self._run_ids(self.versions()) | {output.id for _, _, output in self._read_merges()}
        removed = 0
        for folder in (self._runs, self._versions, self._merges):
            for path in folder.iterdir():
                named = folder != self._runs or path.stem in kept
                if named and not path.name.endswith(_TEMPORARY):
                    continue
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime_ns < before_ns:
                        path.unlink()
                        removed += 1
        return removed

    def statistics(self) -> BackendStatistics:
        sizes = 0
        for folder in (self._runs, self._versions, self._merges):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    sizes += entry.stat().st_size
        versions = self.versions()
        stacks = self._read_version(versions[-1]).stacks if versions else {}
        return BackendStatistics(
            versions=len(versions),
            local_bytes=sizes,
            rows={table: sum(f.rows for f in files) for table, files in stacks.items()},
            runs={table: len(files) for table, files in stacks.items()},
        )

    def close(self) -> None:
        """Nothing is held open."""

    def open_run(self, file: RunFile, schema: TableSchema) -> Run:
        """Map one run.

        Raises
        ------
        NotFoundError
            Its file is gone: the version was dropped.
        CorruptionError
            Its file is not what was written.
        """
        path = self._run_path(file.id)
        with _local_errors(path), pa.memory_map(str(path)) as mapped:
            if mapped.size() != file.file_bytes:
                raise CorruptionError(
                    f"{path} was cut or altered", size_bytes=mapped.size(), expected=file.file_bytes
                )
            data = mapped.read_buffer()
        stored = stored_file.decode(data, source=str(path), kind="run", verify=False)
        return Run.read(stored.sections[schema.name], schema, source=str(path))

    def _run_path(self, run_id: str) -> Path:
        return self._runs / f"{run_id}.arrow"

    def _run_ids(self, pointers: Iterable[Pointer]) -> set[str]:
        ids = set()
        for pointer in pointers:
            with suppress(NotFoundError):
                stacks = self._read_version(pointer).stacks
                ids |= {f.id for files in stacks.values() for f in files}
        return ids

    def _use_merges(self, stack: list[RunFile]) -> list[RunFile]:
        """Return `stack` with every merged stretch of runs replaced by the run that equals it."""
        for _, inputs, output in self._read_merges():
            ids = [f.id for f in stack]
            if inputs[0] in ids:
                start = ids.index(inputs[0])
                if ids[start : start + len(inputs)] == inputs:
                    stack = [*stack[:start], output, *stack[start + len(inputs) :]]
        return stack

    def _read_merges(self) -> Iterator[tuple[Path, list[str], RunFile]]:
        for path in sorted(self._merges.iterdir()):
            if not path.name.endswith(_TEMPORARY):
                with suppress(NotFoundError):
                    record = self._read(path, "merge")
                    yield path, record["inputs"], RunFile(**record["output"])

    def _read_version(self, pointer: Pointer) -> _Version:
        record = self._read(self._versions / str(pointer), "version")
        stacks = {table: [RunFile(**f) for f in files] for table, files in record["stacks"].items()}
        return _Version(stacks, record["properties"])

    def _write_version(self, pointer: Pointer, version: _Version) -> None:
        stacks = {table: [asdict(f) for f in files] for table, files in version.stacks.items()}
        record = {"stacks": stacks, "properties": dict(version.properties)}
        self._write(self._versions / str(pointer), "version", record)

    def _write_run(self, run: Run) -> RunFile:
        run_id = self.new_id()
        header = {"table": run.schema.name, "rows": len(run)}
        sections = {run.schema.name: run.write}
        size, digest = self._write(self._run_path(run_id), "run", header, sections)
        return RunFile(run_id, size, run.size_bytes, len(run), digest)

    def _read(self, path: Path, kind: str) -> Mapping[str, Any]:
        with _local_errors(path):
            data = path.read_bytes()
        return stored_file.decode(data, source=str(path), kind=kind).header

    def _write(
        self,
        path: Path,
        kind: str,
        header: Mapping[str, Any],
        sections: Mapping[str, stored_file.SectionWriter] | None = None,
    ) -> tuple[int, str]:
        """Write a file under a temporary name and rename it; nothing is left behind on failure."""
        temporary = path.with_name(f"{self.new_id()}{_TEMPORARY}")
        with _local_errors(path):
            try:
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    written = stored_file.write_to(file, kind, header, sections)
                    if self.fsync:
                        file.flush()
                        os.fsync(file.fileno())
                os.rename(temporary, path)
                if self.fsync:
                    _sync_directory(path.parent)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        return written


def _sync_directory(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _local_errors(path: Path) -> Iterator[None]:
    """Map the operating system's errors on local files to the project's."""
    try:
        yield
    except OSError as exc:
        raise _map_local_error(exc, path) from exc


def _map_local_error(exc: OSError, path: Path) -> HoldfastError:
    if isinstance(exc, FileNotFoundError):
        return NotFoundError(f"{path} is not there", path=str(path))
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnavailableError(
            f"no space left for local state under {path.parent}: free space there, or name a larger "
            "directory in spark.holdfast.local.dir",
            path=str(path),
        )
    return UnavailableError(
        f"local state under {path.parent} cannot be used ({exc.strerror}): check that the directory exists "
        "and is writable, or name another in spark.holdfast.local.dir",
        path=str(path),
    )
