"""Options of a storage: from Spark's flat strings to the nested, typed values that fsspec takes.

::

    spark.holdfast.storage.key                            1234          {"key": "1234",
    spark.holdfast.storage.client_kwargs.endpoint_url     http://h:9     "client_kwargs": {"endpoint_url": ...},
    spark.holdfast.storage.config_kwargs.read_timeout     5              "config_kwargs": {"read_timeout": 5.0}}

Only names in the tables below are converted; all others stay strings. So an access key that looks like a number or like
"true" is never changed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BOOLS = frozenset(
    {
        "anon",
        "cache_regions",
        "client_kwargs.use_ssl",
        "client_kwargs.verify",
        "config_kwargs.disable_request_compression",
        "config_kwargs.ignore_configured_endpoint_urls",
        "config_kwargs.s3.payload_signing_enabled",
        "config_kwargs.s3.use_accelerate_endpoint",
        "config_kwargs.s3.use_arn_region",
        "config_kwargs.s3.use_dualstack_endpoint",
        "config_kwargs.tcp_keepalive",
        "config_kwargs.use_dualstack_endpoint",
        "config_kwargs.use_fips_endpoint",
        "fixed_upload_size",
        "local_expiry_check",
        "requester_pays",
        "use_ssl",
        "version_aware",
    }
)
_INTS = frozenset(
    {
        "config_kwargs.max_pool_connections",
        "config_kwargs.retries.max_attempts",
        "config_kwargs.retries.total_max_attempts",
        "default_block_size",
        "max_concurrency",
        "part_size_bytes",
    }
)
_FLOATS = frozenset(
    {"config_kwargs.connect_timeout", "config_kwargs.read_timeout", "operation_timeout_seconds", "retry_seconds"}
)
_PATH_OR_BOOL = "client_kwargs.verify"
_WORDS = {"true": True, "false": False}
#: Credentials, as file systems name them. Spark Connect hides most of these names from the program that sets them.
CREDENTIALS = ("key", "secret", "token", "username", "password", "account_key", "sas_token", "client_secret")
_SECRET_NAME = re.compile(
    r"key|secret|token|password|passphrase|passwd|username|credential|connection_string|sas|authorization|cookie",
    re.IGNORECASE,
)


def parse_storage_options(flat: Mapping[str, str]) -> dict[str, object]:
    """Return the nested options of a flat mapping of strings.

    Raises `InvalidArgumentError` if a name has an empty part, is both a value and a group, or its value cannot be
    converted. Values are never shown.

    `flat`: names without the prefix ``spark.holdfast.storage.``; a dot nests.

    Returns options for `open_storage`. Names in the tables above become bool, int or float; all others, and so every
    key, secret and token, stay strings exactly as given.
    """
    nested: dict[str, object] = {}
    for name, text in flat.items():
        parts = name.split(".")
        if not all(parts):
            raise InvalidArgumentError("storage option has an empty part in its name", option=name)
        group = nested
        for part in parts[:-1]:
            inner = group.setdefault(part, {})
            if not isinstance(inner, dict):
                raise InvalidArgumentError("storage option is both a value and a group", option=name)
            group = inner
        if parts[-1] in group:
            raise InvalidArgumentError("storage option is both a value and a group", option=name)
        group[parts[-1]] = _typed(name, text)
    return nested


def dotted(options: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested options flat again, as Hadoop names its own: ``{"dfs": {"a": 1}}`` is ``{"dfs.a": 1}``."""
    flat: dict[str, object] = {}
    for name, value in options.items():
        flat |= dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def secrets_of(options: Mapping[str, object]) -> frozenset[str]:
    """Return the values, at any depth, of options whose name suggests a secret, for redaction."""
    return frozenset(_secrets(options, hidden=False))


def _typed(name: str, text: str) -> object:
    """Return the value of one option as the type its name asks for."""
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
            # from None: the cause would show the value.
            raise InvalidArgumentError("storage option must be a number", option=name) from None
    return text


def _secrets(value: object, *, hidden: bool) -> Iterator[str]:
    """Yield the strings below a secret name."""
    if isinstance(value, dict) or hasattr(value, "items"):
        for name, inner in value.items():
            yield from _secrets(inner, hidden=hidden or bool(_SECRET_NAME.search(str(name))))
    elif hidden and isinstance(value, str) and value:
        yield value
