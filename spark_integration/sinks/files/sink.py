"""Base of the sinks that write Parquet files: attempts write files, notes record their owners, a target shows them.

    note ─▶ files ─▶ is the note still there? ─▶ handle          commit: make the files visible, then delete the notes
                                                                abort:  delete the files, then the notes

    _holdfast/<sink>/<query id>/attempts/<attempt>.<number>     a note: FORMAT.md section 9
    _holdfast/<sink>/<query id>/attempts/<attempt>.ended-<n>    mark of an aborted attempt with n files: empty
    _holdfast/<sink>/<query id>/staged/part-….parquet           files whose rows the target copies
    <attempt>   <micro-batch, 18 digits>-<partition, 6 digits>-<attempt id>

An attempt has one note per group of files that it writes together, numbered from 0. Only attempts that have not ended
have notes, so the listing does not grow with the sink. If an attempt has many files, as in a task with hundreds of
partitions, its handle contains only a digest of them, which keeps decisions small.

An abort cannot stop a put in progress, and a worker that dies during the put does not delete the file. The mark
therefore stays for an hour by the store's clock; a later run that finds it deletes files that arrived in the meantime.

Storages accept only whole objects, so each file is built in memory.

Invariants
----------
* **noted**: a file is written after the note that names it, and deleted before the note.
* **derived**: a file's key is derived from its attempt and number; notes and handles contain no paths.
* **ended**: an attempt that lacks a note or a file was ended, and never counts as prepared.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from holdfast.errors import (
    CorruptionError,
    FencedError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.fields import NOT_STORED, Digest, Stored, refuse
from holdfast.snapshotter.sink_log import checked_sink
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.options import CREDENTIALS, parse_url
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.retention import store_time_ms
from holdfast.spark_integration.shard.task import io_executor
from holdfast.spark_integration.sinks.files.location import FOLDER, sizes_of, storage_of
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
)
from holdfast.spark_integration.spark_types import require_utf8

COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")


class FileTransaction(SinkTransaction):
    """An attempt at a partition: buffers rows, and writes files for each `FileSink.file_mb` of Arrow data."""

    def __init__(self, sink: FileSink, attempt: SinkAttempt, schema: pa.Schema) -> None:
        self._sink, self._attempts, self._schema = sink, sink.attempts(attempt.query), schema
        self._attempt = attempt_name(attempt)
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._files: list[DataFile] = []
        self._notes = 0
        # False while a put is in progress or after one failed: its objects may still arrive.
        self._is_settled = True

    def write(self, rows: pa.RecordBatch) -> None:
        # Checked before the decision: decided rows that a table cannot merge would stop the query for good.
        require_utf8(rows, "the results", "most readers of Parquet refuse")
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= self._sink.file_mb << 20:
            self._put()

    def prepare(self) -> Handle:
        if self._held or not self._files:
            self._put()
        # Check every note: an abort deletes only the notes that exist by then, and this attempt may have added more.
        for number in range(self._notes):
            self._attempts.require_note(self._attempt, number)
        return PreparedAttempt.of(self._attempt, self._notes, self._files).to_json()

    def abort(self) -> None:
        """Delete the written files if the storage answers; a later start deletes the rest."""
        self._held = []
        if self._notes:
            with suppress(HoldfastError):
                # Even if another driver ended the attempt before its files arrived: no note names them any more.
                self._attempts.storage.delete([self._attempts.key_of(file.name) for file in self._files])
                if self._is_settled:
                    self._attempts.forget([(self._attempt, self._notes)])

    def _put(self) -> None:
        rows = pa.Table.from_batches(self._held, self._schema)
        made = [
            (encoded(part, self._sink.compression), part.num_rows, details) for part, details in self._sink.split(rows)
        ]
        first = len(self._files)
        files = [
            DataFile(rows, data.size, xxhash.xxh3_128_hexdigest(data), details, self._attempt, number)
            for number, (data, rows, details) in enumerate(made, first)
        ]
        self._notes += 1
        self._is_settled = False
        self._attempts.note(self._attempt, self._notes - 1, first, files)
        # Recorded before the put: a failed put may have stored some files, and their note may be deleted already.
        self._files += files
        objects = [(self._attempts.key_of(file.name), data) for file, (data, _, _) in zip(files, made, strict=True)]
        # If one put fails, wait for the others: a file must not arrive after `abort` has deleted its note.
        list(ahead(io_executor(), lambda each: self._attempts.storage.put(*each), objects, window=len(objects)))
        self._held, self._held_bytes, self._is_settled = [], 0, True


def encoded(rows: pa.Table, compression: str = "zstd") -> pa.Buffer:
    """Encode rows as a Parquet file."""
    # For numbers, a dictionary seldom saves space and takes as long as all other encoding.
    texts = [field.name for field in rows.schema if pa.types.is_string(field.type)]
    out = pa.BufferOutputStream()
    pq.write_table(rows, out, compression=compression, use_dictionary=texts)
    return out.getvalue()


_ATTEMPT = re.compile(r"([0-9]{18})-([0-9]{6})-([0-9a-f]{32})")
_NOTE = re.compile(rf"({_ATTEMPT.pattern})\.(0|[1-9][0-9]{{0,5}})")
_ENDED = re.compile(rf"({_ATTEMPT.pattern})\.ended-(0|[1-9][0-9]{{0,5}})")
#: Exceeds the duration of any storage request.
_LATE_MS = 3600_000
_Number = Annotated[int, range(1_000_000)]
#: A handle lists its files in up to this many bytes of JSON: short lists need no extra request.
_LISTED_BYTES_MAX = 2048


@dataclass(frozen=True)
class DataFile(Stored):
    """One file of an attempt, as stored in notes and handles."""

    rows: int
    size_bytes: int
    digest: Digest  #: XXH3-128 of its bytes
    details: Mapping[str, Any]  #: The sink's own metadata of the file
    attempt: Annotated[str, NOT_STORED] = ""
    number: Annotated[int, NOT_STORED] = 0  #: Counted from 0, in the order of the attempt's rows

    @property
    def name(self) -> str:
        return file_name(self.attempt, self.number)

    def read_rows(self, storage: ObjectStorage, key: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows. Raises `NotFoundError` if the file is gone, `CorruptionError` if it is damaged."""
        data = storage.get(key, limit_bytes=self.size_bytes)
        if len(data) != self.size_bytes or xxhash.xxh3_128_hexdigest(data) != self.digest:
            raise CorruptionError("a file was altered or damaged", key=key, storage=storage.url)
        try:
            # partitioning=None: take columns only from the file, not from its path.
            return pq.read_table(pa.BufferReader(data), columns=columns, partitioning=None)
        except (pa.ArrowException, OSError) as exc:
            raise CorruptionError(f"a file is not Parquet: {exc}", key=key, storage=storage.url) from exc


