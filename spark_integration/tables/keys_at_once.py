"""How many keys are looked up, called and written together, so that their state fits into memory."""

from __future__ import annotations

AT_ONCE_BYTES = 32 << 20
#: Until the size of the state is known; and how many times as many as before come later, since rows may be absent.
_FIRST, _GROWTH = 256, 8


class KeysAtOnce:
    """As many keys as `AT_ONCE_BYTES` hold, by the size of what the last ones read and wrote.

    Parameters
    ----------
    count : int, optional
        How many come first.

    Attributes
    ----------
    count : int
        How many come next.
    """

    def __init__(self, count: int = _FIRST) -> None:
        self.count = count

    def learn(self, keys: int, size_bytes: int) -> None:
        """Note how much some keys have read and written."""
        self.count = max(1, min(AT_ONCE_BYTES * keys // max(1, size_bytes), _GROWTH * max(keys, self.count)))
