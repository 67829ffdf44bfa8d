"""Where state, savepoints and results lie, as people write it: one parser for every setting, argument and sink.

::

    /data/app                               a path; made absolute, since workers run in other directories
    file:/data/app, file:///data/app        the same
    s3://bucket/app                         also s3a
    hdfs://namenode:8020/app                hdfs:/app and hdfs:///app: the name node of HADOOP_CONF_DIR
    abfss://container@account.dfs…/app      Azure: here nothing before the @ is secret
    gs://bucket/app                         any other file system that fsspec knows
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from holdfast.errors import InvalidArgumentError

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_OF_WINDOWS = re.compile(r"\s*([A-Za-z]:|\\\\)")
_IPV6 = r"\[[0-9A-Fa-f:.]+\]"
_HOST = re.compile(rf"(?:{_IPV6}|[^:]*)(?::[0-9]*)?")
_S3 = ("s3", "s3a")


class StorageUrl(NamedTuple):
    """A URL in its parts; as text, the one form that driver and workers understand alike."""

    scheme: str
    """In lower case; "file" for a path."""
    authority: str
    """Bucket, container or host; empty for "file"."""
    path: str
    """With its leading slash and without a slash at the end, or empty. Nothing is decoded."""

    def __str__(self) -> str:
        return self.path if self.scheme == "file" else f"{self.scheme}://{self.authority}{self.path}"


def parse_url(url: str | os.PathLike[str]) -> StorageUrl:
    """Return the parts of a URL or path. Nothing is contacted. Raises `InvalidArgumentError`."""
    text = os.fspath(url)
    if not text.strip() or text.startswith("~"):
        raise InvalidArgumentError("it must be a URL or a path, and ~ is not expanded")
    if "\x00" in text:
        raise InvalidArgumentError("a URL or path cannot hold a zero byte")
    if "::" in re.sub(rf"(?<=[/@]){_IPV6}", "", text):
        raise InvalidArgumentError(
            "chained storage URLs (a::b) are refused: a caching layer would answer from its copy"
        )
    if _OF_WINDOWS.match(text):
        raise InvalidArgumentError(
            "this is a path of Windows, where holdfast does not run: write a path such as /data/app", path=text
        )
    match = _SCHEME.fullmatch(text)
    if match is None:
        return StorageUrl("file", "", os.path.abspath(text))
    scheme, rest = match[1].lower(), match[2]
    return StorageUrl("file", "", _local_path(rest)) if scheme == "file" else _remote(scheme, rest)


def _local_path(rest: str) -> str:
    """Return the absolute path of ``file:`` and what follows it."""
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise InvalidArgumentError("file URL names a host: write file:///path", host=host)
        rest = slash + path
    if not rest.startswith("/"):
        raise InvalidArgumentError("file URL must hold an absolute path, such as file:///path")
    return os.path.normpath("/" + rest.lstrip("/"))


def _remote(scheme: str, rest: str) -> StorageUrl:
    if scheme == "dbfs":
        raise InvalidArgumentError(
            "dbfs: is known to Databricks' Spark only: write the path under which the file system is mounted on every "
            "machine, /dbfs/… or /Volumes/…"
        )
    if scheme == "hdfs" and rest.startswith("/") and not rest.startswith("//"):
        rest = f"//{rest}"
    if not rest.startswith("//"):
        raise InvalidArgumentError(
            f"URL must be scheme://root, or a path: write {scheme}://…, or ./{scheme}:… where it is a path",
            scheme=scheme,
        )
    authority, slash, path = rest[2:].partition("/")
    user, _, host = authority.rpartition("@")
    # A secret may itself hold a slash, and end the authority: what stands after a colon is a port then, or a secret.
    is_secret = ":" in user or not _HOST.fullmatch(host)
    if scheme in _S3:  # whose buckets have no port
        is_secret = ":" in authority or "@" in rest
    if is_secret or "?" in rest:
        raise InvalidArgumentError(
            "the URL holds credentials or parameters: remove them, and set them as options "
            "(spark.holdfast.storage.key and spark.holdfast.storage.secret, for example; those of a sink are "
            "spark.holdfast.sink.<name>.<option>), or use the environment's own credentials",
            scheme=scheme,
        )
    return StorageUrl(scheme, authority, f"{slash}{path}".rstrip("/"))
