"""Cached answers of stores, so that no view waits for a store that hangs.

Readers share an answer for a few seconds, or longer if it took long to get. After that, they get the old answer with
its age while a new request runs. A hanging store occupies one thread per inquiry.
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
#: A store rests for this many times the duration of its last request.
_REST = 10
#: The longest rest after a failure, since the store may have recovered.
_FAILED_REST_MS = 30_000
#: How long a view waits for new answers in total, and for a request that another view began.
PATIENCE_S = 2.0
#: The least time to wait for a store, however long earlier stores took.
_LEAST_S = 0.25

_T = TypeVar("_T")
_K = TypeVar("_K")


class Patience:
    """The time that a view may wait for all its stores together. `seconds`: None for no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._until_ms = clock.monotonic_ms() + int((seconds or 0) * 1000)

    @classmethod
    def of_a_view(cls) -> Patience:
        """Return the patience of a view that starts now."""
        return cls(PATIENCE_S)

    @property
    def left_s(self) -> float | None:
        """How long to wait for the next store; None for no limit."""
        if self._seconds is None:
            return None
        return max((self._until_ms - clock.monotonic_ms()) / 1000, min(self._seconds, _LEAST_S))


@dataclass(frozen=True)
class Dated(Generic[_T]):
    """An answer, with its age."""

    found: _T
    taken_ms: int  #: When it was requested, in ms since 1970
    took_ms: int
    error: HoldfastError | None = None  #: Why the last request failed, if it did
    is_late: bool = False  #: Whether a newer answer is overdue


class Inquiry(Generic[_T]):
    """Caches a store's latest answer, for any thread. `ask` must not wait for `executor`."""

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
        self._request: Future[None] | None = None
        self._requested_ms = 0

    @property
    def known(self) -> _T | None:
        """The last answer, however old; None before the first."""
        with self._lock:
            return self._latest.found if self._latest else None

    def begin(self) -> tuple[Future[None], float]:
        """Start a request if none is running and the answer is old; return the request, and how long to wait for it."""
        with self._lock:
            now_ms = self._monotonic_ms()
            if self._request is None or (self._request.done() and now_ms >= self._due_ms):
                self._request, self._requested_ms = self._executor.submit(self._make), now_ms
            return self._request, max(self._requested_ms / 1000 + PATIENCE_S - now_ms / 1000, 0)

    def latest(self, patience: Patience | None = None) -> Dated[_T]:
        """Return the latest answer, waiting up to `patience` for a newer one; raise the error if there is none."""
        request, left_s = self.begin()
        within_s = (patience or Patience.of_a_view()).left_s
        wait([request], None if within_s is None else min(within_s, left_s))
        is_late = not request.done()
        if not is_late:
            request.result()  # raises errors that are not holdfast's
        with self._lock:
            if self._latest is None:
                raise self._error or UnavailableError(
                    "the storage has not responded yet: the page shows the result once it does", location=self._location
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


def answers(inquiries: Mapping[_K, Inquiry[_T]], patience: Patience) -> dict[_K, Dated[_T] | HoldfastError]:
    """Ask stores in parallel; return an answer or an error for each."""
    for one in inquiries.values():
        one.begin()
    found: dict[_K, Dated[_T] | HoldfastError] = {}
    for key, one in inquiries.items():
        try:
            found[key] = one.latest(patience)
        except HoldfastError as exc:
            found[key] = exc
    return found
