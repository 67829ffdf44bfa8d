"""Run files: a snapshot reads only what is new, and a shard opens while it is let go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import CorruptionError
from holdfast.testing.state_rows import P1, P2, P3, TABLES, counts

MANY = counts(*((f"user {i}", i) for i in range(20_000)))


def test_a_snapshot_reads_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state server freezes a version every few commits; most of its runs it has frozen before."""
    read: list[int] = []
    decode = stored_file.decode

    def counted(data: Any, **how: Any) -> Any:
        if how.get("verify", True):
            read.append(len(memoryview(data)))
        return decode(data, **how)

    with FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id) as worker:
        worker.apply(None, P1, MANY, {})
        worker.apply(P1, P2, counts(("ann", 1)), {})
    server = FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id)
    monkeypatch.setattr(stored_file, "decode", counted)
    files = server.freeze(P2)
    assert sum(read) > 0.9 * sum(path.stat().st_size for path in files)
    read.clear()
    worker.apply(P2, P3, counts(("bob", 2)), {})
    read.clear()
    assert {path.name for path in server.freeze(P3)} & {path.name for path in files}
    assert sum(read) < 10_000


def test_what_was_just_made_is_measured_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a shard ends with its figures; those of a newer version that another process made are read."""
    worker, other = (FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id) for _ in range(2))
    worker.apply(None, P1, counts(("ann", 1), ("bob", 1)), {})
    read = other.statistics()
    with monkeypatch.context() as patched:
        patched.setattr(stored_file, "decode", None)
        assert worker.statistics() == read
    other.apply(P1, P2, counts(("cem", 2)), {})
    assert worker.statistics() == other.statistics() != read
    other.drop([P2])
    assert worker.statistics() == read


def test_what_was_written_to_since_the_last_snapshot_is_read_again(tmp_path: Path) -> None:
    """A run that was frozen once may be damaged later, like any other."""
    backend = FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id)
    backend.apply(None, P1, MANY, {})
    run = next(path for path in backend.freeze(P1) if path.suffix == ".arrow")
    run.touch()
    assert backend.freeze(P1), "touched, and whole"
    with run.open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff\x00\xff")
    with pytest.raises(CorruptionError):
        backend.freeze(P1)


def test_a_shard_opens_though_it_is_let_go_at_this_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state server moves its directory away between two steps of a worker that opens it: no call fails for it."""
    taken: list[Path] = []
    mkdir = Path.mkdir

    def racing(path: Path, *args: Any, **how: Any) -> None:
        if path.name == "merges" and not taken:
            taken.append(path.parent.rename(tmp_path / "going"))
        mkdir(path, *args, **how)

    monkeypatch.setattr(Path, "mkdir", racing)
    backend = MemoryBackend(tmp_path / "query" / "totals" / "shard-0000", TABLES, clock.new_id)
    backend.load(P1, counts(("ann", 1)), {})
    assert taken
    assert backend.versions() == [P1]
