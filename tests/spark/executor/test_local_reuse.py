"""A query that is started again in another application finds its local files, and believes none that is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.spark.application import run_program
from tests.spark.conftest import Lab

PROGRAM = Path(__file__).parents[1] / "local_query.py"
ROWS = [("a", 1), ("b", 2), (None, 3), ("c", 4), ("d", 5), ("e", 6)]


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


@pytest.mark.all
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_local_files_are_used_after_a_restart_and_restored_where_they_are_damaged(lab: Lab) -> None:
    """Of one shard nothing but the local files holds the state; of the other one they are damaged."""
    lab.feed(ROWS)
    shown, _ = run_program(PROGRAM, lab.folder, "filesystem")
    assert json.loads(shown) == [sorted(([key, 1, value] for key, value in ROWS), key=repr)]
    lab.local = lab.folder / "local"
    damaged, intact = sorted(shards(lab), key=lambda shard: shard.name)
    flip_a_bit_of_each(damaged)
    for commit in (lab.folder / "durable" / "totals" / intact.name[: len("shard-0000")]).glob("commits/*"):
        commit.write_bytes(b"gone")
    lab.configure({"backend": "filesystem", "local.dir": str(lab.local), "commit.carriedBytes": "0"})
    lab.feed(ROWS)
    (found,) = lab.run(lab.totals())
    assert {row["key"]: (row["n"], row["total"]) for row in found} == {key: (2, 2 * value) for key, value in ROWS}
    assert len(shards(lab)) == 2, "they were taken over, not copied"
    assert [path.parent.parent.name for path in lab.local.glob("*/*/disk/*/totals/shard-*/set-aside/*")] == [
        damaged.name
    ]


def shards(lab: Lab) -> list[Path]:
    return list(lab.local.glob("*/executor-*/disk/*/totals/shard-*"))
