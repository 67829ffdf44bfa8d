"""Which shards the server holds open, and that each is opened once."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends.run import TableSchema
from holdfast.clock import new_id
from holdfast.errors import (
    CorruptionError,
    NotFoundError,
    SchemaMismatchError,
    UnavailableError,
)
from holdfast.spark_integration.client.messages import ShardAddress
from holdfast.spark_integration.client.remote_backend import RemoteBackend
from holdfast.spark_integration.server import open_shards
from holdfast.spark_integration.server.open_shards import OpenShards
from holdfast.testing.state_rows import COUNTS, P1, PAIRS, contents, counts
from tests.faults.executor_process import (
    OWNED,
    Executor,
)
from tests.faults.remote_backend.rows import TABLES

pytestmark = pytest.mark.slow


def test_another_schema_opens_the_shard_again(backend: RemoteBackend) -> None:
    """A query that comes back with other columns is told so; one with the old columns then goes on."""
    backend.apply(None, P1, counts(("ann", 1)), {})
    other = TableSchema.of("counts", COUNTS.key, pa.schema([("n", pa.string())]))
    shard = dataclasses.replace(backend._shard, tables=ShardAddress.of("", "", {}, {"counts": other}).tables)
    changed = RemoteBackend(backend._client, shard, {"counts": other}, new_id)
    with pytest.raises((SchemaMismatchError, NotFoundError)):
        contents(changed.view(P1), "counts")
    with backend.view(P1) as view:
        assert contents(view, "counts") == {("ann",): (1,)}


def test_a_directory_that_vanishes_is_opened_anew(backend: RemoteBackend) -> None:
    backend.apply(None, P1, counts(("ann", 1)), {})
    shutil.rmtree(backend.directory)
    assert backend.versions() == []
    backend.load(P1, counts(("ann", 1)), {})
    with backend.view(P1) as view:
        assert contents(view, "counts") == {("ann",): (1,)}


class TestOpenShards:
    """The registry alone, in this process."""

    @pytest.fixture
    def shards(self, executor: Executor) -> OpenShards:
        return OpenShards(executor.directory)

    @pytest.fixture
    def address(self, executor: Executor) -> ShardAddress:
        return ShardAddress.of(executor.directory / "disk" / "query" / new_id(), OWNED, {}, TABLES)

    def test_one_backend_for_all_uses(self, shards: OpenShards, address: ShardAddress) -> None:
        with shards.use(address) as one, shards.use(address) as two:
            assert one is two
        with shards.use(address) as three:
            assert three is one

    def test_what_cannot_be_opened_is_tried_again(self, shards: OpenShards, address: ShardAddress) -> None:
        bad = dataclasses.replace(address, tables={"counts": ["AAAA", "AAAA"]})
        for _ in range(2):
            with pytest.raises(CorruptionError), shards.use(bad):
                pass
        with shards.use(address) as backend:
            assert backend.versions() == []

    def test_another_definition_waits_for_those_who_use_the_old_one(
        self, shards: OpenShards, address: ShardAddress, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = ShardAddress.of(address.directory, OWNED, {}, {"counts": COUNTS, "pairs": PAIRS})
        with shards.use(address) as old:
            monkeypatch.setattr(open_shards, "REPLACE_WITHIN_SECONDS", 0.05)
            with pytest.raises(UnavailableError, match="stop the other query"), shards.use(other):
                pass
            monkeypatch.setattr(open_shards, "REPLACE_WITHIN_SECONDS", 10)
            found: list[Any] = []

            def use_other() -> None:
                with shards.use(other) as backend:
                    found.append(backend)

            waiting = threading.Thread(target=use_other)
            waiting.start()
        waiting.join()
        assert found[0] is not old
        assert set(found[0].tables) == {"counts", "pairs"}

    def test_unused_shards_are_closed(
        self, shards: OpenShards, address: ShardAddress, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with shards.use(address) as used:
            monkeypatch.setattr(open_shards, "IDLE_AFTER_MS", -1)
            shards.close_unused()
            with shards.use(address) as still:
                assert still is used
        monkeypatch.setattr(open_shards, "IDLE_AFTER_MS", 10_000)
        shards.close_unused()
        with shards.use(address) as still:
            assert still is used
        shutil.rmtree(address.directory)
        shards.close_unused()
        with shards.use(address) as opened:
            assert opened is not used
        monkeypatch.setattr(open_shards, "IDLE_AFTER_MS", -1)
        shards.close_unused()
        with shards.use(address) as again:
            assert again is not opened

    def test_closing_leaves_what_is_in_use(self, shards: OpenShards, address: ShardAddress) -> None:
        closed: list[str] = []
        second = dataclasses.replace(address, directory=address.directory + "x")
        with shards.use(address) as used, shards.use(second) as free:
            used.close = lambda: closed.append("used")  # type: ignore[method-assign]
            free.close = lambda: closed.append("free")  # type: ignore[method-assign]
            with shards.use(address):
                pass
        with shards.use(address):
            shards.close(0.05)
        assert closed == ["free"]
