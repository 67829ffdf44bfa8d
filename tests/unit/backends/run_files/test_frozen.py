"""Run files that are read where they are stored: what somebody else has made of them is damage, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.frozen_files import FrozenFiles
from holdfast.backends.run import Run
from holdfast.backends.run_files import written_run
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.backends.run_files.version_file import RunFile
from holdfast.backends.run_files.view import FrozenRuns
from holdfast.backends.run_files.written_run import WrittenRun
from holdfast.errors import CorruptionError
from holdfast.testing.state_rows import COUNTS, P1, TABLES, counts

ROWS = counts(*((f"user {i}", 0) for i in range(3000)))["counts"]


class WholeFiles(FrozenFiles):
    """Files that are here already."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes = {path.name: path.stat().st_size for path in folder.iterdir()}

    def require(self, name: str, start: int = 0, end: int | None = None) -> None:
        assert name in self.sizes


def frozen(folder: Path, header: Mapping[str, Any], section: stored_file.SectionWriter) -> WholeFiles:
    """Make a frozen version of one run file."""
    folder.mkdir()
    data, digest = stored_file.encode("run", header, {"counts": section})
    (folder / "a1.arrow").write_bytes(data)
    run = RunFile("a1", data.size, ROWS.size_bytes, len(ROWS), digest, 0)
    version = {"pointer": str(P1), "stacks": {"counts": [asdict(run)]}, "properties": {}}
    (folder / "version").write_bytes(stored_file.encode("version", version)[0])
    return WholeFiles(folder)


def test_an_index_that_leaves_out_a_stretch_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is right, and its stretches hold more than the index says."""
    monkeypatch.setattr(written_run, "STRETCH_BYTES", 20_000)
    written = WrittenRun(COUNTS)
    stored_file.encode("run", {}, {"counts": partial(written.write, [ROWS])})
    index = written.header["stretches"]
    assert len(index) > 3
    for left_out in ([], [1]):
        header = {**written.header, "stretches": [one for i, one in enumerate(index) if i not in left_out]}
        files = frozen(tmp_path / f"{left_out}", header, partial(WrittenRun(COUNTS).write, [ROWS]))
        if left_out:
            with pytest.raises(CorruptionError, match="one batch"):
                list(FrozenRuns(P1, TABLES, files).scan("counts"))
        else:
            assert sum(map(len, FrozenRuns(P1, TABLES, files).scan("counts"))) == len(ROWS)


def test_a_version_file_of_any_size_takes_no_memory(tmp_path: Path) -> None:
    """It is read as a whole, so its size is looked at before."""
    files = frozen(tmp_path / "frozen", {"table": "counts"}, partial(WrittenRun(COUNTS).write, [ROWS]))
    with (files.folder / "version").open("ab") as version:
        version.truncate(32 << 20)
    with pytest.raises(CorruptionError, match="wrong size"):
        FrozenRuns(P1, TABLES, WholeFiles(files.folder))
    with (
        FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id) as backend,
        pytest.raises(CorruptionError, match="larger than a file without sections"),
    ):
        backend.thaw(P1, files.folder)


def test_a_run_takes_no_more_memory_than_its_file(tmp_path: Path) -> None:
    """Runs are stored as they lie in memory: one that would unpack to a multiple of that is refused before it does."""

    def packed(run: Run, file: pa.NativeFile) -> None:
        run.write(file, compression="lz4")

    files = frozen(tmp_path / "frozen", {"table": "counts"}, partial(packed, ROWS))
    assert 2 * files.sizes["a1.arrow"] < ROWS.size_bytes
    with pytest.raises(CorruptionError, match="larger than declared"):
        list(FrozenRuns(P1, TABLES, files).scan("counts"))
    with (
        FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id) as backend,
        pytest.raises(CorruptionError, match="larger than declared"),
    ):
        backend.thaw(P1, files.folder)
