"""Where the state server answers Prometheus, from announcements of whatever release and with whatever address."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from holdfast.backends.base import Pointer
from holdfast.snapshotter.snapshots.policy import SnapshotPolicy
from holdfast.spark_integration.client.messages import Committed, ShardAddress
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
