"""How many keys are looked up, called and written together, so that their state fits into memory."""

from __future__ import annotations

AT_ONCE_BYTES = 32 << 20
#: Until the size of the state is known; and how many times as many as before come later, since rows may be absent.
_FIRST, _GROWTH = 256, 8


class KeysAtOnce:
    """The number of keys that fit into `AT_ONCE_BYTES`, by what the last ones read and wrote.

    `count`: how many come first.
    """

    def __init__(self, count: int = _FIRST) -> None:
        self.count = count

    def learn(self, keys: int, size_bytes: int) -> None:
        """Learn from the bytes that some keys read and wrote."""
        self.count = max(1, min(AT_ONCE_BYTES * keys // max(1, size_bytes), _GROWTH * max(keys, self.count)))
