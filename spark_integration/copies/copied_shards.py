"""What a task does for a clone: it copies what a shard's version is made of, byte by byte.

Names of objects say nothing of the checkpoint directory or the query, so they stay as they are. Copied are the commits
and snapshots up to the version, whether it builds on them or not: so the clone can do without a damaged snapshot as
the original can, and knows as much of what was cleaned up. What is later, or an attempt at the version that Spark did
not accept, is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, HoldfastError, NotFoundError, StateLostError
from holdfast.settings import Settings
from holdfast.snapshotter.commit_objects import COMMIT_BYTES_MAX, CommitObjects
from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.snapshots.manifest import read_manifest
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.spark_integration.savepoints.tasks import as_text
from holdfast.spark_integration.shard.task_storage import io_executor, storage_at

#: What a task returns of each shard; it is given what `holdfast.spark_integration.savepoints.saving` has.
COPIED = "operator string, shard int, objects long, error string"
_COPIED = pa.schema([("operator", pa.string()), ("shard", pa.int32()), ("objects", pa.int64()), ("error", pa.string())])


@dataclass(frozen=True)
class ShardCopier:
    """Copies the shards of a task; a function for ``mapInArrow``.

    Attributes
    ----------
    settings : Settings
        Of the session, without credentials; their checkpoint directory is the original's.
    target : str
        URL of the clone's.
    """

    settings: Settings
    target: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield how many objects each shard has.

        Raises
        ------
        UnavailableError
            A storage did not answer; Spark repeats the task. Other errors are returned: repeating would not help.
        """
        for batch in batches:
            for row in batch.to_pylist():
                yield pa.RecordBatch.from_pylist([self._copied(row)], schema=_COPIED)

    def _copied(self, row: Mapping[str, Any]) -> dict[str, Any]:
        outcome = {"operator": row["operator"], "shard": row["shard"], "objects": None, "error": None}
        prefix = shard_prefix(row["directory"], row["shard"])
        assert self.settings.checkpoint_dir is not None
        source, target = (
            PrefixedStorage(storage_at(url, self.settings), prefix)
            for url in (self.settings.checkpoint_dir, self.target)
        )
        carried = None if row["carried"] is None else bytes(row["carried"])
        try:
            return outcome | {"objects": copy_shard(source, target, Pointer(row["version"], row["commit"]), carried)}
        except HoldfastError as exc:
            if exc.retryable:
                raise
            return outcome | {"error": as_text(exc)}


def copy_shard(source: PrefixedStorage, target: PrefixedStorage, pointer: Pointer, carried: bytes | None) -> int:
    """Copy what a version is made of; return how many objects these are.

    Parameters
    ----------
    carried : bytes or None
        The version's commit, if the query's pointer carries it.

    Raises
    ------
    StateLostError
        An object that the version is made of is missing.
    CorruptionError
        Its commit is damaged.
    """
    commits = CommitObjects(source, {})
    commit = commits.fetch_newest(pointer) if carried is None else commits.decode_carried(carried, pointer)
    needed = {entry.key: entry.size_bytes for entry in commit.lineage.chain}
    if carried is None:
        needed[commit.entry.key] = commit.entry.size_bytes
    stored = [one for one in list_shard(source).versions if one.version < pointer.version or one.pointer == pointer]
    copied = _copy_snapshots(source, target, [one.key for one in stored if one.kind == "snapshot"])
    copied |= _copy_all(source, target, [one.key for one in stored if one.kind == "commit"])
    missing = sorted(key for key, size_bytes in needed.items() if copied.get(key) != size_bytes)
    if missing:
        raise StateLostError(
            "an object that the version is made of is missing, or is another one",
            key=f"{source.url}/{missing[0]}",
            version=pointer.version,
        )
    return sum(size_bytes > 0 for size_bytes in copied.values())


def _copy_snapshots(source: PrefixedStorage, target: PrefixedStorage, keys: Sequence[str]) -> dict[str, int]:
    """Copy snapshots, their manifests last; return the sizes of the manifests of those that are whole."""
    manifests: dict[str, tuple[memoryview, dict[str, int]]] = {}
    for key in keys:
        try:
            data = source.get(key)
            manifest, _ = read_manifest(data, source.prefix, f"{source.url}/{key}", key)
        except (NotFoundError, CorruptionError):
            continue
        manifests[key] = data, {part.key: part.size_bytes for file in manifest.files for part in file.parts}
    # Snapshots share parts.
    copied = _copy_all(source, target, sorted({key for _, parts in manifests.values() for key in parts}))
    whole = {key: data for key, (data, parts) in manifests.items() if parts.items() <= copied.items()}
    for key, data in whole.items():
        target.put(key, data)
    return {key: len(data) for key, data in whole.items()}


def _copy_all(source: PrefixedStorage, target: PrefixedStorage, keys: Sequence[str]) -> dict[str, int]:
    return dict(zip(keys, io_executor().map(partial(_copy, source, target), keys), strict=True))


def _copy(source: PrefixedStorage, target: PrefixedStorage, key: str) -> int:
    """Copy an object, and return its size; 0 if it is gone: it was cleaned up, unless the version needs it."""
    try:
        data = source.get(key, COMMIT_BYTES_MAX)
    except NotFoundError:
        return 0
    target.put(key, data)
    return len(data)
