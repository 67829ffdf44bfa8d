"""Opens the storage that a URL names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from holdfast.distribution import pip_install
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.options import parse_storage_options, parse_url

_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


def open_storage(url: str, options: Mapping[str, object] = _NO_OPTIONS) -> ObjectStorage:
    """Open the storage that a URL names, without contacting it; `options` are those of `parse_storage_options`."""
    # Imported on demand: botocore and fsspec take a tenth of a second, which local users need not spend.
    parsed, options = parse_url(url), parse_storage_options(options)
    scheme, prefix = parsed.scheme, parsed.path.removeprefix("/")
    if scheme == "file":
        from holdfast.snapshotter.storage.local import LocalStorage

        return LocalStorage(parsed.path)
    if parsed.store[0] == "s3":
        from holdfast.snapshotter.storage.s3 import S3Storage

        return S3Storage(parsed.authority, prefix, options)
    if scheme == "hdfs":
        try:
            from holdfast.snapshotter.storage.hdfs import HdfsStorage
        except ModuleNotFoundError as exc:
            raise InvalidArgumentError(
                f"hdfs:// needs the package hdfs-native on the driver and the executors: {pip_install('hdfs')}"
            ) from exc
        return HdfsStorage(parsed.authority, prefix, options)
    from holdfast.snapshotter.storage.fsspec import FsspecStorage

    return FsspecStorage(scheme, str(parsed), _NO_OPTIONS if scheme == "memory" else options)
