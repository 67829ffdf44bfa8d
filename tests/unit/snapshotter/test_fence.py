"""The fence: whoever looks again gets a number, however many begin at once."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import ConflictError
from holdfast.snapshotter.fence import Fence, looks
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from tests.storage_in_ram import storage_in_ram

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Crowded(WrappedStorage):
    """Before each of our puts somebody else has put, so many times."""

    others = 0

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if self.others:
            self.others -= 1
            self.inner.put_if_absent(key, b"other")
        super().put_if_absent(key, data)


def take(storage: Crowded) -> int:
    """Take the next number as everybody does."""
    fence = Fence(storage, "f")
    for _ in looks(storage.url):
        number, _ = fence.newest()
        with suppress(ConflictError):
            return fence.take(number + 1, b"mine")[-1]
    raise AssertionError("looks has raised")


def test_many_may_begin_at_once() -> None:
    """As queries that a program starts upon one Delta table: the last one is in nobody's way."""
    with storage_in_ram() as inner:
        storage = Crowded(inner)
        storage.others = 40
        assert take(storage) == 41


def test_who_is_never_the_first_is_told() -> None:
    """Something writes there without end: nobody waits for ever."""
    with storage_in_ram() as inner:
        storage = Crowded(inner)
        storage.others = 10**9
        with pytest.raises(ConflictError, match="other processes won each attempt"):
            take(storage)
