"""A queue of announced commits that keeps only the newest of each shard."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from holdfast.spark_integration.client.messages import Committed


class ShardQueue:
    """A queue with at most one announcement per shard; a newer one replaces an older one.

    Threads: `work` in one, everything else from any.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, Committed] = OrderedDict()
        self._working = False
        self._ending = False

    def put(self, message: Committed) -> None:
        with self._changed:
            self._waiting[message.shard.directory] = message
            self._changed.notify_all()

    def put_back(self, message: Committed) -> None:
        """Queue a commit again, unless a newer one of its shard waits."""
        with self._changed:
            self._waiting.setdefault(message.shard.directory, message)
            self._changed.notify_all()

    def forget(self, directory: str) -> None:
        """Drop the announcement of a shard, if any."""
        with self._changed:
            self._waiting.pop(directory, None)
            self._changed.notify_all()

    def end(self) -> None:
        """Let `work` return once the queue is empty."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until the queue is empty and idle; return False if the time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._working, timeout_seconds)

    def work(self, handle: Callable[[Committed], None]) -> None:
        """Handle announcements one after another, until `end`."""
        while True:
            with self._changed:
                self._working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return
                _, message = self._waiting.popitem(last=False)
                self._working = True
            handle(message)
