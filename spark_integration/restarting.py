"""Restart a query after transient failures, as Flink's restart strategies do.

::

    start() ─▶ runs ─▶ fails ─▶ transient? ──no──▶ the error is raised
      ▲                            │ yes
      └──── wait ◀── strategy ◀────┘    returns None: the error is raised

A started query resumes by itself, so a strategy only decides when to start it. The strategies and their names are from
https://nightlies.apache.org/flink/flink-docs-stable/docs/ops/state/task_failure_recovery/
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast import clock
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.failures import explain, is_transient

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)

#: The most failures a strategy sees, and can count.
FAILURES_MAX = 1000
_LOOK_EVERY_S = 0.5


class RestartStrategy(ABC):
    """Decides how long to wait after a failure."""

    @abstractmethod
    def delay_s(self, failures_s: Sequence[float]) -> float | None:
        """Return the seconds until the next start; None to give up.

        Parameters
        ----------
        failures_s : sequence of float
            When the query failed, in monotonic seconds, newest last; at most 1,000.
        """


@dataclass(frozen=True)
class SameDelay(RestartStrategy):
    """Waits for the same time after each failure, until more than `failures` fall within `interval_s`."""

    seconds: float
    failures: int
    interval_s: float = math.inf

    def delay_s(self, failures_s: Sequence[float]) -> float | None:
        recent = sum(failures_s[-1] - one <= self.interval_s for one in failures_s)
        return self.seconds if recent <= self.failures else None


@dataclass(frozen=True)
class Exponential(RestartStrategy):
    """See `exponential`."""

    first_s: float
    longest_s: float
    factor: float
    quiet_s: float
    jitter: float
    attempts: int | None
    chance: Callable[[], float] = clock.chance

    def delay_s(self, failures_s: Sequence[float]) -> float | None:
        """Return a delay that grows with the failures since the last `quiet_s` without one."""
        in_a_row, later = 1, failures_s[-1]
        for earlier in reversed(failures_s[:-1]):
            if later - earlier > self.quiet_s:
                break
            in_a_row, later = in_a_row + 1, earlier
        if self.attempts is not None and in_a_row > self.attempts:
            return None
        delay_s = self.first_s
        for _ in range(in_a_row - 1):
            delay_s = min(self.longest_s, delay_s * self.factor)
        return delay_s * (1 + self.jitter * (2 * self.chance() - 1))


def fixed_delay(attempts: int = 3, delay_s: float = 10.0) -> RestartStrategy:
    """Return a strategy that restarts a query at most `attempts` times, each time after `delay_s` seconds.

    Raises
    ------
    InvalidArgumentError
        A number is out of range.
    """
    _check(attempts=(attempts, 0, FAILURES_MAX - 1), delay_s=(delay_s, 0, None))
    return SameDelay(delay_s, attempts)


def exponential(
    first_s: float = 1.0,
    longest_s: float = 60.0,
    *,
    factor: float = 1.5,
    quiet_s: float = 3600.0,
    jitter: float = 0.1,
    attempts: int | None = None,
) -> RestartStrategy:
    """Return a strategy that waits longer after each failure, and resets after a time without failure.

    Parameters
    ----------
    first_s, longest_s : float
        The first and the longest delay, in seconds.
    factor : float
        The ratio of a delay to the previous one.
    quiet_s : float
        After this many seconds without a failure, the next failure counts as the first.
    jitter : float
        The random deviation of a delay, as a fraction of it, so that queries do not all start at once.
    attempts : int, optional
        The most failures in a row that are followed by a restart; unlimited by default.

    Raises
    ------
    InvalidArgumentError
        A number is out of range.
    """
    _check(
        first_s=(first_s, 0, None),
        longest_s=(longest_s, first_s, None),
        factor=(factor, 1, None),
        quiet_s=(quiet_s, 0, None),
        jitter=(jitter, 0, 1),
        attempts=(attempts or 0, 0, FAILURES_MAX - 1),
    )
    return Exponential(first_s, longest_s, factor, quiet_s, jitter, attempts)


def failure_rate(failures: int = 3, interval_s: float = 300.0, delay_s: float = 10.0) -> RestartStrategy:
    """Return a strategy that gives up after more than `failures` failures within `interval_s` seconds.

    Raises
    ------
    InvalidArgumentError
        A number is out of range.
    """
    _check(failures=(failures, 0, FAILURES_MAX - 1), interval_s=(interval_s, 0, None), delay_s=(delay_s, 0, None))
    return SameDelay(delay_s, failures, interval_s)


@dataclass(frozen=True)
class Restart:
    """A restart after a failure."""

    number: int  #: Counted from 1
    error: Exception  #: Why the query failed
    delay_s: float  #: Until the restart
    ran_s: float  #: How long the query ran, including its start


def run(
    start: Callable[[], StreamingQuery],
    *,
    restart: RestartStrategy | None = None,
    on_restart: Callable[[Restart], object] | None = None,
    now_ms: Callable[[], int] = clock.monotonic_ms,
) -> None:
    """Run a query until it ends, and restart it after transient failures.

    Parameters
    ----------
    start : callable
        Defines, starts and returns the query, with the same checkpoint location each time.
    restart : RestartStrategy, optional
        From `holdfast.restart`; ``exponential()`` by default.
    on_restart : callable, optional
        Called with a `Restart` before the wait, to count or to alert.
    now_ms : callable, optional
        As `holdfast.clock.monotonic_ms`.

    Raises
    ------
    InvalidArgumentError
        `start` did not return a query.
    Exception
        The query's error, if it is not transient or the strategy gives up.

    Notes
    -----
    Transient failures are holdfast's `retryable` errors, lost executors and workers, and unresponsive networks and
    servers; docs/operations.md lists them. A function's own error is not transient, nor is the error of a run that a
    newer run of the query has replaced.

    On SIGTERM the query stops and the function returns; outside the main thread the signal is not handled.

    Examples
    --------
    >>> def start():
    ...     return totals.writeStream.option("checkpointLocation", "/data/app").foreachBatch(show).start()
    >>> holdfast.run(start, restart=restart.failure_rate(failures=5, interval_s=600))
    """
    strategy = exponential() if restart is None else restart
    failures_s: deque[float] = deque(maxlen=FAILURES_MAX)
    number = 0
    with _terminated() as signals:
        while not signals:
            began_ms = now_ms()
            try:
                _run_once(start, signals)
                return
            except Exception as exc:
                if signals:
                    return
                failures_s.append(now_ms() / 1000)
                delay_s = strategy.delay_s(tuple(failures_s)) if is_transient(exc) else None
                if delay_s is None:
                    raise
                number += 1
                ran_s = (now_ms() - began_ms) / 1000
                _log.warning("the query restarts in %.1f s (restart %d):\n%s", delay_s, number, explain(exc))
                if on_restart is not None:
                    on_restart(Restart(number, exc, delay_s, ran_s))
            end_ms = now_ms() + int(delay_s * 1000)
            while not signals and (left_ms := end_ms - now_ms()) > 0:
                clock.sleep_ms(min(left_ms, int(_LOOK_EVERY_S * 1000)))


def _run_once(start: Callable[[], StreamingQuery], signals: Sequence[int]) -> None:
    """Start the query and wait until it ends, or stop it after a signal."""
    query = start()
    if not hasattr(query, "awaitTermination"):
        raise InvalidArgumentError(
            "start must return the query that it starts: return ….writeStream.….start()", given=type(query).__name__
        )
    try:
        # In steps: Python handles a signal between two calls into Spark.
        while not query.awaitTermination(_LOOK_EVERY_S):  # type: ignore[arg-type]  # Spark takes fractions, too
            if signals:
                break
    finally:
        if query.isActive:
            query.stop()


@contextmanager
def _terminated() -> Iterator[Sequence[int]]:
    """Yield a list that gets an element on SIGTERM; not an event, whose lock the interrupted thread may hold."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        # None if Python had not installed the handler.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _check(**numbers: tuple[float, float, float | None]) -> None:
    for name, (value, least, most) in numbers.items():
        if not least <= value or (most is not None and value > most):
            limits = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
            raise InvalidArgumentError(f"{name} must be {limits}", given=value)
