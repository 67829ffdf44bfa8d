"""Where a file sink writes: its URL, and the storage behind it with the query's own options."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.executor.per_process import kept_per_process
from holdfast.spark_integration.shard.task_storage import io_executor

#: Options of the `deltalake` package alone begin so.
DELTA_PREFIX = "delta."


def checked_url(url: str | os.PathLike[str]) -> str:
    """Return the URL as driver and workers understand it alike: a bare path is made absolute.

    Raises
    ------
    InvalidArgumentError
        It holds credentials, which a plan would carry along.
    """
    url = os.fspath(url)
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url or url.startswith("~"):
            raise InvalidArgumentError("a sink's url must be a URL or a path, and ~ is not expanded")
        return os.path.abspath(url)
    authority = rest.partition("/")[0]
    in_s3 = scheme.lower() in ("s3", "s3a") and ("@" in rest or ":" in authority)
    if in_s3 or "@" in authority or "?" in rest or urlsplit(url).password:
        raise InvalidArgumentError(
            "the sink's url holds credentials or parameters: set them as spark.holdfast.sink.<name>.<option>",
            scheme=scheme,
        )
    return url.rstrip("/")


def storage_of(url: str, options: Mapping[str, str]) -> ObjectStorage:
    """Return the storage at a URL with a query's options; one for all calls of this process, and never closed."""
    ours = {name: value for name, value in options.items() if not name.startswith(DELTA_PREFIX)}
    return _open(url, tuple(sorted(ours.items())))


@kept_per_process(8)
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
