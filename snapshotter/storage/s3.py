"""Objects in a bucket of S3 or of a compatible store (``s3://``), through s3fs.

::

    put      up to the size of 2 parts: one PutObject    larger: CreateMultipartUpload, parts 4 at a time, Complete
    put_if_absent    one PutObject, If-None-Match: *
    get      one GetObject                               larger: the size from its header, then ranges 4 at a time
    list     ListObjectsV2, page by page                 delete: DeleteObjects, 1,000 keys per request

s3fs's own ``rm`` drops the errors of single keys, its uploads continue while they abort, and its retries multiply with
botocore's. So this module makes single requests, with s3fs's options and session, and sets its retries to one.

Bounded: botocore's standard mode with 9 attempts per request in about 45 s, 5 attempts for a PutObject that conflicts
with another put of its key (409), 5 s to connect, 20 s without a byte, and `operation_timeout_seconds` (120) plus 1 s
per MiB for a whole operation. A body that is truncated or does not match its checksum is read up to 3 times.

Lost reply: a PutObject is sent again; a conditional one then finds its own object, and compares the bytes. A repeated
CompleteMultipartUpload that has already succeeded answers NoSuchUpload; then the object's size decides, which is safe
because keys are written once.

::

    S3FileSystem._call_s3      makes one request, with the user's options and s3fs's errors
    S3FileSystem._s3           the client, None before the first request
    S3FileSystem._s3creator    ends the session: no public close of s3fs works at any time
    fsspec.asyn.iothread       the event loop's own thread

These are private to s3fs and fsspec. `PRIVATE` lists them; a test fails if a new release drops one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import logging
import math
import re
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import aiobotocore.session
import aiohttp
import botocore.loaders
import fsspec.asyn
import s3fs
from botocore.exceptions import BotoCoreError

from holdfast.backends.options import did_you_mean
from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError
from holdfast.snapshotter.storage.connections import Connections
from holdfast.snapshotter.storage.errors import error_for_code, s3_status, translated
from holdfast.snapshotter.storage.object_storage import (
    KEY_LIMIT_BYTES,
    Action,
    Buffer,
    ObjectInfo,
    ObjectStorage,
    RequestCounts,
    check_folder,
    check_key,
    check_range,
    flat_view,
    unconditional,
)
from holdfast.snapshotter.storage.options import CREDENTIALS, secrets_of

_NOT_PLAIN = {"self", "kwargs", "session", "asynchronous", "loop"}
#: Attempts per request. The pauses between them are random, up to 1, 2, 4, 8, 16, 20, 20 and 20 s: 45 s on average, and
#: under 20 s in one of a hundred cases, so a store may be down for half a minute.
TOTAL_MAX_ATTEMPTS = 9
_OURS = {"operation_timeout_seconds": 120.0, "part_size_bytes": 16 << 20, "max_concurrency": 4}
PRIVATE = {s3fs.S3FileSystem: ("_call_s3", "_s3", "_s3creator"), fsspec.asyn: ("iothread",)}
_CLOSE_TIMEOUT_SECONDS = 5
_CONFLICT = 409
_CONFLICT_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 0.05
# The action as which a request is counted; all other requests are puts.
_ACTIONS: dict[str, Action] = {
    "GetObject": "get",
    "HeadObject": "get",
    "ListObjectsV2": "list",
    "ListMultipartUploads": "list",
    "DeleteObjects": "delete",
    "AbortMultipartUpload": "delete",
}
_LOG = logging.getLogger(__name__)
# These loggers write the session token at DEBUG.
_WITH_TOKENS = ("botocore.auth", "botocore.endpoint")
_T = TypeVar("_T")
_Entries: TypeAlias = "list[dict[str, Any]]"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_MIN_RATE_BYTES_PER_SECOND = 1 << 20
_MIN_PART_BYTES = 5 << 20
_MAX_PARTS = 10_000
_BODY_ATTEMPTS = 3
_ABORT_TIMEOUT_SECONDS = 30
_DELETE_BATCH = 1_000
# HTTP statuses of a conditional put: key taken, and conditions not supported. Some stores send no error code.
_TAKEN, _NO_CONDITIONS = 412, 501


def check_options(options: Mapping[str, object]) -> None:
    """Refuse options that s3fs would refuse later or reveal in a message."""
    known = (set(inspect.signature(s3fs.S3FileSystem.__init__).parameters) - _NOT_PLAIN) | set(_OURS) | {"profile"}
    for name in options:
        if name not in known:
            raise InvalidArgumentError(f"unknown option for s3 storage{did_you_mean(name, known)}", option=name)
    for name in CREDENTIALS:
        value = options.get(name)
        if value is not None and (not isinstance(value, str) or not value or re.search(r"[\s\x00-\x1f]", value)):
            raise InvalidArgumentError("option must be a non-empty string without white space", option=name)
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
    """Refuse incomplete or contradictory credentials, among which a client would silently choose."""
    for pair in (("key", "secret"), ("username", "password")):
        if len(given & set(pair)) == 1:
            raise InvalidArgumentError("options belong together: set both, or neither", options=" ".join(pair))
    if given == {"token"}:
        raise InvalidArgumentError("option token requires key and secret: set them, too", option="token")
    ways = [*sorted(given), *(name for name in ("anon", "profile") if options.get(name))]
    if ("anon" in ways or "profile" in ways) and len(ways) > 1:
        raise InvalidArgumentError(
            "options contradict each other: credentials, profile and anon are alternative ways to authenticate; set "
            "only one of them",
            options=" ".join(ways),
        )


def with_defaults(options: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters for s3fs, with limits on time and attempts unless the user sets others."""
    given = cast("dict[str, Any]", options.get("config_kwargs", {}))
    retries = {"mode": "standard", **given.get("retries", {})}
    if "max_attempts" not in retries:
        retries.setdefault("total_max_attempts", TOTAL_MAX_ATTEMPTS)
    config = {"connect_timeout": 5, "read_timeout": 20, "max_pool_connections": 32, **given, "retries": retries}
    plain = {name: value for name, value in options.items() if name not in {*_OURS, "profile"}}
    concurrency = options.get("max_concurrency", _OURS["max_concurrency"])
    return {**plain, "config_kwargs": config, "max_concurrency": concurrency, "use_listings_cache": False}


