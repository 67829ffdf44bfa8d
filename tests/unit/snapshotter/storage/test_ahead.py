"""Work done ahead: its order, its errors, how much of it there is at once, and that none is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest

from holdfast.errors import UnavailableError
from holdfast.snapshotter.storage.ahead import ahead

TIMEOUT_SECONDS = 30


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


class Work:
    """Squares numbers, and counts how many are under way; it waits while it may not go on."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.under_way = self.most = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._lock = threading.Lock()

    def __call__(self, number: int) -> int:
        with self._lock:
            self.begun.append(number)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            assert self.may_go_on.wait(TIMEOUT_SECONDS)
            if number < 0:
                raise UnavailableError("cannot be read", number=number)
            return number * number
        finally:
            with self._lock:
                self.under_way -= 1


@pytest.mark.parametrize("window", [1, 2, 4, 100])
@pytest.mark.parametrize("count", [0, 1, 4, 30])
def test_results_come_in_the_order_of_the_items(threads: Executor, window: int, count: int) -> None:
    assert list(ahead(threads, Work(), range(count), window)) == [number**2 for number in range(count)]


def test_a_later_item_is_done_while_an_earlier_one_still_is(threads: Executor) -> None:
    """Else nothing would be ahead, and the order would be that of who ends first."""
    second_done = threading.Event()

    def work(number: int) -> int:
        if number:
            second_done.set()
        else:
            assert second_done.wait(TIMEOUT_SECONDS)
        return number

    assert list(ahead(threads, work, range(2), 2)) == [0, 1]


@pytest.mark.parametrize("window", [1, 3])
def test_no_more_is_under_way_or_waiting_than_the_window(threads: Executor, window: int) -> None:
    """It bounds memory: items are not even asked for before there is room."""
    work, asked = Work(), []

    def items() -> Iterator[int]:
        for number in range(20):
            asked.append(number)
            yield number

    for taken, _ in enumerate(ahead(threads, work, items(), window)):
        assert len(asked) <= taken + window
    assert len(asked) == len(work.begun) == 20
    assert work.most <= window


def test_an_error_comes_where_its_result_would_and_ends_all_work(threads: Executor) -> None:
    work = Work()
    found = ahead(threads, work, [1, 2, -3, 4, -5, 6, 7, 8], 3)
    assert [next(found), next(found)] == [1, 4]
    with pytest.raises(UnavailableError, match="number=-3"):
        next(found)
    assert work.under_way == 0
    assert 8 not in work.begun
    assert list(found) == []


def test_an_error_of_the_items_ends_all_work(threads: Executor) -> None:
    work = Work()

    def items() -> Iterator[int]:
        yield from (1, 2)
        raise UnavailableError("no more items")

    with pytest.raises(UnavailableError, match="no more items"):
        list(ahead(threads, work, items(), 4))
    assert work.under_way == 0


def test_who_stops_early_leaves_nothing_under_way() -> None:
    """Nor waiting for a thread: what has not begun never does."""
    with ThreadPoolExecutor(1) as one:
        work = Work()
        found = ahead(one, work, range(10), 4)
        assert next(found) == 0
        work.may_go_on.clear()
        timer = threading.Timer(0.05, work.may_go_on.set)
        timer.start()
        found.close()
        assert work.under_way == 0
        assert len(work.begun) <= 4
        timer.join()


def test_nothing_begins_before_the_first_result_is_wanted(threads: Executor) -> None:
    work = Work()
    found = ahead(threads, work, range(3))
    assert work.begun == []
    assert list(found) == [0, 1, 4]
