"""Opens the storage that a URL names."""

from __future__ import annotations

import os
import re
from types import MappingProxyType
from typing import TYPE_CHECKING

from holdfast.distribution import pip_install
from holdfast.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.snapshotter.storage.object_storage import ObjectStorage

__all__ = ["open_storage"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


def open_storage(url: str, options: Mapping[str, object] = _NO_OPTIONS) -> ObjectStorage:
    """Open the storage that a URL names, without contacting it.

    Parameters
    ----------
    url : str
        ``file:///path``, a bare path, ``memory://name``, ``s3://bucket/prefix`` (also ``s3a``),
        ``hdfs://host:port/path`` (also a name service; ``hdfs:///path`` for the default of HADOOP_CONF_DIR), or
        the URL of any other installed fsspec file system. Never credentials.
    options : Mapping[str, object], optional
        What `parse_storage_options` returns: parameters of the file system, such as `key`, `secret` or
        `client_kwargs`. Local and memory storage need none and ignore them.

    Returns
    -------
    ObjectStorage
        To be closed, best by a ``with`` statement.

    Raises
    ------
    InvalidArgumentError
        The URL holds credentials, its scheme is not known, the package for it is not installed (the message
        names it), or an option is not known.
    """
    # Imported here: botocore and fsspec cost a tenth of a second that local users need not pay.
    scheme, rest = _split_url(url)
    if scheme == "file":
        from holdfast.snapshotter.storage.local import LocalStorage

        return LocalStorage(_local_path(rest))
    if not rest.startswith("//"):
        raise InvalidArgumentError("storage URL must be scheme://root, or a path", scheme=scheme)
    _refuse_credentials(scheme, rest)
    if scheme in ("s3", "s3a"):
        from holdfast.snapshotter.storage.s3.storage import S3Storage

        bucket, _, prefix = rest.removeprefix("//").partition("/")
        return S3Storage(bucket, prefix.rstrip("/"), options)
    if scheme == "hdfs":
        return _open_hdfs(rest, options)
    from holdfast.snapshotter.storage.fsspec import FsspecStorage

    return FsspecStorage(scheme, f"{scheme}:{rest}", _NO_OPTIONS if scheme == "memory" else options)


def _open_hdfs(rest: str, options: Mapping[str, object]) -> ObjectStorage:
    try:
        from holdfast.snapshotter.storage.hdfs.storage import HdfsStorage
    except ModuleNotFoundError as exc:
        raise InvalidArgumentError(
            f"hdfs:// needs the package hdfs-native on the driver and the executors: {pip_install('hdfs')}"
        ) from exc
    authority, _, path = rest.removeprefix("//").partition("/")
    return HdfsStorage(authority, path.rstrip("/"), options)


def _refuse_credentials(scheme: str, rest: str) -> None:
    """Raise InvalidArgumentError for a URL that carries credentials; the message never shows the URL."""
    authority = rest.removeprefix("//").partition("/")[0]
    user, at, _ = authority.rpartition("@")
    # A secret may itself hold a slash, so for S3 a colon in the authority, or an @ anywhere, is enough.
    in_s3 = scheme in ("s3", "s3a") and (":" in authority or "@" in rest)
    if in_s3 or (at and ":" in user):
        raise InvalidArgumentError(
            "storage URL holds credentials: remove them and set spark.holdfast.storage.key and "
            "spark.holdfast.storage.secret, or the environment's own credentials",
            scheme=scheme,
        )


def _split_url(url: str) -> tuple[str, str]:
    """Return the lower-case scheme and what follows its colon; a bare path has the scheme "file"."""
    if "::" in url:
        raise InvalidArgumentError(
            "chained storage URLs (a::b) are refused: a caching layer would answer from its copy"
        )
    match = _SCHEME.fullmatch(url)
    if match is None:
        if not url or url.startswith("~"):
            raise InvalidArgumentError("storage URL must be a URL or a path, and ~ is not expanded")
        return "file", os.path.abspath(url)
    return match[1].lower(), match[2]


def _local_path(rest: str) -> str:
    """Return the absolute path of ``file:`` and what follows it; nothing is decoded."""
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise InvalidArgumentError("file URL names a host: write file:///path", host=host)
        rest = slash + path
    if not rest.startswith("/") or "\x00" in rest:
        raise InvalidArgumentError("file URL must hold an absolute path, such as file:///path")
    return os.path.normpath("/" + rest.lstrip("/"))
