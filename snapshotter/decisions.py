"""What queries have decided to show through a sink: the middle of a two-phase commit, and the only part that counts.

::

    _sinks/<sink>/<query id>/begun            the query writes under this name
    _sinks/<sink>/<query id>/decided-17       micro-batch 17 will be visible: kind "decision", the handles of its parts

A decision is stored after everything that it names was prepared, and before any of it is visible. Whoever finds it
commits the handles that it holds, however often; what was prepared and stands in no decision is aborted.

Invariants
----------
* **once**: a micro-batch is decided once: a query repeats none that was decided.
* **one query**: two queries do not use one name: each puts ``begun``, looks who else did, and withdraws if another has.
* **bounded**: the newest decision is all that a start needs. As many are kept as versions of the state are, for people
  to look at; a micro-batch without rows has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.backends import stored_file
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND = "decision"
#: No operator has this name.
FOLDER = "_sinks"
SINK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
QUERY_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_BEGUN = "begun"
_DECIDED = re.compile(r"decided-(0|[1-9][0-9]{0,17})")
#: Leaves room in the footer of a stored file for the other fields.
_HANDLES_BYTES_MAX = 15 << 20
#: Old decisions are deleted so many at a time: one request for all.
_PRUNED_EACH = 16


def checked_sink(name: object) -> str:
    """Return a sink's name if every storage and target can hold it.

    Raises
    ------
    InvalidArgumentError
        It is no such name.
    """
    if not isinstance(name, str) or not SINK.fullmatch(name):
        raise InvalidArgumentError(
            "a sink's name has letters, digits, _ and -, begins with a letter or digit and has at most 100 characters",
            sink=name,
        )
    return name


@dataclass(frozen=True)
class Decision:
    """A micro-batch that will be visible.

    Attributes
    ----------
    sink, query_id : str
    batch_id : int
    rows : int
        Of all partitions.
    handles : tuple of mapping
        Of what the workers prepared, by partition; what they hold is the sink's own.
    """

    sink: str
    query_id: str
    batch_id: int
    rows: int
    handles: tuple[Mapping[str, Any], ...]

    FIELDS = ("sink", "query_id", "batch_id", "rows", "handles")


class Decisions:
    """The decisions of one query about one sink.

    Parameters
    ----------
    storage : ObjectStorage
        The state directory.
    sink, query_id : str

    Notes
    -----
    Threads: one, the driver's.
    """

    def __init__(self, storage: ObjectStorage, sink: str, query_id: str) -> None:
        self.sink, self.query_id = sink, query_id
        self._all = PrefixedStorage(storage, f"{FOLDER}/{sink}")
        self._folder = PrefixedStorage(storage, f"{FOLDER}/{sink}/{query_id}")
        self._kept: list[int] = []

    def queries(self) -> set[str]:
        """Return the ids of all queries that write, or wrote, under the sink's name; what others put there is none."""
        parsed = (parse_key(f"{self._all.prefix}/{info.key}") for info in self._all.list(""))
        return {query_id for _, query_id, _ in filter(None, parsed)}

    def begin(self) -> None:
        """Say that this query writes under the name."""
        self._folder.put(_BEGUN, b"")

    def withdraw(self) -> None:
        """Take that back; there are no decisions."""
        self._folder.delete([_BEGUN])

    def batches(self) -> list[int]:
        """Return the micro-batches whose decisions are stored, oldest first."""
        self._kept = _numbers(info.key for info in self._folder.list(""))
        return list(self._kept)

    def read(self, batch_id: int) -> Decision:
        """Return a decision.

        Raises
        ------
        CorruptionError
            It is damaged, or belongs elsewhere.
        NotFoundError
            There is none.
        """
        key = f"decided-{batch_id}"
        source = f"{self._folder.url}/{key}"
        stored = stored_file.decode(self._folder.get(key), source=source, kind=KIND, plain_bytes_max=0)
        fields = Fields(stored.header, source, *Decision.FIELDS)
        decision = Decision(
            fields.text("sink", SINK),
            fields.text("query_id", QUERY_ID),
            fields.number("batch_id"),
            fields.number("rows"),
            tuple(fields.objects("handles")),
        )
        if (decision.sink, decision.query_id, decision.batch_id) != (self.sink, self.query_id, batch_id):
            fields.refuse("belongs elsewhere: it was moved or copied", batch=decision.batch_id)
        return decision

    def put(self, decision: Decision) -> None:
        """Store a decision: from here on its micro-batch will be visible.

        Raises
        ------
        ConflictError
            Another driver has decided the same micro-batch.
        InvalidArgumentError
            The handles are too large.
        UnavailableError
            The storage did not answer; whether it is stored is unknown.
        """
        header = {name: getattr(decision, name) for name in Decision.FIELDS} | {
            "handles": [dict(handle) for handle in decision.handles]
        }
        size_bytes = len(json.dumps(header["handles"]))
        if size_bytes > _HANDLES_BYTES_MAX:
            raise InvalidArgumentError(
                "the sink's handles are too large to be stored: write fewer partitions, with coalesce",
                sink=self.sink,
                handles=len(decision.handles),
                size_bytes=size_bytes,
                limit_bytes=_HANDLES_BYTES_MAX,
            )
        self._folder.put_if_absent(f"decided-{decision.batch_id}", stored_file.encode(KIND, header)[0])
        self._kept.append(decision.batch_id)

    def prune(self, retained: int) -> None:
        """Delete what is older than the newest `retained` decisions, now and then.

        Raises
        ------
        UnavailableError
            Some are left for the next time.
        """
        surplus = len(self._kept) - max(2, retained)
        if surplus >= _PRUNED_EACH:
            self._folder.delete([f"decided-{batch_id}" for batch_id in self._kept[:surplus]])
            del self._kept[:surplus]

    def delete(self) -> None:
        """Delete all that is stored of the query under this name: another one has taken its place."""
        # The newest decision goes last, so that a killed delete is begun again by it: of earlier ones a target may
        # remember nothing, and without any what has just been shown may look like a leftover.
        keys = [info.key for info in self._folder.list("")]
        last = [f"decided-{batch_id}" for batch_id in _numbers(keys)[-1:]]
        self._folder.delete([key for key in keys if key not in last])
        self._folder.delete(last)


