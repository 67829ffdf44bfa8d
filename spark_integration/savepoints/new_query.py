"""A query under construction: its checkpoint location, its id, and leftovers of interrupted attempts.

::

    checkpoint location                    holdfast-restoring-<id>        marker: a query with this id is being made
    state directory                   _queries/<id>                  the operator directories to fill
                                           _rescaling/<id>/…              its savepoint, while it is rescaled
    beside the location                    …-restoring-<id>/…             its stub

A failed attempt deletes all of these files, ``metadata`` first and the marker last. An interrupted attempt deletes only
``metadata``, because Spark's tasks may still be writing. Its marker stays, as after a kill, and the next attempt
deletes exactly the files of the marker's id. Spark starts no query without ``metadata``, so it is written last. If the
outcome of that write is unknown, the attempt leaves everything in place: either the query is complete, or the next
attempt deletes it.

Checks before and after writes keep two attempts apart. A fence cannot: Spark starts any location with ``metadata``, and
another attempt's fencing number cannot make that write fail, which is conditional only on the file's absence.

Contents of the new location:

::

    stub's location                      new location
        state/  ──────── copied ───────▶     state/          version 1 of each pointer, or written there directly
        offsets/0  ── its settings ────▶     offsets/0       positions and watermark of the savepoint
        commits/0  ── its form ────────▶     commits/0       the watermark of the next micro-batch
    the planned micro-batch  ──────────▶     offsets/1       if sinks are continued
    savepoint's sources  ──────────────▶     sources/…
                                             metadata        the new query's id: last

Spark refuses a filled location without ``metadata``, so no query starts from an incomplete location. The query starts
with micro-batch 1 at exactly the saved positions; if it continues sinks, that is the saved query's planned micro-batch.

Source: Spark 4.3's ``OffsetSeqLog`` and ``CommitLog``, and queries started from locations made this way.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast import clock
from holdfast.errors import ConflictError, CorruptionError, HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.settings import PREFIX, Settings
from holdfast.snapshotter.ownership.operator_record import find_operator
from holdfast.snapshotter.ownership.queries import (
    RESCALING,
    NotedLocation,
    QueryOrigin,
    declare_origin,
    find_origin,
    forget_origin,
    is_filling,
    note_location,
)
from holdfast.snapshotter.savepoints.manifest import SHARDS_LIMIT, PlannedBatch, SavedQuery, SavedSource
from holdfast.snapshotter.savepoints.savepoints import read_log
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_url, sibling_url
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.lookup.places import require_no_state_directory
from holdfast.spark_integration.shard.pointer_row import operator_of
from holdfast.spark_integration.spark_state.query_location import NAMED_SOURCES

# Paths that a restore writes in the location, besides ``metadata``.
_OURS = ("offsets/", "commits/", "sources/", "state/")
# A running or interrupted attempt's marker: this prefix, then the new query's id.
_MARK = "holdfast-restoring-"
_MARK_OF = re.compile(rf"{_MARK}([A-Za-z0-9-]{{1,64}})")
_DONE = "if there is a file metadata, the query is complete and can be started"
_AGAIN = "run the same command again with the checkpoint location %s, which first deletes what is left"
_log = logging.getLogger(__name__)
#: The setting for the number of partitions of Spark's state.
PARTITIONS = "spark.sql.shuffle.partitions"
_COUNT = re.compile("[1-9][0-9]{0,9}")
_STATE = "state/"
_STATE_BYTES_MAX = 4 << 30
_METADATA = re.compile(r"state/[0-9]+/_metadata/(metadata|v[0-9]+/[0-9]+)")
# Paths as Spark writes them: file:/…, file:///…, s3a://bucket/…, or without a scheme.
_PATH = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?/")
_BELOW = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*:)?/.*(?P<state>/state/[0-9]+/_.+)")


@dataclass
class NewQuery:
    """A query under construction."""

    settings: Settings  #: With the new query's state directory
    options: Mapping[str, object]  #: Storage options
    url: str  #: Its checkpoint location
    stubs: str  #: URL prefix of this location's stubs; the query's id is appended
    #: The checkpoint location and the state directory
    location: ObjectStorage
    storage: ObjectStorage
    query_id: str
    is_finishing: bool = False  #: Whether the last step has begun, so that the query may be complete
    state_id: str = ""  #: The id in the query's pointers and records; set by `fill`

    @property
    def stub_url(self) -> str:
        """The stub's location, beside the query's."""
        return self.stubs + self.query_id

    @property
    def rescaling_url(self) -> str:
        """The directory for a temporary savepoint named after the query's id."""
        return f"{str(self.settings.state_dir).rstrip('/')}/{RESCALING}"

    def remove_stub(self) -> None:
        """Delete the stub's location if it exists."""
        remove_folder(self.stub_url, self.options)

    def remove_savepoint(self) -> None:
        """Delete the temporary savepoint named after the query's id if it exists."""
        remove_folder(f"{self.rescaling_url}/{self.query_id}", self.options)

    def fill(self, origin: QueryOrigin) -> None:
        """Record that this query will fill these directories."""
        declare_origin(self.storage, origin)
        self.state_id = origin.state_id

    def require(self) -> None:
        """Raise `ConflictError` if another process has taken the location, to which our writes would then belong."""
        require_mine(self.location, self.query_id)

    def finish(self) -> None:
        """Make the query startable. Raises `ConflictError` if another process has taken its location meanwhile."""
        self.is_finishing = True
        finish(self.location, self.query_id)
        if self.state_id:
            self._note()

    def _note(self) -> None:
        noted = NotedLocation(self.state_id, self.query_id, self.location.url, socket.gethostname())
        try:
            note_location(self.storage, noted)
        except HoldfastError as exc:  # the query's first run will retry
            _log.info("could not note the new query's checkpoint location in the state directory: %s", exc)


