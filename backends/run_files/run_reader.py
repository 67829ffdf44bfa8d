"""Opening run files: mapped, checked against what their version notes of them, and as runs of their table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from holdfast.backends.local_files import map_stored_file
from holdfast.backends.run import Run, read_stretches
from holdfast.backends.run_files.damage import DamagedRuns
from holdfast.backends.run_files.version_file import RunFile
from holdfast.backends.schema import TableSchema
from holdfast.errors import CorruptionError, SchemaMismatchError


class RunReader:
    """Opens the run files of one shard.

    Parameters
    ----------
    tables : mapping of str to TableSchema
        The shard's tables.
    damaged : DamagedRuns
        Sets aside what holds a damaged file.
    """

    def __init__(self, tables: Mapping[str, TableSchema], damaged: DamagedRuns) -> None:
        self._tables = tables
        self._damaged = damaged

    def open_all(self, folder: Path, files: Iterable[RunFile], table: str, *, verify: bool = False) -> list[Run]:
        """Map the files of a stack, as `open` does; return their runs in the order of the files."""
        return [run for file in files for run in self.open(folder / file.name, file, table, verify=verify)]

    def open(self, path: Path, file: RunFile, table: str, *, verify: bool = False) -> list[Run]:
        """Map one run file.

        Parameters
        ----------
        verify : bool
            Compute its digest: where it is read as a whole anyway, and what is damaged would get a new digest.

        Raises
        ------
        NotFoundError
            It is gone: the version was dropped.
        CorruptionError
            It is not what was written; what holds it is set aside.
        """
        try:
            return self.read(path, file, table, verify=verify, trusted=True)
        except CorruptionError:
            self._damaged.set_aside_holders(file)
            raise
        except SchemaMismatchError:
            self._damaged.check(path, file)  # damage may look like another schema
            raise

    def read(self, path: Path, file: RunFile, table: str, *, verify: bool, trusted: bool) -> list[Run]:
        """Map one run file; unless it is trusted, its columns are checked as well, as `Run.read` does."""
        stored = map_stored_file(path, "run", file.note, verify=verify)
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
        return runs