def _of_attempt(attempt: str, files: Iterable[DataFile], first: int = 0) -> list[DataFile]:
    return [replace(file, attempt=attempt, number=number) for number, file in enumerate(files, first)]


def file_name(attempt: str, number: int) -> str:
    """Return the last segment of a file's key."""
    return f"part-{attempt}-{number:06}.parquet"


def attempt_name(attempt: SinkAttempt) -> str:
    """Return the attempt's name as used in keys."""
    name = f"{attempt.batch_id:018}-{attempt.partition:06}-{attempt.attempt_id}"
    if not _ATTEMPT.fullmatch(name):
        raise InvalidArgumentError("an attempt's id must have 32 hexadecimal digits", attempt=name)
    return name


@dataclass(frozen=True)
class PreparedAttempt(Stored):
    """A parsed handle."""

    attempt: Annotated[str, _ATTEMPT]
    notes: _Number  #: The attempt's number of notes
    count: _Number  #: The attempt's number of files
    digest: Digest  #: XXH3-128 of the file entries in the notes
    files: tuple[DataFile, ...] | None  #: None if only the notes list them

    @classmethod
    def of(cls, attempt: str, notes: int, files: Sequence[DataFile]) -> PreparedAttempt:
        """Build the handle of an attempt from its number of notes and its files."""
        text = json.dumps([file.to_json() for file in files], sort_keys=True).encode()
        listed = tuple(files) if len(text) <= _LISTED_BYTES_MAX else None
        return cls(attempt, notes, len(files), xxhash.xxh3_128_hexdigest(text), listed)

    @property
    def names(self) -> list[str]:
        return [file_name(self.attempt, number) for number in range(self.count)]


