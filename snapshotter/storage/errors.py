"""Maps exceptions of file systems and clients to holdfast's errors, in one place.

::

    cause                                                      error                  why this class
    no such object                                             NotFoundError
    access denied, wrong or expired credentials, read-only     InvalidArgumentError   a person must fix it
    no such bucket, bad endpoint, bad option                   InvalidArgumentError   never "absent"
    object and folder with the same name                       InvalidArgumentError
    the store's checksum repeatedly does not match             CorruptionError
    timeout, refused, 5xx, throttled, cut, disk full or bad    UnavailableError       may succeed later
    an object vanishes during its put: something deleted it    UnavailableError       nothing was stored; never "absent"

hdfs-native raises RuntimeError for nearly everything; its message contains HDFS's answer, with a Java class name.

Exception classes are recognized by name, bases included, so users of local disks never load botocore.
No message holds a credential; an original exception that contains one is left out of the chain.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError

_DETAIL_LIMIT = 200

_DENIED = "access denied: check credentials, permissions of this action and, for s3, the machine's clock"
_DENIED_LOCALLY = "access denied: make the folder writable and readable for this user, or choose a different root"
_DENIED_ON_HDFS = "access denied: check the user (HADOOP_USER_NAME, Kerberos) and the permissions of the folder"
_FULL = "no space left: free space or choose a different root; nothing of this object was stored"
_NO_BUCKET = "no such bucket: create it, or correct the storage URL"
_NOT_A_STORE = "the answer does not come from an object store: check the endpoint URL"
_COLLISION = "key collides: the storage has an object in place of a folder that the key needs, or the reverse"
_REFUSED = "the storage refused the call: check its URL and options"
_NO_ANSWER = "storage is unavailable"
_VANISHED = "the object vanished while it was written: stop programs that delete it, and check the storage URL"
_DAMAGED = "the storage's own checksum does not match the object"

_LOCAL_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_LOCAL_FULL = {errno.ENOSPC, errno.EDQUOT}
_LOCAL_COLLISION = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP}
_LOCAL_BAD_CALL = {errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS, errno.EOPNOTSUPP}

# Names of exception classes (see the module docstring). Order matters: the first match decides.
_BY_NAME: tuple[tuple[frozenset[str], type[HoldfastError], str], ...] = (
    (frozenset({"FlexibleChecksumError", "ChecksumError"}), CorruptionError, _DAMAGED),
    (
        frozenset({"HTTPClientError", "ConnectionError", "ClientPayloadError", "ClientConnectionError"})
        | {"ResponseParserError", "IncompleteReadError", "IncompleteRead", "MetadataRetrievalError"},
        UnavailableError,
        _NO_ANSWER,
    ),
    (
        frozenset({"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}),
        InvalidArgumentError,
        _DENIED,
    ),
    (
        frozenset({"BotoCoreError", "ImportError", "ValueError", "TypeError", "LookupError", "NotImplementedError"}),
        InvalidArgumentError,
        _REFUSED,
    ),
)
_BUSY_STATUS = frozenset({408, 409, 429})
_BUSY_CODES = {
    *("InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown"),
    *("Throttling", "ThrottlingException"),
}
_DENIED_CODES = {
    *("AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired"),
}
_ABSENT_CODES = {"NoSuchKey", "NoSuchVersion"}

# A message of hdfs-native names the variant of its error or, in an answer of HDFS, the remote exception's class.
_HDFS_TEXT = re.compile(r'(\w+)(?:\("(?:\w+[.$])*(\w+)")?')
_HDFS_DENIED = {
    *("AccessControlException", "AuthorizationException", "GSSAPIError", "InvalidToken", "NoSASLMechanism"),
    *("SASLError", "SaslException"),
}
_HDFS_REFUSED = {
    *("InvalidArgument", "InvalidPathException", "PathComponentTooLongException", "UrlParseError", "XmlParseError"),
}
_BY_HDFS_NAME: dict[str, tuple[type[HoldfastError], str]] = {
    **dict.fromkeys(_HDFS_DENIED, (InvalidArgumentError, _DENIED_ON_HDFS)),
    **dict.fromkeys(_HDFS_REFUSED, (InvalidArgumentError, _REFUSED)),
    **dict.fromkeys(("DSQuotaExceededException", "NSQuotaExceededException"), (UnavailableError, _FULL)),
    "ParentNotDirectoryException": (InvalidArgumentError, _COLLISION),
}
_HDFS_RENAME_ONTO_FOLDER = "must both be directories"


@contextmanager
def translated(action: str, url: str, key: str, secrets: AbstractSet[str] = frozenset()) -> Iterator[None]:
    """Map exceptions of the context to holdfast's; messages name `action` and `url`, which holds no credentials."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as exc:  # noqa: BLE001  always raised again, as a holdfast error
        error = map_error(exc, action=action, url=url, key=key, secrets=secrets)
        raise error from (None if _mentions(exc, secrets) else exc)