def _numbers(keys: Iterable[str]) -> list[int]:
    """Return the micro-batches that keys of decisions name, oldest first."""
    return sorted(int(found[1]) for key in keys if (found := _DECIDED.fullmatch(key)))


@dataclass(frozen=True)
class StoredSink:
    """The decisions of one query under one sink's name, as a listing showed them.

    Attributes
    ----------
    sink, query_id : str
    decided : tuple of int
        Micro-batches, oldest first.
    size_bytes : int
    modified_ms : int
        When the newest object was stored, by the store's clock, in ms since 1970.
    """

    sink: str
    query_id: str
    decided: tuple[int, ...]
    size_bytes: int
    modified_ms: int


def stored_sinks(infos: Iterable[ObjectInfo]) -> tuple[StoredSink, ...]:
    """Return what a listing of a state directory shows of sinks, by name and query."""
    found: dict[tuple[str, str], list[tuple[int | None, ObjectInfo]]] = {}
    for info in infos:
        parsed = parse_key(info.key)
        if parsed is not None:
            sink, query_id, batch_id = parsed
            found.setdefault((sink, query_id), []).append((batch_id, info))
    return tuple(
        StoredSink(
            sink,
            query_id,
            tuple(sorted(batch_id for batch_id, _ in objects if batch_id is not None)),
            sum(info.size_bytes for _, info in objects),
            max(info.modified_ms for _, info in objects),
        )
        for (sink, query_id), objects in sorted(found.items())
    )


def parse_key(key: str) -> tuple[str, str, int | None] | None:
    """Return sink, query and micro-batch of an object's key below the state directory; None if it is not ours.

    The micro-batch is None for what says only that the query has begun.
    """
    parts = key.split("/")
    if len(parts) != 4 or parts[0] != FOLDER or not SINK.fullmatch(parts[1]) or not QUERY_ID.fullmatch(parts[2]):
        return None
    decided = _DECIDED.fullmatch(parts[3])
    if decided is None and parts[3] != _BEGUN:
        return None
    return parts[1], parts[2], int(decided[1]) if decided else None


def damages(storage: ObjectStorage, stored: StoredSink) -> Sequence[tuple[str, str]]:
    """Read all decisions of a query; return key and problem of each that is damaged."""
    decisions, found = Decisions(storage, stored.sink, stored.query_id), []
    for batch_id in stored.decided:
        try:
            decisions.read(batch_id)
        except CorruptionError as exc:
            found.append((f"{FOLDER}/{stored.sink}/{stored.query_id}/decided-{batch_id}", str(exc)))
        except NotFoundError:  # pruned since the listing
            continue
    return found
