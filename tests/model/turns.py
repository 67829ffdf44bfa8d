"""Actors that share one storage, of which any may stand still between any two of its requests.

Each actor is a thread that waits before each of its requests; whoever runs the actors says which one makes the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.model.sink_target import Crash, Killed

T = TypeVar("T")


class Turns(Crash):
    """Makes each request of an actor wait until it is its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go, self.has_gone = threading.Semaphore(0), threading.Semaphore(0)
        self.is_killed = False
        #: What the actor is about to ask, where a world tells.
        self.asks: str | None = None

    def wait(self) -> None:
        self.has_gone.release()
        self.may_go.acquire()
        if self.is_killed:
            raise Killed

    @contextmanager
    def around(self) -> Iterator[None]:
        self.wait()
        yield


class Actor(threading.Thread):
    """A thread that stands still before the first request of its act, until it may go."""

    def __init__(self, act: Callable[[Turns], Any], name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self.turns, self._act = Turns(), act
        self.returned: Any = None
        self.error: BaseException | None = None
        #: Set before the last release: a thread that has released may still be alive for a moment.
        self.has_ended = False
        self.steps = 0
        self.start()
        self.turns.has_gone.acquire()

    def run(self) -> None:
        try:
            self.returned = self._act(self.turns)
        except BaseException as exc:  # noqa: BLE001  it is judged
            self.error = exc
        finally:
            self.has_ended = True
            self.turns.has_gone.release()

    def go(self, steps: int | None = None) -> None:
        """Let the actor make some requests, or all that it still wants to."""
        while not self.has_ended and (steps is None or steps > 0):
            self.turns.may_go.release()
            self.turns.has_gone.acquire()
            self.steps += 1
            steps = None if steps is None else steps - 1

    def kill(self) -> None:
        self.turns.is_killed = True
        self.go()
        self.join()


def by_turns(
    storage: ObjectStorage, acts: Sequence[Callable[[FaultyStorage], T]], plan: Iterable[tuple[int, int]]
) -> list[T]:
    """Let actors make requests by a plan of (actor, requests), then the last one to its end, and the one before.

    Return what the acts return.
    """

    def actor(act: Callable[[FaultyStorage], T]) -> Actor:
        return Actor(lambda turns: act(FaultyStorage(storage, [Fault("delay", times=None, wait=turns.wait)])))

    actors = [actor(act) for act in acts]
    for number, requests in plan:
        actors[number].go(requests)
    for one in reversed(actors):
        one.go()
        if one.error is not None:
            raise one.error
    return [one.returned for one in actors]