def attempts_of(handles: Iterable[Handle], batch_id: int | None = None) -> list[PreparedAttempt]:
    """Parse handles. Raises `CorruptionError` for a malformed handle, or one of a different micro-batch."""
    found = [PreparedAttempt.read(handle, "a handle") for handle in handles]
    for each in found:
        if batch_id not in (None, int(each.attempt[:18])):
            refuse("a handle", "belongs to another micro-batch", attempt=each.attempt, batch=batch_id)
    return found


@dataclass(frozen=True)
class _Note(Stored, kind="sink-attempt"):
    sink: str
    query_id: str
    attempt: str
    number: int
    first_file: _Number
    files: tuple[DataFile, ...]


class Attempts:
    """A query's attempts below a sink's URL. `folder` holds their files; None if the target copies the rows."""

    def __init__(self, storage: ObjectStorage, query: SinkQuery, folder: str | None) -> None:
        self.storage, self._query = storage, query
        self.folder = f"{FOLDER}/{query.sink}/{query.query_id}/"
        self._is_staged = folder is None
        self._files = f"{self.folder}staged/" if folder is None else folder

    def key_of(self, name: str) -> str:
        return self._files + name

    def note(self, attempt: str, number: int, first_file: int, files: Sequence[DataFile]) -> None:
        """Store a note of the files to be written."""
        note = _Note(self._query.sink, self._query.query_id, attempt, number, first_file, tuple(files))
        self.storage.put(self._key(attempt, number), note.encode())

    def require_note(self, attempt: str, number: int) -> None:
        """Raise `FencedError` if an attempt's note is gone."""
        try:
            self.storage.get(self._key(attempt, number))
        except NotFoundError as exc:
            raise FencedError("a new run of the query has ended this attempt", attempt=attempt) from exc

    def noted(self) -> dict[str, set[int]]:
        """Return the note numbers of each attempt."""
        return _noted(info.key for info in self.storage.list(f"{self.folder}attempts/"))

    def files(
        self, attempts: Sequence[PreparedAttempt], there: Mapping[str, set[int]]
    ) -> tuple[list[DataFile], list[str]]:
        """Return the attempts' files, and the missing attempts or files. `there`: the result of `noted`."""
        if gone := [each.attempt for each in attempts if there.get(each.attempt) != {*range(each.notes)}]:
            return [], gone
        listed = list(io_executor().map(self._listed, attempts))
        if gone := [each.attempt for each, files in zip(attempts, listed, strict=True) if files is None]:
            return [], gone
        files = [file for each in listed for file in each or ()]
        sizes = sizes_of(self.storage, (self.key_of(file.name) for file in files))
        return files, [file.name for file, size in zip(files, sizes, strict=True) if size != file.size_bytes]

    def _listed(self, attempt: PreparedAttempt) -> Sequence[DataFile] | None:
        """Return an attempt's files from its handle or notes; None if the attempt was ended."""
        if attempt.files is not None:
            return _of_attempt(attempt.attempt, attempt.files)
        files = [file for number in range(attempt.notes) for file in self._read(attempt.attempt, number)]
        if len(files) < attempt.count:
            return None
        if PreparedAttempt.of(attempt.attempt, attempt.notes, files).digest != attempt.digest:
            raise CorruptionError(
                "an attempt's notes name different files than the decision",
                attempt=attempt.attempt,
                storage=self.storage.url,
            )
        return files

    def rows(self, files: Sequence[DataFile]) -> pa.Table:
        return pa.concat_tables(io_executor().map(lambda f: f.read_rows(self.storage, self.key_of(f.name)), files))

    def left(self) -> list[Handle]:
        """Return attempts with notes, and aborted attempts old enough that no put can still be in progress."""
        infos = self.storage.list(f"{self.folder}attempts/")
        there = _noted(info.key for info in infos)
        files = self._of_notes(there)
        marks = [(mark, info.modified_ms) for info in infos if (mark := _ended(info.key)) is not None]
        # The driver's clock may be hours off the store's.
        over_ms = store_time_ms(PrefixedStorage(self.storage, FOLDER)) - _LATE_MS if marks else 0
        ended = sorted(mark for mark, stored_ms in marks if stored_ms < over_ms)
        over = [replace(PreparedAttempt.of(attempt, 0, ()), count=count, files=None) for attempt, count in ended]
        whole = [PreparedAttempt.of(attempt, len(there[attempt]), files[attempt]) for attempt in sorted(there)]
        return [each.to_json() for each in over + whole]

    def abort(self, handles: Iterable[Handle]) -> None:
        """End attempts: delete their files, then their notes."""
        named = {each.attempt: each for each in attempts_of(handles)}
        there = {attempt: numbers for attempt, numbers in self.noted().items() if attempt in named}
        files, over = self._of_notes(there), [each for each in named.values() if not each.notes]
        marks = [self._mark(attempt, len(each)) for attempt, each in files.items()]
        list(io_executor().map(lambda mark: self.storage.put(mark, b""), marks))
        names = [file.name for each in files.values() for file in each] + [name for each in over for name in each.names]
        self.storage.delete([self.key_of(name) for name in names])
        notes = [self._key(attempt, number) for attempt, numbers in there.items() for number in numbers]
        self.storage.delete([*notes, *(self._mark(each.attempt, each.count) for each in over)])

    def end(self, attempts: Sequence[PreparedAttempt]) -> None:
        """Delete the notes of committed attempts, and files whose rows the target has copied."""
        if self._is_staged:
            self.storage.delete([self.key_of(name) for each in attempts for name in each.names])
        self.forget((each.attempt, each.notes) for each in attempts)

    def forget(self, attempts: Iterable[tuple[str, int]]) -> None:
        """Delete the notes of attempts, given as pairs of name and number of notes."""
        self.storage.delete([self._key(attempt, number) for attempt, notes in attempts for number in range(notes)])

    def _of_notes(self, there: Mapping[str, set[int]]) -> dict[str, list[DataFile]]:
        notes = [(attempt, number) for attempt, numbers in there.items() for number in sorted(numbers)]
        found: dict[str, list[DataFile]] = {attempt: [] for attempt in there}
        for (attempt, _), files in zip(notes, io_executor().map(lambda note: self._read(*note), notes), strict=True):
            found[attempt] += files
        return found

    def _read(self, attempt: str, number: int) -> list[DataFile]:
        key = self._key(attempt, number)
        source = f"{self.storage.url}/{key}"
        try:
            data = self.storage.get(key)
        except NotFoundError:
            return []
        note = _Note.decode(data, source)
        owner = (note.sink, note.query_id, note.attempt, note.number)
        if owner != (self._query.sink, self._query.query_id, attempt, number):
            refuse(source, "belongs to a different attempt than its name says")
        return _of_attempt(attempt, note.files, note.first_file)

    def _key(self, attempt: str, number: int) -> str:
        return f"{self.folder}attempts/{attempt}.{number}"

    def _mark(self, attempt: str, files: int) -> str:
        return f"{self.folder}attempts/{attempt}.ended-{files}"