@contextmanager
def new_query(
    settings: Settings,
    options: Mapping[str, object],
    checkpoint_location: str | Path,
    state_dir: str | Path | None = None,
) -> Iterator[NewQuery]:
    """Make a query in a checkpoint location that is empty or left by an interrupted attempt."""
    if state_dir is not None:
        given = Settings.parse({f"{PREFIX}state.dir": str(state_dir)})
        settings = replace(settings, state_dir=given.state_dir)
    url, query_id = str(checkpoint_location), clock.new_uuid()
    stubs = sibling_url(url, "-restoring-")
    with open_storage(url, options) as location, open_storage(str(settings.state_dir), options) as storage:
        if location.url == storage.url:
            raise InvalidArgumentError("the new query's state directory must not be its checkpointLocation", given=url)
        with _no_state_directory(location):
            stopped = begin(location, query_id)
        new = NewQuery(settings, options, url, stubs, location, storage, query_id)
        for other in stopped:
            left = replace(new, query_id=other)
            left.remove_stub()
            left.remove_savepoint()
            _clear(storage, other)
        forget(location, stopped)
        try:
            yield new
        except BaseException as exc:  # including Ctrl-C and Spark's errors
            try:
                if _may_leave_tasks(exc):
                    _withdraw(new)
                elif new.is_finishing and isinstance(exc, UnavailableError):
                    # The last write may still arrive: after a clean-up, Spark would start a query without state.
                    _log.warning(f"the new query may or may not be complete: {_DONE}; else {_AGAIN}", url)
                else:
                    _remove(new)
            except HoldfastError as failed:
                _log.warning(f"some objects of the new query could not be deleted: {_AGAIN}; {_DONE}: %s", url, failed)
            raise


def require_new_location(url: str, options: Mapping[str, object]) -> None:
    """Raise the errors of `new_query` for an occupied checkpoint location; write nothing."""
    with open_storage(url, options) as location, _no_state_directory(location):
        _stopped(location, {info.key for info in location.list("")})


@contextmanager
def _no_state_directory(location: ObjectStorage) -> Iterator[None]:
    """Replace a `ConflictError` for an occupied location by one that says if it is a state directory."""
    try:
        yield
    except ConflictError:
        require_no_state_directory(location)
        raise


def shards_to_set(state_dir: str, options: Mapping[str, object], query_id: str) -> int | None:
    """Return the number of shards that a new query's session must set; None if the operators' names imply it."""
    with open_storage(state_dir, options) as storage:
        origin = find_origin(storage, query_id)
        for directory in () if origin is None else origin.directories:
            named, own = find_operator(storage, operator_of(directory) or directory), find_operator(storage, directory)
            if named is not None and own is not None and named.shards != own.shards:
                return own.shards
    return None


def _may_leave_tasks(error: BaseException) -> bool:
    """Return whether tasks may be writing after an error: Spark does not wait for a cancelled job's tasks."""
    from pyspark.errors import PySparkException

    cause: BaseException | None = error
    while isinstance(cause, UnavailableError):  # our error for a failed job
        cause = cause.__cause__
    return not isinstance(error, HoldfastError) or isinstance(cause, PySparkException)


def _withdraw(new: NewQuery) -> None:
    """Prevent Spark from starting the query, and leave the rest to the next attempt."""
    if is_mine(new.location, new.query_id):  # otherwise finished, or owned by another attempt
        new.location.delete(["metadata"])
        _log.warning(
            "the new query's objects stay, because tasks may be writing to them; no query can start from them: once "
            f"the tasks have ended, {_AGAIN}",
            new.url,
        )


