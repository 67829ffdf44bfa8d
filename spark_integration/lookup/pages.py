"""Where a page of a shard's rows begins: at a hash, behind as many of its rows as were shown before."""

from __future__ import annotations

import re

from holdfast.backends.arrow.rows import HashArray
from holdfast.errors import InvalidArgumentError

_PLACE = re.compile(r"([0-9a-f]{16})\+([0-9]{1,12})")


def read_place(after: str | None) -> tuple[int, int]:
    """Return the hash at which a page begins, and how many of its rows were shown before."""
    found = _PLACE.fullmatch(after or f"{0:016x}+0")
    if found is None:
        raise InvalidArgumentError("no page ends there", after=ascii(after)[:80])
    return int(found[1], 16), int(found[2])


def next_place(hashes: HashArray, limit: int, first_hash: int, skipped: int) -> str | None:
    """Return where the page after `limit` rows begins; None at the end."""
    if len(hashes) <= limit:
        return None
    shown = int((hashes[:limit] == hashes[limit]).sum())
    return f"{int(hashes[limit]):016x}+{shown + (skipped if int(hashes[limit]) == first_hash else 0)}"
