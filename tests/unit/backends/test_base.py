"""Pointers: what a query remembers of a shard."""

from __future__ import annotations

import pytest

from holdfast.backends.base import Pointer
from holdfast.errors import InvalidArgumentError


def test_pointers_as_text() -> None:
    """Only what a pointer writes is read, and nothing that would be a path."""
    assert Pointer.parse(str(Pointer(7, "9f3c"))) == Pointer(7, "9f3c")
    for text in ("", "7", "7-", "-7-a", "07-a", "7-../a", "7-a/b", "7-é", "٣-a", "7-a\n", "x-a", "7-a-b"):
        with pytest.raises(InvalidArgumentError, match="not a pointer"):
            Pointer.parse(text)
