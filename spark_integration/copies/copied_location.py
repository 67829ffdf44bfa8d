"""Copies Spark's checkpoint location of a query as it was after a micro-batch, while the query may run.

::

    offsets/5 … 7   commits/5 … 7          up to the micro-batch
    sources/…                              what its offsets need
    state/<operator>/<partition>/8.zip     up to the version after it; files without a version, all
    state/<operator>/_metadata/v2/4        up to the micro-batch
    metadata                               not copied: the clone has an id of its own

State is copied as it is, whoever keeps it: Spark's own operators, too. Only where Spark's metadata names its own files
by path, the path is changed, whatever it was.

Source: Spark 4.3's ``HDFSBackedStateStoreProvider``, ``RocksDBFileManager``, ``OperatorStateMetadata``, and locations
that it wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from holdfast.errors import NotFoundError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.savepoints import seeding
from holdfast.spark_integration.shard.task_storage import io_executor
from holdfast.spark_integration.spark_state.query_location import LEFTOVER, LoggedBatch, QueryLocation

_FILE_BYTES_MAX = 4 << 30
#: Files in memory at once have so many bytes together; a larger one is there alone.
AT_ONCE_BYTES = 256 << 20
_LOG = re.compile(r"(offsets|commits)/(0|[1-9][0-9]{0,17})")
# A version of a state store, perhaps with an id of its own, and who writes what names which files it has.
_VERSION = re.compile(r"([0-9]{1,18})(_[0-9A-Za-z-]+)?\.(zip|delta|snapshot|changelog)")
_METADATA = re.compile(r"state/[0-9]+/_metadata/v[0-9]+/([0-9]{1,18})")


def copy_location(source: ObjectStorage, target: ObjectStorage, query: QueryLocation, batch: LoggedBatch) -> None:
    """Copy everything but ``metadata``.

    Raises `UnavailableError` if the query has left the micro-batch behind, or a storage did not answer: try again.

    Parameters
    ----------
    source, target : ObjectStorage
        Their roots are the locations.
    query : QueryLocation
        Reads `source`.
    """
    folders = ("state/", "offsets/", "commits/", "sources/")
    sizes = {info.key: info.size_bytes for folder in folders for info in source.list(folder)}
    state = [key for key in sizes if key.startswith("state/") and _is_of(key, batch.batch_id)]
    logs = [key for key in sizes if (found := _LOG.fullmatch(key)) and int(found[2]) <= batch.batch_id]
    kept = query.kept_sources(batch.sources)
    logs += [f"sources/{name}/{log}" for name, offset in kept for log in query.source_logs(name, offset)]
    vanished = {key for keys in (state, logs) for key in _copy_all(source, target, keys, sizes, query)}
    needed = {f"offsets/{batch.batch_id}", f"commits/{batch.batch_id}"}
    needed |= {key for key in logs if key.startswith("sources/")}
    # What Spark deletes meanwhile is older than what it keeps, as long as it keeps the micro-batch.
    if vanished & needed or batch.batch_id not in query.committed():
        raise UnavailableError(
            "the query has moved past the micro-batch: try again", batch_id=batch.batch_id, location=source.url
        )


def _is_of(key: str, batch_id: int) -> bool:
    """Tell whether a file of Spark's state belongs to a version that a micro-batch wrote, or an earlier one."""
    if LEFTOVER.search(key):
        return False
    described = _METADATA.fullmatch(key)
    if described:
        return int(described[1]) <= batch_id
    version = _VERSION.fullmatch(key.rpartition("/")[2])
    return version is None or int(version[1]) <= batch_id + 1


def _copy_all(
    source: ObjectStorage, target: ObjectStorage, keys: Iterable[str], sizes: Mapping[str, int], query: QueryLocation
) -> list[str]:
    """Copy files, and return those that are gone."""

    def copy(key: str) -> str | None:
        folder, _, below = key.partition("/")
        try:
            data = query.source_log(*below.split("/", 1)) if folder == "sources" else source.get(key, _FILE_BYTES_MAX)
        except NotFoundError:
            return key
        target.put(key, seeding.moved(key, data, target.url))
        return None

    copied = (gone for group in _side_by_side(keys, sizes) for gone in io_executor().map(copy, group))
    return [key for key in copied if key is not None]


def _side_by_side(keys: Iterable[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield files in groups that fit into memory; files that Spark has compacted since count as empty."""
    group: list[str] = []
    room = AT_ONCE_BYTES
    for key in keys:
        size_bytes = sizes.get(key, 0)
        if group and size_bytes > room:
            yield group
            group, room = [], AT_ONCE_BYTES
        group.append(key)
        room -= size_bytes
    if group:
        yield group
