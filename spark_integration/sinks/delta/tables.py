"""Delta tables that this process has opened: their storage options, their syncing, and `deltalake`'s errors as ours.

A process keeps each table that it has used, and reads only what was added to its log: reading all of it takes as long
as there are files.
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
# Options that say how the store is reached, or in whose name, and that `deltalake` (1.6) lacks: their default, and what
# it must be told instead of another value.
_S3_SAID_TWICE = {
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
# A commit with another error did not fail because another writer was faster.
_FASTER = re.compile("Failed to commit transaction:|Tried committing existing table version")
# What another attempt does not change: a newer kind of table, a catalogue's table, refused rows or statements.
_FOR_GOOD = re.compile(
    "[Uu]nsupported|[Nn]ot supported|Invalid protocol action|catalog-managed|append-only|MERGE matched|"
    "Error during planning|Invalid data found|Schema error|name too long"
)
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_DETAIL_MAX = 400


class KeptTable:
    """An open table, with the facts that reveal whether it was recreated or set back."""

    def __init__(self, url: str) -> None:
        found = _ESCAPE.search(url) or ("://" in url and _FRAGMENT.search(url))
        if found:  # which `deltalake` decodes, even in paths, or takes for a slash, or not at all
            raise InvalidArgumentError(
                "deltalake misreads this URL, and would part the table from its log: choose another folder name",
                table=url,
                part=found[0],
            )
        self.url = url
        #: The table's writer requirements when it was last checked.
        self.checked: tuple[object, ...] | None = None
        self.storage_options = storage_options(url, {})
        self._options: Mapping[str, str] = {}
        self._secrets: Collection[str] = ()
        self._table: DeltaTable | None = None
        # None as long as nobody has opened it.
        self._table_id: str | None = None
        # The newest known commit; no digest if its bytes are missing.
        self._version = 0
        self._digest: str | None = None

    def with_options(self, options: Mapping[str, str]) -> KeptTable:
        """Use a query's options from now on; return the table."""
        if options != self._options:
            self.storage_options = storage_options(self.url, options)
            self._secrets = secrets_of(parse_storage_options(options)) | secrets_of(self.storage_options)
            self._options, self._table = options, None
        return self

    def open(self) -> DeltaTable:
        """Return the table, read again. Raises `NotFoundError` if there is none."""
        self._table = None
        with self.translated("open"):
            table = DeltaTable(self.url, storage_options=self.storage_options)
        self._table = table
        self._table_id = str(table.metadata().id)
        self._know(table.version())
        return table

    def current(self) -> DeltaTable:
        """Return the table with the latest commits."""
        # Another query may be about to open the same table: it is refused later, and must not disturb this one.
        table = self._table
        if table is None:
            return self.open()
        with self.translated("read"):
            table.update_incremental()
        if table.version() != self._version:
            self._know(table.version())
        return table

    def require_same(self) -> None:
        """Raise `StateLostError` if the table is gone, replaced or set back, judged by its newest known version."""
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
                "the Delta table was dropped or moved while the query was running: restore it as it was, or give the "
                "sink another name to start afresh",
                table=self.url,
            ) from exc
        is_another = str(found.metadata().id) != self._table_id
        # A commit that is gone was cleaned up, if there are later ones.
        if is_another or found.version() < self._version or None not in (self._digest, there):
            what = "dropped, and another one was made in its place" if is_another else "set back to an older version"
            raise StateLostError(
                f"the Delta table was {what} while the query was running, and lacks what was committed: restore the "
                "original, or give the sink another name to start afresh",
                table=self.url,
                was=f"{self._table_id} at {self._version}",
                there=f"{found.metadata().id} at {found.version()}",
            )
        self._table = found
        self._know(found.version())

    def _know(self, version: int) -> None:
        self._version, self._digest = version, self._digest_of(version)

    def _digest_of(self, version: int) -> str | None:
        """Return the digest of a commit in the log; None if it was cleaned up, or is too large."""
        try:
            data = storage_of(self.url, self._options).get(f"_delta_log/{version:020}.json")
        except (NotFoundError, CorruptionError):
            return None
        return xxhash.xxh3_128(data).hexdigest()

    def sync(self, table: DeltaTable, since: int) -> None:
        """Sync the commits since a version, if the table is on a local disk."""
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
                for name in [unquote(add["path"]) for add in added if add]:  # a URL, relative to the table's
                    _sync(root / name)
                    folders.update((root / name).parents[: name.count("/") + 1])
                _sync(path)
        for folder in folders:
            _sync(folder)

    @contextmanager
    def translated(self, action: str) -> Iterator[None]:
        """Raise the errors of `deltalake` as holdfast's, without credentials."""
        try:
            yield
        except HoldfastError:
            raise
        except (DeltaError, OSError, ValueError, TypeError) as exc:
            text = _COLOURS.sub("", str(exc))
            is_silent = any(secret and secret in text for secret in self._secrets)
            detail = "" if is_silent else " ".join(text.split())[:_DETAIL_MAX]
            error = _error(exc, text)(_MESSAGES[_error(exc, text)], action=action, table=self.url, detail=detail)
            raise error from (None if is_silent else exc)


_MESSAGES: dict[type[HoldfastError], str] = {
    NotFoundError: "there is no Delta table",
    ConflictError: "another writer committed to the Delta table first",
    InvalidArgumentError: "the Delta table, or its storage, refuses this: see the detail",
    UnavailableError: "the Delta table is not available",
}


def _error(exc: Exception, text: str) -> type[HoldfastError]:
    if isinstance(exc, TableNotFoundError):
        return NotFoundError
    if (isinstance(exc, CommitFailedError) and _FASTER.search(text)) or _EXISTS in text:
        return ConflictError
    refused = isinstance(exc, DeltaProtocolError | SchemaMismatchError | ValueError | TypeError)
    refused = refused or bool(_DENIED.search(text) or _FOR_GOOD.search(text))
    return InvalidArgumentError if refused else UnavailableError


@kept_per_process()
def _kept(url: str, sink: str) -> KeptTable:
    return KeptTable(url)


def kept_table(url: str, sink: str, options: Mapping[str, str]) -> KeptTable:
    """Return this process's table at a URL, for one sink."""
    return _kept(url, sink).with_options(options)


def storage_options(url: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return a query's options in `deltalake`'s names. Raises `InvalidArgumentError` for an unknown one."""
    theirs = {
        name.removeprefix(DELTA_PREFIX): value for name, value in options.items() if name.startswith(DELTA_PREFIX)
    }
    if url.startswith(("s3://", "s3a://")):
        theirs = {_S3_NAMES[name]: value for name, value in options.items() if name in _S3_NAMES} | theirs
        # Where no option names an endpoint, `deltalake` takes the environment's, as all clients do.
        if (theirs.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://"):
            theirs.setdefault("AWS_ALLOW_HTTP", "true")
        for name, (default, needed) in _S3_SAID_TWICE.items():
            if options.get(name, default).lower() != default and needed not in theirs:
                raise InvalidArgumentError(
                    "deltalake, which writes Delta tables on S3, does not know this option: set "
                    f"{DELTA_PREFIX}{needed} too",
                    option=name,
                )
    return theirs


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
