"""What a clone's shard is made of: whole, and the version that the pointer names; else an error, and no clone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import CorruptionError, StateLostError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.copies.cloning import copy_shard
from tests.unit.snapshotter.upkeep.upkeep_bench import Bench

SHARD = "one/shard-0000"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A shard with snapshots, and commits after the newest one."""
    made = Bench(tmp_path)
    made.run(made.query(), made.executor(), 13)
    yield made
    made.close()


def copied(bench: Bench) -> set[str]:
    """Copy the shard anew, and return the keys of the copy."""
    pointer, _ = bench.queries[0].rows[0]
    target = bench.path / "copy"
    shutil.rmtree(target, ignore_errors=True)
    with open_storage(str(bench.place.path)) as source, open_storage(str(target)) as new:
        number = copy_shard(PrefixedStorage(source, SHARD), PrefixedStorage(new, SHARD), pointer, None)
        keys = {info.key.removeprefix(f"{SHARD}/") for info in new.list("")}
    assert all((target / SHARD / key).read_bytes() == stored(bench, key).read_bytes() for key in keys)
    assert number == len([key for key in keys if not key.startswith("files/")])
    return keys


def stored(bench: Bench, key: str) -> Path:
    return bench.place.path / SHARD / key


def by_age(bench: Bench, folder: str) -> list[str]:
    """Return the keys of a folder, oldest version first."""
    names = [path.name for path in stored(bench, folder).iterdir()]
    return [f"{folder}/{name}" for name in sorted(names, key=lambda name: int(name.partition("-")[0]))]


def flip(path: Path) -> bytes:
    """Damage one byte, and return what was there."""
    before = path.read_bytes()
    path.write_bytes(before[:20] + bytes([before[20] ^ 1]) + before[21:])
    return before


def test_what_the_version_builds_on_is_checked_byte_by_byte(bench: Bench) -> None:
    """One flipped byte has the right size: a clone of it would fail when the original is gone."""
    whole = copied(bench)
    assert whole == {
        str(path.relative_to(stored(bench, ""))) for path in stored(bench, "").rglob("*") if path.is_file()
    }
    needed = [*by_age(bench, "commits")[-2:], by_age(bench, "snapshots")[-1]]
    for key in needed:
        before = flip(stored(bench, key))
        with pytest.raises(CorruptionError):
            copied(bench)
        stored(bench, key).unlink()
        with pytest.raises(StateLostError):
            copied(bench)
        stored(bench, key).write_bytes(before)
    assert copied(bench) == whole


def test_a_damaged_part_is_found(bench: Bench) -> None:
    """Parts are most of the bytes; an older snapshot that has one is left out."""
    refused = 0
    whole = copied(bench)
    for path in sorted(stored(bench, "files").iterdir()):
        before = flip(path)
        try:
            left = copied(bench)
        except CorruptionError:
            refused += 1
        else:
            assert [key for key in whole - left if key.startswith("snapshots/")]
        path.write_bytes(before)
    assert refused


def test_another_object_in_its_place_is_found(bench: Bench) -> None:
    """Whole, but not the one that the commit builds on."""
    older, newer = by_age(bench, "commits")[-3:-1]
    stored(bench, newer).write_bytes(stored(bench, older).read_bytes())
    with pytest.raises(CorruptionError, match="altered or damaged"):
        copied(bench)
