"""Clients of S3: made, used for single requests and closed. All that is not public in s3fs and fsspec stands here.

::

    S3FileSystem._call_s3      one request, with the options of the user and the errors of s3fs
    S3FileSystem._s3           the client, None before the first request
    S3FileSystem._s3creator    what ends its session: s3fs offers no way to close that works at any time
    fsspec.asyn.iothread       whether this is the event loop's own thread

`PRIVATE` names them; a test fails by name when a new release has one no more.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Mapping
from typing import Any, cast

import aiobotocore.session
import aiohttp
import botocore.loaders
import fsspec.asyn
import s3fs

from holdfast.snapshotter.storage.object_storage import Action, RequestCounts

PRIVATE = {s3fs.S3FileSystem: ("_call_s3", "_s3", "_s3creator"), fsspec.asyn: ("iothread",)}
_CLOSE_TIMEOUT_SECONDS = 5
_CONFLICT = 409
_CONFLICT_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 0.05
# What a request counts as; all others are puts.
_ACTIONS: dict[str, Action] = {
    "GetObject": "get",
    "HeadObject": "get",
    "ListObjectsV2": "list",
    "ListMultipartUploads": "list",
    "DeleteObjects": "delete",
    "AbortMultipartUpload": "delete",
}


def connect(options: Mapping[str, object], profile: str | None, requests: RequestCounts) -> s3fs.S3FileSystem:
    """Return an instance of s3fs, which opens its session with the first request.

    Parameters
    ----------
    options : mapping of str to object
        Parameters of `s3fs.S3FileSystem`.
    profile : str or None
        Of the AWS configuration.
    requests : RequestCounts
        Counts each attempt of a request.
    """
    session = aiobotocore.session.AioSession(profile=profile)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    session.register("request-created.s3", functools.partial(_count, requests))
    session.register("needs-retry.s3.PutObject", _pause_seconds)
    # asynchronous: s3fs registers no finalizer of its own, which would misbehave in a forked child.
    made = s3fs.S3FileSystem(asynchronous=True, skip_instance_cache=True, session=session, **options)
    made.retries = 1
    return made


@functools.cache
def _loader(data_path: str | None) -> botocore.loaders.Loader:
    """Return the models of the services, parsed once for all sessions (60 ms of CPU)."""
    return botocore.loaders.create_loader(data_path)


def _count(requests: RequestCounts, operation_name: str, **_: object) -> None:
    """Count a request; botocore calls this for each attempt."""
    requests.add(_ACTIONS.get(operation_name, "put"))


def _pause_seconds(response: Any, attempts: int, **_: object) -> float | None:
    """Have botocore repeat a put that conflicts with another one of its key, as AWS asks; it does not by itself."""
    is_conflict = response is not None and response[0].status_code == _CONFLICT
    return _FIRST_PAUSE_SECONDS * 2**attempts if is_conflict and attempts < _CONFLICT_ATTEMPTS else None


async def request_of(client: s3fs.S3FileSystem, operation: str, **request: Any) -> Any:
    """Make one request, which only botocore repeats."""
    return await client._call_s3(operation, **request)  # noqa: SLF001


def announced_size(response: Any) -> int:
    """Return the announced size of a reply's body: without it a truncated body looks whole."""
    if "ContentLength" not in response:
        raise aiohttp.ClientPayloadError("the reply has no Content-Length; what is in between must not remove it")
    return cast("int", response["ContentLength"])


async def read_body(response: Any, most: int) -> bytes:
    """Return the whole body, which must be as long as announced; one that is longer than `most` is not read."""
    size = announced_size(response)
    data = cast("bytes", await response["Body"].read()) if size <= most else b""
    if len(data) != size:
        raise aiohttp.ClientPayloadError(f"body has {len(data)} of {size} bytes, and at most {most} are wanted")
    return data


def close(client: s3fs.S3FileSystem) -> None:
    """Close a client on the event loop; from the loop's own thread (a collected storage) without waiting."""
    if client._s3 is None:  # noqa: SLF001
        return
    loop = fsspec.asyn.get_loop()
    closing = asyncio.run_coroutine_threadsafe(client._s3creator.__aexit__(None, None, None), loop)  # noqa: SLF001
    if threading.current_thread() is not fsspec.asyn.iothread[0]:
        closing.result(_CLOSE_TIMEOUT_SECONDS)