def _ended(key: str) -> tuple[str, int] | None:
    match = _ENDED.fullmatch(key.rpartition("/")[2])
    return None if match is None else (match[1], int(match[5]))


def _noted(keys: Iterable[str]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for key in keys:
        folder, _, name = key.rpartition("/")
        match = _NOTE.fullmatch(name) if folder.endswith("/attempts") else None
        if match:
            found.setdefault(match[1], set()).add(int(match[5]))
    return found


class FileTarget(ABC):
    """A target that makes the files of one query's micro-batches visible."""

    def check(self, files: Sequence[DataFile]) -> None:  # noqa: B027  optional
        """Check, before the decision, that the target accepts these files."""

    @abstractmethod
    def has(self, batch_id: int, prepared: Sequence[PreparedAttempt], listed: Sequence[ObjectInfo]) -> bool:
        """Return whether these attempts are visible. Raises `StateLostError` if the micro-batch shows others."""

    @abstractmethod
    def show(self, batch_id: int, prepared: Sequence[PreparedAttempt], files: Sequence[DataFile]) -> None:
        """Make a micro-batch visible; called if `has` returned False."""


class FileSink(TwoPhaseSink):
    """Base class of file sinks; a subclass is a frozen dataclass with these fields."""

    url: str
    compression: str
    file_mb: int  #: Uncompressed MB of rows per file
    credentials: ClassVar[Sequence[str]] = CREDENTIALS

    def __post_init__(self) -> None:
        checked_sink(self.name)
        object.__setattr__(self, "url", str(parse_url(self.url)))
        if self.compression not in COMPRESSIONS:
            raise InvalidArgumentError(
                f"no such compression; choose one of {', '.join(COMPRESSIONS)}", compression=self.compression
            )
        if not 1 <= self.file_mb <= 1024:
            raise InvalidArgumentError("file_mb must be from 1 to 1024", file_mb=self.file_mb)

    @property
    @abstractmethod
    def folder(self) -> str | None:
        """The folder for files below the URL, with a final slash; None if the target copies the rows."""

    @abstractmethod
    def target(self, query: SinkQuery, attempts: Attempts) -> FileTarget:
        """Return the target that shows a query's files."""

    def split(self, rows: pa.Table) -> Iterable[tuple[pa.Table, Mapping[str, Any]]]:
        """Split buffered rows into one table per file, each with the sink's metadata for the file."""
        return [(rows, {})]

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        return FileTransaction(self, attempt, schema)

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        attempts = self.attempts(query)
        files, gone = attempts.files(attempts_of(handles, batch_id), attempts.noted())
        if gone:
            problem = "files just written are gone; the micro-batch is written again"
            raise UnavailableError(problem, batch=batch_id, url=self.url, gone=", ".join(gone[:3]))
        self.target(query, attempts).check(files)

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        prepared = attempts_of(handles, batch_id)
        if not prepared:
            return
        attempts = self.attempts(query)
        target, listed = self.target(query, attempts), list(attempts.storage.list(attempts.folder))
        if not target.has(batch_id, prepared, listed):
            files, gone = attempts.files(prepared, _noted(info.key for info in listed))
            if gone:
                raise StateLostError(
                    "files of a decided micro-batch are missing: they were deleted, or written below another URL, and "
                    "their rows cannot become visible; restore them, or set the URL back",
                    batch=batch_id,
                    url=self.url,
                    gone=", ".join(gone[:3]),
                )
            target.show(batch_id, prepared, files)
        attempts.end(prepared)

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        self.attempts(query).abort(handles)

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        return self.attempts(query).left()

    def attempts(self, query: SinkQuery) -> Attempts:
        return Attempts(storage_of(self.url, query.options), query, self.folder)
