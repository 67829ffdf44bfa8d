"""The contract of each built-in backend, and what only one of them promises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends import run_stack
from holdfast.backends.base import Pointer
from holdfast.backends.rocksdb import backend as rocksdb
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.run import Run
from holdfast.backends.run_files import backend as run_files
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.backends.run_files.version_file import RunFile, VersionFile
from holdfast.backends.run_files.view import RunFilesView
from holdfast.backends.run_stack import parts_of
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.testing import BackendContract, MakeBackend
from holdfast.testing.state_rows import P1, P2, P3, TABLES, contents, counts, no_counts, users


class TestFilesystemBackend(BackendContract):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda directory, tables: FilesystemBackend(directory, tables, clock.new_id)


@pytest.mark.all
@pytest.mark.slow
class TestFilesystemBackendInStretches(BackendContract):
    """As with shards far larger than what is merged at a time: each file, merge and scan is of many pieces."""

    @pytest.fixture(autouse=True)
    def small_stretches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_stack, "STRETCH_BYTES", 200)
        monkeypatch.setattr(run_files, "COMMIT_MERGE_LIMIT_BYTES", 0)

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda directory, tables: FilesystemBackend(directory, tables, clock.new_id)

    def test_a_merge_writes_one_file_of_many_stretches(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        """Else this class would test nothing of its own."""
        with make_backend(tmp_path / "shard", TABLES) as backend:
            backend.apply(None, P1, counts(*((f"user {i}", i) for i in range(1000))), {})
            backend.apply(P1, P2, counts(*((f"user {i}", -i) for i in range(700))), {})
            assert backend.maintain(P2) == 1
            backend.apply(P2, P3, no_counts("user 7"), {})
            with backend.view(P3) as view:
                assert isinstance(view, RunFilesView)
                assert len(parts_of(view.stack("counts"))) > 20
                assert backend.statistics().runs["counts"] == 2
                expected = {(f"user {i}",): (-i if i < 700 else i,) for i in range(1000) if i != 7}
                assert contents(view, "counts") == expected
                assert users(view, "user 999", "user 7", "nobody", "user 1") == [(999,), None, None, (-1,)]


class TestMemoryBackend(BackendContract):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda directory, tables: MemoryBackend(directory, tables, clock.new_id)


# The limit of what the shards of one executor hold


def shard_of(executor: Path, number: int, limit: str | None) -> MemoryBackend:
    directory = executor / "memory" / "query" / "totals" / f"shard-{number:04d}"
    return MemoryBackend(directory, TABLES, clock.new_id, {"limit": limit} if limit else {}, executor)


MANY = counts(*((f"user {i}", i) for i in range(20_000)))


@pytest.mark.slow(0.5)
@pytest.mark.parametrize("how", ["commit", "restore"])
def test_what_would_pass_the_limit_is_refused_whole_and_goes_on_when_it_is_raised(tmp_path: Path, how: str) -> None:
    """All shards of the executor count together; nothing is half-written."""
    one, other = (shard_of(tmp_path, number, "1m") for number in (0, 1))
    one.apply(None, P1, MANY, {})
    other.apply(None, P1, counts(("ann", 1)), {})
    before = other.statistics()
    with pytest.raises(UnavailableError, match=r"spark\.holdfast\.memory\.limit.*raise the limit") as caught:
        other.apply(P1, P2, MANY, {}) if how == "commit" else other.load(P2, MANY, {})
    facts = caught.value.facts
    assert facts["limit_bytes"] == 1 << 20 < facts["held_bytes"] + facts["wanted_bytes"]
    assert facts["held_bytes"] > 600_000
    assert other.statistics() == before
    assert other.remove_leftovers(2**63) == 0
    other.apply(P1, P3, counts(("bob", 2)), {})
    raised = shard_of(tmp_path, 1, "4m")
    raised.apply(P1, P2, MANY, {})
    with raised.view(P2) as view:
        assert len(contents(view, "counts")) == 20_001


def test_a_background_merge_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not worth an error: the state is the same without it."""
    monkeypatch.setattr(run_files, "COMMIT_MERGE_LIMIT_BYTES", 0)
    full = shard_of(tmp_path, 0, "2m")
    full.apply(None, P1, MANY, {})
    full.apply(P1, P2, MANY, {})
    assert full.maintain(P2) == 0
    assert shard_of(tmp_path, 0, "9m").maintain(P2) == 1


def test_state_on_disk_does_not_count(tmp_path: Path) -> None:
    """Another query of the executor may keep its state there."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "file").write_bytes(b"x" * (2 << 20))
    shard_of(tmp_path, 0, "1m").apply(None, P1, counts(("ann", 1)), {})


def test_an_embedded_shard_has_the_limit_for_itself(tmp_path: Path) -> None:
    alone = MemoryBackend(tmp_path / "shard", TABLES, clock.new_id, {"limit": "100k"})
    alone.apply(None, P1, counts(("ann", 1)), {})
    with pytest.raises(UnavailableError, match="limit"):
        alone.apply(P1, P2, MANY, {})


@pytest.mark.parametrize("text", ["", "0", "-1g", "lots", "1.5g"])
def test_a_limit_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"spark\.holdfast\.memory\.limit cannot be"):
        MemoryBackend.parse_options("memory", {"limit": text})


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


class NothingInRuns(BackendContract):
    """As with shards far larger than what may lie in runs."""

    @pytest.fixture(autouse=True)
    def no_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rocksdb.RocksDBBackend, "share_bytes", lambda _: 0)


@pytest.mark.all
@pytest.mark.slow
class TestRocksDBBackendInLayers(NothingInRuns):
    """Above databases lie the runs that are not moved yet."""

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda directory, tables: LayeredBackend(directory, tables, clock.new_id)


@pytest.mark.slow
class TestRocksDBBackendMoved(NothingInRuns):
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
