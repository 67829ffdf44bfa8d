"""The time zone of the process, which decides how Python shows times and makes them; Spark's session has another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def process_in(zone: str) -> Iterator[None]:
    """Set the zone of this process for the context, such as ``America/New_York``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        yield
    time.tzset()