def connect(options: Mapping[str, object], profile: str | None, requests: RequestCounts) -> s3fs.S3FileSystem:
    """Return an s3fs instance, which opens its session at the first request; `requests` counts every attempt."""
    for logger in map(logging.getLogger, _WITH_TOKENS):
        if logger.level == logging.NOTSET:  # DEBUG on the root logger must not reveal tokens
            logger.setLevel(logging.INFO)
    session = aiobotocore.session.AioSession(profile=profile)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    session.register("request-created.s3", functools.partial(_count, requests))
    session.register("needs-retry.s3.PutObject", _pause_seconds)
    # With `asynchronous`, s3fs registers no finalizer, which would misbehave in a forked child.
    made = s3fs.S3FileSystem(asynchronous=True, skip_instance_cache=True, session=session, **options)
    made.retries = 1
    return made


@functools.cache
def _loader(data_path: str | None) -> botocore.loaders.Loader:
    """Return botocore's service models, parsed once for all sessions (60 ms of CPU)."""
    return botocore.loaders.create_loader(data_path)


def _count(requests: RequestCounts, operation_name: str, **_: object) -> None:
    """Count a request; botocore calls this for each attempt."""
    requests.add(_ACTIONS.get(operation_name, "put"))


def _pause_seconds(response: Any, attempts: int, **_: object) -> float | None:
    """Make botocore retry a put that conflicts with another put of its key, as AWS advises; by default it does not."""
    is_conflict = response is not None and response[0].status_code == _CONFLICT
    return _FIRST_PAUSE_SECONDS * 2**attempts if is_conflict and attempts < _CONFLICT_ATTEMPTS else None


def declared_size(response: Any) -> int:
    """Return the declared size of a reply's body; without it, a truncated body would look complete."""
    if "ContentLength" not in response:
        raise aiohttp.ClientPayloadError("the reply has no Content-Length: a proxy must not remove it")
    return cast("int", response["ContentLength"])


async def read_body(response: Any, most: int) -> bytes:
    """Return the whole body, which must have its declared size; do not read a body larger than `most`."""
    size = declared_size(response)
    data = cast("bytes", await response["Body"].read()) if size <= most else b""
    if len(data) != size:
        raise aiohttp.ClientPayloadError(f"body has {len(data)} of {size} bytes, and at most {most} are wanted")
    return data


