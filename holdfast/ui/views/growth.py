"""How an operator's state has grown, as its stored snapshots tell.

Each snapshot's manifest says how many bytes the shard's state had. Of many shards some are asked, evenly spaced, and
stand for the others; of each the newest snapshots are.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np

from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.snapshotter.upkeep.state_size import StateSizes
from holdfast.ui.stored_objects import SNAPSHOT, StoredObjects
from holdfast.ui.survey import OperatorSurvey
from holdfast.ui.views.time_line import Curve, curve

SHARDS_MAX = 32
SNAPSHOTS_MAX = 24
POINTS_MAX = 200


@dataclass(frozen=True)
class Growth:
    """The size of an operator's state over time."""

    curve: Curve
    #: Shards that were asked, of how many with snapshots
    sampled: int
    shards: int
    unreadable: int  #: Snapshots that could not be read


class GrowthReader:
    """Reads how operators of one directory have grown.

    `executor`: for requests side by side; `sizes`: of the same directory.

    Notes
    -----
    Threads: any.
    """

    def __init__(self, storage: ObjectStorage, executor: Executor, sizes: StateSizes) -> None:
        self._storage = storage
        self._executor = executor
        self._size_of = sizes.snapshot_bytes

    def growth(self, operator: OperatorSurvey) -> Growth | None:
        """Return how an operator has grown; None if no snapshot tells.

        Raises `InvalidArgumentError` or `UnavailableError` if the storage refuses or does not answer.
        """
        shards, chosen = _chosen(operator.objects)
        found = list(self._executor.map(partial(self._sizes, operator.name), chosen))
        sizes = [(at_ms, place, size) for place, of_shard in enumerate(found) for at_ms, size in of_shard]
        known = sorted((at_ms, place, size) for at_ms, place, size in sizes if size is not None)
        if not known:
            return None
        total = _total(known)
        scale = shards / len({place for _, place, _ in known})
        drawn = total[np.unique(np.linspace(0, len(total) - 1, min(len(total), POINTS_MAX)).astype(int))]
        return Growth(
            curve(drawn[:, 0].astype(np.int64), drawn[:, 1] * scale), len(chosen), shards, len(sizes) - len(known)
        )

    def _sizes(self, operator: str, shard: int) -> list[tuple[int, int | None]]:
        folder = PrefixedStorage(self._storage, shard_prefix(operator, shard))
        snapshots = list_shard(folder).of_kind("snapshot")[-SNAPSHOTS_MAX:]
        return [(stored.modified_ms, self._size_of(folder.prefix, stored)) for stored in snapshots]


def _chosen(objects: StoredObjects) -> tuple[int, list[int]]:
    """Return how many shards have snapshots, and which of them are asked."""
    shards = np.unique(objects.shard[objects.kind == SNAPSHOT])
    places = np.unique(np.linspace(0, len(shards) - 1, min(len(shards), SHARDS_MAX)).astype(int))
    return len(shards), [int(shard) for shard in shards[places]]


def _total(known: list[tuple[int, int, int]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return time and sum of sizes after each snapshot; before its first one a shard counts as it was there."""
    current: dict[int, int] = {}
    for _, place, size in known:
        current.setdefault(place, size)
    total, points = float(sum(current.values())), []
    for at_ms, place, size in known:
        total += size - current[place]
        current[place] = size
        points.append((float(at_ms), total))
    return np.array(points)
