"""Failures reported in the state directory: of micro-batches, snapshots and clean-ups; numbers and times in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.errors import CorruptionError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import ShardListing
from holdfast.snapshotter.upkeep.troubles import batch_of, read_trouble

_UNITS = ((24 * 60 * 60_000, "d"), (60 * 60_000, "h"), (60_000, "min"), (1_000, "s"))
SHOWN_MAX = 20


def count(value: float) -> str:
    """Return a whole number with its thousands marked."""
    return f"{value:,.0f}"


def counted(value: float, noun: str) -> str:
    """Return how many of something there are: 1 commit, 2 commits."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def duration(ms: float) -> str:
    """Return a length of time in its largest one or two units: 3 min 20 s."""
    if ms < 1_000:
        return f"{ms:.0f} ms"
    for place, (unit_ms, name) in enumerate(_UNITS):
        if ms >= unit_ms:
            whole, rest = divmod(int(ms), unit_ms)
            finer = f" {rest // below[0]} {below[1]}" if (below := _finer(place)) and rest >= below[0] else ""
            return f"{whole:,} {name}{finer if whole < 10 else ''}"
    raise AssertionError


def _finer(place: int) -> tuple[int, str] | None:
    return _UNITS[place + 1] if place + 1 < len(_UNITS) else None


def ago(at_ms: int, now_ms: int) -> str:
    """Return how long ago a moment was; a future one is now, since clocks differ a little."""
    return "now" if now_ms - at_ms < 1_000 else f"{duration(now_ms - at_ms)} ago"


@dataclass(frozen=True, order=True)
class Report:
    """A report, as a listing shows it."""

    stored_ms: int
    shard: str  #: The shard's prefix
    key: str  #: Below the shard

    @property
    def batch_id(self) -> int | None:
        """The failed micro-batch; None for other failures."""
        return batch_of(self.key)


@dataclass(frozen=True)
class Failure:
    """A failure, as its report describes it."""

    shard: str  #: The shard's prefix
    stored_ms: int  #: When it was stored, by the store's clock
    what: str  #: What fails: ``snapshot``, ``clean-up`` or ``micro-batch 42``
    error: str
    in_a_row: int = 0  #: How often in a row; 0 if the report cannot be read
    host: str = ""

    def sentence(self, now_ms: int) -> str:
        """Return the failure in words."""
        times = f", {self.in_a_row:,} times in a row" if self.in_a_row > 1 else ""
        host = f" on {self.host}" if self.host else ""
        return f"{self.shard}: {self.what} failed{times}, last {ago(self.stored_ms, now_ms)}{host}: {self.error}"


def reports(shards: Iterable[ShardListing], committed: int | None = None) -> list[Report]:
    """Return the reports of failures that persist, the newest first.

    `committed`: the last micro-batch that is known to be committed: what failed before it is over.
    """
    found = [Report(o.modified_ms, shard.prefix, o.key) for shard in shards for o in shard.troubles]
    return sorted(still(found, committed), reverse=True)


def still(found: Iterable[Report], committed: int | None) -> Iterator[Report]:
    """Yield the reports except those of micro-batches that have been committed since."""
    return (one for one in found if one.batch_id is None or committed is None or one.batch_id > committed)


def read_failures(storage: ObjectStorage, told: Iterable[Report]) -> list[Failure]:
    """Read the first `SHOWN_MAX` reports. Raises `UnavailableError` if the storage does not answer."""
    found = []
    for report in [*told][:SHOWN_MAX]:
        try:
            trouble = read_trouble(PrefixedStorage(storage, report.shard), report.key)
        except NotFoundError:  # over since the listing
            continue
        except CorruptionError as exc:
            found.append(Failure(report.shard, report.stored_ms, report.key, str(exc)))
        else:
            what = trouble.what.replace("micro-batch-", "micro-batch ")
            found.append(Failure(report.shard, report.stored_ms, what, trouble.error, trouble.in_a_row, trouble.host))
    return found
