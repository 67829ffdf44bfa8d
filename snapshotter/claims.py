"""The claims on an operator's directory: which run of which query is at work there.

::

    <operator>/operator                                                   whose state it is, for ever
    <operator>/claims/<epoch>.<started ms>.<query id>.<run id>.<id>       who is at work on it

Each executor of a run puts a claim before it writes anything else, and a new one every `RENEW_EVERY_MS` as long as
micro-batches run. What follows from them:

another query     is refused, by name and start of the first one, as long as that one has renewed within `ALIVE_MS`.
                  Afterwards it takes the place of one that has no record, and so no state; the state of another query
                  is never taken over
the same query    begins at once, whatever its runs before have left: a new run takes the next epoch
an older run      of the same query, which still lives, sees the higher epoch when it renews, and stops

Invariants
----------
* **look, write, look again**: of two queries that begin in an empty directory at once, at least one sees the other, and
  withdraws. A claim comes before the record, and the record before the first state.
* **one clock**: ages are differences of times that the store gave; start times only label things.
* **nothing waits**: a claim is no lock. What protects the state is that every object has a name of its own, and that
  Spark accepts the pointers of one run.

Cost: to begin, 2 lists, 1 put, 1 get, and 1 delete where old claims lie about; to renew, 1 list, 1 put, 1 delete.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.errors import ConflictError, FencedError, NotFoundError
from holdfast.snapshotter.operator_record import OperatorRecord, check_operator, find_operator
from holdfast.snapshotter.storage import ObjectStorage

RENEW_EVERY_MS = 2 * 60_000
ALIVE_MS = 5 * 60_000
"""A claim that is older was left by a run that ended, was killed, or had nothing to do."""
KEPT_MS = 24 * 3600_000
"""Claims of earlier runs stay so long: an executor that such a run gets late must see what came after it."""

_NAME = re.compile(r"(\d{8})\.(\d+)\.([^./]+)\.([^./]+)\.[^./]+")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claimant:
    """Who claims.

    Attributes
    ----------
    query_id, run_id : str
        Of Spark.
    query_name : str or None
        As the user named the query.
    host : str
        Where the executor runs.
    """

    query_id: str
    run_id: str
    query_name: str | None
    host: str


@dataclass(frozen=True)
class Held:
    """What a run holds: its place in the order of the query's runs, and when it began to hold it."""

    epoch: int
    started_ms: int


@dataclass(frozen=True)
class _Listed:
    """A claim as a listing shows it."""

    key: str
    epoch: int
    started_ms: int
    query_id: str
    run_id: str
    modified_ms: int


