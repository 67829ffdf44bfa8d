"""The claim on an operator's directory, as it is stored: which run holds the directory, and which ones did before.

::

    <operator>/claims/00000000000000000017      kind "claim", see `Claim`
    <operator>/claims/beside@00001795287600000@<run id>@<application>@<driver>@5f0c1d…      see `Beside`

The claims are a fence (`holdfast.snapshotter.fence`), whose newest object says all. Who decides by them:
`ownership.claims`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

from holdfast.snapshotter.fence import key_of, read_newest
from holdfast.snapshotter.fields import Fields, PositiveInt, Stored, refuse_stray
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND = "claim"
FOLDER = "claims"
ALIVE_MS = 5 * 60_000
"""An older claim belongs to a run that ended, was killed, or was idle."""

_BESIDE = re.compile(r"beside@([0-9]{17})@([^@/]+)@([0-9a-f]{16}|)@([^@/]*)@([0-9a-f]{16})")


@dataclass(frozen=True)
class ClaimingRun(Stored, notice=True):
    """One run of a query, as a claim tells of it."""

    run_id: str
    started_ms: int  #: When it began, as a label
    seen_ms: int  #: When it claimed last, by the store's clock; of a claim's own run, when that was stored
    batch_id: int | None  #: The micro-batch that it was at then; None if unknown
    retained_versions: PositiveInt  #: How many versions back it may return
    #: The processes of its driver, where that is known, and of the executor that claimed last: texts by which those
    #: that see them can tell whether they live
    driver: str
    executor: str


@dataclass(frozen=True)
class Claim(Stored, notice=True):
    """The newest claim."""

    operator: str
    number: PositiveInt  #: Its place in the sequence, from 1
    #: Whose run it is, and how the user has named that query
    query_id: str
    query_name: str | None
    application: str  #: Spark's id of the run's application
    host: str  #: Of the executor that claimed
    runs: tuple[ClaimingRun, ...]  #: Of the query; the last one holds the directory

    def require(self, header: Fields) -> None:
        """Refuse a claim of nobody."""
        if not self.runs:
            header.refuse("names no run")

    @property
    def holder(self) -> ClaimingRun:
        """The run that holds the directory."""
        return self.runs[-1]


@dataclass(frozen=True)
class Beside:
    """A run that works beside the holder of the directory: an object whose name says all."""

    #: When the run began, by the store's clock, or the one before it whose place it has: of several, the first one may
    #: take the number
    begun_ms: int
    run_id: str
    application: str  #: A digest of Spark's id of the run's application; empty where that is not known
    driver: str  #: As of a `ClaimingRun`
    object_id: str  #: Tells each look of the run from the others
    seen_ms: int = 0  #: When it looked last, by the store's clock: when the object was stored

    @classmethod
    def of(cls, info: ObjectInfo) -> Beside | None:
        """Parse a listed object's name; None if it is not one of ours."""
        match = _BESIDE.fullmatch(info.key)
        if match is None:
            return None
        begun, run, application, driver, object_id = match.groups()
        told = cls(int(begun), unquote(run), application, unquote(driver), object_id, info.modified_ms)
        return told if told.key == info.key else None

    @property
    def key(self) -> str:
        """Its key in the folder of claims."""
        run, driver = (quote(text, safe="") for text in (self.run_id, self.driver))
        return f"beside@{self.begun_ms:017d}@{run}@{self.application}@{driver}@{self.object_id}"


def claims_of(storage: ObjectStorage, operator: str) -> PrefixedStorage:
    """Return the folder of an operator's claims."""
    return PrefixedStorage(storage, f"{operator}/{FOLDER}")


def read_claim(folder: PrefixedStorage, info: ObjectInfo) -> Claim:
    """Return a listed claim. Raises `CorruptionError`, `NotFoundError`."""
    source = f"{folder.url}/{info.key}"
    claim = Claim.decode(folder.get(info.key), KIND, source)
    if (f"{claim.operator}/{FOLDER}", key_of(claim.number)) != (folder.prefix, info.key):
        refuse_stray(source, operator=claim.operator, number=claim.number)
    return replace(claim, runs=(*claim.runs[:-1], replace(claim.holder, seen_ms=info.modified_ms)))


def find_claim(storage: ObjectStorage, operator: str) -> Claim | None:
    """Return the newest claim on an operator's directory, or None."""
    return look(storage, operator)[0]


def look(storage: ObjectStorage, operator: str, known: Claim | None = None) -> tuple[Claim | None, Sequence[Beside]]:
    """Return the newest claim on an operator's directory, if there is one, and who works beside its holder.

    `known`: read before: not read again if it is still the newest.

    Cost: 1 list and, unless the claim is known, 1 get.
    """
    folder = claims_of(storage, operator)

    def read(newest: ObjectInfo, infos: Sequence[ObjectInfo]) -> tuple[Claim, Sequence[Beside]]:
        claim = known if known and newest.key == key_of(known.number) else read_claim(folder, newest)
        return claim, [beside for info in infos if (beside := Beside.of(info)) is not None]

    return read_newest(folder, read) or (None, ())


def retained_versions(storage: ObjectStorage, record: OperatorRecord) -> int:
    """Return how many versions back an operator's query may return, as far as storage tells.

    The largest number in the record, which is as old as the state, and of the runs that were at work last.
    """
    claim = find_claim(storage, record.operator)
    runs = claim.runs if claim is not None and claim.query_id == record.query_id else ()
    latest = [run.retained_versions for run in runs if runs[-1].seen_ms - run.seen_ms < ALIVE_MS]
    return max([record.retained_versions, *latest])
