"""The size of shards' state: what a restore of the newest version reads, not all that is stored.

::

    snapshot 20   snapshot 40   commit 41   commit 42
    older: stays    └───── state: parts that its manifest names, and the commits stored since ─────┘

Only manifests know which parts their snapshots are made of. Of many shards some are read, evenly spaced; the others
count by what they store.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import Headers, OperatorListing, ShardListing, StoredObject

SHARDS_READ_MAX = 32
_KNOWN_MAX = 100_000


@dataclass(frozen=True)
class StateSize:
    """The size of an operator's state, as it is stored."""

    of_shards: Mapping[str, int]  #: Bytes by the shard's prefix
    estimated: int  #: How many shards are estimated from the others

    @property
    def state_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(self.of_shards.values())


class StateSizes:
    """Sizes of one directory's operators. Remembers what manifests say: a snapshot never changes.

    `executor`: for requests side by side; must not run the caller.

    Threads: any.
    """

    def __init__(self, storage: ObjectStorage, executor: Executor) -> None:
        self._storage, self._executor = storage, executor
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], int | None] = {}

    def of_operator(self, operator: OperatorListing) -> StateSize:
        """Return the size of an operator's state. Raises `UnavailableError` if the storage does not answer.

        Cost: a small request for each of the first `SHARDS_READ_MAX` snapshots, once each.
        """
        shards = list(operator.shards.values())
        with_snapshot = [shard for shard in shards if shard.newest_snapshot]
        step = max(len(with_snapshot) / SHARDS_READ_MAX, 1)
        chosen = [with_snapshot[int(place * step)] for place in range(min(len(with_snapshot), SHARDS_READ_MAX))]
        sizes = self._executor.map(self._state_bytes, chosen)
        read = {shard.prefix: size for shard, size in zip(chosen, sizes, strict=True) if size is not None}
        stored = sum(shard.stored_bytes for shard in chosen if shard.prefix in read)
        share = sum(read.values()) / stored if stored else 1.0
        found = {}
        for shard in shards:
            if shard.newest_snapshot is None:
                found[shard.prefix] = sum(o.size_bytes for o in shard.of_kind("commit"))
            else:
                found[shard.prefix] = read.get(shard.prefix, int(shard.stored_bytes * share))
        return StateSize(found, len(with_snapshot) - len(read))

    def snapshot_bytes(self, prefix: str, stored: StoredObject) -> int | None:
        """Return the size of the state in a shard's snapshot; None if it is damaged, gone or not readable."""
        key = (prefix, stored.key)
        with self._lock:
            if key in self._known:
                return self._known[key]
        try:
            size = Headers(PrefixedStorage(self._storage, prefix)).manifest(stored).stored_bytes
        except InvalidArgumentError:  # access denied, which may change
            return None
        except (CorruptionError, NotFoundError):  # damaged, or cleaned up since it was listed
            size = None
        with self._lock:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[key] = size
        return size

    def _state_bytes(self, shard: ShardListing) -> int | None:
        newest = shard.newest_snapshot
        assert newest is not None
        in_snapshot = self.snapshot_bytes(shard.prefix, newest)
        later = sum(o.size_bytes for o in shard.of_kind("commit") if o.modified_ms > newest.modified_ms)
        return None if in_snapshot is None else in_snapshot + later