class Claims:
    """The claims on one operator's directory, made by one run.

    Parameters
    ----------
    storage : ObjectStorage
    operator : str
    me : Claimant
    new_id, now_ms : callable, optional
        As in `holdfast.clock`.

    Notes
    -----
    Threads: any; executors of one run need not know of each other.
    """

    def __init__(
        self,
        storage: ObjectStorage,
        operator: str,
        me: Claimant,
        new_id: Callable[[], str] = clock.new_id,
        now_ms: Callable[[], int] = clock.now_ms,
    ) -> None:
        self._storage = storage
        self._operator = operator
        self._me = me
        self._new_id, self._now_ms = new_id, now_ms
        self._folder = f"{operator}/claims/"
        self._where = {"operator": operator, "storage": storage.url}

    def take(self, record: OperatorRecord) -> Held:
        """Claim the directory for this run.

        Parameters
        ----------
        record : OperatorRecord
            Whose state it is to hold; nothing is written where the stored one does not allow it.

        Raises
        ------
        ConflictError
            Another query is at work here, or has state here; or another operator of this query has the name.
        FencedError
            A newer run of this query is at work.
        SchemaMismatchError
            The state was written with other columns or another number of shards.
        """
        listed = self._list()
        stored = find_operator(self._storage, self._operator)
        self._refuse_others(listed, stored)
        if stored is not None:
            check_operator(stored, record, self._storage.url)
        held = self._place(listed)
        self._refuse_newer(listed, held)
        key = self._put(held)
        listed = self._list()
        try:
            self._refuse_others(listed, stored)
        except ConflictError:
            self._storage.delete([key])
            raise
        self._refuse_newer(listed, held)
        self._delete_old(listed)
        return held

    def renew(self, held: Held) -> None:
        """Say that this run is still at work.

        Raises
        ------
        FencedError
            A newer run of this query is at work: stop.
        """
        listed = self._list()
        self._refuse_newer(listed, held)
        self._put(held)
        self._delete_old(listed)

    def _list(self) -> list[_Listed]:
        claims = []
        for info in self._storage.list(self._folder):
            # What another release may have written here is not ours to judge.
            if found := _NAME.fullmatch(info.key.removeprefix(self._folder)):
                epoch, started_ms, query_id, run_id = found.groups()
                claims.append(_Listed(info.key, int(epoch), int(started_ms), query_id, run_id, info.modified_ms))
        return claims

    def _of_others(self, listed: list[_Listed]) -> list[_Listed]:
        return [claim for claim in listed if claim.query_id != self._me.query_id]

    def _place(self, listed: list[_Listed]) -> Held:
        """Return the run's place: the one that another executor has taken for it, or the next."""
        own = [claim for claim in listed if claim.run_id == self._me.run_id]
        if own:
            return Held(max(claim.epoch for claim in own), min(claim.started_ms for claim in own))
        return Held(1 + max((claim.epoch for claim in listed), default=0), self._now_ms())

    def _put(self, held: Held) -> str:
        me = self._me
        key = f"{self._folder}{held.epoch:08d}.{held.started_ms}.{me.query_id}.{me.run_id}.{self._new_id()}"
        header = {"operator": self._operator, **asdict(me), "started_ms": held.started_ms}
        self._storage.put(key, stored_file.encode("claim", header)[0])
        return key

    def _refuse_newer(self, listed: list[_Listed], held: Held) -> None:
        """Raise FencedError if another run of this query comes after this one; run ids decide between equal epochs."""
        runs = [claim for claim in listed if claim.query_id == self._me.query_id]
        newest = max(runs, key=lambda claim: (claim.epoch, claim.run_id), default=None)
        if newest is not None and (newest.epoch, newest.run_id) > (held.epoch, self._me.run_id):
            raise FencedError(
                "a newer run of this query is at work on its state, so this one stops: let one application only use a "
                "checkpoint location",
                **self._where,
                query=self._me.query_id,
                run=self._me.run_id,
                newer_run=newest.run_id,
                newer_started=_time(newest.started_ms),
            )

    def _refuse_others(self, listed: list[_Listed], stored: OperatorRecord | None) -> None:
        """Raise ConflictError if the directory is another query's: it has a record, or a young claim and nobody has."""
        me = self._me
        if stored is not None and stored.query_id == me.query_id:
            return
        owners = [c for c in listed if c.query_id == stored.query_id] if stored else self._of_others(listed)
        newest = max(owners, key=lambda claim: claim.modified_ms, default=None)
        if newest is not None and self._lives(newest):
            raise ConflictError(
                f"another query is at work on this directory, or was within {ALIVE_MS // 60_000} minutes: stop it, "
                "give this operator another name, or set spark.holdfast.checkpoint.dir to a directory of its own",
                **self._where,
                **self._described(newest),
                query=me.query_id,
            )
        if stored is not None:
            raise ConflictError(
                "this directory holds the state of another query, which is not at work now: give the operator another "
                "name, or set spark.holdfast.checkpoint.dir to a directory of its own (delete the old one if that "
                "query is gone for good)",
                **self._where,
                owner=stored.query_id,
                last_seen=newest and _time(newest.modified_ms),
                query=me.query_id,
            )

    def _lives(self, claim: _Listed) -> bool:
        """Tell whether a claim is young, by the store's clock."""
        stamp = f"{self._folder}now.{self._new_id()}"
        self._storage.put(stamp, b"")
        try:
            now_ms = next(i.modified_ms for i in self._storage.list(self._folder) if i.key == stamp)
        finally:
            self._storage.delete([stamp])
        return now_ms - claim.modified_ms < ALIVE_MS

    def _described(self, claim: _Listed) -> dict[str, Any]:
        """Return what a user knows the claim's query by."""
        try:
            header = stored_file.decode(self._storage.get(claim.key), source=claim.key, kind="claim").header
        except NotFoundError:  # renewed since it was listed
            header = {}
        return {
            "owner": claim.query_id,
            "name": header.get("query_name") or "(none)",
            "started": _time(claim.started_ms),
            "host": header.get("host"),
        }

    def _delete_old(self, listed: list[_Listed]) -> None:
        """Delete this run's claims that newer ones have replaced, and those of runs long past."""
        newest_ms = max((claim.modified_ms for claim in listed), default=0)

        def is_old(claim: _Listed) -> bool:
            kept_ms = ALIVE_MS if claim.run_id == self._me.run_id else KEPT_MS
            return newest_ms - claim.modified_ms > kept_ms

        old = [claim.key for claim in listed if is_old(claim)]
        if old:
            self._storage.delete(old)


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
