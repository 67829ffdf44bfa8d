"""What attempts have written and nobody has ended: a note before each file, so that no file is ever searched for.

::

    note ─▶ files ─▶ is the note still there? ─▶ handle          commit: what makes the files visible, then the notes go
                                                                abort:  "aborted" ─▶ files ─▶ notes ─▶ "aborted"

    _holdfast/<sink>/<query id>/attempts/<attempt>.<number>     kind "sink-attempt": sink, query_id, attempt, number,
                                                                files: what the handle says of them
    _holdfast/<sink>/<query id>/attempts/<attempt>.aborted      its files may be gone: it is never committed
    <attempt>   <micro-batch, 18 digits>-<partition, 6 digits>-<attempt id>

An attempt has one note for each group of files that it puts at once, numbered from 0. Notes exist only of what is under
way, so listing them does not follow what the sink holds.

Invariants
----------
* **noted**: a file is put only after a note that names it, and taken away before the note.
* **derived**: a file's key is made from the attempt and the file's number; no path in a note or handle is followed.
* **ended**: an attempt without all its notes, or with ``aborted``, was ended, and is never taken for prepared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.backends import stored_file
from holdfast.errors import FencedError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.fields import DIGEST, Fields
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.sinks.files.claims import FOLDER
from holdfast.spark_integration.sinks.files.places import sizes_of
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt

KIND = "sink-attempt"
_ATTEMPT = re.compile(r"([0-9]{18})-([0-9]{6})-([0-9a-f]{32})")
_NOTE = re.compile(rf"({_ATTEMPT.pattern})\.([0-9]{{1,6}}|aborted)")
_FILE_FIELDS = ("rows", "size_bytes", "digest", "details")


@dataclass(frozen=True)
class DataFile:
    """One file of an attempt.

    Attributes
    ----------
    attempt : str
        See the module.
    number : int
        From 0, in the order of its rows.
    rows, size_bytes : int
    digest : str
        XXH3-128 of its bytes, as 32 hexadecimal digits.
    details : mapping
        What the sink itself keeps of it.
    """

    attempt: str
    number: int
    rows: int
    size_bytes: int
    digest: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of its key."""
        return file_name(self.attempt, self.number)

    def as_json(self) -> dict[str, Any]:
        """Return what a note and a handle say of it."""
        return {"rows": self.rows, "size_bytes": self.size_bytes, "digest": self.digest, "details": dict(self.details)}


def file_name(attempt: str, number: int) -> str:
    """Return the last part of a file's key."""
    return f"part-{attempt}-{number:06}.parquet"


def attempt_name(attempt: SinkAttempt) -> str:
    """Return an attempt as keys name it."""
    name = f"{attempt.batch_id:018}-{attempt.partition:06}-{attempt.attempt_id}"
    if not _ATTEMPT.fullmatch(name):
        raise InvalidArgumentError("an attempt's id has 32 hexadecimal digits", attempt=name)
    return name


def batch_of(attempt: str) -> int:
    """Return an attempt's micro-batch."""
    return int(attempt[:18])


def handle_of(attempt: str, notes: int, files: Iterable[DataFile]) -> Handle:
    """Return what finds a prepared attempt again."""
    return {"attempt": attempt, "notes": notes, "files": [file.as_json() for file in files]}


def files_of(handles: Iterable[Handle], batch_id: int | None = None) -> list[DataFile]:
    """Return the files that handles name.

    Raises
    ------
    CorruptionError
        A handle is not of this kind, or of another micro-batch.
    """
    files: list[DataFile] = []
    for handle in handles:
        fields = _fields(handle)
        attempt = fields.text("attempt", _ATTEMPT)
        if batch_id is not None and batch_of(attempt) != batch_id:
            fields.refuse("is of another micro-batch", attempt=attempt, batch=batch_id)
        files += _files(fields, attempt, 0)
    return files


def _fields(handle: object) -> Fields:
    return Fields(handle, "a handle", "attempt", "notes", "files")


def _files(fields: Fields, attempt: str, first: int) -> list[DataFile]:
    return [
        DataFile(
            attempt,
            number,
            each.number("rows"),
            each.number("size_bytes"),
            each.text("digest", DIGEST),
            each.mapping("details"),
        )
        for number, each in enumerate(fields.each("files", *_FILE_FIELDS), first)
    ]


