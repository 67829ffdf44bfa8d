"""A custom sink: a folder of CSV files, of which readers see whole micro-batches.

::

    <folder>/part-<query>-<attempt>.csv      prepared; committed once a list names it
             list-<query>-000000000007       a committed micro-batch: the names of its parts, one per line
             header                          the columns
             writer                          the query that writes here, and the queries it replaced, newest first
             unfinished-*                    any of the last three before it is complete

One rename makes a list, and with it the micro-batch, visible to `read`. Reading the parts without the lists also
returns rows that were never committed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv

from holdfast.errors import ConflictError, InvalidArgumentError, SchemaMismatchError, StateLostError, UnavailableError
from holdfast.sinks import Handle, SinkAttempt, SinkQuery, SinkTransaction, TwoPhaseSink


@dataclass(frozen=True)
class CsvFolder(TwoPhaseSink):
    """A folder that the driver and all workers share."""

    folder: str
    name: str = "csv"

    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        """Create the folder or check its owner; return the newest committed micro-batch."""
        writers, columns = self._lines("writer"), str(schema).splitlines()
        if query.was_shown is not None and query.query_id not in writers:
            message = "the folder lacks micro-batches that the query committed: it was changed or emptied; restore it"
            raise StateLostError(message, folder=self.folder)
        if writers and writers[0] not in (query.query_id, query.replaces):
            message = "another query writes to this folder; choose a different folder, or set replaces"
            raise ConflictError(message, folder=self.folder, query=writers[0])
        if self._lines("header") not in ([], columns):
            message = "the folder's files have different columns; choose a different folder"
            raise SchemaMismatchError(message, folder=self.folder)
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as exc:
            raise InvalidArgumentError("cannot create the folder; choose a different one", folder=self.folder) from exc
        for unfinished in Path(self.folder).glob("unfinished-*"):
            unfinished.unlink(missing_ok=True)
        self._make("header", columns)
        if writers[:1] != [query.query_id]:
            self._make("writer", [query.query_id, *writers])
        return max((int(name.rpartition("-")[2]) for name in self._names(query, "list")), default=-1)

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        """Write to a file of this attempt."""
        return _Part(Path(self.folder, f"part-{attempt.query.query_id}-{attempt.attempt_id}.csv"), schema)

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        """Check that all files exist."""
        if missing := self._missing(handles):
            raise UnavailableError("files that were just written are missing", batch=batch_id, files=missing)

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        """Name the files in a list; repeating the commit writes the same list."""
        if missing := self._missing(handles):
            raise StateLostError("files of a decided micro-batch are missing", batch=batch_id, files=missing)
        self._make(f"list-{query.query_id}-{batch_id:012}", [str(handle["file"]) for handle in handles])

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        """Remove the files."""
        for handle in handles:
            self._path(handle).unlink(missing_ok=True)

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        """Return the files that no list names, including half-written files."""
        listed = {file for name in self._names(query, "list") for file in self._lines(name)}
        return [{"file": file} for file in self._names(query, "part") if file not in listed]

    def _names(self, query: SinkQuery, kind: str) -> list[str]:
        return [path.name for path in Path(self.folder).glob(f"{kind}-{query.query_id}-*")]

    def _missing(self, handles: Sequence[Handle]) -> list[str]:
        return [str(handle["file"]) for handle in handles if not self._path(handle).exists()]

    def _path(self, handle: Handle) -> Path:
        # Only a name: a stored handle must not lead out of the folder.
        return Path(self.folder, os.path.basename(str(handle["file"])))

    def _lines(self, name: str) -> list[str]:
        path = Path(self.folder, name)
        return path.read_text().splitlines() if path.exists() else []

    def _make(self, name: str, lines: Sequence[str]) -> None:
        """Write a small file atomically and durably."""
        # Under a unique name: an older driver may be writing the same file.
        unfinished = Path(self.folder, f"unfinished-{secrets.token_hex(8)}")
        with unfinished.open("w") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        try:
            unfinished.replace(Path(self.folder, name))
        except FileNotFoundError as exc:
            message = "another driver of this query has started and cleaned up; this one must end"
            raise ConflictError(message, folder=self.folder) from exc
        _sync(self.folder)


class _Part(SinkTransaction):
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._file = path.open("xb")
        self._writer = csv.CSVWriter(self._file, schema)

    def write(self, rows: pa.RecordBatch) -> None:
        self._writer.write_batch(rows)

    def prepare(self) -> Handle:
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        _sync(str(self._path.parent))
        return {"file": self._path.name}

    def abort(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def read(folder: str, schema: pa.Schema) -> pa.Table:
    """Return the rows of all committed micro-batches."""
    files = [file for path in sorted(Path(folder).glob("list-*")) for file in path.read_text().splitlines()]
    types = csv.ConvertOptions(column_types=schema)
    return pa.concat_tables(
        [schema.empty_table(), *(csv.read_csv(Path(folder, file), convert_options=types) for file in files)]
    )


def _sync(folder: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
