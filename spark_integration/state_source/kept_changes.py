"""Whether the commits that a change feed needs are kept: asked on the driver, before any task runs."""

from __future__ import annotations

from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.stored_reads import ReadShard, StoredRead
from holdfast.snapshotter.upkeep.catalogue import list_state_dir
from holdfast.snapshotter.upkeep.headers import Headers
from holdfast.spark_integration.state_source.query_table import cleaned_up


def require_kept(storage: ObjectStorage, read: StoredRead, version: int) -> None:
    """Check that commits of later versions than one are kept, of all shards.

    Clean-ups delete the oldest ones, so the oldest that is there says how far back they reach.

    Raises
    ------
    NotFoundError
        They are not; says with which micro-batch a feed may begin.
    CorruptionError, UnavailableError
        A commit is damaged, or the storage does not answer.

    Notes
    -----
    Cost: one listing, and a read of one commit for each shard that has none as old as that version.
    """
    missing: list[tuple[int, ReadShard]] = []
    for directory in read.directories:
        listing = list_state_dir(storage, directory).operators[directory]
        for at in read.shards:
            if at.directory == directory and at.pointer.version > version:
                prefix = shard_prefix(directory, at.shard)
                shard = listing.shards.get(prefix)
                commits = shard.of_kind("commit") if shard else []
                if commits and commits[0].version > version:
                    last = Headers(PrefixedStorage(storage, prefix)).commit(commits[0]).lineage.last
                    if last is not None and last.version > version:
                        missing.append((last.version, at))
    if missing:
        first, at = max(missing, key=lambda one: one[0])
        raise cleaned_up(at, first)
