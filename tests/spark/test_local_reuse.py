"""A query that is started again in another application finds its local files, and believes none that is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.spark.application import run_program
from tests.spark.conftest import Lab

PROGRAM = Path(__file__).with_name("local_query.py")


class Applications:
    """Runs one query in one application after the other, and knows what it must give."""

    def __init__(self, folder: Path) -> None:
        self.lab = Lab(None, folder, folder / "local")  # type: ignore[arg-type]
        self.folder = folder
        self.totals: dict[str | None, list[int]] = {}

    def run(self, rows: list[tuple[str | None, int]]) -> str:
        """Feed rows and run the query over them in a new process; check its output and return what it logged."""
        self.lab.feed(rows)
        for key, value in rows:
            n, total = self.totals.get(key, [0, 0])
            self.totals[key] = [n + 1, total + value]
        shown, logged = run_program(PROGRAM, self.folder, "filesystem")
        (batch,) = json.loads(shown)
        expected: list[Any] = [[key, *self.totals[key]] for key in {key for key, _ in rows}]
        assert batch == sorted(expected, key=repr)
        return logged

    def shards(self) -> list[Path]:
        return list(self.folder.glob("local/*/executor-*/disk/*/totals/shard-*"))

    def commits(self) -> Path:
        """Return where the commits are, of which a restore reads; the operator's record lies beside."""
        return self.folder / "durable" / "totals"

    def hide_commits(self) -> None:
        for shard in self.commits().glob("shard-*"):
            shard.rename(shard.with_name(f"hidden-{shard.name}"))

    def show_commits(self) -> None:
        for hidden in self.commits().glob("hidden-*"):
            for new in self.commits().glob(f"{hidden.name.removeprefix('hidden-')}/*/*"):
                new.rename(hidden / new.parent.name / new.name)
            for folder in self.commits().glob(f"{hidden.name.removeprefix('hidden-')}/*"):
                folder.rmdir()
            (self.commits() / hidden.name.removeprefix("hidden-")).rmdir()
            hidden.rename(hidden.with_name(hidden.name.removeprefix("hidden-")))


def flip_a_bit_of_each(shard: Path) -> None:
    """As a failing disk does: in the middle of each run, with no time stamp to tell of it."""
    paths = list(shard.glob("versions/*/*.arrow"))
    assert paths
    for inode in {path.stat().st_ino: path for path in paths}.values():
        found = inode.stat()
        data = bytearray(inode.read_bytes())
        data[len(data) // 2] ^= 1
        with inode.open("r+b") as file:
            file.write(data)
        os.utime(inode, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(1500)
def test_local_files_are_used_after_a_restart_and_restored_where_they_are_damaged(
    java_home: Path, tmp_path: Path
) -> None:
    """First nothing but the local files holds the state; then what they hold is damaged."""
    applications = Applications(tmp_path)
    applications.run([("a", 1), ("b", 2), (None, 3), ("c", 4), ("d", 5)])
    assert len(applications.shards()) == 2
    applications.hide_commits()
    applications.run([("a", 10), (None, 30), ("e", 50)])
    assert len(applications.shards()) == 2, "they were taken over, not copied"
    applications.show_commits()
    for shard in applications.shards():
        flip_a_bit_of_each(shard)
    logged = applications.run([("a", 100), ("b", 200), ("f", 300)])
    assert "holds a damaged file" in logged
    assert len(list(tmp_path.glob("local/*/*/disk/*/totals/shard-*/set-aside/*"))) >= 2
    assert len(applications.shards()) == 2
