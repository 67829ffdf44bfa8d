"""Who claims an operator's directory. A claim's name holds all that decisions need, so one listing is enough."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import fields as fields_of

import xxhash

from holdfast.backends import stored_file
from holdfast.errors import NotFoundError
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

ALIVE_MS = 5 * 60_000
"""An older claim belongs to a run that ended, was killed, or was idle."""

KIND = "claim"
EPOCH_MAX = 10**8 - 1
_NAME = re.compile(
    r"([0-9]{8})\.([0-9]{1,18})\.([^./]+)\.([^./]+)\.([0-9]{1,18}|unknown)\.([0-9a-f]{16})\.([0-9a-f]{16})\.([0-9]{1,9}-[0-9]{1,18})\.[^./]+"
)
_STAMP = re.compile(r"now\.[^./]+")


@dataclass(frozen=True)
class Claimant:
    """Who claims.

    Attributes
    ----------
    query_id, run_id : str
        Of Spark.
    query_name : str or None
        As the user named the query.
    application : str
        Spark's id of the application.
    host : str
        Where the executor runs.
    machine : str
        Identifies the machine or container that `process` runs on.
    process : str
        The executor's: number and start, on that machine.
    batch_id : int or None
        The micro-batch that the run is at; None if unknown.
    retained_versions : int
        How many versions back the query may return to.
    """

    query_id: str
    run_id: str
    query_name: str | None
    application: str
    host: str
    machine: str
    process: str
    batch_id: int | None
    retained_versions: int


_FIELDS = ("operator", *(field.name for field in fields_of(Claimant)), "started_ms")


@dataclass(frozen=True)
class ListedClaim:
    """A claim as a listing shows it.

    Attributes
    ----------
    key : str
    epoch : int
        Orders the query's runs; 0 beside another run that may live.
    started_ms : int
    query_id, run_id : str
    batch_id : int or None
        The micro-batch that the run was at; None if unknown.
    application, machine : str
        Digests: of Spark's application, and of what tells processes of one machine from those of another.
    process : str
        Of the executor, on that machine.
    modified_ms : int
        By the store's clock.
    """

    key: str
    epoch: int
    started_ms: int
    query_id: str
    run_id: str
    batch_id: int | None
    application: str
    machine: str
    process: str
    modified_ms: int

    def is_further_than(self, batch_id: int | None) -> bool:
        """Whether the run was at a later micro-batch; false if either is unknown."""
        return self.batch_id is not None and batch_id is not None and self.batch_id > batch_id


def claims_of(storage: ObjectStorage, operator: str) -> PrefixedStorage:
    """Return the folder of an operator's claims."""
    return PrefixedStorage(storage, f"{operator}/claims")


def claim_name(me: Claimant, epoch: int, started_ms: int) -> str:
    """Return the name of a claim, without what makes it unique."""
    place = f"{digest(me.application)}.{digest(me.machine)}.{me.process}"
    at = "unknown" if me.batch_id is None else me.batch_id
    return f"{epoch:08d}.{started_ms}.{me.query_id}.{me.run_id}.{at}.{place}"


def digest(text: str) -> str:
    """Return what stands for an application or a machine in the name of a claim."""
    return xxhash.xxh3_64_hexdigest(text.encode())


def list_claims(folder: PrefixedStorage) -> tuple[list[ListedClaim], dict[str, int]]:
    """Return the claims in a folder, and by key when each stamp, written to learn the store's time, was stored."""
    return claims_among(folder.list(""))


def claims_among(infos: Iterable[ObjectInfo]) -> tuple[list[ListedClaim], dict[str, int]]:
    """Return the same of a folder that was listed, with keys below it."""
    claims, stamps = [], {}
    for info in infos:
        # What another release may have written here is not ours to judge.
        if found := _NAME.fullmatch(info.key):
            claims.append(_parsed(info, found))
        elif _STAMP.fullmatch(info.key):
            stamps[info.key] = info.modified_ms
    return claims, stamps


def _parsed(info: ObjectInfo, found: re.Match[str]) -> ListedClaim:
    epoch, started_ms, query_id, run_id, batch_id, application, machine, process = found.groups()
    return ListedClaim(
        key=info.key,
        epoch=int(epoch),
        started_ms=int(started_ms),
        query_id=query_id,
        run_id=run_id,
        batch_id=None if batch_id == "unknown" else int(batch_id),
        application=application,
        machine=machine,
        process=process,
        modified_ms=info.modified_ms,
    )


def read_claim(folder: PrefixedStorage, claim: ListedClaim) -> Claimant | None:
    """Return who made a claim; None if it was deleted after the listing.

    Raises
    ------
    CorruptionError
        It is damaged, of a newer format, or contradicts its name.
    """
    source = f"{folder.url}/{claim.key}"
    try:
        stored = stored_file.decode(folder.get(claim.key), source=source, kind=KIND, plain_bytes_max=0)
    except NotFoundError:
        return None
    fields = Fields.of_notice(stored.header, source, *_FIELDS)
    fields.text("operator"), fields.number("started_ms")
    claimant = Claimant(
        fields.text("query_id"),
        fields.text("run_id"),
        fields.text_or_none("query_name"),
        fields.text("application"),
        fields.text("host"),
        fields.text("machine"),
        fields.text("process"),
        fields.number_or_none("batch_id"),
        fields.number("retained_versions", 1),
    )
    if (claimant.query_id, claimant.run_id) != (claim.query_id, claim.run_id):
        fields.refuse("belongs elsewhere: it was moved or copied", query=claimant.query_id, run=claimant.run_id)
    return claimant


def latest_claims(folder: PrefixedStorage, query_id: str) -> list[ListedClaim]:
    """Return the newest claim of each of a query's latest runs."""
    claims = sorted((c for c in list_claims(folder)[0] if c.query_id == query_id), key=lambda c: c.modified_ms)
    newest = {c.run_id: c for c in claims if claims[-1].modified_ms - c.modified_ms < ALIVE_MS}
    return list(newest.values())


def retained_versions(storage: ObjectStorage, record: OperatorRecord) -> int:
    """Return how many versions back an operator's query may return, as far as storage tells.

    The largest number in the record, which is as old as the state, and in the claims of the latest runs.

    Raises
    ------
    CorruptionError
        A claim cannot be read: it may say a larger number.
    """
    folder = claims_of(storage, record.operator)
    claimants = [read_claim(folder, claim) for claim in latest_claims(folder, record.query_id)]
    return max([record.retained_versions, *(one.retained_versions for one in claimants if one is not None)])
