"""The rocksdb backend keeps what every backend promises: in runs, in a database, and in both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.rocksdb import backend as rocksdb
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.run import Run
from holdfast.backends.run_files.version_file import RunFile, VersionFile
from holdfast.testing import BackendContract, MakeBackend
from holdfast.testing.state_rows import P1, P2, TABLES, contents, counts


class TestRocksDBBackend(BackendContract):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda directory, tables: RocksDBBackend(directory, tables, clock.new_id)


class LayeredBackend(RocksDBBackend):
    """Moves what it can after each commit: a version is a run, or a few, above a generation."""

    def apply(self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        super().apply(base, new, runs, properties)
        self.maintain(new)


class MovedBackend(RocksDBBackend):
    """Moves all of a version before anybody sees it: it is a generation and nothing else."""

    def apply(self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        before = Pointer(new.version, self.new_id())
        super().apply(base, before, runs, properties)
        try:
            self.maintain(before)
            super().apply(before, new, {}, properties)
        finally:
            self.drop([before])

    def _settled(self, version: VersionFile) -> dict[str, list[RunFile]]:
        return {table: files for table, files in version.stacks.items() if files}


@pytest.mark.slow
class TestRocksDBBackendInLayers(BackendContract):
    """As with shards far larger than what may lie in runs."""

    @pytest.fixture(autouse=True)
    def no_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rocksdb.RocksDBBackend, "share_bytes", lambda _: 0)

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda directory, tables: LayeredBackend(directory, tables, clock.new_id)


@pytest.mark.slow
class TestRocksDBBackendMoved(TestRocksDBBackendInLayers):
    """As with what nobody has written for long."""

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda directory, tables: MovedBackend(directory, tables, clock.new_id)

    def test_a_version_is_a_generation(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        """Else this class would test nothing of its own."""
        with make_backend(tmp_path / "shard", TABLES) as backend:
            backend.apply(None, P1, counts(("ann", 1)), {})
            backend.apply(P1, P2, counts(("ann", 2), ("bob", 1)), {})
            assert not list(tmp_path.glob("shard/versions/*/*.arrow"))
            assert len(list(tmp_path.glob("shard/generations/*/generation"))) == 2
            with backend.view(P1) as old, backend.view(P2) as new:
                assert contents(old, "counts") == {("ann",): (1,)}
                assert contents(new, "counts") == {("ann",): (2,), ("bob",): (1,)}
