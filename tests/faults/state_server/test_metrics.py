"""What the state server counts, tells workers, and shows to Prometheus; and that none of it disturbs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from holdfast import clock
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.spark_integration.client.connection import recent_batches
from holdfast.spark_integration.client.measures import CallMeasures
from holdfast.spark_integration.client.messages import Committed, MeasuredBatch, SnapshotNews
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.server import exposition
from holdfast.spark_integration.server.exposition import PORTS
from tests.faults.executor_process import Executor, eventually
from tests.faults.state_server.conftest import Shard, counters
from tests.servers.programs import answer_of, free_ports

CALL = CallMeasures(0, *range(1, 13), state_rows=100, state_bytes=1000, snapshot_lag_versions=2)
QUERY = {"query": "query", "operator": "totals"}


def measured(message: Committed, batch_ms: int, **more: Any) -> Committed:
    return replace(message, measured=MeasuredBatch(batch_ms // 1000, batch_ms, CALL.announced()), **more)


def told(shard: Shard, message: Committed) -> SnapshotNews:
    return SnapshotNews.read(shard.client.call("committed", message.encode()))


def scraped(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return what a server shows, by sample and labels."""
    import urllib.request

    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=10) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


@contextmanager
def taken(*ports: int) -> Iterator[None]:
    """Let another program have some ports."""
    held = [socket.create_server(("127.0.0.1", port)) for port in ports]
    try:
        yield
    finally:
        for each in held:
            each.close()


@pytest.fixture
def shard(executor: Executor, shards: Callable[..., Shard]) -> Shard:
    client = executor.client()
    executor.start(client)
    return shards(executor, client)


def test_a_micro_batch_counts_once_however_often_it_is_attempted(shard: Shard) -> None:
    for batch_ms in (1000, 2000, 2000, 2000, 3000):
        shard.announce(measured(shard.commit(batch_ms), batch_ms))
    found = shard.client.call("recent")
    assert [(b["batch_id"], b["batch_ms"], b["shards"], b["values"]["rows"]) for b in found] == [
        (1, 1000, 1, 1),
        (2, 2000, 1, 1),
        (3, 3000, 1, 1),
    ]


def test_a_server_remembers_so_many_micro_batches(shard: Shard) -> None:
    """A query that never ends takes no more memory than one of an hour."""
    message = shard.commit(1)
    for batch_ms in range(exposition.BATCHES_KEPT + 3):
        shard.announce(measured(message, batch_ms))
    assert [b["batch_ms"] for b in shard.client.call("recent")] == list(range(3, exposition.BATCHES_KEPT + 3))


def test_prometheus_sees_names_and_values_as_openmetrics_has_them(shard: Shard) -> None:
    [port] = free_ports(1)
    shard.announce(measured(shard.commit(1), 1000, metrics_port=port))
    shard.announce(measured(shard.commit(2), 2000, metrics_port=port))
    shard.announce(measured(shard.commit(3), 2000, metrics_port=port))
    found = scraped(port)
    of_operator = {name: value for (name, labels), value in found.items() if dict(labels) == QUERY}
    assert of_operator["holdfast_batches_total"] == of_operator["holdfast_calls_total"] == 2
    assert of_operator["holdfast_repeated_calls_total"] == 1
    assert of_operator["holdfast_rows_total"] == 2 * CALL.rows
    assert of_operator["holdfast_commit_seconds_total"] == pytest.approx(2 * CALL.commit_us / 1e6)
    assert of_operator["holdfast_state_rows"] == 100, "a gauge is that of the last call"
    assert of_operator["holdfast_snapshot_lag_versions_max"] == 2
    assert ("holdfast_snapshot_failures_total", ()) in found


