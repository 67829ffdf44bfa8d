"""A process's open Delta tables: storage options, fsync, and translation of `deltalake`'s errors.

A process keeps its tables open and reads only new log entries, because a full read takes longer with each file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

import xxhash
from deltalake import DeltaTable
from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    DeltaProtocolError,
    SchemaMismatchError,
    TableNotFoundError,
)

from holdfast.errors import (
    ConflictError,
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.storage.options import parse_storage_options, secrets_of
from holdfast.spark_integration.executor.processes import kept_per_process
from holdfast.spark_integration.sinks.files.location import DELTA_PREFIX, storage_of

_S3_NAMES = {
    "key": "AWS_ACCESS_KEY_ID",
    "username": "AWS_ACCESS_KEY_ID",
    "secret": "AWS_SECRET_ACCESS_KEY",
    "password": "AWS_SECRET_ACCESS_KEY",
    "token": "AWS_SESSION_TOKEN",
    "anon": "AWS_SKIP_SIGNATURE",
    "endpoint_url": "AWS_ENDPOINT_URL",
    "client_kwargs.endpoint_url": "AWS_ENDPOINT_URL",
    "client_kwargs.region_name": "AWS_REGION",
}
# Connection and identity options that `deltalake` (1.6) lacks: each option's default, and the `deltalake` option that
# must also be set for any other value.
_S3_REPEATED = {
    "profile": ("", "AWS_ACCESS_KEY_ID"),
    "client_kwargs.verify": ("true", "ALLOW_INVALID_CERTIFICATES"),
    "requester_pays": ("false", "AWS_REQUEST_PAYER"),
}
_DENIED = re.compile(
    r"40[13] (Forbidden|Unauthorized)|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|NoSuchBucket|"
    r"Permission denied|lacked the necessary privileges|Unauthenticated|Read-only file system"
)
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f]")
_FRAGMENT = re.compile("#.*")
_EXISTS = "already exists at that location"
# The errors of a commit that lost to another writer.
_LOST_RACE = re.compile("Failed to commit transaction:|Tried committing existing table version")
# Errors that a retry cannot fix: an unsupported or catalog-managed table, refused rows or statements.
_PERMANENT = re.compile(
    "[Uu]nsupported|[Nn]ot supported|Invalid protocol action|catalog-managed|append-only|MERGE matched|"
    "Error during planning|Invalid data found|Schema error|name too long"
)
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_DETAIL_MAX = 400


class KeptTable:
    """An open table, with the state needed to detect that it was recreated or rolled back."""

    def __init__(self, url: str) -> None:
        found = _ESCAPE.search(url) or ("://" in url and _FRAGMENT.search(url))
        if found:  # `deltalake` decodes escapes, reads backslashes as slashes, drops fragments
            raise InvalidArgumentError(
                "deltalake misreads this URL and would separate the table from its log: choose another name",
                table=url,
                part=found[0],
            )
        self.url = url
        #: The table's requirements and the sink's arguments at the last check.
        self.checked: tuple[object, ...] | None = None
        self.storage_options = storage_options(url, {})
        self._options: Mapping[str, str] = {}
        self._secrets: Collection[str] = ()
        self._table: DeltaTable | None = None
        # None until the table is first opened.
        self._table_id: str | None = None
        # The newest known commit; the digest is None if the commit's file is missing or too large.
        self._version = 0
        self._digest: str | None = None

    def with_options(self, options: Mapping[str, str]) -> KeptTable:
        """Switch to a query's options; return the table."""
        if options != self._options:
            self.storage_options = storage_options(self.url, options)
            self._secrets = secrets_of(parse_storage_options(options)) | secrets_of(self.storage_options)
            self._options, self._table = options, None
        return self

    def open(self) -> DeltaTable:
        """Read the table from scratch and return it. Raises `NotFoundError` if there is none."""
        self._table = None
        with self.translated("open"):
            table = DeltaTable(self.url, storage_options=self.storage_options)
        self._table = table
        self._table_id = str(table.metadata().id)
        self._know(table.version())
        return table

    def current(self) -> DeltaTable:
        """Return the table, updated to the latest commit."""
        # Another query, to be refused later, may be opening the same table: it must not disturb this call.
        table = self._table
        if table is None:
            return self.open()
        with self.translated("read"):
            table.update_incremental()
        if table.version() != self._version:
            self._know(table.version())
        return table

    def require_same(self) -> None:
        """Raise `StateLostError` if the newest known commit shows the table to be gone, replaced or rolled back."""
        if self._table_id is None:
            return
        there = self._digest_of(self._version)
        if self._digest is not None and there == self._digest:
            return
        try:
            with self.translated("open"):
                found = DeltaTable(self.url, storage_options=self.storage_options)
        except NotFoundError as exc:
            raise StateLostError(
                "the Delta table was dropped or moved while the query was running: restore it, or give the sink "
                "another name to start over",
                table=self.url,
            ) from exc
        is_another = str(found.metadata().id) != self._table_id
        # If later commits exist, a missing commit was merely cleaned up.
        if is_another or found.version() < self._version or None not in (self._digest, there):
            what = "dropped and recreated" if is_another else "rolled back to an older version"
            raise StateLostError(
                f"the Delta table was {what} while the query was running, and lacks committed rows: restore the "
                "original, or give the sink another name to start over",
                table=self.url,
                was=f"{self._table_id} at {self._version}",
                there=f"{found.metadata().id} at {found.version()}",
            )
        self._table = found
        self._know(found.version())

    def _know(self, version: int) -> None:
        self._version, self._digest = version, self._digest_of(version)

    def _digest_of(self, version: int) -> str | None:
        """Return the digest of a log entry; None if the entry was cleaned up or is too large."""
        try:
            data = storage_of(self.url, self._options).get(f"_delta_log/{version:020}.json")
        except (NotFoundError, CorruptionError):
            return None
        return xxhash.xxh3_128(data).hexdigest()

    def sync(self, table: DeltaTable, since: int) -> None:
        """Fsync the commits after a version, and their files, if the table is on a local disk."""
        if "://" in self.url and not self.url.startswith("file://"):
            return
        root = Path(self.url.removeprefix("file://"))
        log = root / "_delta_log"
        folders = {root, log}
        for version in range(since + 1, table.version() + 1):
            with suppress(FileNotFoundError):  # cleaned up by another writer
                path = log / f"{version:020}.json"
                with path.open("rb") as lines:
                    added = [json.loads(line).get("add") for line in lines]
                for name in [unquote(add["path"]) for add in added if add]:  # a URL path, relative to the table
                    _sync(root / name)
                    folders.update((root / name).parents[: name.count("/") + 1])
                _sync(path)
        for folder in folders:
            _sync(folder)

    @contextmanager
    def translated(self, action: str) -> Iterator[None]:
        """Translate `deltalake`'s errors to holdfast's, without credentials."""
        try:
            yield
        except HoldfastError:
            raise
        except (DeltaError, OSError, ValueError, TypeError) as exc:
            text = _COLOURS.sub("", str(exc))
            has_secret = any(secret and secret in text for secret in self._secrets)
            detail = "" if has_secret else " ".join(text.split())[:_DETAIL_MAX]
            error = _error(exc, text)(_MESSAGES[_error(exc, text)], action=action, table=self.url, detail=detail)
            raise error from (None if has_secret else exc)


