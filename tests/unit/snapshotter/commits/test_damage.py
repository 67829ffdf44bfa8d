"""What the commit log refuses to restore, and what a failed write leaves: nothing."""

from __future__ import annotations

import json
import os
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.errors import (
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    SchemaMismatchError,
    StateLostError,
    UnavailableError,
)
from holdfast.snapshotter.commit_objects import COMMIT_BYTES_MAX, CommitObjects
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.testing.state_rows import PAIRS, counts, run_of
from tests.unit.snapshotter.commits.shard import PREFIX, TABLES, Shard, with_header


def test_a_commit_that_is_not_there_is_lost_state(shard: Shard, elsewhere: Shard, storage: ObjectStorage) -> None:
    """Never an empty state: the error names the object, and the setting to check."""
    base = shard.grow(None, 1)
    storage.delete([f"{PREFIX}/commits/{base}"])
    with pytest.raises(StateLostError, match=r"spark\.holdfast\.state\.dir") as caught:
        elsewhere.store.begin(base)
    assert caught.value.facts["key"] == f"{PREFIX}/commits/{base}"


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _alter(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 1]) + data[41:]


@pytest.mark.parametrize("which", ["commit in the chain", "newest commit"])
@pytest.mark.parametrize("damage", ["gone", "cut", "altered", "replaced"])
def test_a_damaged_commit_is_named_and_changes_nothing_local(
    shard: Shard, elsewhere: Shard, storage: ObjectStorage, tmp_path: Path, which: str, damage: str
) -> None:
    base = shard.grow(None, 2)
    shard.snapshot(base)
    between = shard.grow(base, 1)
    last = shard.grow(between, 1)
    key = {"commit in the chain": f"commits/{between}", "newest commit": f"commits/{last}"}[which]
    inflict(damage, storage, key, donor=f"commits/{base}")
    wanted: type[HoldfastError] = StateLostError if (which, damage) == ("newest commit", "gone") else CorruptionError
    with pytest.raises(wanted) as caught:
        elsewhere.store.begin(last)
    assert key in str(caught.value)
    assert elsewhere.backend.versions() == []
    assert not any(p.is_file() for p in (tmp_path / "elsewhere").rglob("*"))


def inflict(damage: str, storage: ObjectStorage, key: str, donor: str) -> None:
    """Remove, cut or alter an object of the shard, or put another one in its place."""
    path = f"{PREFIX}/{key}"
    data = bytes(storage.get(path))
    storage.delete([path])
    if damage != "gone":
        made = {"cut": _cut(data), "altered": _alter(data), "replaced": bytes(storage.get(f"{PREFIX}/{donor}"))}[damage]
        storage.put(path, made)


@pytest.mark.parametrize("which", ["commit in the chain", "newest commit"])
def test_a_commit_that_is_larger_than_it_can_be_is_not_read(executor: Executor, tmp_path: Path, which: str) -> None:
    """The chain tells the size of a commit; the newest one, which only the pointer names, has what any may have."""
    shard = Shard(open_storage(str(tmp_path / "durable")), executor, tmp_path / "here")
    first = shard.grow(None, 1)
    last = shard.grow(first, 1)
    planted = {"commit in the chain": first, "newest commit": last}[which]
    path = tmp_path / "durable" / PREFIX / "commits" / str(planted)
    limit_bytes = path.stat().st_size if planted == first else COMMIT_BYTES_MAX
    os.truncate(path, 1 << 40)
    elsewhere = Shard(open_storage(str(tmp_path / "durable")), executor, tmp_path / "elsewhere")
    with pytest.raises(CorruptionError, match=f"size_bytes={1 << 40} limit_bytes={limit_bytes}") as caught:
        elsewhere.store.begin(last)
    assert str(planted) in str(caught.value)


def test_a_commit_that_no_reader_would_take_is_not_written(storage: ObjectStorage) -> None:
    """The error comes before Spark is told that the version exists, and says what helps."""
    commits = CommitObjects(PrefixedStorage(storage, PREFIX), TABLES, limit_bytes=2_000)
    small, large = (counts(*((f"user {i}", i * i) for i in range(rows))) for rows in (1, 2_000))
    assert commits.encode(Pointer(1, "aa"), Lineage(), small)[0].size <= 2_000
    with pytest.raises(InvalidArgumentError, match="more shards"):
        commits.encode(Pointer(1, "aa"), Lineage(), large)


def test_a_commit_of_another_shard_is_refused(
    shard: Shard, storage: ObjectStorage, executor: Executor, tmp_path: Path
) -> None:
    """Copied between directories by hand, say: right bytes, wrong state."""
    base = shard.grow(None, 1)
    storage.put(f"totals/shard-0004/commits/{base}", bytes(storage.get(f"{PREFIX}/commits/{base}")))
    other = ObjectCommitLog(storage, "totals/shard-0004", TABLES, executor, tmp_path / "other")
    with pytest.raises(CorruptionError, match="moved or copied") as caught, other.restore(base):
        pass
    assert caught.value.facts["shard"] == PREFIX


