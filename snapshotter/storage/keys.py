"""Keys that every storage can hold; see `holdfast.snapshotter.storage.object_storage`."""

from __future__ import annotations

import re

from holdfast.errors import InvalidArgumentError

KEY_LIMIT_BYTES = 1024
SEGMENT_LIMIT_BYTES = 255
TEMPORARY_PREFIX = ".tmp-"
"""File names that begin so are unfinished writes: no key may hold one, no list shows one."""

# S3 sends keys as XML 1.0, which cannot hold the first ones, and HDFS has no colon in a name, and no file .snapshot;
# refusing them everywhere keeps storages alike.
_UNSAFE = re.compile("[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff:]")
_RESERVED = {"", ".", "..", ".snapshot"}


def check_key(key: str) -> str:
    """Return `key` if it is one that every storage can hold.

    Raises `InvalidArgumentError` if the key is absolute, too long, has an empty, ``.`` or ``..`` segment, a colon, a
    control character, a lone surrogate, or a segment that is reserved: for unfinished writes, or ``.snapshot``.

    `key`: segments joined by "/", each 1 to 255 bytes of UTF-8, 1,024 bytes in all.
    """
    problem = key_problem(key)
    if problem:
        shown = key if len(key) <= 80 else key[:77] + "..."
        raise InvalidArgumentError(f"storage key {problem}", key=ascii(shown))
    return key


def check_root(prefix: str) -> str:
    """Return the prefix of a root, checked like a key, but with colons allowed: users choose it, and S3 takes them."""
    if prefix:
        check_key(prefix.replace(":", "-"))
    return prefix


def check_folder(prefix: str) -> str:
    """Return `prefix` if it is "" or a valid folder ending in a slash; raise InvalidArgumentError if not."""
    if prefix:
        if not prefix.endswith("/"):
            raise InvalidArgumentError('list prefix must be "" or a folder that ends in "/"', prefix=ascii(prefix))
        check_key(prefix[:-1])
    return prefix


def key_problem(key: str) -> str | None:
    """Return what is wrong with a key, or None."""
    if _UNSAFE.search(key):
        return "has a colon, a control character or a lone surrogate"
    if len(key.encode()) > KEY_LIMIT_BYTES:
        return f"is longer than {KEY_LIMIT_BYTES} bytes"
    for segment in key.split("/"):
        if segment in _RESERVED:
            return "must be relative, without empty, ., .. or .snapshot segments"
        if len(segment.encode()) > SEGMENT_LIMIT_BYTES:
            return f"has a segment longer than {SEGMENT_LIMIT_BYTES} bytes"
        if segment.startswith(TEMPORARY_PREFIX):
            return f"has a segment that begins with {TEMPORARY_PREFIX}, which is reserved for unfinished writes"
    return None
