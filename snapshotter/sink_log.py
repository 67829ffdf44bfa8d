"""A sink's log: which query writes to the sink, and which micro-batches are decided.

::

    _sinks/<sink>/00000000000000000017      kind "sink-entry", see `Entry`

    begin     a driver starts: from now on, only this driver may decide
    decide    a micro-batch will become visible; holds the handles of all its partitions
    continue  a query restored from a savepoint replaces the saved query, for good

The log is a fence (`holdfast.snapshotter.fence`). A driver appends after the entry it has read, and fails if another
driver has appended since. So once an entry is stored, older prepared rows that no decision names will never be decided,
and may be aborted.

Invariants
----------
* **once**: a query never decides a micro-batch twice.
* **one query**: only the query of the newest entry writes under the name; a different query needs the user's consent.
* **bounded**: a start reads the newest entry and the decision that it names. The log keeps as many entries as the state
  keeps versions, for inspection; a micro-batch without rows adds none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import xxhash

from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, StateLostError
from holdfast.snapshotter.fence import TypedFence, key_of, number_of
from holdfast.snapshotter.fields import DIGEST, NUMBER_LIMIT, QUERY_ID, Fields, PositiveInt, SignedInt, Stored
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.options import parse_url

#: No operator has this name.
FOLDER = "_sinks"
SINK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
#: Leaves room in the footer of a stored file for the other fields.
_HANDLES_BYTES_MAX = 15 << 20
#: Old entries are deleted in one request, when there are this many.
_PRUNED_EACH = 16
#: How many replaced queries to keep; every start looks for rows of each in the target.
_ENDED_KEPT = 2


def checked_sink(name: object) -> str:
    """Return a sink's name if every storage and target accepts it. Raises `InvalidArgumentError`."""
    if not isinstance(name, str) or not SINK.fullmatch(name):
        raise InvalidArgumentError(
            "invalid sink name: use at most 100 letters, digits, _ and -, beginning with a letter or digit",
            sink=name,
        )
    return name


def plan_of(batch: str, sources: Iterable[tuple[str, str]]) -> str:
    """Return a digest that distinguishes a micro-batch's plan from other plans with the same number.

    Equal offsets do not mean equal results: a later plan may fire more timers, and a file source's offsets may refer
    to different files. So the digest covers the sources and the time that Spark logged in `batch`.
    """
    facts = [sorted(sources), json.loads(batch).get("batchTimestampMs")]
    return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())


def place_digest(location: str) -> str:
    """Return a digest that identifies a checkpoint location; empty for an invalid URL."""
    try:
        return xxhash.xxh3_128_hexdigest(str(parse_url(location).for_spark).rstrip("/").encode())
    except InvalidArgumentError:
        return ""


