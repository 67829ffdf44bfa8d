"""Storages: URLs, wrappers, connections, work done ahead, rare answers of HDFS, and names that clients keep private."""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import sinks
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.settings import Settings
from holdfast.snapshotter.storage import fsspec, hdfs, s3
from holdfast.snapshotter.storage import hdfs as hdfs_storage
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.snapshotter.storage.connections import Connections
from holdfast.snapshotter.storage.hdfs import HdfsStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_url
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


NAMES = [(owner, name) for module in (s3, hdfs, fsspec) for owner, names in module.PRIVATE.items() for name in names]


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=lambda value: getattr(value, "__name__", value))
def test_a_private_name_is_still_there(owner: object, name: str) -> None:
    """Some stand in instances only: then whoever defines them must mention them."""
    assert hasattr(owner, name) or re.search(rf"self\.{name}\b", inspect.getsource(owner)), name  # type: ignore[arg-type]


THREADS = 4


@pytest.fixture
def _often_interrupted() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.slow(1)
@pytest.mark.usefixtures("_often_interrupted")
def test_threads_that_close_at_once_close_each_connection_once() -> None:
    """None of them fails because another one was faster."""
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(5_000):
            closed: list[object] = []
            connections = Connections(object, closed.append)
            connection = connections.of_this_process()
            all_there = threading.Barrier(THREADS)

            def close(connections: Connections[object] = connections, all_there: threading.Barrier = all_there) -> None:
                all_there.wait()
                connections.release()

            for done in [threads.submit(close) for _ in range(THREADS)]:
                done.result(timeout=60)
            assert closed == [connection]


@pytest.mark.slow(1)
def test_a_delete_that_was_left_behind_takes_nothing_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NameNode that hung answers both attempts at one moment: both have deleted the file, and neither has failed."""
    threads: list[threading.Thread] = []
    is_second = threading.Event()

    def delete_file(_client: object, _path: str) -> None:
        threads.append(threading.current_thread())
        if len(threads) == 1:
            assert is_second.wait(60)
        else:
            is_second.set()
            threads[0].join(60)

    monkeypatch.setattr(hdfs_storage, "delete_file", delete_file)
    options = {"operation_timeout_seconds": "1"}
    storage = HdfsStorage("namenode:8020", "app", options, sleep_ms=lambda _milliseconds: None)
    monkeypatch.setattr(storage, "_clients", Connections(object))  # of which nobody asks anything
    storage.delete(["commits/1-aa"])
    assert len(threads) == 2


_AS_WRITTEN = {
    "/data/app": "/data/app",
    "app": os.path.abspath("app"),
    "file:/data/app": "/data/app",
    "file:///data//app/": "/data/app",
    "FILE://localhost/data": "/data",
    "FILE:///x/../y": "/y",
    "/data/with space?#%20": "/data/with space?#%20",
    "hdfs:/app": "hdfs:///app",
    "hdfs:///app/": "hdfs:///app",
    "hdfs://namenode:8020/app": "hdfs://namenode:8020/app",
    "S3A://bucket/app/": "s3a://bucket/app",
    " s3://bucket/app": "s3://bucket/app",
    "./totals:v2": os.path.abspath("totals:v2"),
    "s3://bucket/a:b": "s3://bucket/a:b",
    "abfss://box@account.dfs.core.windows.net/app": "abfss://box@account.dfs.core.windows.net/app",
    "sftp://user@host/app": "sftp://user@host/app",
    "sftp://host:22/a@b": "sftp://host:22/a@b",
    "hdfs://namenode:8020/a:b@c": "hdfs://namenode:8020/a:b@c",
    "sftp://user@[fd00::1]:22/app": "sftp://user@[fd00::1]:22/app",
    "hdfs://[2001:db8:0:0:0:0:0:1]/app": "hdfs://[2001:db8:0:0:0:0:0:1]/app",
}
_REFUSED = {
    "": "URL or a path|empty",
    "~/app": "~ is not expanded",
    "file:app": "absolute path",
    "file:": "absolute path",
    "file://host/app": "names a host",
    "/data/a\x00b": "zero byte",
    "s3:/bucket/app": "write s3://",
    "totals:v2": "or ./totals:… for a path",
    "s3://CANARY:CANARY@bucket/app": r"holds credentials.*spark\.holdfast\.storage\.secret",
    "s3://bucket/a@b": "holds credentials",
    "sftp://user:CANARY@host/app": "holds credentials",
    "abfss://box@account/app?sig=CANARY": "holds credentials or parameters",
    "dbfs:/app": "/dbfs/",
    r"C:\data\app": "Windows",
    r"\\host\share\app": "Windows",
    r"\\?\C:\data\app": "Windows",
    "gs://CANARY:CANARY/CANARY@bucket/app": "holds credentials",
    "sftp://user:CANARY/CANARY@host:22/app": "holds credentials",
    "sftp://[fd00::1]:CANARY/app": "holds credentials",
    "simplecache::s3://bucket": "chained",
    "simplecache::sftp://[fd00::1]/app": "chained",
}


def test_a_path_reads_as_one() -> None:
    assert parse_url(Path("/data/app")) == ("file", "", "/data/app")


@pytest.mark.parametrize("url", _AS_WRITTEN)
def test_state_and_sinks_understand_a_url_alike(url: str) -> None:
    expected = _AS_WRITTEN[url]
    assert str(parse_url(url)) == expected
    assert str(parse_url(expected)) == expected
    assert Settings.parse({"spark.holdfast.state.dir": url}).state_dir == expected
    assert sinks.parquet("totals", url).url == expected  # type: ignore[attr-defined]
    assert sinks.delta("totals", url).url == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("url", _REFUSED)
def test_state_and_sinks_refuse_a_url_alike(url: str) -> None:
    """Credentials would travel with the state's settings and with a sink; the refusal must not show them either."""
    for opened in (
        parse_url,
        lambda url: Settings.parse({"spark.holdfast.state.dir": url}),
        lambda url: sinks.parquet("totals", url),
        lambda url: sinks.delta("totals", url),
    ):
        with pytest.raises(InvalidArgumentError, match=_REFUSED[url]) as raised:
            opened(url)
        assert "CANARY" not in "".join(traceback.format_exception(raised.value))
