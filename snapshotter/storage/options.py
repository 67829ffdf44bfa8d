"""Parses storage URLs and storage options, for every setting, argument and sink.

Spark's flat strings become the nested, typed values that fsspec expects::

    spark.holdfast.storage.key                            1234          {"key": "1234",
    spark.holdfast.storage.client_kwargs.endpoint_url     http://h:9     "client_kwargs": {"endpoint_url": ...},
    spark.holdfast.storage.config_kwargs.read_timeout     5              "config_kwargs": {"read_timeout": 5.0}}

Only options in the tables below are converted; all others stay strings. So an access key that looks like a number or
like "true" is never changed.

URLs::

    /data/app                               a path; made absolute, since workers run in different directories
    file:/data/app, file:///data/app        the same
    s3://bucket/app                         also s3a
    hdfs://namenode:8020/app                hdfs:/app and hdfs:///app use the NameNode of HADOOP_CONF_DIR
    abfss://container@account.dfs…/app      Azure: the text before the @ is not secret
    gs://bucket/app                         any other file system that fsspec supports
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from holdfast.errors import InvalidArgumentError

_BOOLS = {
    *("anon", "cache_regions", "fixed_upload_size", "local_expiry_check", "requester_pays", "use_ssl", "version_aware"),
    *("client_kwargs.use_ssl", "client_kwargs.verify", "config_kwargs.disable_request_compression"),
    *("config_kwargs.ignore_configured_endpoint_urls", "config_kwargs.tcp_keepalive"),
    *("config_kwargs.use_dualstack_endpoint", "config_kwargs.use_fips_endpoint"),
    *("config_kwargs.s3.payload_signing_enabled", "config_kwargs.s3.use_accelerate_endpoint"),
    *("config_kwargs.s3.use_arn_region", "config_kwargs.s3.use_dualstack_endpoint"),
}
_INTS = {
    *("default_block_size", "max_concurrency", "part_size_bytes", "config_kwargs.max_pool_connections"),
    *("config_kwargs.retries.max_attempts", "config_kwargs.retries.total_max_attempts"),
}
_FLOATS = {"config_kwargs.connect_timeout", "config_kwargs.read_timeout", "operation_timeout_seconds", "retry_seconds"}
_PATH_OR_BOOL = "client_kwargs.verify"
_WORDS = {"true": True, "false": False}
#: Options that hold credentials. Spark Connect hides most of them from the program that sets them.
CREDENTIALS = ("key", "secret", "token", "username", "password", "account_key", "sas_token", "client_secret")
_SECRET_NAME = re.compile(
    r"key|secret|token|password|passphrase|passwd|username|credential|connection_string|sas|authorization|cookie",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_WINDOWS_PATH = re.compile(r"\s*([A-Za-z]:|\\\\)")
_IPV6 = r"\[[0-9A-Fa-f:.]+\]"
_HOST = re.compile(rf"(?:{_IPV6}|[^:]*)(?::[0-9]*)?")
_S3 = ("s3", "s3a")


def parse_storage_options(given: Mapping[str, object]) -> dict[str, object]:
    """Convert options, named without Spark's prefix, for file systems: dots nest, and text is parsed by type."""
    nested: dict[str, object] = {}
    for name, value in given.items():
        *parts, last = name.split(".")
        if not all((*parts, last)):
            raise InvalidArgumentError("storage option has an empty part in its name", option=name)
        group: object = nested
        for part in parts:
            group = group.setdefault(part, {}) if isinstance(group, dict) else None
        if not isinstance(group, dict) or last in group:
            raise InvalidArgumentError("storage option is both a value and a group", option=name)
        group[last] = _typed(name, value) if isinstance(value, str) else value
    return nested


