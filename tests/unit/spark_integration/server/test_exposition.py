"""What the state server shows to Prometheus, and where: from announcements of any release, and with any address."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from holdfast.backends.base import Pointer
from holdfast.snapshotter.snapshots.snapshots import SnapshotPolicy
from holdfast.spark_integration.client.measures import CallMeasures
from holdfast.spark_integration.client.messages import Committed, MeasuredBatch, ShardAddress
from holdfast.spark_integration.server.exposition import Exposition, MeasuredBatches, ServerMetrics
from tests.servers.programs import free_ports

COMMITTED = Committed(
    ShardAddress("/local/query/totals/shard-0000", "memory", {}, {}),
    accepted=None,
    committed=Pointer(1, "0123456789abcdef"),
    prefix="totals/shard-0000",
    state_dir=None,
    storage_options={},
    policy=SnapshotPolicy(),
    retained_versions=2,
)


@pytest.fixture
def exposition() -> Iterator[Exposition]:
    found = Exposition(ServerMetrics(MeasuredBatches(), dict, dict), lambda: 0)
    yield found
    found.close()


def test_gauges_are_of_the_last_calls_of_all_shards() -> None:
    """What shards hold adds up; of sizes, times and lags the largest is shown."""
    batches = MeasuredBatches()
    for number, rows in enumerate((5, 9)):
        call = CallMeasures(number, rows, *range(2, 13), state_rows=10 * rows, state_bytes=100, snapshot_lag_versions=3)
        shard = replace(COMMITTED.shard, directory=f"/local/query/totals/shard-000{number}")
        batches.announce(replace(COMMITTED, shard=shard, measured=MeasuredBatch(1, 1_000, call.announced())))
    metrics = ServerMetrics(batches, Counter, lambda: {"/local/query/totals/shard-0001": 2_500})
    found = {sample.name: sample.value for family in metrics.collect() for sample in family.samples if sample.labels}
    assert (
        found
        | {
            "holdfast_batches_total": 1,
            "holdfast_calls_total": 2,
            "holdfast_rows_total": 14,
            "holdfast_call_seconds_total": 16e-6,
            "holdfast_shards": 2,
            "holdfast_state_rows": 140,
            "holdfast_state_bytes": 200,
            "holdfast_shard_state_rows_max": 90,
            "holdfast_shard_rows_max": 9,
            "holdfast_shard_call_seconds_max": 8e-6,
            "holdfast_snapshot_lag_versions_max": 3,
            "holdfast_snapshot_lag_seconds_max": 2.5,
        }
        == found
    )


@pytest.mark.parametrize("address", ["a..b", "x" * 300, "no.such.host.invalid", "\udcff", "1.2.3.4.5", "-"])
def test_an_address_that_is_none_fails_no_announcement(exposition: Exposition, address: str) -> None:
    """The rest of the announcement is handled whatever the address says."""
    exposition.announce(replace(COMMITTED, metrics_port=free_ports(1)[0], metrics_address=address))
    assert (exposition.port, exposition.failures) == (None, 1)


def test_shards_that_announce_at_once_open_one_port(exposition: Exposition, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second port would be one that nobody closes, and that the next executor lacks."""
    message = replace(COMMITTED, metrics_port=free_ports(1)[0])
    listening: list[socket.socket] = []
    listen = socket.socket.listen

    def counted(one: socket.socket, *backlog: int) -> None:
        listening.append(one)
        listen(one, *backlog)

    monkeypatch.setattr(socket.socket, "listen", counted)
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(exposition.announce, [message] * 64))
    assert exposition.port is not None
    assert len(listening) == 1


def test_an_announcement_of_a_release_without_metrics_is_read() -> None:
    """A state server outlives an upgrade of the workers, and the other way round."""
    fields = json.loads(replace(COMMITTED, metrics_port=9321).encode())
    for name in ("metrics_address", "metrics_port", "measured"):
        del fields[name]
        read = Committed.decode(json.dumps(fields | {"of a later release": 1}).encode())
        assert read.metrics_address == "127.0.0.1"
    assert read.metrics_port is None
