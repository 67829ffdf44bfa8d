"""What ``holdfast gc`` and ``holdfast verify`` would report, a few shards at a time; deletes and writes nothing.

A page covers at most `SHARDS_MAX` shards. Verifying a shard reads all of it, so a page reads at most `READ_BYTES_MAX`,
for about `VERIFY_MS`, and leaves larger and slower shards to the command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np

from holdfast import clock
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.ownership.claims import retained_versions
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, shard_prefix
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import Headers, list_shard
from holdfast.snapshotter.upkeep.retention import RETAINED_VERSIONS, History, needed_in_storage, plan
from holdfast.snapshotter.upkeep.verification import Damage, verify_shard
from holdfast.ui.survey import OperatorSurvey

SHARDS_MAX = 32
READ_BYTES_MAX = 256 << 20
VERIFY_MS = 8_000
#: The default grace period of gc: 24 hours.
GC_GRACE_MS = 24 * 60 * 60_000
_OBJECTS_SHOWN = 50
_IN_TIME = f"within the page's {VERIFY_MS // 1000} s"


@dataclass(frozen=True)
class Leftover:
    """An object that gc would delete."""

    key: str
    size_bytes: int
    reason: str


@dataclass(frozen=True)
class CheckedShard:
    shard: int
    objects: int = 0  #: Objects to delete, or objects read
    size_bytes: int = 0  #: Their bytes
    kept: int = 0  #: Objects that gc would keep; or restorable versions, if the shard was verified
    problem: str = ""  #: Why the shard was not examined; empty if it was


@dataclass(frozen=True)
class Upkeep:
    """The result of a command for some shards."""

    check: str
    rows: list[CheckedShard]
    leftovers: list[Leftover]  #: The first objects that gc would delete
    damages: list[Damage]  #: The first findings
    damage_count: int
    retained: int  #: Versions before the newest that the query may return to
    #: First shards of the previous and the next page
    before: int | None
    after: int | None
    is_cut: bool  #: Whether the page ran out of time before its last shard

    @property
    def objects(self) -> int:
        return sum(row.objects for row in self.rows)

    @property
    def size_bytes(self) -> int:
        return sum(row.size_bytes for row in self.rows)

    @property
    def read_bytes(self) -> int:
        """Bytes of the shards that were read."""
        return sum(row.size_bytes for row in self.rows if not row.problem)

    @property
    def problems(self) -> int:
        """Shards that could not be examined."""
        return sum(bool(row.problem) for row in self.rows)


def upkeep(
    storage: ObjectStorage,
    executor: Executor,
    operator: OperatorSurvey,
    check: str,
    first: int,
    now_ms: int,
    monotonic_ms: Callable[[], int] = clock.monotonic_ms,
) -> Upkeep:
    """Return the result of a command for shards, starting at `first`; `now_ms` determines the age of objects."""
    record = operator.signs.record
    if isinstance(record, HoldfastError):
        raise record
    retained = _retained(storage, record)
    objects = operator.objects
    begin = int(np.searchsorted(objects.shards, first))
    chosen = _shards_that_fit(objects.stored_bytes[begin : begin + SHARDS_MAX]) if check == "verify" else SHARDS_MAX
    shards = [int(shard) for shard in objects.shards[begin : begin + chosen]]
    folders = [PrefixedStorage(storage, shard_prefix(operator.name, shard)) for shard in shards]
    leftovers: list[Leftover] = []
    damages: list[Damage] = []
    if check == "gc":
        planned = list(executor.map(partial(_plan, retained=retained, now_ms=now_ms), shards, folders))
        rows = [row for row, _ in planned]
        leftovers = [leftover for _, found in planned for leftover in found][:_OBJECTS_SHOWN]
    else:
        # One shard after another: each shard's objects are read in parallel.
        verified = _verified(executor, retained, dict(zip(shards, folders, strict=True)), monotonic_ms)
        rows = [row for row, _ in verified]
        damages = [damage for _, found in verified for damage in found]
    end = begin + len(rows)
    after = int(objects.shards[end]) if end < len(objects.shards) else None
    before = int(objects.shards[max(begin - SHARDS_MAX, 0)]) if begin and len(objects.shards) else None
    return Upkeep(
        check, rows, leftovers, damages[:_OBJECTS_SHOWN], len(damages), retained, before, after, len(rows) < len(shards)
    )


def _retained(storage: ObjectStorage, record: OperatorRecord) -> int:
    try:
        return retained_versions(storage, record)
    except CorruptionError:  # damaged claim, which verify reports
        return RETAINED_VERSIONS


def _shards_that_fit(sizes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Return how many of the next shards a page covers; shards that are too large are not read."""
    read = np.cumsum(np.where(sizes > READ_BYTES_MAX, 0, sizes))
    return max(int(np.searchsorted(read, READ_BYTES_MAX, side="right")), 1)


def _plan(shard: int, folder: PrefixedStorage, *, retained: int, now_ms: int) -> tuple[CheckedShard, list[Leftover]]:
    try:
        listing = list_shard(folder)
        history = History(listing, Headers(folder))
        planned = plan(history, needed_in_storage(retained, history), now_ms, GC_GRACE_MS)
    except (InvalidArgumentError, UnavailableError):
        raise
    except HoldfastError as exc:
        return CheckedShard(shard, problem=str(exc)), []
    leftovers = [
        Leftover(f"{folder.prefix}/{key}", listing.objects[key].size_bytes, why)
        for key, why in list(planned.delete.items())[:_OBJECTS_SHOWN]
    ]
    return CheckedShard(shard, len(planned.delete), planned.delete_bytes, len(planned.keep)), leftovers


def _verified(
    executor: Executor, retained: int, folders: Mapping[int, PrefixedStorage], monotonic_ms: Callable[[], int]
) -> list[tuple[CheckedShard, tuple[Damage, ...]]]:
    """Return the findings for as many shards as there is time for, at least one."""
    until_ms = monotonic_ms() + VERIFY_MS
    found: list[tuple[CheckedShard, tuple[Damage, ...]]] = []

    def require_time(_size_bytes: int) -> None:
        if monotonic_ms() >= until_ms:
            raise TimeoutError

    for shard, folder in folders.items():
        try:
            if found:
                require_time(0)
            found.append(_verify(executor, retained, shard, folder, require_time))
        except TimeoutError:
            if not found:  # otherwise the next page starts with it
                found.append((CheckedShard(shard, problem=f"not read {_IN_TIME}: holdfast verify reads it"), ()))
            break
    return found


def _verify(
    executor: Executor, retained: int, shard: int, folder: PrefixedStorage, require_time: Callable[[int], None]
) -> tuple[CheckedShard, tuple[Damage, ...]]:
    size_bytes = sum(o.size_bytes for o in list_shard(folder).objects.values())
    if size_bytes > READ_BYTES_MAX:
        return CheckedShard(shard, 0, size_bytes, problem="too large for a page: holdfast verify reads it"), ()
    try:
        report = verify_shard(folder, executor, retained, require_time)
    except NotFoundError as exc:  # it is being deleted
        return CheckedShard(shard, problem=str(exc)), ()
    return CheckedShard(shard, report.objects, report.size_bytes, report.versions), report.damages