def test_each_server_of_a_machine_finds_a_port(shard: Shard, executor: Executor, shards: Callable[..., Shard]) -> None:
    """The first one of those that begin at the configured port, also where others have some."""
    first = next(p for p in range(20_000, 60_000, PORTS) if all(_is_free(p + i) for i in range(3)))
    with taken(first, first + 1):
        shard.announce(measured(shard.commit(1), 1000, metrics_port=first))
        assert shard.client.call("statistics")["metrics_port"] == first + 2
    assert scraped(first + 2)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_without_a_port_the_server_says_so_once_and_works(shard: Shard, executor: Executor) -> None:
    for batch_ms in range(3):
        shard.announce(measured(shard.commit(batch_ms), batch_ms, metrics_port=9321, metrics_address="192.0.2.77"))
    done = counters(shard.client)
    assert done | {"announced": 3, "errors": 0, "metrics_errors": 1} == done
    assert executor.log.count("cannot serve metrics to Prometheus") == 1
    assert shard.client.call("statistics")["metrics_port"] is None


def test_a_server_without_a_port_set_listens_nowhere(shard: Shard) -> None:
    shard.announce(measured(shard.commit(1), 1000))
    assert shard.client.call("statistics")["metrics_port"] is None


def test_it_tells_what_became_of_snapshots_since_the_micro_batch_before(
    executor: Executor, shards: Callable[..., Shard], tmp_path: Path
) -> None:
    """A second attempt is told the same; the next micro-batch only what is new."""
    client = executor.client()
    executor.start(client)
    shard = shards(executor, client, str(tmp_path / "durable"), policy=SnapshotPolicy(max_commits=1))
    assert told(shard, measured(shard.commit(1), 1000)).stored_bytes == 0
    assert counters(client)["snapshots"] == 1
    message = measured(shard.commit(2), 2000)
    second = told(shard, message)
    assert second.stored_bytes > 0
    assert second.failures == 0
    assert second.age_ms is not None
    assert told(shard, message).stored_bytes >= second.stored_bytes
    counters(client)
    told(shard, measured(shard.commit(3), 3000))
    counters(client)
    last = shard.commit(4)
    (tmp_path / "durable").rename(tmp_path / "away")
    (tmp_path / "durable").write_text("no directory")
    try:
        told(shard, measured(last, 4000))
        assert counters(client)["snapshot_errors"] == 1
        assert told(shard, measured(last, 5000)).failures == 1
        assert told(shard, measured(last, 6000)).failures == 0
    finally:
        (tmp_path / "durable").unlink()
        (tmp_path / "away").rename(tmp_path / "durable")


def test_recent_micro_batches_are_those_of_all_servers_that_live(executor: Executor, shard: Shard) -> None:
    """One that is killed is left out, and nobody waits for it."""
    shard.announce(measured(shard.commit(1), 1000))
    [found] = recent_batches(str(executor.root))
    assert (found.query, found.operator, found.batch_id, found.shards) == ("query", "totals", 1, 1)
    assert found.values["keys"] == CALL.keys
    assert shard.client.process is not None
    shard.client.process.kill()
    shard.client.process.wait()
    assert recent_batches(str(executor.root)) == []
    assert recent_batches(str(executor.root / "nowhere")) == []


def test_servers_that_hang_hold_nobody_up_for_long(tmp_path: Path) -> None:
    """Each costs a part of what is waited for all of them."""
    hanging: list[socket.socket] = []
    with ExitStack() as stack:
        for number in range(4):
            directory = tmp_path / local_dirs.user_name() / f"executor-{number}"
            directory.mkdir(parents=True)
            path = local_dirs.socket_path(directory)
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.bind(str(path))
            stack.callback(path.unlink)
            silent.listen()
            silent.setblocking(False)
            hanging.append(silent)
        begun_ms = clock.monotonic_ms()
        assert recent_batches(str(tmp_path)) == []
        assert clock.monotonic_ms() - begun_ms < 6_000
        for silent in hanging:
            silent.accept()[0].close()  # raises where nobody has asked


def test_an_answer_of_nonsense_is_an_error_of_ours() -> None:
    for nonsense in (None, [], {"stored_bytes": "1", "failures": 0}, {"stored_bytes": 1}):
        with pytest.raises(InvalidArgumentError, match="state server"):
            SnapshotNews.read(nonsense)


def test_nothing_answers_any_more_when_the_executor_has_ended(shard: Shard, executor: Executor) -> None:
    [port] = free_ports(1)
    shard.announce(measured(shard.commit(1), 1000, metrics_port=port))
    assert scraped(port)
    executor.kill()
    eventually(lambda: answer_of(f"http://127.0.0.1:{port}/metrics") is None)