def dotted(options: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten nested options to dotted names, as Hadoop uses: ``{"dfs": {"a": 1}}`` becomes ``{"dfs.a": 1}``."""
    flat: dict[str, object] = {}
    for name, value in options.items():
        flat |= dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def secrets_of(options: Mapping[str, object]) -> frozenset[str]:
    """Return the values, at any depth, of options whose names suggest secrets, for redaction."""
    return frozenset(_secrets(options, hidden=False))


def _typed(name: str, text: str) -> object:
    if name in _BOOLS:
        value = _WORDS.get(text.strip().lower())
        if value is None and name == _PATH_OR_BOOL:
            return text
        if value is None:
            raise InvalidArgumentError("storage option must be true or false", option=name)
        return value
    if name in _INTS or name in _FLOATS:
        try:
            return int(text) if name in _INTS else float(text)
        except ValueError:
            # From None: the cause would show the value.
            raise InvalidArgumentError("storage option must be a number", option=name) from None
    return text


def _secrets(value: object, *, hidden: bool) -> Iterator[str]:
    """Yield the strings under names that suggest a secret."""
    if isinstance(value, dict) or hasattr(value, "items"):
        for name, inner in value.items():
            yield from _secrets(inner, hidden=hidden or bool(_SECRET_NAME.search(str(name))))
    elif hidden and isinstance(value, str) and value:
        yield value


class StorageUrl(NamedTuple):
    """The parts of a URL; `str` returns the form that both driver and workers accept."""

    scheme: str
    """In lower case; "file" for a path."""
    authority: str
    """Bucket, container or host; empty for "file"."""
    path: str
    """With a leading and without a trailing slash, or empty; not decoded."""

    @property
    def store(self) -> tuple[str, str]:
        """The store that holds the path; equal for all URLs of the same store, whatever their schemes."""
        return "s3" if self.scheme in _S3 else self.scheme, self.authority

    @property
    def for_spark(self) -> StorageUrl:
        """The same location with the scheme of Spark's own file system."""
        return self._replace(scheme="s3a") if self.scheme == "s3" else self

    def __str__(self) -> str:
        return self.path if self.scheme == "file" else f"{self.scheme}://{self.authority}{self.path}"


def parse_url(url: str | os.PathLike[str]) -> StorageUrl:
    """Parse a URL or path, without contacting the storage. Raises `InvalidArgumentError`."""
    text = os.fspath(url)
    if not text.strip() or text.startswith("~"):
        raise InvalidArgumentError("it must be a URL or a path, and ~ is not expanded")
    if "\x00" in text:
        raise InvalidArgumentError("a URL or path cannot hold a zero byte")
    if "::" in re.sub(rf"(?<=[/@]){_IPV6}", "", text):
        raise InvalidArgumentError(
            "chained storage URLs (a::b) are refused: a caching layer would answer from its copy"
        )
    if _WINDOWS_PATH.match(text):
        raise InvalidArgumentError(
            "this is a Windows path, and holdfast does not run there: write a path such as /data/app", path=text
        )
    match = _SCHEME.fullmatch(text)
    if match is None:
        return StorageUrl("file", "", os.path.abspath(text))
    scheme, rest = match[1].lower(), match[2]
    return StorageUrl("file", "", _local_path(rest)) if scheme == "file" else _remote(scheme, rest)


def sibling_url(url: str, suffix: str) -> str:
    """Return the URL of a sibling folder with this suffix. Raises `InvalidArgumentError` for a whole bucket."""
    if not parse_url(url).path.strip("/"):
        raise InvalidArgumentError("this is a whole bucket or file system: name a folder in it", given=url)
    return f"{url.rstrip('/')}{suffix}"


def _local_path(rest: str) -> str:
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
            "only Databricks' Spark supports dbfs: use the path at which every machine mounts the file system, /dbfs/… "
            "or /Volumes/…"
        )
    if scheme == "hdfs" and rest.startswith("/") and not rest.startswith("//"):
        rest = f"//{rest}"
    if not rest.startswith("//"):
        raise InvalidArgumentError(
            f"URL must be scheme://root, or a path: write {scheme}://…, or ./{scheme}:… for a path",
            scheme=scheme,
        )
    authority, slash, path = rest[2:].partition("/")
    user, _, host = authority.rpartition("@")
    # A secret with a slash would end the authority early: the text after a colon may be a port, or part of a secret.
    is_secret = ":" in user or not _HOST.fullmatch(host)
    if scheme in _S3:  # S3 buckets have no port
        is_secret = ":" in authority or "@" in rest
    if is_secret or "?" in rest:
        raise InvalidArgumentError(
            "the URL holds credentials or parameters: remove them, and set them as options "
            "(spark.holdfast.storage.key and spark.holdfast.storage.secret, for example; for a sink, "
            "spark.holdfast.sink.<name>.<option>), or use the environment's own credentials",
            scheme=scheme,
        )
    return StorageUrl(scheme, authority, f"{slash}{path}".rstrip("/"))
