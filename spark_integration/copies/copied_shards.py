"""What a task does for a clone: it copies what a shard's version is made of, byte by byte.

Names of objects say nothing of the state directory or the query, so they stay as they are. Copied are the commits
and snapshots up to the version, whether it builds on them or not: so the clone can do without a damaged snapshot as
the original can, and knows as much of what was cleaned up. What the version builds on is checked, byte by byte, and so
are the parts of all snapshots: one with a damaged part is left out. What is later, or an attempt at the version that
Spark did not accept, is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, NotFoundError, StateLostError
from holdfast.snapshotter.commit_objects import COMMIT_BYTES_MAX, CommitObjects
from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.snapshots.manifest import read_manifest
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.spark_integration.savepoints.tasks import ShardTask
from holdfast.spark_integration.shard.task_storage import io_executor

#: What a task returns of each shard; it is given what `holdfast.spark_integration.savepoints.saving` has.
COPIED = "operator string, shard int, objects long, error string"
_COPIED = pa.schema([("operator", pa.string()), ("shard", pa.int32()), ("objects", pa.int64()), ("error", pa.string())])


@dataclass(frozen=True)
class ShardCopier(ShardTask):
    """Copies shards from the original's state directory to that of the clone; see `ShardTask`."""

    RETURNED: ClassVar[pa.Schema] = _COPIED

    def work(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[dict[str, Any]]:
        """Yield how many objects a shard has."""
        prefix = shard_prefix(row["directory"], row["shard"])
        assert self.settings.state_dir is not None
        source, target = (PrefixedStorage(opened(url), prefix) for url in (self.settings.state_dir, self.target))
        carried = None if row["carried"] is None else bytes(row["carried"])
        objects = copy_shard(source, target, Pointer(row["version"], row["commit"]), carried)
        yield {"operator": row["operator"], "shard": row["shard"], "objects": objects, "error": None}


def copy_shard(source: PrefixedStorage, target: PrefixedStorage, pointer: Pointer, carried: bytes | None) -> int:
    """Copy what a version is made of; return how many commits and snapshots these are.

    Parameters
    ----------
    carried : bytes or None
        The version's commit, if the query's pointer carries it.

    Raises
    ------
    StateLostError
        An object that the version is made of is missing.
    CorruptionError
        One is damaged, or another one than the version was made of.
    """
    commits = CommitObjects(source, {})
    commit = commits.fetch_newest(pointer) if carried is None else commits.decode_carried(carried, pointer)
    needed = [*commit.lineage.chain, *([commit.entry] if carried is None else [])]
    stored = [one for one in list_shard(source).versions if one.version < pointer.version or one.pointer == pointer]
    copied = _copy_snapshots(source, target, [one.key for one in stored if one.kind == "snapshot"])
    copied |= _copy_all(source, target, [one.key for one in stored if one.kind == "commit"])
    for entry in needed:
        _require(copied, entry.key, _Object(entry.size_bytes, entry.digest), source, pointer)
    return sum(one is not None and one.digest is not None for one in copied.values())


class _Object(NamedTuple):
    """An object to copy; without a digest if it is damaged."""

    size_bytes: int
    digest: str | None


def _require(
    copied: Mapping[str, _Object | None],
    key: str,
    wanted: _Object,
    source: PrefixedStorage,
    pointer: Pointer,
) -> None:
    """Check that an object which the version is made of was copied, and is the one that it was made of."""
    facts = {"key": f"{source.url}/{key}", "version": pointer.version}
    found = copied.get(key)
    if found is None:
        raise StateLostError("an object that the version is made of is missing, or a part of it is", **facts)
    if found != wanted:
        raise CorruptionError(
            "an object that the version is made of, or a part of it, was altered or damaged; holdfast verify names it",
            **facts,
        )


def _copy_snapshots(source: PrefixedStorage, target: PrefixedStorage, keys: Sequence[str]) -> dict[str, _Object | None]:
    """Copy the snapshots that are whole, their manifests last; return what the manifests of all are.

    A manifest that names a damaged part counts as damaged, and one that names a missing part as missing.
    """
    found: dict[str, _Object | None] = {}
    manifests: dict[str, tuple[memoryview, dict[str, _Object]]] = {}
    for key in keys:
        try:
            data = source.get(key)
            manifest, _ = read_manifest(data, source.prefix, f"{source.url}/{key}", key)
        except NotFoundError:
            found[key] = None
        except CorruptionError:
            found[key] = _Object(0, None)
        else:
            parts = {part.key: _Object(part.size_bytes, part.digest) for file in manifest.files for part in file.parts}
            manifests[key] = data, parts
    # Snapshots share parts.
    copied = _copy_all(source, target, sorted({key for _, parts in manifests.values() for key in parts}))
    for key, (data, parts) in manifests.items():
        if parts.items() <= copied.items():
            target.put(key, data)
            found[key] = _Object(len(data), stored_file.digest_of(data))
        else:
            found[key] = None if None in map(copied.get, parts) else _Object(len(data), None)
    return found


def _copy_all(source: PrefixedStorage, target: PrefixedStorage, keys: Sequence[str]) -> dict[str, _Object | None]:
    return dict(zip(keys, io_executor().map(partial(_copy, source, target), keys), strict=True))


def _copy(source: PrefixedStorage, target: PrefixedStorage, key: str) -> _Object | None:
    """Copy an object, and return what it is; None if it is gone: it was cleaned up, unless the version needs it."""
    try:
        data = source.get(key, COMMIT_BYTES_MAX)
    except NotFoundError:
        return None
    target.put(key, data)
    return _Object(len(data), stored_file.digest_of(data))
