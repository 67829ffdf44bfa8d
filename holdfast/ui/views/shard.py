"""One shard: its versions and snapshots, newest first, as ``holdfast log`` lists them."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.commands.log import describe, note
from holdfast.errors import NotFoundError
from holdfast.health.failures import Failure, read_failures, reports
from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import Headers, list_shard
from holdfast.ui.survey import KINDS, OperatorSurvey

VERSIONS_MAX = 20


@dataclass(frozen=True)
class VersionRow:
    """A stored commit or snapshot."""

    version: str
    kind: str
    stored_ms: int
    size_bytes: int
    note: str
    is_damaged: bool


@dataclass(frozen=True)
class ShardView:
    """What a shard holds."""

    shard: int
    kinds: list[tuple[str, int, int]]  #: Kind of object, how many, and their bytes
    rows: list[VersionRow]  #: The newest `VERSIONS_MAX`
    versions: int  #: How many commits and snapshots there are
    commits_since_snapshot: int  #: All commits, if there is no snapshot
    has_snapshot: bool
    state_bytes: int
    failures: list[Failure]  #: Failures of this shard
    #: The neighbouring shards
    before: int | None
    after: int | None


def shard_view(
    storage: ObjectStorage, executor: Executor, operator: OperatorSurvey, shard: int, committed: int | None = None
) -> ShardView:
    """Return what a shard holds now. Raises `NotFoundError` if the operator has no such shard.

    `committed`: the query's last micro-batch that is known to be committed.

    Cost: one listing of the shard, and one request for each version that is shown.
    """
    if shard >= operator.shard_count:
        raise NotFoundError("the operator has no such shard", shard=shard, shards=operator.shard_count)
    folder = PrefixedStorage(storage, shard_prefix(operator.name, shard))
    listing, headers = list_shard(folder), Headers(folder)
    newest = [*reversed(listing.versions)][:VERSIONS_MAX]
    described = executor.map(partial(describe, headers), newest)
    totals = [(kind, listing.of_kind(kind)) for kind in KINDS]
    return ShardView(
        shard,
        [(kind, len(found), sum(o.size_bytes for o in found)) for kind, found in totals if found],
        [_row(row) for row in described],
        len(listing.versions),
        listing.commits_since_snapshot,
        listing.newest_snapshot is not None,
        int(operator.state[operator.objects.shards == shard].sum()),
        read_failures(storage, reports([listing], committed)),
        shard - 1 if shard else None,
        shard + 1 if shard + 1 < operator.shard_count else None,
    )


def _row(row: dict[str, Any]) -> VersionRow:
    size_bytes = row["size_bytes"] + row.get("stored_bytes", 0)
    return VersionRow(row["version"], row["kind"], row["stored_ms"], size_bytes, note(row), "error" in row)