def map_error(
    exc: Exception, *, action: str, url: str, key: str, secrets: AbstractSet[str] = frozenset()
) -> HoldfastError:
    """Map a third-party exception to a holdfast error, by the table in the module docstring."""
    kind, message = _classify(exc)
    if kind is NotFoundError and action == "put":
        kind, message = UnavailableError, _VANISHED
    return kind(message, action=action, key=key, storage=url, detail=_redacted(_detail(exc), secrets))


def s3_status(exc: BaseException) -> int:
    """Return the HTTP status of an S3 store's answer; 0 if it did not answer."""
    answer = _answer(exc)
    return answer[1] if answer else 0


def error_for_code(code: str, status: int) -> tuple[type[HoldfastError], str]:
    """Return the error class and message for an S3 error code and an HTTP status (0 if unknown)."""
    if code in _ABSENT_CODES:
        return NotFoundError, "no such object"
    if code == "NoSuchBucket":
        return InvalidArgumentError, _NO_BUCKET
    if code in _BUSY_CODES or status in _BUSY_STATUS or status >= 500:
        return UnavailableError, _NO_ANSWER
    if code in _DENIED_CODES or status in (401, 403):
        return InvalidArgumentError, _DENIED
    if code == "InvalidRange":
        return CorruptionError, "the object is shorter than expected"
    if code in ("NoSuchUpload", "InvalidPart"):
        return UnavailableError, "another process aborted the multipart upload"
    return InvalidArgumentError, _NOT_A_STORE if status == 404 else _REFUSED


def _classify(exc: BaseException) -> tuple[type[HoldfastError], str]:
    answer = _answer(exc)
    if answer is not None:
        return error_for_code(*answer)
    names = {base.__name__ for base in type(exc).__mro__}
    # Clients' names come first: some classes derive from both BotoCoreError and OSError.
    for known, kind, message in _BY_NAME:
        if known & names and "OSError" not in names:
            return kind, message
    if isinstance(exc, OSError):
        return _classify_os(exc)
    if _HDFS_RENAME_ONTO_FOLDER in str(exc):
        return InvalidArgumentError, _COLLISION
    of_hdfs = _HDFS_TEXT.match(str(exc))
    for name in reversed(of_hdfs.groups()) if of_hdfs else ():
        if name in _BY_HDFS_NAME:
            return _BY_HDFS_NAME[name]
    return UnavailableError, _NO_ANSWER


def _classify_os(exc: OSError) -> tuple[type[HoldfastError], str]:
    """Return the error class and message for an operating-system error; many fsspec errors have no errno."""
    if exc.errno in _LOCAL_FULL:
        return UnavailableError, _FULL
    if exc.errno in _LOCAL_DENIED:
        return InvalidArgumentError, _DENIED_LOCALLY
    if isinstance(exc, PermissionError):
        return InvalidArgumentError, _DENIED
    if isinstance(exc, FileNotFoundError):
        return NotFoundError, "no such object"
    if exc.errno in _LOCAL_COLLISION or isinstance(exc, (IsADirectoryError, NotADirectoryError, FileExistsError)):
        return InvalidArgumentError, _COLLISION
    if exc.errno in _LOCAL_BAD_CALL:
        return InvalidArgumentError, _REFUSED
    return UnavailableError, _NO_ANSWER


def _answer(exc: BaseException) -> tuple[str, int] | None:
    """Return the error code and HTTP status of the server's answer behind an exception (s3fs keeps it as cause)."""
    seen: BaseException | None = exc
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict) and "Error" in response:
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response["Error"].get("Code", "")), int(status)
        seen = seen.__cause__
    return None


def _detail(exc: BaseException) -> str:
    """Return the shortest text that explains the error."""
    answer = _answer(exc)
    if answer is not None:
        return f"{answer[0]}/{answer[1]}"
    if isinstance(exc, OSError) and exc.errno is not None:
        return f"{errno.errorcode.get(exc.errno, exc.errno)}: {os.strerror(exc.errno)}"
    # An answer of HDFS ends in a stack trace, with line ends escaped or not.
    text = " ".join(re.split(r"\n\s*at |\\n\\tat ", str(exc), maxsplit=1)[0].split())
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def _redacted(text: str, secrets: AbstractSet[str]) -> str:
    """Return the text without secrets, at most `_DETAIL_LIMIT` characters long."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text if len(text) <= _DETAIL_LIMIT else text[: _DETAIL_LIMIT - 3] + "..."


def _mentions(exc: BaseException, secrets: AbstractSet[str]) -> bool:
    """Return whether a message in the exception's traceback would show a secret."""
    chain: list[BaseException] = [exc]
    seen: set[int] = set()
    while chain and secrets:
        one = chain.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        text = f"{one!s} {one!r} {getattr(one, '__notes__', '')}"
        if any(secret in text for secret in secrets):
            return True
        chain += [link for link in (one.__cause__, one.__context__) if link is not None]
    return False
