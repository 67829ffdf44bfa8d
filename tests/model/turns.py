"""Actors that share one storage, of which any may stand still between any two of its requests.

An `Actor` is a thread that waits before each of its requests: whoever runs the actors says which one makes the next.
`every_order` tries all orders, as an explicit-state model checker does (Holzmann, *The SPIN Model Checker*, 2003), with
code that is run again instead of stored (Godefroid, *Model Checking for Programming Languages using VeriSoft*, 1997):

* An actor that is told the same does the same: its ids are drawn the same, and its clock stands still. So `Position`
  comes to any of its requests by running it on the answers before.
* Histories only grow, and whoever is overtaken again and again gives up: so the search ends.
* What can follow depends on the objects and on where each actor stands, and on nothing else. So each such `Moment` is
  gone on from once, however many orders lead to it.
* Where an actor stands is all that it was told. Of a call that keeps nothing to itself, that is what it returned: this
  is what `Replay.as_one` declares.

What holds at each moment holds after crashes at any requests: a killed actor is one that stands still for ever. Each
object that is deleted is a request.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import pytest

from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.errors import HoldfastError
from holdfast.snapshotter import fence
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage, check_key
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from tests.model.shard_history import TimedStorage
from tests.model.sink_target import Crash, Killed

if TYPE_CHECKING:
    from typing_extensions import Buffer


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


T = TypeVar("T")
Act: TypeAlias = "Callable[[Replay], Any]"
Objects: TypeAlias = frozenset[tuple[str, tuple[bytes, int]]]
Request: TypeAlias = tuple[Any, ...]
Answer: TypeAlias = "bytes | tuple[ObjectInfo, ...] | HoldfastError | None"
History: TypeAlias = tuple[tuple[Request, Answer], ...]


class TimelessStorage(TimedStorage):
    """Objects in memory, all of one age: what is the same is equal."""

    def __init__(self, objects: Objects = frozenset()) -> None:
        super().__init__()
        self.objects = dict(objects)

    def put(self, key: str, data: Buffer) -> None:
        self.objects[check_key(key)] = (bytes(data), 0)

    def answer(self, request: Request) -> Answer:
        action, *given = request
        try:
            found = getattr(self, action)(*given)
        except HoldfastError as exc:
            return exc
        return bytes(found) if action == "get" else tuple(found) if action == "list" else None


class OverwritingStorage(WrappedStorage):
    """Takes a condition, and ignores it."""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.inner.put(key, data)


class _Unanswered(BaseException):
    """Ends an actor's run at the first request that nobody has answered."""


