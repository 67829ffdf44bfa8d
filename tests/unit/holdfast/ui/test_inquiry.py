"""When a directory is listed, and what is shown meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import HoldfastError, UnavailableError
from holdfast.ui.inquiry import SHOWN_MS, Inquiry
from holdfast.ui.survey import Survey


class Listings:
    """Takes surveys that take time, or fail."""

    def __init__(self) -> None:
        self.now_ms, self.took_ms, self.taken = 0, 0, 0
        self.error: Exception | None = None
        self.executor = ThreadPoolExecutor(1)

    def take(self) -> Survey:
        self.now_ms += self.took_ms
        self.taken += 1
        if self.error:
            raise self.error
        return Survey({}, (), self.taken, ())

    def surveyor(self) -> Inquiry[Survey]:
        return Inquiry(self.take, self.executor, "memory://state", lambda: self.now_ms, lambda: self.now_ms)


def test_all_who_ask_at_once_see_one_listing() -> None:
    """A page costs the store nothing while the last listing is young."""
    listings = Listings()
    surveyor = listings.surveyor()
    for _ in range(10):
        assert surveyor.latest().found.unknown == 1
    listings.now_ms += SHOWN_MS
    assert surveyor.latest().found.unknown == 2


def test_a_long_listing_is_shown_longer() -> None:
    """Of a large directory, listings take a tenth of the time at most."""
    listings = Listings()
    listings.took_ms = 10_000
    surveyor = listings.surveyor()
    surveyor.latest()
    listings.now_ms += 99_000
    assert surveyor.latest().took_ms == 10_000
    assert listings.taken == 1
    listings.now_ms += 1_000
    surveyor.latest()
    assert listings.taken == 2


def test_a_failed_listing_leaves_the_last_one() -> None:
    """What was listed stays, with the error and its age; when the store answers again the error is over."""
    listings = Listings()
    surveyor = listings.surveyor()
    surveyor.latest()
    listings.now_ms += SHOWN_MS
    listings.error = UnavailableError("the storage did not answer")
    stale = surveyor.latest()
    assert (stale.found.unknown, stale.taken_ms, stale.error) == (1, 0, listings.error)
    listings.now_ms += SHOWN_MS
    listings.error = None
    assert surveyor.latest().error is None


def test_a_first_listing_that_fails_is_an_error() -> None:
    """There is nothing else to show."""
    listings = Listings()
    listings.error = UnavailableError("the storage did not answer")
    with pytest.raises(HoldfastError, match="did not answer"):
        listings.surveyor().latest()


def test_what_is_no_error_of_ours_is_not_hidden() -> None:
    """A mistake of the program reaches the log, not a page that looks whole."""
    listings = Listings()
    listings.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        listings.surveyor().latest()
