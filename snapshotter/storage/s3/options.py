"""Options of `s3`: what s3fs takes, checked before it sees them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import s3fs

from holdfast.backends.options import did_you_mean
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.storage.options import CREDENTIALS

_NOT_PLAIN = {"self", "kwargs", "session", "asynchronous", "loop"}
#: Attempts of one request. The pauses between them are at random, up to 1, 2, 4, 8, 16, 20, 20 and 20 s: 45 s on the
#: average and less than 20 s once in a hundred times, so a store may be away for half a minute.
TOTAL_MAX_ATTEMPTS = 9
_OURS = {"operation_timeout_seconds": 120.0, "part_size_bytes": 16 << 20, "max_concurrency": 4}


def check_options(options: Mapping[str, object]) -> None:
    """Refuse options that s3fs would refuse later, or would put into a message."""
    known = (set(inspect.signature(s3fs.S3FileSystem.__init__).parameters) - _NOT_PLAIN) | set(_OURS) | {"profile"}
    for name in options:
        if name not in known:
            raise InvalidArgumentError(f"unknown option for s3 storage{did_you_mean(name, known)}", option=name)
    for name in CREDENTIALS:
        value = options.get(name)
        if value is not None and (not isinstance(value, str) or not value or re.search(r"[\s\x00-\x1f]", value)):
            raise InvalidArgumentError("option must be a string without white space, not empty", option=name)
    _check_credentials({name for name in CREDENTIALS if options.get(name) is not None}, options)
    client = options.get("client_kwargs", {})
    endpoints = [options.get("endpoint_url"), client.get("endpoint_url") if isinstance(client, dict) else None]
    for endpoint in endpoints:
        if endpoint is not None and "@" in urlsplit(str(endpoint)).netloc:
            raise InvalidArgumentError("endpoint_url holds credentials: set key and secret instead")
    if len({str(endpoint) for endpoint in endpoints if endpoint is not None}) > 1:
        raise InvalidArgumentError(
            "options contradict each other: endpoint_url and client_kwargs.endpoint_url differ; set one of them"
        )


def _check_credentials(given: set[str], options: Mapping[str, object]) -> None:
    """Refuse incomplete or contradictory credentials: a client would silently choose some."""
    for pair in (("key", "secret"), ("username", "password")):
        if len(given & set(pair)) == 1:
            raise InvalidArgumentError("options belong together: set both, or neither", options=" ".join(pair))
    if given == {"token"}:
        raise InvalidArgumentError("option token goes with a key and a secret: set them too", option="token")
    ways = [*sorted(given), *(name for name in ("anon", "profile") if options.get(name))]
    if ("anon" in ways or "profile" in ways) and len(ways) > 1:
        raise InvalidArgumentError(
            "options contradict each other: credentials, a profile and anon are three ways to authenticate; set one "
            "of them",
            options=" ".join(ways),
        )


def with_defaults(options: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters for s3fs: time-outs and attempts bounded unless the user says otherwise."""
    given = cast("dict[str, Any]", options.get("config_kwargs", {}))
    retries = {"mode": "standard", **given.get("retries", {})}
    if "max_attempts" not in retries:
        retries.setdefault("total_max_attempts", TOTAL_MAX_ATTEMPTS)
    config = {"connect_timeout": 5, "read_timeout": 20, "max_pool_connections": 32, **given, "retries": retries}
    plain = {name: value for name, value in options.items() if name not in {*_OURS, "profile"}}
    concurrency = options.get("max_concurrency", _OURS["max_concurrency"])
    return {**plain, "config_kwargs": config, "max_concurrency": concurrency, "use_listings_cache": False}
