"""How many requests a storage has made, and with how many bytes: what users of a store pay for."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal

Action = Literal["put", "get", "list", "delete"]
ACTIONS: tuple[Action, ...] = ("put", "get", "list", "delete")


class RequestCounts:
    """Counts requests by action, and the bytes of the objects that were stored and returned.

    Notes
    -----
    Threads: any. Each counts for itself, without a lock, so that a fork in the middle leaves none that is held.
    """

    def __init__(self) -> None:
        self._by_thread: dict[int, Counter[str]] = {}

    def add(self, action: Action, requests: int = 1) -> None:
        """Count requests."""
        self._mine()[action] += requests

    def add_bytes(self, action: Literal["put", "get"], size_bytes: int) -> None:
        """Count the bytes of an object that was stored or returned whole."""
        self._mine()[f"{action}_bytes"] += size_bytes

    def as_dict(self) -> dict[str, int]:
        """Return the sums: ``put``, ``get``, ``list``, ``delete``, ``put_bytes``, ``get_bytes``."""
        # A list, and a copy of each: threads go on counting.
        counts = [counter.copy() for counter in list(self._by_thread.values())]
        return {name: sum(counter[name] for counter in counts) for name in (*ACTIONS, "put_bytes", "get_bytes")}

    def _mine(self) -> Counter[str]:
        # A number that a dead thread had may come again: the new thread counts on where that one ended.
        thread = threading.get_ident()
        mine = self._by_thread.get(thread)
        return mine if mine is not None else self._by_thread.setdefault(thread, Counter())
