"""More shards on one executor than the budget keeps open: each micro-batch is slower, and none fails.

After the loss of executors the others get its shards; scheduled jobs leave theirs behind; a query may have been given
more shards than anybody thought of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends.base import Backend, Pointer
from holdfast.clock import new_id
from holdfast.spark_integration.client.messages import ShardAddress
from holdfast.spark_integration.client.remote_backend import RemoteBackend
from holdfast.spark_integration.server import open_shards
from holdfast.spark_integration.server.open_shards import OpenShards
from holdfast.testing.state_rows import P1, TABLES, contents, counts, users
from tests.faults.executor_process import OWNED, Executor, StartExecutor, started_executors
from tests.faults.owned_backend import OwnedBackend
from tests.tiers import repetitions

#: The budget keeps 17 shards open.
SMALL = {"memory": "298m"}
MOST = 17


@pytest.fixture(scope="module")
def executors() -> Iterator[StartExecutor]:
    with started_executors() as start:
        yield start


@pytest.fixture
def executor(executors: StartExecutor) -> Executor:
    return executors()


def remote_shards(executor: Executor, number: int) -> list[RemoteBackend]:
    client = executor.client()
    addresses = [
        ShardAddress.of(executor.directory / "disk" / "query" / "totals" / f"shard-{i:04}", "rocksdb", SMALL, TABLES)
        for i in range(number)
    ]
    return [RemoteBackend(client, address, TABLES, new_id) for address in addresses]


def test_many_shards_are_slower_and_none_fails(executor: Executor) -> None:
    """Each micro-batch goes through all shards; those that rest are closed, and keep what they hold."""
    shards = remote_shards(executor, len(repetitions(MOST + 8, 200)))
    for version in range(1, 4):
        base = Pointer(version - 1, "a") if version > 1 else None
        for i, shard in enumerate(shards):
            if base is not None:
                with shard.view(base) as view:
                    assert users(view, "ann") == [(i + version - 1,)]
            shard.apply(base, Pointer(version, "a"), counts(("ann", i + version)), {})
            if base is not None:
                shard.drop([Pointer(version - 2, "a")])
    for i, shard in enumerate(shards):
        assert shard.versions() == [Pointer(2, "a"), Pointer(3, "a")]
        with shard.view(Pointer(3, "a")) as view:
            assert contents(view, "counts") == {("ann",): (i + 3,)}
    statistics = shards[0]._client.call("statistics")
    assert statistics["counters"]["closed_for_others"] >= 3 * len(shards) - MOST
    assert statistics["counters"]["beyond_budget"] == 0
    assert executor.log.count("there are more shards here than the 17") == 1
    assert "spark.holdfast.rocksdb.memory" in executor.log


def test_shards_that_are_all_in_use_are_all_open(executor: Executor) -> None:
    """As many tasks at once as cannot be helped: then the budget gives way, with a warning, not the query."""
    shards = remote_shards(executor, MOST + 3)
    for i, shard in enumerate(shards):
        shard.apply(None, P1, counts(("ann", i)), {})
    with ExitStack() as held:
        views = [held.enter_context(shard.view(P1)) for shard in shards]
        assert [users(view, "ann") for view in views] == [[(i,)] for i in range(len(shards))]
        counters = shards[0]._client.call("statistics")["counters"]
        assert counters["beyond_budget"] == len(shards) - MOST
    assert executor.log.count("more shards are in use at once than the 17") == 1


def test_the_server_may_open_as_many_files_as_the_system_allows(executor: Executor) -> None:
    """Databases keep many files open, and most systems give a process 1,024 until it asks for more."""
    pid = executor.start(executor.client())["pid"]
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    (soft, hard), *_ = (line.split()[3:5] for line in limits if line.startswith("Max open files"))
    assert soft == hard


# The registry alone, in this process.


@pytest.fixture
def shards(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> OpenShards:
    monkeypatch.setattr(OwnedBackend, "most_open", classmethod(lambda *_: 2))
    return OpenShards(executor.directory)


@pytest.fixture
def addresses(executor: Executor) -> list[ShardAddress]:
    return [ShardAddress.of(executor.directory / "disk" / "query" / new_id(), OWNED, {}, TABLES) for _ in range(6)]


def use(shards: OpenShards, address: ShardAddress) -> int:
    with shards.use(address) as backend:
        return id(backend)


def test_the_longest_unused_shard_is_closed(
    shards: OpenShards, addresses: list[ShardAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none that is in use, though it was opened first."""
    monkeypatch.setattr(open_shards.clock, "monotonic_ms", iter(range(1000)).__next__)
    first, second, third, fourth = addresses[:4]
    with shards.use(first) as held:
        use(shards, second)
        use(shards, third)
        assert shards.counters == {"closed_for_others": 1, "beyond_budget": 0}
        with shards.use(third), shards.use(fourth):
            assert shards.counters == {"closed_for_others": 1, "beyond_budget": 1}
        with shards.use(first) as still:
            assert still is held
    use(shards, second)
    assert shards.counters == {"closed_for_others": 3, "beyond_budget": 1}, "back to what the budget keeps open"
    with shards.use(first) as still:
        assert still is held, "it was used last before"


def test_shards_of_queries_that_have_ended_are_forgotten(
    shards: OpenShards, addresses: list[ShardAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sees many short queries does not keep a note of each."""
    for address in addresses:
        use(shards, address)
    monkeypatch.setattr(open_shards, "IDLE_AFTER_MS", -1)
    with shards.use(addresses[0]):
        shards.close_unused()
        assert len(shards._slots) == 1
    shards.close_unused()
    assert not shards._slots


def test_threads_that_open_and_close_each_other_s_shards(
    shards: OpenShards, addresses: list[ShardAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever, no directory is open twice, and what is used is open."""
    failures: list[BaseException] = []
    is_open: set[str] = set()
    really_open = open_shards.open_backend

    def open_once(name: str, path: Path, *more: Any) -> Backend:
        backend, directory = really_open(name, path, *more), str(path)
        assert directory not in is_open
        is_open.add(directory)
        backend.close = lambda: is_open.remove(directory)  # type: ignore[method-assign]
        return backend

    monkeypatch.setattr(open_shards, "open_backend", open_once)
    monkeypatch.setattr(open_shards, "IDLE_AFTER_MS", -1)

    def work(number: int) -> None:
        try:
            for step in repetitions(100, 2_000):
                address = addresses[(number + step * (number + 1)) % len(addresses)]
                with shards.use(address) as backend, shards.use(address) as same:
                    assert same is backend
                    assert address.directory in is_open
                if number == 0:
                    shards.close_unused()
        except BaseException as exc:  # noqa: BLE001  shown below
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures
    assert shards.counters["closed_for_others"] > 0
