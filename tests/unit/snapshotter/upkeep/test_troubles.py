"""Failures of micro-batches and in the background, as others read of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import CorruptionError, UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.snapshotter.upkeep.troubles import Troubles, batch_of, of_batch, read_trouble


def test_a_path_that_is_no_text_can_be_told_and_read(tmp_path: Path) -> None:
    """A local directory's name may be any bytes; the disk is full there, and nobody would hear of it."""
    with open_storage(str(tmp_path)) as storage:
        shard = PrefixedStorage(storage, "totals/shard-0003")
        Troubles(shard).tell("snapshot", UnavailableError("the disk is full", folder="/data-\udcff"), 3, "host-1", 0)
        (told,) = shard.list("troubles/")
        assert read_trouble(shard, told.key).error == r"the disk is full, folder=/data-\udcff"


def test_of_a_shard_the_micro_batch_that_failed_last_is_kept(tmp_path: Path) -> None:
    """However many fail, one report stays, beside those of the background; its name tells which micro-batch."""
    with open_storage(str(tmp_path)) as storage:
        shard = PrefixedStorage(storage, "totals/shard-0003")
        troubles = Troubles(shard)
        troubles.tell("snapshot", UnavailableError("the disk is full"), 3, "host-1", 0)
        for batch_id in (41, 42):
            troubles.tell(of_batch(batch_id), ValueError("no number: 'x'"), 1, "host-1", 0)
        found = {batch_of(info.key): read_trouble(shard, info.key) for info in shard.list("troubles/")}
        assert {batch_id: one.what for batch_id, one in found.items()} == {None: "snapshot", 42: "micro-batch-42"}
        assert found[42].error == "ValueError: no number: 'x'"
        (listed,) = [o for o in list_shard(shard).troubles if batch_of(o.key) is not None]
        assert listed.kind == "trouble"


def test_a_report_under_another_name_is_refused(tmp_path: Path) -> None:
    """A copied report of one micro-batch says nothing of another one."""
    with open_storage(str(tmp_path)) as storage:
        shard = PrefixedStorage(storage, "totals/shard-0003")
        Troubles(shard).tell(of_batch(42), ValueError("x"), 1, "host-1", 0)
        (told,) = shard.list("troubles/")
        moved = told.key.replace("-42-", "-43-")
        shard.put(moved, shard.get(told.key))
        with pytest.raises(CorruptionError, match="moved or copied"):
            read_trouble(shard, moved)