_MESSAGES: dict[type[HoldfastError], str] = {
    NotFoundError: "there is no Delta table",
    ConflictError: "another writer committed to the Delta table first",
    InvalidArgumentError: "the Delta table or its storage rejected this: see the detail",
    UnavailableError: "the Delta table is not available",
}


def _error(exc: Exception, text: str) -> type[HoldfastError]:
    if isinstance(exc, TableNotFoundError):
        return NotFoundError
    if (isinstance(exc, CommitFailedError) and _LOST_RACE.search(text)) or _EXISTS in text:
        return ConflictError
    refused = isinstance(exc, DeltaProtocolError | SchemaMismatchError | ValueError | TypeError)
    refused = refused or bool(_DENIED.search(text) or _PERMANENT.search(text))
    return InvalidArgumentError if refused else UnavailableError


@kept_per_process()
def _kept(url: str, sink: str) -> KeptTable:
    return KeptTable(url)


def kept_table(url: str, sink: str, options: Mapping[str, str]) -> KeptTable:
    """Return the process's open table for a URL and sink."""
    return _kept(url, sink).with_options(options)


def storage_options(url: str, options: Mapping[str, str]) -> dict[str, str]:
    """Translate options to `deltalake`'s names. Raises `InvalidArgumentError` if `deltalake` lacks an option."""
    theirs = {
        name.removeprefix(DELTA_PREFIX): value for name, value in options.items() if name.startswith(DELTA_PREFIX)
    }
    if url.startswith(("s3://", "s3a://")):
        theirs = {_S3_NAMES[name]: value for name, value in options.items() if name in _S3_NAMES} | theirs
        # Without an endpoint option, `deltalake` uses the environment's, as all clients do.
        if (theirs.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://"):
            theirs.setdefault("AWS_ALLOW_HTTP", "true")
        for name, (default, needed) in _S3_REPEATED.items():
            if options.get(name, default).lower() != default and needed not in theirs:
                raise InvalidArgumentError(
                    f"deltalake, which writes Delta tables on S3, lacks this option: set {DELTA_PREFIX}{needed} too",
                    option=name,
                )
    return theirs


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