@dataclass(frozen=True)
class Entry(Stored, kind="sink-entry"):
    """One entry of a sink's log: the start of a driver's run, or a decision."""

    sink: Annotated[str, SINK]
    number: PositiveInt  #: Position in the log, from 1
    query_id: Annotated[str, QUERY_ID]
    #: A random id of the run, so that no two drivers append the same bytes
    driver: Annotated[str, re.compile("[0-9a-f]{1,64}")]
    #: Number of the newest decision, this entry included: the next start makes sure that it is committed. 0: none
    decided: int = 0
    ending: tuple[str, ...] = ()  #: Queries that this query has replaced and that may have left prepared rows
    batch_id: int | None = None  #: The decided micro-batch; None for a start
    #: The query's previous decided micro-batch; -1 if there is none
    before: Annotated[int, range(-1, NUMBER_LIMIT)] = -1
    rows: int = 0  #: Number of rows in all partitions
    #: What the workers prepared, by partition, in the sink's own format
    handles: tuple[Mapping[str, Any], ...] = ()
    #: The driver's process, with a digest of its machine; empty if a different process may continue the run
    process: Annotated[str, re.compile(r"([0-9a-f]{16}\.[0-9]{1,9}-[0-9]{1,18})?")] = ""
    at_ms: int = 0  #: When it was appended, by the driver's clock
    #: `plan_of` the micro-batch in `batch_id` or `stands_for`; empty if unknown
    plan: Annotated[str, re.compile(rf"({DIGEST.pattern})?")] = ""
    #: Until a query that took over the sink decides: which of its micro-batches the last decision already covers, so
    #: that its rows are dropped; -1 if none. None for any other query.
    stands_for: SignedInt | None = None
    #: The last replaced queries, newest last: their drivers may still prepare rows, but not decide
    ended: tuple[str, ...] = ()
    location: Annotated[str, re.compile(rf"({DIGEST.pattern})?")] = ""  #: See `place_digest`; empty if unknown

    def require(self, header: Fields) -> None:
        if self.decided > self.number:
            header.refuse_value("decided", self.decided)
        is_odd = self.is_decision != (self.decided == self.number) or (self.is_decision and self.continues)
        if is_odd or not all(map(QUERY_ID.fullmatch, (*self.ending, *self.ended))):
            header.refuse("contradicts itself", decided=self.decided, batch=self.batch_id)

    def is_of_plan(self, plan: str) -> bool:
        """Return whether the entry matches a plan; True if either plan is unknown."""
        return not (plan and self.plan) or plan == self.plan

    @property
    def is_decision(self) -> bool:
        return self.batch_id is not None

    @property
    def continues(self) -> bool:
        """Whether the query has taken over the sink and decided nothing yet."""
        return self.stands_for is not None

    def ended_before(self, query_id: str, ending: Collection[str]) -> tuple[str, ...]:
        """Return `ended` for the next entry: replaced queries that are not in `ending`."""
        found = dict.fromkeys((*self.ended, *self.ending))
        return tuple(one for one in found if one != query_id and one not in ending)[-_ENDED_KEPT:]

    def newest_batch(self, decision: Entry | None, query_id: str) -> int | None:
        """Return a query's newest decided micro-batch: -1 for none, None if the sink belongs to a different query."""
        if decision is not None and decision.query_id == query_id:
            return decision.batch_id
        if self.query_id != query_id:
            return None
        return -1 if self.stands_for is None else self.stands_for


class SinkLog:
    """A sink's log in a state directory. Threads: the driver's only."""

    def __init__(self, storage: ObjectStorage, sink: str) -> None:
        self.sink = sink
        self._fence = TypedFence(storage, f"{FOLDER}/{sink}", Entry, sink=sink)
        self._kept: list[int] = []

    def newest(self) -> Entry | None:
        """Return the newest entry; None if the log is empty."""
        return self._fence.newest_value()[1]

    def latest(self) -> tuple[Entry | None, Entry | None]:
        """Return the newest entry and decision, while others may append. Raises `StateLostError` if that is deleted."""
        entry = self.newest()
        while True:
            try:
                return entry, self.decision(entry)
            except NotFoundError as exc:  # pruned since the entry was read, or lost
                found, entry = entry, self.newest()
                if entry == found:
                    raise StateLostError(
                        "the sink's last decision is missing: restore the log", sink=self.sink, storage=self._fence.url
                    ) from exc

    def decision(self, entry: Entry | None) -> Entry | None:
        """Return the newest decision as of an entry; None if there is none."""
        if entry is None or not entry.decided:
            return None
        return entry if entry.decided == entry.number else self.read(entry.decided)

    def names(self, query_id: str, restored_from: str | None) -> bool:
        """Return whether a query may write to a damaged log, according to the newest intact entry and later ones.

        Two later entries without a query id may be any query's start and decision. One may be the start of a restored
        query, which replaces the last query, or a query restored from the same one. Ended queries cannot write.
        """
        oldest = nameless = 0
        may_continue = False
        for number in reversed(self._fence.numbers()):
            if number < oldest:
                break
            with suppress(CorruptionError, NotFoundError):
                data = bytes(self._fence.read(number))
                before_ended = data.partition(b'"ended"')[0]
                if query_id.encode() in before_ended:
                    return True
                nameless += b'"query_id"' not in before_ended
                if not oldest:
                    oldest = self._fence.decode(number, data).decided or number
                    may_continue = nameless > 0 and restored_from is not None and restored_from.encode() in data
        return nameless > 1 or may_continue

    def read(self, number: int) -> Entry:
        """Return an entry. Raises `CorruptionError`, `NotFoundError`."""
        return self._fence.decode(number, self._fence.read(number))

    def append(self, entry: Entry) -> None:
        """Store an entry after the newest one that was read; once a decision is stored, its rows will become visible.

        After `FencedError` or `InvalidArgumentError` the entry does not count; after `ConflictError` it may count, and
        later drivers act on it; after `UnavailableError` it is unknown whether it counts.
        """
        size_bytes = len(json.dumps(entry.to_json()["handles"]))
        if size_bytes > _HANDLES_BYTES_MAX:
            raise InvalidArgumentError(
                "the sink's handles are too large to store: write fewer partitions, with coalesce",
                sink=self.sink,
                handles=len(entry.handles),
                size_bytes=size_bytes,
                limit_bytes=_HANDLES_BYTES_MAX,
            )
        self._kept = self._fence.take(entry.number, entry.encode())

    def prune(self, entry: Entry, retained: int) -> None:
        """Delete entries older than the newest `retained`, in batches. Raises `UnavailableError`."""
        surplus = len(self._kept) - max(2, retained)
        if surplus >= _PRUNED_EACH:
            needed = {entry.number, entry.decided}
            self._fence.delete([number for number in self._kept[:surplus] if number not in needed])