def test_rows_of_a_table_that_nobody_knows_are_not_left_out(shard: Shard) -> None:
    """What says which tables there are may be lost, or older than the commit: never a part of a version."""
    pointer, runs = Pointer(1, "aa"), counts(("ann", 1)) | {"pairs": run_of(PAIRS, [((1, 0.5, "x"), ("n", None))])}
    objects = CommitObjects(shard.log.objects, {**TABLES, "pairs": PAIRS})
    data, entry = objects.encode(pointer, Lineage((), (pointer,)), runs)
    shard.log.objects.put(entry.key, data)
    with pytest.raises(SchemaMismatchError, match="tables that the operator does not declare"):
        shard.store.begin(pointer)
    assert shard.backend.versions() == []
    shard.log.carried[pointer] = data.to_pybytes()
    with pytest.raises(SchemaMismatchError, match="tables that the operator does not declare"):
        shard.log.append(Pointer(2, "bb"), Lineage((), (pointer,)).to_json(), counts(("bob", 2)))


@pytest.mark.parametrize(
    "chain",
    [
        [{"kind": "commit"}],
        [{"kind": "commit", "pointer": "1-aa", "size_bytes": 1, "digest": "0" * 32, "more": 1}],
        ["1-aa"],
        3,
    ],
)
def test_a_commit_with_an_unreadable_chain_is_named(shard: Shard, storage: ObjectStorage, chain: object) -> None:
    pointer = Pointer(7, "abcd")
    header = {"pointer": str(pointer), "shard": PREFIX, "chain": chain, "rows": {}, "plain_bytes": {}}
    header |= {"since": [str(pointer)], "last": None}
    storage.put(f"{PREFIX}/commits/{pointer}", stored_file.encode("commit", header)[0])
    with pytest.raises(CorruptionError, match=f"commits/{pointer}"), shard.log.restore(pointer):
        pass


@pytest.mark.parametrize("pointer", ["../../../outside", "/etc/passwd", "..", ""])
def test_no_chain_leads_out_of_the_storage(shard: Shard, storage: ObjectStorage, tmp_path: Path, pointer: str) -> None:
    entry = {"kind": "commit", "pointer": pointer, "size_bytes": 1, "digest": "0" * 32, "content_bytes": 0}
    own = Pointer(7, "abcd")
    header = {"pointer": str(own), "shard": PREFIX, "chain": [entry], "rows": {}, "plain_bytes": {}}
    header |= {"since": [str(own)], "last": entry}
    storage.put(f"{PREFIX}/commits/{own}", stored_file.encode("commit", header)[0])
    (tmp_path / "outside").write_text(json.dumps({}))
    with pytest.raises(CorruptionError, match="an invalid field"):
        shard.log.restore(own).__enter__()


def test_a_storage_that_does_not_answer_is_neither_lost_nor_corrupt(shard: Shard, elsewhere: Shard) -> None:
    """Trying again must be possible: the error says retryable."""
    last = shard.grow(None, 2)
    faulty = FaultyStorage(elsewhere.log.storage, [Fault("fail", action="get", nth=2)])
    elsewhere.log.storage = faulty
    with pytest.raises(UnavailableError):
        elsewhere.store.begin(last)
    faulty.assert_all_hit()
    assert elsewhere.state(last) == {"u0": 0, "u1": 1}


@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
def test_a_commit_that_could_not_be_stored_leaves_no_local_version(shard: Shard, kind: str) -> None:
    """Else a pointer could name what no other executor can restore."""
    base = shard.grow(None, 1)
    shard.log.storage = FaultyStorage(shard.log.storage, [Fault(kind, action="put")])  # type: ignore[arg-type]
    with pytest.raises(UnavailableError):
        shard.commit(base, ("ann", 1))
    assert shard.backend.versions() == [base]
    assert shard.state(shard.commit(base, ("ann", 2))) == {"u0": 0, "ann": 2}


def test_a_snapshot_that_could_not_be_stored_leaves_no_note(shard: Shard, tmp_path: Path) -> None:
    base = shard.grow(None, 2)
    shard.log.storage = FaultyStorage(shard.log.storage, [Fault("fail", action="put")])
    with pytest.raises(UnavailableError):
        shard.snapshot(base)
    assert len(shard.chain(shard.commit(base, ("ann", 1)))) == 3


def test_a_note_that_cannot_be_written_says_so_as_ours(shard: Shard, tmp_path: Path) -> None:
    """The state server goes on after errors of holdfast, and dies of others."""
    base = shard.grow(None, 1)
    (tmp_path / "here" / "snapshots").write_text("in the way")
    with pytest.raises(UnavailableError, match="snapshots"):
        shard.snapshot(base)


@pytest.mark.parametrize("field", ["content_bytes", "size_bytes"])
def test_an_object_of_another_size_than_declared_is_refused(
    shard: Shard, elsewhere: Shard, storage: ObjectStorage, field: str
) -> None:
    """Sizes are checked against what was declared outside of the object."""
    last = shard.grow(None, 2)
    data = bytes(storage.get(f"{PREFIX}/commits/{last}"))

    def enlarge(header: dict[str, Any]) -> None:
        for entry in (header["chain"][0], header["last"]):
            entry[field] += 1

    storage.delete([f"{PREFIX}/commits/{last}"])
    storage.put(f"{PREFIX}/commits/{last}", with_header(data, enlarge))
    with pytest.raises(CorruptionError, match="is not the object"):
        elsewhere.store.begin(last)
