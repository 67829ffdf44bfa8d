"""The storage behind a file sink's URL, with the query's own options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from holdfast.errors import CorruptionError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.executor.per_process import STORAGES, kept_per_process
from holdfast.spark_integration.shard.task_storage import io_executor

#: Options of the `deltalake` package alone begin so.
DELTA_PREFIX = "delta."


def storage_of(url: str, options: Mapping[str, str]) -> ObjectStorage:
    """Return the storage at a URL with a query's options; one for all calls of this process, and never closed."""
    ours = {name: value for name, value in options.items() if not name.startswith(DELTA_PREFIX)}
    return _open(url, tuple(sorted(ours.items())))


@kept_per_process(STORAGES)
def _open(url: str, options: tuple[tuple[str, str], ...]) -> ObjectStorage:
    return open_storage(url, parse_storage_options(dict(options)))


def sizes_of(storage: ObjectStorage, keys: Iterable[str]) -> list[int]:
    """Return the sizes of objects, by the store's own account; -1 for one that is gone. No object is read."""
    return list(io_executor().map(lambda key: _size_of(storage, key), keys))


def _size_of(storage: ObjectStorage, key: str) -> int:
    try:
        return len(storage.get(key, limit_bytes=0))
    except NotFoundError:
        return -1
    except CorruptionError as exc:
        # The store says how large it is, and is not asked for the bytes.
        size = exc.facts.get("size_bytes")
        if not isinstance(size, int):
            raise
        return size


def read_file(
    storage: ObjectStorage, key: str, size_bytes: int, digest: str, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return the rows of a Parquet file.

    Raises
    ------
    NotFoundError
        It is gone.
    CorruptionError
        It is not what was written.
    """
    data = storage.get(key, limit_bytes=size_bytes)
    if len(data) != size_bytes or xxhash.xxh3_128(data).hexdigest() != digest:
        raise CorruptionError("a file was altered or damaged", key=key, storage=storage.url)
    try:
        # partitioning=None: the file alone says what its columns are.
        return pq.read_table(pa.BufferReader(data), columns=columns, partitioning=None)
    except (pa.ArrowException, OSError) as exc:
        raise CorruptionError(f"a file is not Parquet: {exc}", key=key, storage=storage.url) from exc