@dataclass(frozen=True)
class StoredSink:
    """A sink's log, as found in a listing."""

    sink: str
    numbers: tuple[int, ...]  #: Numbers of its entries, in order
    size_bytes: int
    modified_ms: int  #: When the newest object was stored, by the store's clock, in ms since 1970


@dataclass(frozen=True)
class SinkState:
    """A sink's writer and newest decision; None if absent or unreadable."""

    stored: StoredSink
    query_id: str | None = None
    decision: Entry | None = None
    error: str = ""

    @classmethod
    def read(cls, storage: ObjectStorage, stored: StoredSink) -> SinkState:
        """Read the newest entry and decision of a sink's log, or report its damage."""
        log = SinkLog(storage, stored.sink)
        try:
            newest = log.read(stored.numbers[-1])
            return cls(stored, newest.query_id, log.decision(newest))
        except NotFoundError:  # deleted since it was listed
            return cls(stored)
        except CorruptionError as exc:
            return cls(stored, error=str(exc))


def stored_sinks(infos: Iterable[ObjectInfo]) -> tuple[StoredSink, ...]:
    """Return the sinks in a state directory's listing, by name."""
    found: dict[str, list[tuple[int, ObjectInfo]]] = {}
    for info in infos:
        parsed = parse_key(info.key)
        if parsed is not None:
            found.setdefault(parsed[0], []).append((parsed[1], info))
    return tuple(
        StoredSink(
            sink,
            tuple(sorted(number for number, _ in objects)),
            sum(info.size_bytes for _, info in objects),
            max(info.modified_ms for _, info in objects),
        )
        for sink, objects in sorted(found.items())
    )


def parse_key(key: str) -> tuple[str, int] | None:
    """Return sink and number of an entry's key in the state directory; None for other keys."""
    parts = key.split("/")
    if len(parts) != 3 or parts[0] != FOLDER or not SINK.fullmatch(parts[1]):
        return None
    number = number_of(parts[2])
    return None if number is None else (parts[1], number)


def damages(storage: ObjectStorage, stored: StoredSink) -> Sequence[tuple[str, str]]:
    """Read all entries of a sink; return the key and the problem of each damaged entry."""
    log, found = SinkLog(storage, stored.sink), []
    for number in stored.numbers:
        try:
            log.read(number)
        except CorruptionError as exc:
            found.append((f"{FOLDER}/{stored.sink}/{key_of(number)}", str(exc)))
        except NotFoundError:  # pruned since the listing
            continue
    return found
