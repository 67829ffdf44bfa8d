"""A store's latest answer, refreshed now and then: no view waits for a store that does not answer.

An answer serves all readers for some seconds, longer if it took longer. Later readers get the old answer, with its age,
while the store is asked again; a hanging store holds one thread per inquiry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast import clock
from holdfast.errors import HoldfastError, UnavailableError

SHOWN_MS = 3_000
#: Asking takes at most this fraction of the time.
_REST = 10
#: A failed store is asked again within this time: it may be back.
_FAILED_REST_MS = 30_000
#: How long a view waits for newer answers: for all together, and for another view's request.
PATIENCE_S = 2.0
#: The time that a hanging store leaves to each later one.
_LEAST_S = 0.25

_T = TypeVar("_T")
_K = TypeVar("_K")


class Patience:
    """How long a view still waits for all its stores together. `seconds`: None to wait until they answer or fail."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._until_ms = clock.monotonic_ms() + int((seconds or 0) * 1000)

    @classmethod
    def of_a_view(cls) -> Patience:
        """Return the patience of a view that begins now."""
        return cls(PATIENCE_S)

    @property
    def left_s(self) -> float | None:
        """How long to wait for the next one; None for as long as it takes."""
        if self._seconds is None:
            return None
        return max((self._until_ms - clock.monotonic_ms()) / 1000, min(self._seconds, _LEAST_S))


@dataclass(frozen=True)
class Dated(Generic[_T]):
    """An answer, and how old it is."""

    found: _T
    taken_ms: int  #: When it was asked for, in ms since 1970
    took_ms: int
    error: HoldfastError | None = None  #: Why there is no newer one
    is_late: bool = False  #: Whether a newer one was asked for, and has not come


class Inquiry(Generic[_T]):
    """Gives a store's latest answer, to any thread; `executor` must not be one that `ask` waits for."""

    def __init__(
        self,
        ask: Callable[[], _T],
        executor: Executor,
        location: str,
        now_ms: Callable[[], int] = clock.now_ms,
        monotonic_ms: Callable[[], int] = clock.monotonic_ms,
    ) -> None:
        self._ask = ask
        self._executor = executor
        self._location = location
        self._now_ms, self._monotonic_ms = now_ms, monotonic_ms
        self._lock = threading.Lock()
        self._latest: Dated[_T] | None = None
        self._error: HoldfastError | None = None
        self._due_ms = 0
        self._asked: Future[None] | None = None
        self._asked_ms = 0

    @property
    def known(self) -> _T | None:
        """The last answer, however old; None before the first."""
        with self._lock:
            return self._latest.found if self._latest else None

    def begin(self) -> tuple[Future[None], float]:
        """Ask, unless a call is under way or the last answer is young; return the outcome, and how long to wait."""
        with self._lock:
            now_ms = self._monotonic_ms()
            if self._asked is None or (self._asked.done() and now_ms >= self._due_ms):
                self._asked, self._asked_ms = self._executor.submit(self._make), now_ms
            return self._asked, max(self._asked_ms / 1000 + PATIENCE_S - now_ms / 1000, 0)

    def latest(self, patience: Patience | None = None) -> Dated[_T]:
        """Return the latest answer, waiting `patience` for a newer one; raises the reason if there is none."""
        asked, left_s = self.begin()
        within_s = (patience or Patience.of_a_view()).left_s
        wait([asked], None if within_s is None else min(within_s, left_s))
        is_late = not asked.done()
        if not is_late:
            asked.result()  # raises errors that are not holdfast's
        with self._lock:
            if self._latest is None:
                raise self._error or UnavailableError(
                    "the storage has not responded yet: the page will show this once it does", location=self._location
                )
            found = self._latest
            return Dated(found.found, found.taken_ms, found.took_ms, self._error, is_late)

    def _make(self) -> None:
        begun_ms, taken_ms = self._monotonic_ms(), self._now_ms()
        found, error = None, None
        try:
            found = Dated(self._ask(), taken_ms, 0)
        except HoldfastError as exc:
            error = exc
        finally:
            took_ms = self._monotonic_ms() - begun_ms
            rest_ms = _REST * took_ms if found else min(_REST * took_ms, _FAILED_REST_MS)
            with self._lock:
                self._due_ms = begun_ms + took_ms + max(SHOWN_MS, rest_ms)
                self._error = error
                if found is not None:
                    self._latest = Dated(found.found, taken_ms, took_ms)


def answers(asked: Mapping[_K, Inquiry[_T]], patience: Patience) -> dict[_K, Dated[_T] | HoldfastError]:
    """Ask some stores in parallel; return answers, or an error for each still silent."""
    for one in asked.values():
        one.begin()
    found: dict[_K, Dated[_T] | HoldfastError] = {}
    for key, one in asked.items():
        try:
            found[key] = one.latest(patience)
        except HoldfastError as exc:
            found[key] = exc
    return found