def close(client: s3fs.S3FileSystem) -> None:
    """Close a client on the event loop; do not wait on the loop's own thread, which may be collecting a storage."""
    if client._s3 is None:  # noqa: SLF001
        return
    loop = fsspec.asyn.get_loop()
    closing = asyncio.run_coroutine_threadsafe(client._s3creator.__aexit__(None, None, None), loop)  # noqa: SLF001
    if threading.current_thread() is not fsspec.asyn.iothread[0]:
        closing.result(_CLOSE_TIMEOUT_SECONDS)


class S3Storage(ObjectStorage):
    """Objects in a bucket; see the module docstring.

    `bucket`: name of an existing bucket; `prefix`: key prefix of the root, "" for the whole bucket; `options`:
    parameters of `s3fs.S3FileSystem`, and this module's `operation_timeout_seconds` and `part_size_bytes`.
    """

    def __init__(self, bucket: str, prefix: str, options: Mapping[str, object]) -> None:
        if not _BUCKET.fullmatch(bucket):
            raise InvalidArgumentError("s3 URL must be s3://bucket or s3://bucket/prefix, and hold no credentials")
        if prefix:  # checked like a key except for colons, which S3 allows
            check_key(prefix.replace(":", "-"))
        check_options(options)
        super().__init__(f"s3://{bucket}/{prefix}".rstrip("/"))
        self._bucket = bucket
        self._root = f"{prefix}/" if prefix else ""
        self._secrets = secrets_of(options)
        ours: dict[str, Any] = {name: options.get(name, default) for name, default in _OURS.items()}
        self._timeout_seconds = float(ours["operation_timeout_seconds"])
        self._part_bytes = max(_MIN_PART_BYTES, int(ours["part_size_bytes"]))
        self._parallel = int(ours["max_concurrency"])
        profile = cast("str | None", options.get("profile"))
        self._connections = Connections(partial(connect, with_defaults(options), profile, self._requests), close)
        weakref.finalize(self, self._connections.release)

    def put(self, key: str, data: Buffer) -> None:
        """Store an object; see `ObjectStorage.put`. Bytes are not copied, other buffers are copied part by part."""
        name = self._name(key)
        # BytesIO shares bytes without copying; sending a large body as plain bytes would block the event loop.
        view = data if isinstance(data, bytes) else flat_view(data)
        with translated("put", self.url, key, self._secrets):
            if len(view) <= 2 * self._part_bytes:
                self._run(self._put_small(self._fs(), name, view))
            else:
                self._run(self._put_large(self._fs(), name, memoryview(view)))
        self._requests.add("put_bytes", len(view))
        _LOG.debug("put key=%s size_bytes=%d", key, len(view))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        name, view = self._name(key), bytes(flat_view(data))
        with translated("put", self.url, key, self._secrets):
            refusal = self._run(self._put_new(self._fs(), name, view))
        if refusal == _TAKEN:
            self._require(key, view)
        elif refusal == _NO_CONDITIONS:
            raise unconditional(key, self.url)
        else:
            self._requests.add("put_bytes", len(view))

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        self._name(key)
        with translated("get", self.url, key, self._secrets):
            data = memoryview(self._run(self._get(self._fs(), key, limit_bytes))).toreadonly()
        self._requests.add("get_bytes", data.nbytes)
        return data

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        name = self._name(key)
        check_range(start, end)
        with translated("get", self.url, key, self._secrets):
            data = memoryview(self._run(self._get_range(self._fs(), name, start, end))).toreadonly()
        self._requests.add("get_bytes", data.nbytes)
        return self._whole_range(data, start, end, key)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        check_folder(prefix)
        with translated("list", self.url, prefix, self._secrets):
            folder = self._root + prefix
            entries = self._run(self._pages(self._fs(), "list_objects_v2", folder, "Contents", "ContinuationToken"))
        return self._listed(
            ObjectInfo(one["Key"].removeprefix(self._root), one["Size"], int(one["LastModified"].timestamp() * 1000))
            for one in entries
        )

    def delete(self, keys: Iterable[str]) -> None:
        names = list(dict.fromkeys(self._name(key) for key in keys))
        failures: list[tuple[str, HoldfastError]] = []
        for start in range(0, len(names), _DELETE_BATCH):
            batch = names[start : start + _DELETE_BATCH]
            try:
                with translated("delete", self.url, batch[0].removeprefix(self._root), self._secrets):
                    errors = self._run(self._delete(self._fs(), batch))
            except HoldfastError as error:
                failures += [(name.removeprefix(self._root), error) for name in batch]
            else:
                for entry in errors:
                    code, key = entry.get("Code"), str(entry.get("Key", "")).removeprefix(self._root)
                    kind, message = error_for_code(str(code or ""), 0)
                    failures.append((key, kind(message, action="delete", key=key, storage=self.url, detail=code)))
        self._require_deleted(failures)

    def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
        check_folder(prefix)
        with translated("abort", self.url, prefix, self._secrets):
            return self._run(self._abort_uploads(self._fs(), self._root + prefix, before_ms))

    def close(self) -> None:
        """Close this process's connections; running calls fail."""
        super().close()
        self._connections.release()

    def _name(self, key: str) -> str:
        name = self._root + check_key(key)
        if len(name.encode()) > KEY_LIMIT_BYTES:
            raise InvalidArgumentError(
                f"storage key is longer than {KEY_LIMIT_BYTES} bytes with the root's prefix", storage=self.url
            )
        return name

    def _fs(self) -> Any:
        """Return this process's s3fs instance; it opens its session with the first request."""
        self._require_open()
        return self._connections.of_this_process()

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on fsspec's event loop, which restarts after a fork; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, fsspec.asyn.get_loop())
        try:
            return future.result()
        finally:
            future.cancel()

    def _limit(self, size_bytes: int = 0) -> asyncio.Timeout:
        return asyncio.timeout(self._timeout_seconds + size_bytes / _MIN_RATE_BYTES_PER_SECOND)

    async def _call(self, fs: Any, operation: str, **request: Any) -> Any:
        """Make one request to the bucket; only botocore retries it."""
        return await fs._call_s3(operation, Bucket=self._bucket, **request)  # noqa: SLF001

    async def _put_small(self, fs: Any, name: str, view: bytes | memoryview, **condition: str) -> None:
        async with self._limit(len(view)):
            await self._call(fs, "put_object", Key=name, Body=io.BytesIO(view), **condition)

    async def _put_new(self, fs: Any, name: str, data: bytes) -> int | None:
        """Put an object unless the key is taken; return the status of a refusal, None if it was stored."""
        try:
            await self._put_small(fs, name, data, IfNoneMatch="*")
        except OSError as exc:
            status = s3_status(exc)
            if status not in (_TAKEN, _NO_CONDITIONS):
                raise
            return status
        return None

    async def _put_large(self, fs: Any, name: str, view: memoryview) -> None:
        """Upload an object in parts; on any failure, stop all parts and then abort the upload."""
        async with self._limit(view.nbytes):
            upload = await self._call(fs, "create_multipart_upload", Key=name)
        target = {"Key": name, "UploadId": upload["UploadId"]}
        try:
            async with self._limit(view.nbytes):
                parts = await self._put_parts(fs, target, view)
                await self._complete(fs, target, parts, view.nbytes)
        except BaseException as exc:
            await self._abort(fs, target, exc)
            raise

    async def _put_parts(self, fs: Any, target: dict[str, str], view: memoryview) -> _Entries:
        size = max(self._part_bytes, math.ceil(view.nbytes / _MAX_PARTS))
        slots = asyncio.Semaphore(self._parallel)

        async def put_part(number: int) -> dict[str, object]:
            async with slots:
                body = io.BytesIO(view[(number - 1) * size : number * size])
                answer = await self._call(fs, "upload_part", PartNumber=number, Body=body, **target)
                return {"PartNumber": number, "ETag": answer["ETag"]}

        return await _all(put_part(number) for number in range(1, math.ceil(view.nbytes / size) + 1))

    async def _complete(self, fs: Any, target: dict[str, str], parts: _Entries, size_bytes: int) -> None:
        try:
            await self._call(fs, "complete_multipart_upload", MultipartUpload={"Parts": parts}, **target)
        except FileNotFoundError:
            # NoSuchUpload: completed by a request whose reply was lost, or aborted by another process.
            if await self._size(fs, target["Key"]) != size_bytes:
                raise

    async def _size(self, fs: Any, name: str) -> int | None:
        try:
            return declared_size(await self._call(fs, "head_object", Key=name))
        except FileNotFoundError:
            return None

    async def _abort(self, fs: Any, target: dict[str, str], cause: BaseException) -> None:
        """Abort an upload; if that fails, add a note to `cause`."""
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_SECONDS):
                await self._abort_upload(fs, target)
        except (OSError, BotoCoreError):
            _LOG.warning("multipart upload left behind key=%s upload=%s", target["Key"], target["UploadId"])
            cause.add_note(f"multipart upload left behind; add a lifecycle rule for it: upload={target['UploadId']}")

    async def _get(self, fs: Any, key: str, limit_bytes: int) -> bytes | bytearray:
        name = self._name(key)
        async with self._limit() as limit:
            response = await self._call(fs, "get_object", Key=name)
            try:
                size = declared_size(response)
                self._require_size(size, limit_bytes, key)
            except (CorruptionError, aiohttp.ClientPayloadError):
                response["Body"].close()
                raise
            limit.reschedule((limit.when() or 0) + size / _MIN_RATE_BYTES_PER_SECOND)
            if size <= 2 * self._part_bytes:
                return await self._body(fs, name, response, min(limit_bytes, 2 * self._part_bytes))
            response["Body"].close()
            return await self._get_ranges(fs, name, size)

    async def _get_ranges(self, fs: Any, name: str, size: int) -> bytearray:
        """Read ranges concurrently; the store has no checksums for ranges, but holdfast's files do."""
        data = bytearray(size)
        slots = asyncio.Semaphore(self._parallel)

        async def get_part(start: int) -> None:
            end = min(start + self._part_bytes, size)
            async with slots:
                part = await self._get_range(fs, name, start, end)
                if len(part) != end - start:
                    raise aiohttp.ClientPayloadError(f"range has {len(part)} of {end - start} bytes")
                data[start:end] = part

        await _all(get_part(start) for start in range(0, size, self._part_bytes))
        return data

    async def _get_range(self, fs: Any, name: str, start: int, end: int) -> bytes:
        wanted = f"bytes={start}-{end - 1}"
        async with self._limit(end - start):
            response = await self._call(fs, "get_object", Key=name, Range=wanted)
            return await self._body(fs, name, response, end - start, Range=wanted)

    async def _body(self, fs: Any, name: str, response: Any, most: int, **request: str) -> bytes:
        """Read the body of a response; repeat the request if the body is truncated or damaged."""
        for attempt in range(1, _BODY_ATTEMPTS + 1):
            try:
                return await read_body(response, most)
            except (aiohttp.ClientError, BotoCoreError):
                if attempt == _BODY_ATTEMPTS:
                    raise
            finally:
                response["Body"].close()
            _LOG.debug("incomplete body, retrying key=%s attempt=%d", name, attempt)
            response = await self._call(fs, "get_object", Key=name, **request)
        raise AssertionError("unreachable")

    async def _pages(self, fs: Any, operation: str, folder: str, entries: str, marker: str) -> _Entries:
        """Return the `entries` of all pages; each page holds the `marker` of the next page."""
        found: _Entries = []
        request = {"Prefix": folder}
        while True:
            async with self._limit():
                page = await self._call(fs, operation, **request)
            found += page.get(entries, [])
            if not page.get("IsTruncated"):
                return found
            request[marker] = page[f"Next{marker}"]

    async def _delete(self, fs: Any, names: Sequence[str]) -> _Entries:
        """Delete one batch; return the keys that the store could not delete."""
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        async with self._limit():
            answer = await self._call(fs, "delete_objects", Delete=wanted)
        return [entry for entry in answer.get("Errors", []) if entry.get("Code") != "NoSuchKey"]

    async def _abort_uploads(self, fs: Any, folder: str, before_ms: int) -> int:
        # Without UploadIdMarker, which versitygw does not accept: of two uploads of one key, one may be left for the
        # next call.
        uploads = await self._pages(fs, "list_multipart_uploads", folder, "Uploads", "KeyMarker")
        aborted = 0
        for upload in uploads:
            if upload["Key"].startswith(folder) and upload["Initiated"].timestamp() * 1000 < before_ms:
                async with self._limit():
                    aborted += await self._abort_upload(fs, {name: upload[name] for name in ("Key", "UploadId")})
        return aborted

    async def _abort_upload(self, fs: Any, target: dict[str, str]) -> bool:
        """Abort an upload; return whether it existed."""
        try:
            await self._call(fs, "abort_multipart_upload", **target)
        except FileNotFoundError:
            return False  # completed, or aborted by another process
        return True


async def _all(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines concurrently; on the first failure, stop the others, wait for them, and raise the failure."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