def _remove(new: NewQuery) -> None:
    """Delete the unfinished query, to which no task is writing any more."""
    new.remove_savepoint()
    new.remove_stub()
    if is_mine(new.location, new.query_id):  # otherwise the files may be another attempt's
        new.location.delete(["metadata"])  # first, or Spark could start a query without state
        new.location.delete([info.key for info in new.location.list("") if info.key.startswith(_OURS)])
        _clear(new.storage, new.query_id)
        forget(new.location, [new.query_id])


def _clear(storage: ObjectStorage, query_id: str) -> None:
    """Delete an unfinished query's files in the state directory; no query has used them."""
    origin = find_origin(storage, query_id)
    if origin is None:
        return
    for directory, owner in origin.directories.items() if is_filling(storage, origin) else ():
        record = find_operator(storage, directory)
        if record is not None and record.query_id == owner:
            own = f"{directory}/operator"
            storage.delete(info.key for info in storage.list(f"{directory}/") if info.key != own)
            storage.delete([own])  # last: it identifies the owner of the rest
    forget_origin(storage, origin)


def remove_folder(url: str, options: Mapping[str, object]) -> None:
    """Delete a folder and its contents."""
    with open_storage(url, options) as folder:
        folder.delete([info.key for info in folder.list("")])
        if folder.url.startswith("file://"):  # where empty folders remain
            shutil.rmtree(folder.url.removeprefix("file://"), ignore_errors=True)


def _stopped(location: ObjectStorage, found: set[str]) -> set[str]:
    """Return the ids of interrupted attempts. Raises `ConflictError` if `begin` would refuse the location."""
    marks = _marks(found)
    if found and (not marks or "metadata" in found):
        raise _not_new(location, min(found))
    return marks


def begin(location: ObjectStorage, query_id: str) -> set[str]:
    """Take a checkpoint location that is empty or left by interrupted attempts; return those attempts' query ids."""
    found = {info.key for info in location.list("")}
    marks = _stopped(location, found)
    mine = _MARK + query_id
    location.put(mine, b"")
    # An attempt that finished before our marker appeared is complete; an attempt that sees the marker gives up.
    if any(info.key == "metadata" for info in location.list("")):
        location.delete([mine])
        raise _not_new(location, "metadata")
    location.delete(key for key in found if key.startswith(_OURS))
    return marks


def _not_new(location: ObjectStorage, holds: str) -> ConflictError:
    return ConflictError(
        "the checkpoint location of a new query must be empty: choose a different one",
        location=location.url,
        holds=holds,
    )


def forget(location: ObjectStorage, stopped: Iterable[str]) -> None:
    """Remove the markers of interrupted attempts, whose other leftovers must be gone."""
    location.delete(_MARK + query_id for query_id in stopped)


def is_mine(location: ObjectStorage, query_id: str) -> bool:
    """Return whether this process still owns a location."""
    return _marks(info.key for info in location.list("")) == {query_id}


def _marks(keys: Iterable[str]) -> set[str]:
    return {found[1] for key in keys if (found := _MARK_OF.fullmatch(key))}


def finish(location: ObjectStorage, query_id: str) -> None:
    """Make the query startable; warn if its marker stays. Raises `ConflictError`, `UnavailableError`."""
    require_mine(location, query_id)
    try:
        location.put_if_absent("metadata", json.dumps({"id": query_id}, separators=(",", ":")).encode())
    except ConflictError as exc:  # another attempt has finished, so its file stays
        raise _not_mine(location) from exc
    try:
        require_mine(location, query_id)
    except ConflictError:
        location.delete(["metadata"])
        raise
    try:
        location.delete([_MARK + query_id])
    except HoldfastError as exc:
        _log.warning(
            "the query is complete and can be started; its marker could not be removed from its checkpoint location, "
            "%s: %s",
            location.url,
            exc,
        )


def require_mine(location: ObjectStorage, query_id: str) -> None:
    """Raise `ConflictError` if another attempt has taken the location."""
    if not is_mine(location, query_id):
        raise _not_mine(location)


def _not_mine(location: ObjectStorage) -> ConflictError:
    return ConflictError("another command fills this checkpoint location: run one at a time", location=location.url)


@dataclass(frozen=True)
class FirstState:
    """Facts about a new location's state that its logs must record."""

    conf: Mapping[str, str]  #: The settings that the query pins
    commits_version: str = "v1"  #: Version of the commit log
    commit: Mapping[str, Any] = field(default_factory=dict)  #: Commit log entry of micro-batch 0, except the watermark


def pinned(query: SavedQuery, partitions: int | None) -> dict[str, str]:
    """Return the settings pinned by the saved query's micro-batch, with `partitions` if given."""
    conf: dict[str, str] = dict(json.loads(query.batch)["conf"])
    strange = [name for name in conf if not name.startswith("spark.sql.")]
    if strange:
        raise CorruptionError("the savepoint pins a setting that Spark never pins", setting=strange[0])
    return conf | ({PARTITIONS: str(partitions)} if partitions is not None else {})


