"""Opening run files: mapped, checked against what their version notes of them, and as runs of their table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from holdfast.backends.local_files import map_stored_file
from holdfast.backends.run import read_stretches
from holdfast.backends.run_files.damage import DamagedRuns
from holdfast.backends.run_files.kept_runs import KEPT, KeptRun
from holdfast.backends.run_files.version_file import RunFile
from holdfast.backends.run_stack import Stacked
from holdfast.backends.schema import TableSchema
from holdfast.backends.stretched_run import StretchedRun
from holdfast.errors import CorruptionError, SchemaMismatchError, UnavailableError


class RunReader:
    """Opens the run files of one shard."""

    def __init__(self, tables: Mapping[str, TableSchema], damaged: DamagedRuns) -> None:
        self._tables = tables
        self._damaged = damaged

    def open_all(self, folder: Path, files: Iterable[RunFile], table: str, *, verify: bool = False) -> list[Stacked]:
        """Map the files of a stack, as `open` does; return their runs in the order of the files."""
        return [self.open(folder / file.name, file, table, verify=verify) for file in files]

    def open(self, path: Path, file: RunFile, table: str, *, verify: bool = False) -> Stacked:
        """Map one run file, or find it mapped.

        With `verify` its digest is computed: where it is read as a whole anyway, and what is damaged would get a new
        one. Raises `NotFoundError` if it is gone: the version was dropped. Raises `CorruptionError` if it is not what
        was written; what holds it is set aside.
        """
        kept = KEPT.find(path, file.note, self._tables[table])
        if kept is not None and (not verify or kept.is_whole(file.note)):
            return kept.run
        try:
            kept = self._read_in_room(path, file, table, verify=verify)
        except CorruptionError:
            self._damaged.set_aside_holders(file)
            raise
        except SchemaMismatchError:
            self._damaged.check(path, file)  # damage may look like another schema
            raise
        if not verify:  # what is merged will not be read again
            KEPT.keep(kept, file.note)
        return kept.run

    def _read_in_room(self, path: Path, file: RunFile, table: str, *, verify: bool) -> KeptRun:
        try:
            return self.read(path, file, table, verify=verify, trusted=True)
        except UnavailableError:  # as where the process may open no more, or has no more addresses
            KEPT.forget()
            return self.read(path, file, table, verify=verify, trusted=True)

    def read(self, path: Path, file: RunFile, table: str, *, verify: bool, trusted: bool) -> KeptRun:
        """Map one run file anew; unless it is trusted, its columns are checked as well, as `Run.read` does."""
        mapped, stored = map_stored_file(path, "run", file.note, verify=verify)
        section = stored.section(table, str(path))
        runs = read_stretches(
            section,
            self._tables[table],
            source=str(path),
            trusted=trusted,
            plain_bytes=section.size,  # as it lies in memory: it unpacks to no more than it is
        )
        if sum(len(run) for run in runs) != file.rows:
            raise CorruptionError(f"{path} does not hold the rows that were written", expected=file.rows)
        stretches = [run for run in runs if len(run)]
        if len(stretches) > 1:
            return KeptRun(mapped, self._tables[table], StretchedRun(stretches, section, mapped))
        mapped.expect_scans()
        return KeptRun(mapped, self._tables[table], [*stretches, runs[0]][0])
