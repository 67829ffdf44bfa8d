"""A holdfast backend whose versions are Parquet files: small and complete, a template for your own.

::

    <shard directory>/
        versions/17-9f3c…/            one version, immutable
            version                   JSON with a checksum: pointer, properties, the file of each table
            <digest>.parquet          all live rows of one table, sorted; any Parquet reader opens it
        staging/<id>/                 a version being made or removed, or set aside because it is damaged

A version is made below ``staging`` and renamed into place, so a killed process leaves only whole versions and
leftovers. Each file is named after the digest of its bytes, which every read verifies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.backends import local_files
from holdfast.backends.base import MAX_HASH, NO_OPTIONS, Backend, BackendStatistics, Found, Pointer, View
from holdfast.backends.local_files import StagedFolder
from holdfast.backends.options import parse_options
from holdfast.backends.run import Run, merge_runs, schema_of
from holdfast.backends.run_stack import look_up, scan_runs
from holdfast.backends.schema import Keys, TableSchema, find_table, require_declared
from holdfast.errors import ClosedError, ConflictError, CorruptionError, NotFoundError, SchemaMismatchError

__all__ = ["ParquetBackend", "ParquetView"]

_COMPRESSIONS = ("zstd", "snappy", "lz4", "none")
_VERSION, _VERSION_KIND = "version", "parquet-version"


def _compression(text: str) -> str:
    if text not in _COMPRESSIONS:
        raise ValueError(f"it must be one of {', '.join(_COMPRESSIONS)}")
    return text


class ParquetView(View):
    """A version, read into memory on opening, so that it does not depend on its files."""

    def __init__(self, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self._runs: Mapping[str, Run] | None = runs
        self._properties = properties

    @property
    def properties(self) -> Mapping[str, Any]:
        return self._properties

    def run(self, table: str) -> Run:
        """Return all live rows of a table."""
        if self._runs is None:
            raise ClosedError("the view was closed: open a new one")
        return find_table(self._runs, table)

    def get(self, table: str, keys: Keys) -> Found:
        run = self.run(table)
        return look_up([run], keys, run.schema)

    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        return scan_runs([self.run(table)], first_hash, last_hash)

    def close(self) -> None:
        self._runs = None


class ParquetBackend(Backend):
    """Versions as folders of Parquet files; see the module.

    ``spark.holdfast.parquet.compression`` is one of zstd (the default), snappy, lz4 and none.
    """

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
        self._compression = self.parse_options("parquet", options).get("compression", "zstd")
        self._versions, self._staging = directory / "versions", directory / "staging"
        for folder in (self._versions, self._staging):
            with local_files.writing(folder):
                local_files.make_private_folder(folder)

    @classmethod
    def parse_options(cls, name: str, options: Mapping[str, str]) -> Mapping[str, Any]:
        return parse_options(name, {"compression": _compression}, options)

    def view(self, pointer: Pointer) -> ParquetView:
        folder = self._folder(pointer)
        try:
            version = self._read_version(folder, pointer)
            runs = self._read_runs(folder, version)
        except CorruptionError:
            # Set aside: the backend no longer holds the version, and the next attempt restores it.
            local_files.move_folder(folder, self._staging / self.new_id())
            raise
        empty = {t: Run(s, pa.RecordBatch.from_pylist([], s.columns)) for t, s in self.tables.items()}
        return ParquetView({**empty, **runs}, version["properties"])

    def apply(self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self.require_tables(runs)
        held: dict[str, Run] = {}
        if base is not None:
            with self.view(base) as view:
                held = {table: view.run(table) for table in self.tables}
        merged = {t: merge_runs([held[t], run] if t in held else [run], drop_deletes=True) for t, run in runs.items()}
        with self._staged() as staged:
            self._fill(staged, new, {**held, **merged}, properties)
            staged.publish(self._folder(new))

    def load(self, pointer: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self.require_tables(runs)
        with self._staged() as staged:
            self._fill(staged, pointer, runs, properties)
            self._put_in_place(pointer, staged)

    def _put_in_place(self, pointer: Pointer, staged: StagedFolder) -> None:
        while True:
            try:
                staged.publish(self._folder(pointer))
                return
            except ConflictError:
                # Another process has already restored it, or the existing copy has lost files.
                if self.is_whole(pointer):
                    return
                self.drop([pointer])

    def freeze(self, pointer: Pointer) -> list[Path]:
        self.view(pointer).close()  # verifies all files by reading them
        folder = self._folder(pointer)
        files = self._read_version(folder, pointer)["files"]
        return [folder / _VERSION, *(folder / name for name in set(files.values()))]

    def thaw(self, pointer: Pointer, folder: Path) -> None:
        with local_files.taken_folder(folder, self._staging, self.new_id(), fsync=False) as staged:
            if self.is_whole(pointer):
                return
            with local_files.requiring_whole(folder):
                version = self._read_version(staged.path, pointer)
                self._read_runs(staged.path, version)
                names = {_VERSION, *version["files"].values()}
                staged.keep_only(names)
                for name in names:
                    staged.adopt(name)
            self._put_in_place(pointer, staged)

    def versions(self) -> list[Pointer]:
        return sorted(Pointer.parse(name) for name in local_files.list_folder(self._versions))

    def drop(self, pointers: Iterable[Pointer]) -> None:
        for pointer in set(pointers):
            local_files.retire_folder(self._folder(pointer), self._staging, self.new_id())

    def remove_leftovers(self, before_ns: int) -> int:
        return local_files.remove_stale_folders(self._staging, before_ns)

    def statistics(self) -> BackendStatistics:
        versions = self.versions()
        rows = {}
        if versions:
            with suppress(NotFoundError), self.view(versions[-1]) as view:  # it may have been dropped
                rows = {table: len(view.run(table)) for table in self.tables}
        size = local_files.folder_bytes(self.directory)
        return BackendStatistics(len(versions), size, rows, dict.fromkeys(rows, 1))

    def close(self) -> None:
        """Do nothing: the backend keeps nothing open."""

    def _folder(self, pointer: Pointer) -> Path:
        return self._versions / str(Pointer.parse(str(pointer)))  # checked, since it names a folder

    def _staged(self) -> AbstractContextManager[StagedFolder]:
        # Not synced: a version that a power failure damages is restored from durable storage.
        return local_files.staged_folder(self._staging, self.new_id(), fsync=False)

    def _read_version(self, folder: Path, pointer: Pointer) -> Mapping[str, Any]:
        version = local_files.read_header(folder / _VERSION, _VERSION_KIND)
        if version["pointer"] != str(pointer):
            raise CorruptionError(f"{folder / _VERSION} belongs to a different version", pointer=version["pointer"])
        require_declared(version["files"], self.tables)
        return version

    def _read_runs(self, folder: Path, version: Mapping[str, Any]) -> dict[str, Run]:
        return {table: self._read_run(folder, name, table) for table, name in version["files"].items()}

    def _read_run(self, folder: Path, name: str, table: str) -> Run:
        path = folder / Path(name).name  # a version file must not lead out of the folder
        with local_files.reading(path):
            data = path.read_bytes()
        if _file_name(data) != name:
            raise CorruptionError(f"{path} is damaged: its digest is not the one in its name", table=table)
        rows = pq.ParquetFile(pa.BufferReader(data)).read().replace_schema_metadata(None)
        # The table's columns when the file was written; it may have more now.
        own = schema_of(rows.schema, self.tables[table], source=str(path))
        return Run(own, rows.combine_chunks().to_batches()[0]).projected(self.tables[table])

    def _fill(
        self, staged: StagedFolder, pointer: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]
    ) -> None:
        files = {table: self._write_run(run, staged) for table, run in runs.items() if len(run)}
        header = {"pointer": str(pointer), "files": files, "properties": dict(properties)}
        staged.write(_VERSION, _VERSION_KIND, header)

    def _write_run(self, run: Run, staged: StagedFolder) -> str:
        sink = pa.BufferOutputStream()
        try:
            pq.write_table(pa.Table.from_batches([run.batch]), sink, compression=self._compression)
        except pa.ArrowNotImplementedError as exc:
            raise SchemaMismatchError(f"Parquet cannot hold this table: {exc}", table=run.schema.name) from exc
        data = sink.getvalue()
        path = staged.path / _file_name(data)
        with local_files.writing(path):
            path.touch(mode=0o600)
            path.write_bytes(data)
        return path.name


def _file_name(data: bytes | pa.Buffer) -> str:
    return f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.parquet"