class Attempts:
    """The attempts of one query, below a sink's URL.

    Parameters
    ----------
    storage : ObjectStorage
        The sink's URL.
    sink, query_id : str
    key_of : callable
        Returns the key of a file, of its name.
    """

    def __init__(self, storage: ObjectStorage, sink: str, query_id: str, key_of: Callable[[str], str]) -> None:
        self._storage, self._sink, self._query_id = storage, sink, query_id
        self.key_of = key_of
        self.folder = f"{FOLDER}/{sink}/{query_id}/"

    def note(self, attempt: str, number: int, first_file: int, files: Sequence[DataFile]) -> None:
        """Say which files will be put."""
        header = {
            "sink": self._sink,
            "query_id": self._query_id,
            "attempt": attempt,
            "number": number,
            "first_file": first_file,
            "files": [file.as_json() for file in files],
        }
        self._storage.put(self._key(attempt, number), stored_file.encode(KIND, header)[0])

    def require_note(self, attempt: str, number: int) -> None:
        """Check that nobody has ended the attempt since its note was put.

        Raises
        ------
        FencedError
            Somebody has.
        """
        try:
            self._storage.get(self._key(attempt, number))
        except NotFoundError as exc:
            raise FencedError("a new run of the query has ended this attempt", attempt=attempt) from exc

    def noted(self) -> dict[str, set[str]]:
        """Return for each attempt the ends of its notes' names: numbers, and ``aborted``."""
        return noted(info.key for info in self._storage.list(f"{self.folder}attempts/"))

    def gone(
        self, handles: Sequence[Handle], files: Sequence[DataFile], there: Mapping[str, set[str]] | None = None
    ) -> list[str]:
        """Return what is no longer as it was prepared: attempts that somebody has ended; else files that are not there.

        Parameters
        ----------
        handles : sequence of Handle
        files : sequence of DataFile
            Of these handles: `files_of`.
        there : mapping, optional
            What `noted` says, if that is known; else it is asked for.
        """
        return _ended(handles, self.noted() if there is None else there) or self._missing(files)

    def left(self) -> list[Handle]:
        """Return handles of all attempts that have notes."""
        handles: list[Handle] = []
        for attempt, ends in sorted(self.noted().items()):
            numbers = sorted(int(end) for end in ends if end != "aborted")
            files = {file.number: file for number in numbers for file in self._read(attempt, number)}
            handles.append(handle_of(attempt, len(numbers), [files[number] for number in sorted(files)]))
        return handles

    def abort(self, handles: Iterable[Handle]) -> None:
        """End attempts: their files go, and then their notes. Those that have no note were ended before."""
        there = self.noted()
        named = {_fields(handle).text("attempt", _ATTEMPT) for handle in handles}
        for attempt in sorted(named & there.keys()):
            numbers = [int(end) for end in there[attempt] if end != "aborted"]
            files = [file for number in numbers for file in self._read(attempt, number)]
            self._storage.put(self._key(attempt, "aborted"), b"")
            self._storage.delete(self.key_of(file.name) for file in files)
            self._storage.delete(self._key(attempt, number) for number in sorted(numbers))
            self._storage.delete([self._key(attempt, "aborted")])

    def end(self, handles: Iterable[Handle]) -> None:
        """Take the notes of committed attempts away."""
        keys = [
            self._key(fields.text("attempt", _ATTEMPT), number)
            for fields in map(_fields, handles)
            for number in range(fields.number("notes", limit=1_000_000))
        ]
        self._storage.delete(keys)

    def _missing(self, files: Sequence[DataFile]) -> list[str]:
        """Return the names of files that are not there, or not as large as they were."""
        sizes = sizes_of(self._storage, (self.key_of(file.name) for file in files))
        return [file.name for file, size in zip(files, sizes, strict=True) if size != file.size_bytes]

    def _read(self, attempt: str, number: int) -> list[DataFile]:
        """Return the files of a note; none if it is gone."""
        key = self._key(attempt, number)
        source = f"{self._storage.url}/{key}"
        try:
            data = self._storage.get(key)
        except NotFoundError:
            return []
        stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=0)
        fields = Fields(stored.header, source, "sink", "query_id", "attempt", "number", "first_file", "files")
        owner = (fields.text("sink"), fields.text("query_id"), fields.text("attempt"), fields.number("number"))
        if owner != (self._sink, self._query_id, attempt, number):
            fields.refuse("is of another attempt than its name says")
        return _files(fields, attempt, fields.number("first_file", limit=1_000_000))

    def _key(self, attempt: str, end: int | str) -> str:
        return f"{self.folder}attempts/{attempt}.{end}"


def noted(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return for each attempt the ends of its notes' names, of a listing."""
    found: dict[str, set[str]] = {}
    for key in keys:
        folder, _, name = key.rpartition("/")
        match = _NOTE.fullmatch(name) if folder.endswith("/attempts") else None
        if match:
            found.setdefault(match[1], set()).add(match[5])
    return found


def _ended(handles: Iterable[Handle], there: Mapping[str, set[str]]) -> list[str]:
    """Return the attempts that are not prepared any more, of the notes that are there."""
    gone = []
    for fields in map(_fields, handles):
        attempt = fields.text("attempt", _ATTEMPT)
        if there.get(attempt) != {str(number) for number in range(fields.number("notes", limit=1_000_000))}:
            gone.append(attempt)
    return gone
