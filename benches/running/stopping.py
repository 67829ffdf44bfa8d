"""Ctrl-C and SIGTERM while benches run: the first one stops in good order, the second one at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """Somebody wants the command to stop.

    Parameters
    ----------
    number : int
        The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_status = 128 + number


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` on the first signal; end the process on the second.

    Runs of engines end by themselves in either case, once this process does (`holdfast.benches.runs.child_process`).
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        for name in _SIGNALS:
            signal.signal(name, end_at_once)
        raise Stopped(number)

    def end_at_once(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + number)

    before = {name: signal.signal(name, stop) for name in _SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
