"""Whose turn it is to make a request, where two or three act upon one storage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.testing.faulty_storage import Fault, FaultyStorage

T = TypeVar("T")


class Turns:
    """Lets actors make requests by turns.

    Parameters
    ----------
    plan : iterable of (int, int)
        Whose turn it is, and for how many requests; afterwards the last actor goes on to its end, then the one before.
    actors : int
    """

    def __init__(self, plan: Iterable[tuple[int, int]], actors: int) -> None:
        self._plan: list[tuple[int, float]] = [*plan, *((actor, float("inf")) for actor in reversed(range(actors)))]
        self._over: set[int] = set()
        self._asking: int | None = None
        self._changed = threading.Condition()

    def wait(self, actor: int) -> None:
        """Wait for the turn to make a request; what any actor asked before has been done."""
        with self._changed:
            self._done(actor)
            while self._asking is not None or self._whose() != actor:
                self._changed.wait()
            self._asking = actor
            self._plan[0] = actor, self._plan[0][1] - 1

    def end(self, actor: int) -> None:
        with self._changed:
            self._over.add(actor)
            self._done(actor)

    def _done(self, actor: int) -> None:
        if self._asking == actor:
            self._asking = None
        self._changed.notify_all()

    def _whose(self) -> int:
        while self._plan[0][1] == 0 or self._plan[0][0] in self._over:
            del self._plan[0]
        return self._plan[0][0]


def by_turns(
    threads: ThreadPoolExecutor,
    storage: ObjectStorage,
    acts: Sequence[Callable[[FaultyStorage], T]],
    plan: Iterable[tuple[int, int]],
) -> list[T]:
    """Run each act in a thread, with a storage that waits for the act's turn; return what they return."""
    turns = Turns(plan, len(acts))

    def run(actor: int) -> T:
        asked = FaultyStorage(storage, [Fault("delay", times=None, wait=lambda: turns.wait(actor))])
        try:
            return acts[actor](asked)
        finally:
            turns.end(actor)

    return [done.result(timeout=60) for done in [threads.submit(run, actor) for actor in range(len(acts))]]
