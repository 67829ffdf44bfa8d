"""A sink of Parquet files: attempts write them, notes tell whose they are, and at the commit a target takes them over.

What all such sinks share is here; what makes the files of a micro-batch visible, at once, is a `FileTarget`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import pyarrow as pa

from holdfast.errors import InvalidArgumentError, StateLostError, UnavailableError
from holdfast.snapshotter.sink_log import checked_sink
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.options import CREDENTIALS
from holdfast.snapshotter.storage.url import parse_url
from holdfast.spark_integration.sinks.files.attempts import (
    COMPRESSIONS,
    Attempts,
    DataFile,
    FileTransaction,
    PreparedAttempt,
    Split,
    attempts_of,
    in_one_file,
    noted,
)
from holdfast.spark_integration.sinks.files.places import storage_of
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
)


class FileTarget(ABC):
    """A target that makes the files of one query's micro-batches visible."""

    @abstractmethod
    def check(self, files: Sequence[DataFile]) -> None:
        """Check, before the decision, that the target takes these files."""

    @abstractmethod
    def has(self, batch_id: int, prepared: Sequence[PreparedAttempt], listed: Sequence[ObjectInfo]) -> bool:
        """Tell whether a micro-batch is visible, made of these attempts; `listed` is the query's folder.

        Raises `StateLostError` if it is visible with other rows, or nobody can tell any more.
        """

    @abstractmethod
    def show(self, batch_id: int, prepared: Sequence[PreparedAttempt], files: Sequence[DataFile]) -> None:
        """Make a micro-batch visible that `has` did not find."""


class FileSink(TwoPhaseSink):
    """See the module; a subclass is a frozen dataclass with these fields.

    Attributes
    ----------
    file_mb : int
        How many MB of rows, uncompressed, make a file.
    """

    url: str
    compression: str
    file_mb: int
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
        """The folder of files below the URL, ending in a slash; None if the target copies their rows."""

    @abstractmethod
    def target(self, query: SinkQuery, attempts: Attempts) -> FileTarget:
        """Return a query's target."""

    def split(self) -> Split:
        """Return a function that splits rows into files."""
        return in_one_file

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        """Begin an attempt with files of its own."""
        return FileTransaction(
            self.attempts(attempt.query),
            attempt,
            schema,
            split=self.split(),
            file_bytes=self.file_mb << 20,
            compression=self.compression,
        )

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        """Check that all files exist in their sizes, and that the target takes them."""
        attempts = self.attempts(query)
        files, gone = attempts.files(attempts_of(handles, batch_id), attempts.noted())
        if gone:
            raise UnavailableError(
                "files are gone that were just written", batch=batch_id, url=self.url, gone=", ".join(gone[:3])
            )
        self.target(query, attempts).check(files)

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        """Let the target show the files, unless it already does."""
        prepared = attempts_of(handles, batch_id)
        if not prepared:
            return
        attempts = self.attempts(query)
        target, listed = self.target(query, attempts), list(attempts.storage.list(attempts.folder))
        if not target.has(batch_id, prepared, listed):
            files, gone = attempts.files(prepared, noted(info.key for info in listed))
            if gone:
                raise StateLostError(
                    "files of a decided micro-batch are gone, or were written below another URL: its rows cannot be "
                    "shown here",
                    batch=batch_id,
                    url=self.url,
                    gone=", ".join(gone[:3]),
                )
            target.show(batch_id, prepared, files)
        attempts.end(prepared)

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        """Delete files."""
        self.attempts(query).abort(handles)

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        """Return the attempts that still have notes."""
        return self.attempts(query).left()

    def storage(self, query: SinkQuery) -> ObjectStorage:
        """Return the storage of the URL."""
        return storage_of(self.url, query.options)

    def attempts(self, query: SinkQuery) -> Attempts:
        """Return a query's attempts."""
        return Attempts(self.storage(query), query, self.folder)