class Replay(ObjectStorage):
    """Gives an actor the answers that it has had."""

    def __init__(self, had: History) -> None:
        super().__init__("replay://test")
        self._had, self._asked, self._drawn = had, 0, 0
        self.request: Request | None = None
        #: What the actor has been told, as far as it matters: where it stands.
        self.told: list[object] = []

    def as_one(self, call: Callable[[], T]) -> T:
        """Make a call that changes nothing but objects: the answers to its requests matter by what it returns."""
        before = len(self.told)
        try:
            returned = call()
        except HoldfastError as exc:
            self.told[before:] = [repr(exc), self._drawn]
            raise
        self.told[before:] = [repr(returned), self._drawn]
        return returned

    def draw(self, size: int) -> str:
        self._drawn += 1
        return f"{self._drawn:0{2 * size}x}"

    def _ask(self, *request: Any) -> Any:
        if self._asked == len(self._had):
            self.request = self.request or request
            raise _Unanswered
        asked, answer = self._had[self._asked]
        self._asked += 1
        self.told.append(repr(answer) if isinstance(answer, HoldfastError) else answer)
        assert request == asked, "an actor that is told the same does something else"
        if isinstance(answer, HoldfastError):
            raise answer.with_traceback(None)
        return answer

    def put(self, key: str, data: Buffer) -> None:
        self._ask("put", key, bytes(data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._ask("put_if_absent", key, bytes(data))

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        return memoryview(self._ask("get", key, limit_bytes))

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        return list(self._ask("list", prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._ask("delete", (key,))


class Position:
    """Where an actor stands: what it asks next, or how it has ended."""

    def __init__(
        self, name: str, act: Act, looks: int, had: History = (), known: dict[object, Position] | None = None
    ) -> None:
        self.name, self._act, self._looks, self._had = name, act, looks, had
        self._known: dict[object, Position] = {} if known is None else known
        self._next: dict[object, Position] = {}
        self.returned: Any = None
        self.error: Exception | None = None
        replay, prefix = Replay(had), name.encode().hex()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(secrets, "token_hex", lambda size: prefix + replay.draw(size)[len(prefix) :])
            patch.setattr(time, "time_ns", lambda: 0)
            patch.setattr(fence, "_LOOKS", looks)
            try:
                self.returned = act(replay)
            except _Unanswered:
                pass
            except Exception as exc:  # noqa: BLE001  it is judged
                self.error = exc
        #: None if the actor has ended
        self.request = replay.request
        self._told = tuple(replay.told)

    def after(self, answer: Answer) -> Position:
        """Return where it stands once its request is answered: one position for all that go on alike."""
        told = repr(answer) if isinstance(answer, HoldfastError) else answer
        if told not in self._next:
            had = (*self._had, (self.request or (), answer))
            made = Position(self.name, self._act, self._looks, had, self._known)
            found = self._next[told] = self._known.setdefault(made._told, made)
            ends = [repr((one.request, one.returned, one.error)) for one in (found, made)]
            assert ends[0] == ends[1], f"{self.name} does not do the same: a call has left more than it returned"
        return self._next[told]


@dataclass(frozen=True)
class Moment:
    """All objects, and where each actor stands."""

    objects: Objects
    actors: tuple[Position, ...]
    #: Whose requests have led here, the last one first: (its name, what was before)
    order: tuple[str, Any] | None = None

    def has_ended(self) -> bool:
        return all(actor.request is None for actor in self.actors)

    def storage(self) -> TimelessStorage:
        return TimelessStorage(self.objects)

    def returned(self) -> list[Any]:
        """Return what the actors have returned; raise what one raises."""
        for actor in self.actors:
            if actor.error is not None:
                raise actor.error
        return [actor.returned for actor in self.actors]

    def __str__(self) -> str:
        names, order = [], self.order
        while order is not None:
            name, order = order
            names.append(name)
        turns = [(name, len([*of_one])) for name, of_one in itertools.groupby(reversed(names))]
        return f"after {turns}"


def every_order(
    acts: Mapping[str, Act], objects: Objects = frozenset(), *, are_alike: bool = False, looks: int = 2
) -> Iterator[Moment]:
    """Yield each moment that actors come to, in whatever order their requests are made.

    `acts`: by name, of at most six letters; `objects`: what there is before; `are_alike`: the acts differ in names
    only, so the actors make their first requests in this order: others are the same with the names exchanged.

    `looks`: who is overtaken so often at a fence gives up, as two could overtake each other for ever.
    """
    begun = tuple(Position(name, act, looks) for name, act in acts.items())
    known: dict[Objects, Objects] = {}

    @cache
    def step(objects: Objects, actor: Position) -> tuple[Objects, Position]:
        storage = TimelessStorage(objects)
        after = actor.after(storage.answer(actor.request or ()))
        found = frozenset(storage.objects.items())
        return known.setdefault(found, found), after

    seen, ahead = set[Any](), [Moment(objects, begun)]
    while ahead:
        moment = ahead.pop()
        if (moment.objects, moment.actors) in seen:
            continue
        seen.add((moment.objects, moment.actors))
        yield moment
        for number, actor in enumerate(moment.actors):
            if actor.request is not None:
                found, after = step(moment.objects, actor)
                actors = (*moment.actors[:number], after, *moment.actors[number + 1 :])
                ahead.append(Moment(found, actors, (actor.name, moment.order)))
            if are_alike and actor is begun[number]:
                break


def end_of(act: Act, objects: Objects = frozenset(), name: str = "alone") -> Objects:
    """Return the objects that an actor leaves that is alone."""
    *_, last = every_order({name: act}, objects)
    last.returned()
    return last.objects
