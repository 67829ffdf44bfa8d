"""Storages around a storage: what the limit of bytes per second lets pass, and where a prefix leads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import Bandwidth, LimitedStorage, PrefixedStorage
from holdfast.testing.faulty_storage import Fault, FaultyStorage


class FakeClock:
    """Time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.sleeps: list[int] = []

    def monotonic_ms(self) -> int:
        return self.now_ms

    def sleep_ms(self, milliseconds: int) -> None:
        self.sleeps.append(milliseconds)
        self.now_ms += milliseconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def bandwidth(clock: FakeClock) -> Bandwidth:
    """1,000 bytes a second."""
    return Bandwidth(1000, monotonic_ms=clock.monotonic_ms, sleep_ms=clock.sleep_ms)


def test_what_is_sent_is_paid_for_by_the_next(bandwidth: Bandwidth, clock: FakeClock) -> None:
    """The first part goes at once, each other one when those before it would be through."""
    at_ms = []
    for size_bytes in (500, 1500, 100, 100):
        bandwidth.take(size_bytes)
        at_ms.append(clock.now_ms)
    assert at_ms == [0, 500, 2000, 2100]


def test_time_in_which_nothing_was_sent_is_not_saved_up(bandwidth: Bandwidth, clock: FakeClock) -> None:
    clock.now_ms += 60_000
    bandwidth.take(1000)
    bandwidth.take(1000)
    assert clock.now_ms == 61_000


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3000)), min_size=1))
def test_over_any_stretch_no_more_passes_than_the_rate_and_one_part(steps: list[tuple[int, int]]) -> None:
    clock = FakeClock()
    bandwidth = Bandwidth(1000, monotonic_ms=clock.monotonic_ms, sleep_ms=clock.sleep_ms)
    sent: list[tuple[int, int]] = []
    for size_bytes, pause_ms in steps:
        clock.now_ms += pause_ms
        bandwidth.take(size_bytes)
        sent.append((clock.now_ms, size_bytes))
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            before_last = sum(size_bytes for _, size_bytes in sent[first:last])
            assert before_last <= sent[last][0] - sent[first][0] + len(sent)  # whole ms are rounded


def test_a_wait_is_slept_through_not_polled(bandwidth: Bandwidth, clock: FakeClock) -> None:
    bandwidth.take(1000)
    bandwidth.take(1)
    assert clock.sleeps == [1000]


def test_threads_go_in_the_order_in_which_they_came() -> None:
    """Real threads, a clock that the test moves: nobody who came later overtakes."""
    now_ms = 0
    moved = threading.Condition()

    def sleep_ms(_: int) -> None:
        with moved:
            seen = now_ms
            moved.wait_for(lambda: now_ms > seen, 10)

    bandwidth = Bandwidth(1000, monotonic_ms=lambda: now_ms, sleep_ms=sleep_ms)
    waiting, passed = [], []
    bandwidth.take(100)
    for number in range(5):

        def upload(number: int = number) -> None:
            bandwidth.take(100)
            with moved:
                passed.append((number, now_ms))
                moved.notify_all()

        waiting.append(threading.Thread(target=upload))
        waiting[-1].start()
        while bandwidth._free_ms < 100 * (number + 2):
            waiting[-1].join(0.001)
    for turn in range(1, 6):
        with moved:
            now_ms = 100 * turn
            moved.notify_all()
            assert moved.wait_for(lambda turn=turn: len(passed) == turn, 10)  # type: ignore[misc]
    for thread in waiting:
        thread.join()
    assert passed == [(number, 100 * (number + 1)) for number in range(5)]


def test_a_put_that_fails_has_had_its_turn(bandwidth: Bandwidth, clock: FakeClock) -> None:
    """It may have sent all of it; whoever comes next pays, and nobody waits for ever."""
    with open_storage("memory://limited") as storage:
        limited = PrefixedStorage(LimitedStorage(FaultyStorage(storage, [Fault("fail", "put")]), bandwidth), "shard")
        with pytest.raises(UnavailableError):
            limited.put("a", bytes(1000))
        limited.put("b", b"x")
        assert clock.now_ms == 1000
        assert [info.key for info in storage.list("")] == ["shard/b"]


PREFIXES = ["a", "ab", "b/a", "a b", " a", "..a", "*", "[x]", "?", "a#b", "%2e%2e", "\\", "~", "é", "e\u0301", "\u202e"]


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_prefix_is_taken_as_it_is_and_nothing_leads_out_of_it(kind: str, tmp_path: Path) -> None:
    """One that begins another, patterns, escapes, two forms of one letter: each has its own objects, and no others."""
    url = str(tmp_path) if kind == "file" else "memory://prefixed"
    with open_storage(url) as storage:
        # One inside the other, as a shard of an operator: it is the same folder as by one prefix.
        views = {prefix: PrefixedStorage(PrefixedStorage(storage, "totals"), prefix) for prefix in PREFIXES}
        for prefix, view in views.items():
            view.put("commits/1", prefix.encode())
        assert {info.key for info in storage.list("")} == {f"totals/{prefix}/commits/1" for prefix in PREFIXES}
        for prefix, view in views.items():
            for out in ("../ab/commits/1", "/a", "", ".", "a//b"):
                for call in (
                    view.get,
                    lambda key, view=view: view.put(key, b""),
                    lambda key, view=view: view.delete([key]),
                ):
                    with pytest.raises(InvalidArgumentError):
                        call(out)
            with pytest.raises(InvalidArgumentError):
                view.delete(["commits/1", "../ab/commits/1"])
            assert bytes(view.get("commits/1")) == prefix.encode(), "keys are checked before the first one is deleted"
        for prefix, view in views.items():
            assert [info.key for info in view.list("")] == ["commits/1"]
            view.delete([info.key for info in view.list("commits/")])
            assert f"totals/{prefix}/commits/1" not in {info.key for info in storage.list("")}
        assert not storage.list("")
