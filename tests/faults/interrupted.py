"""Interrupting a put that hangs, as Ctrl+C does."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest


def interrupt_once(put: Callable[[], object], has_hung: Callable[[], int]) -> None:
    """Call `put` in this thread, the main one, and interrupt it once it hangs; it must end by that."""
    me, left = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        while not has_hung():
            time.sleep(0.01)
        # Again, because one that comes just before the wait is noticed only after it.
        while not left.wait(0.5):
            signal.pthread_kill(me, signal.SIGINT)

    def put_and_tell() -> None:
        try:
            put()
        finally:
            left.set()

    # A shell that starts the tests in the background lets them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                put_and_tell()
    finally:
        signal.signal(signal.SIGINT, before)