def partitions_of(conf: Mapping[str, object]) -> int:
    """Return the number of partitions of a query's state; 1 if none is pinned. Raises `CorruptionError`."""
    text = str(conf.get(PARTITIONS, 1))
    if not _COUNT.fullmatch(text) or int(text) >= SHARDS_LIMIT:
        raise CorruptionError("the query's log pins an invalid number of partitions", pinned=text)
    return int(text)


def state_of_stub(stub: ObjectStorage, location: ObjectStorage, conf: Mapping[str, str]) -> FirstState:
    """Copy a stub's state and return the facts for the logs. Raises `InvalidArgumentError`."""
    _, batch = _text(stub, "offsets/0").split("\n")[:2]
    stub_conf: dict[str, str] = json.loads(batch)["conf"]
    differ = sorted(name for name, value in conf.items() if stub_conf.get(name) != value)
    if differ:
        raise InvalidArgumentError(
            "this Spark lacks settings that the savepoint pins: restore with the release that made it, or a later one",
            settings=", ".join(differ),
        )
    for info in stub.list(_STATE):
        if not info.key.endswith(".crc"):  # checksums: the copied files may change
            location.put(info.key, moved(info.key, stub.get(info.key, _STATE_BYTES_MAX), location.url))
    version, commit = _text(stub, "commits/0").split("\n")[:2]
    # A newer Spark may pin more settings, which apply to the state that it has just made.
    return FirstState(stub_conf, version, json.loads(commit))


def seed(
    location: ObjectStorage,
    first: FirstState,
    savepoint: PrefixedStorage,
    query: SavedQuery,
    *,
    fresh: bool,
    planned: PlannedBatch | None = None,
) -> None:
    """Write a location's logs, after its state and before `finish`; if `fresh`, sources start as their options say."""
    for source in () if fresh else (*query.sources, *(planned.sources if planned else ())):
        for log in source.logs:
            location.put(f"sources/{source.name}/{log.name}", read_log(savepoint, log))
    # Rows that a source reads again must not count as late.
    watermark_ms = 0 if fresh else query.next_watermark_ms
    saved = json.loads(query.batch) | {"conf": first.conf} | ({"batchWatermarkMs": 0} if fresh else {})
    location.put("offsets/0", _offsets(query.offsets_version, saved, query.sources, fresh=fresh))
    committed = {**first.commit, "nextBatchWatermarkMs": watermark_ms}
    location.put("commits/0", _log_file(first.commits_version, _json(committed)))
    if planned is not None:
        batch_1 = json.loads(planned.batch) | {"conf": first.conf}
        location.put("offsets/1", _offsets(planned.offsets_version, batch_1, planned.sources, fresh=False))


def _offsets(version: str, batch: Mapping[str, Any], sources: Sequence[SavedSource], *, fresh: bool) -> bytes:
    lines = [("-" if fresh else source.offset) for source in sources]
    if version == NAMED_SOURCES:
        lines = [f"{source.name}:{line}" for source, line in zip(sources, lines, strict=True)]
    return _log_file(version, _json(batch), *lines)


def moved(key: str, data: memoryview, location: str) -> memoryview | bytes:
    """Return a file of Spark's state; in an operator's metadata, replace the old location in paths by the new one."""
    if not _METADATA.fullmatch(key):
        return data
    try:
        version, _, text = bytes(data).decode().partition("\n")
        described = json.loads(text)
    except ValueError as exc:
        raise CorruptionError("metadata of Spark's state cannot be read", key=key) from exc
    return f"{version}\n{_json(_moved(described, key, location))}".encode()


def _moved(value: Any, key: str, location: str) -> Any:
    if isinstance(value, dict):
        return {name: _moved(inner, key, location) for name, inner in value.items()}
    if isinstance(value, list):
        return [_moved(inner, key, location) for inner in value]
    if not isinstance(value, str) or not _PATH.match(value):
        return value
    below = _BELOW.fullmatch(value)
    if below is None:
        raise InvalidArgumentError(
            "metadata of Spark's state names a file outside the checkpoint location, so it cannot be copied",
            key=key,
            path=value,
        )
    place, written = parse_url(location), below["scheme"] or ""
    # Within the same store, keep Spark's spelling: file:/…, s3a://…
    if place._replace(scheme=written.rstrip(":") or "file").store != place.store:
        written = f"{place.for_spark.scheme}:"
    slashes = "//" if written not in ("", "file:") else ""
    return f"{written}{slashes}{place.authority}{place.path}{below['state']}"


def _text(storage: ObjectStorage, key: str) -> str:
    return bytes(storage.get(key)).decode()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _log_file(version: str, *lines: str) -> bytes:
    return "\n".join([version, *lines]).encode()
