"""Failures in the background, as others read of them."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.troubles import Troubles, read_trouble


def test_a_path_that_is_no_text_can_be_told_and_read(tmp_path: Path) -> None:
    """A local directory's name may be any bytes; the disk is full there, and nobody would hear of it."""
    with open_storage(str(tmp_path)) as storage:
        shard = PrefixedStorage(storage, "totals/shard-0003")
        Troubles(shard).tell("snapshot", UnavailableError("the disk is full", folder="/data-\udcff"), 3, "host-1", 0)
        (told,) = shard.list("troubles/")
        assert read_trouble(shard, told.key).error == r"the disk is full, folder=/data-\udcff"
