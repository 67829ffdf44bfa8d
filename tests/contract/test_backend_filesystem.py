"""The filesystem backend keeps what every backend promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import clock
from holdfast.backends import run_stack
from holdfast.backends.run_files import backend as run_files
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.backends.run_files.view import RunFilesView
from holdfast.backends.run_stack import parts_of
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
