"""The commit log on object storage: what is restored, and how long chains of commits get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.run import Run, merge_runs
from holdfast.mvcc.store import RestoredVersion
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.testing.state_rows import COUNTS
from tests.unit.snapshotter.commits.shard import PREFIX, Shard, lineage_of


def test_another_executor_restores_every_version(shard: Shard, elsewhere: Shard) -> None:
    one = shard.commit(None, ("ann", 1), ("bob", None))
    two = shard.commit(one, ("ann", 2), delete=["bob"])
    three = shard.commit(two, ("cem", 3))
    assert elsewhere.state(three) == {"ann": 2, "cem": 3}
    assert elsewhere.state(one) == {"ann": 1, "bob": None}
    assert elsewhere.state(two) == {"ann": 2}


def test_a_chain_goes_on_where_it_was_restored(shard: Shard, elsewhere: Shard, storage: ObjectStorage) -> None:
    there = elsewhere.commit(shard.grow(None, 2), ("ann", 1))
    assert elsewhere.chain(there) == [f"commits/{p}" for p in (*_pointers(storage), there)]
    assert shard.state(there) == {"u0": 0, "u1": 1, "ann": 1}


def test_what_is_held_locally_is_not_read_again(shard: Shard, elsewhere: Shard, storage: ObjectStorage) -> None:
    """A database that survived at an older version is brought forward by the commits since, and by nothing else."""
    two = shard.grow(None, 2)
    dropped = elsewhere.commit(two, ("dropped", 1))
    four = shard.commit(shard.commit(two, ("cem", 3)), ("u1", 7), delete=["u0", "cem"])
    storage.delete([f"{PREFIX}/commits/{p}" for p in _pointers(storage, range(1, 3))])
    with shard.log.restore(four, [two, dropped]) as restored:
        assert restored.base == two
        assert restored.runs["counts"].deleted.sum() == 2, "deletes must reach the base"
    assert elsewhere.state(four) == shard.state(four) == {"u1": 7}
    assert elsewhere.chain(four) == shard.chain(four)


def test_a_base_that_vanishes_meanwhile_is_done_without(
    shard: Shard, elsewhere: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question what is held and its use, another worker may prune."""
    two = shard.grow(None, 2)
    elsewhere.state(two)
    three = shard.commit(two, ("cem", 3))
    restore = elsewhere.log.restore

    @contextmanager
    def pruned_meanwhile(pointer: Pointer, held: Sequence[Pointer] = ()) -> Iterator[RestoredVersion]:
        with restore(pointer, held) as restored:
            elsewhere.backend.drop([two])
            yield restored

    monkeypatch.setattr(elsewhere.log, "restore", pruned_meanwhile)
    assert elsewhere.state(three) == {"u0": 0, "u1": 1, "cem": 3}


def _pointers(storage: ObjectStorage, versions: range = range(1, 3)) -> list[str]:
    names = [o.key.rpartition("/")[2] for o in storage.list(f"{PREFIX}/commits/")]
    return [name for v in versions for name in names if name.startswith(f"{v}-")]


def test_an_attempt_that_was_dropped_is_in_no_later_chain(shard: Shard, elsewhere: Shard) -> None:
    one = shard.commit(None, ("ann", 1))
    dropped, kept = shard.commit(one, ("ann", 7)), shard.commit(one, ("ann", 2))
    last = shard.commit(kept, ("bob", 1))
    assert shard.chain(last) == [f"commits/{p}" for p in (one, kept, last)]
    assert elsewhere.state(last) == {"ann": 2, "bob": 1}
    assert elsewhere.state(dropped) == {"ann": 7}


def test_a_snapshot_shortens_the_chains_that_follow(shard: Shard, elsewhere: Shard) -> None:
    base = shard.grow(None, 5)
    snapshot = shard.snapshot(base)
    after = shard.commit(base, ("ann", 1), delete=["u0"])
    last = shard.commit(after, ("bob", 2))
    assert shard.chain(last) == [snapshot.key, f"commits/{after}", f"commits/{last}"]
    assert elsewhere.state(last) == shard.state(last) == {f"u{i}": i for i in range(1, 5)} | {"ann": 1, "bob": 2}


def test_commits_made_while_a_snapshot_was_written_stay_in_the_chain(shard: Shard, elsewhere: Shard) -> None:
    """The background snapshots an accepted version, on which newer commits stand by the time it is done."""
    accepted = shard.grow(None, 2)
    first = shard.commit(accepted, ("ann", 1))
    second = shard.commit(first, ("bob", 2))
    snapshot = shard.snapshot(accepted)
    last = shard.commit(second, ("cem", 3))
    assert shard.chain(last) == [snapshot.key, *(f"commits/{p}" for p in (first, second, last))]
    assert elsewhere.state(last) == {"u0": 0, "u1": 1, "ann": 1, "bob": 2, "cem": 3}


def test_versions_before_a_snapshot_are_still_there(shard: Shard, elsewhere: Shard) -> None:
    base = shard.grow(None, 3)
    shard.snapshot(base)
    after = shard.commit(base, ("ann", 1))
    assert shard.chain(base) == elsewhere.chain(base)
    assert elsewhere.state(base) == {"u0": 0, "u1": 1, "u2": 2}
    assert elsewhere.state(after) == {"u0": 0, "u1": 1, "u2": 2, "ann": 1}


def test_a_snapshot_of_a_version_outside_the_chain_is_ignored(shard: Shard, elsewhere: Shard) -> None:
    """A dropped attempt's snapshot must not enter the chain of the attempt that was kept."""
    base = shard.grow(None, 2)
    shard.snapshot(shard.commit(base, ("ann", 7)))
    kept = shard.commit(base, ("ann", 2))
    assert all(key.startswith("commits/") for key in shard.chain(kept))
    assert elsewhere.state(kept)["ann"] == 2


def test_an_empty_version_has_a_snapshot(shard: Shard, elsewhere: Shard) -> None:
    base = shard.commit(shard.commit(None, ("ann", 1)), delete=["ann"])
    shard.snapshot(base)
    assert elsewhere.state(base) == {}
    assert elsewhere.state(shard.commit(base, ("bob", 1))) == {"bob": 1}


def test_notes_of_snapshots_do_not_pile_up(shard: Shard, tmp_path: Path) -> None:
    base = None
    for _ in range(8):
        base = shard.grow(base, 2)
        newest = shard.snapshot(base)
    assert [p.name for p in (tmp_path / "here" / "snapshots").iterdir()].count(str(newest.pointer)) == 1
    assert len(list((tmp_path / "here" / "snapshots").iterdir())) == 4
    assert shard.chain(shard.grow(base, 1))[0] == newest.key


@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_a_note_that_cannot_be_read_costs_nothing_but_work(shard: Shard, tmp_path: Path, damage: str) -> None:
    base = shard.grow(None, 2)
    shard.snapshot(base)
    note = tmp_path / "here" / "snapshots" / str(base)
    content = note.read_bytes()
    note.unlink()
    if damage != "gone":
        note.write_bytes(content[:-1] if damage == "cut" else b"")
    assert len(shard.chain(shard.commit(base, ("ann", 1)))) == 3


def test_two_executors_may_snapshot_one_version_in_different_files(
    shard: Shard, elsewhere: Shard, storage: ObjectStorage
) -> None:
    """Neither snapshot may take the other's place."""
    base = shard.grow(None, 3)
    elsewhere.state(base)
    snapshots = [one.snapshot(base) for one in (shard, elsewhere)]
    assert snapshots[0].key != snapshots[1].key
    for one, other, snapshot in zip((shard, elsewhere), (elsewhere, shard), snapshots, strict=True):
        after = one.commit(base, ("ann", 1))
        assert one.chain(after) == [snapshot.key, f"commits/{after}"]
        assert other.state(after) == {"u0": 0, "u1": 1, "u2": 2, "ann": 1}


def test_a_chain_says_how_much_comes_with_each_object(shard: Shard, storage: ObjectStorage) -> None:
    """Of a commit its rows, unpacked; of a snapshot the parts of its files."""
    base = shard.grow(None, 2)
    shard.snapshot(base)
    last = shard.grow(base, 1)
    snapshot, commit = lineage_of(shard, last).chain
    batch = pa.ipc.open_stream(pa.py_buffer(storage.get(f"{PREFIX}/{commit.key}"))).read_next_batch()
    assert batch.nbytes <= commit.content_bytes <= batch.nbytes + 1024
    assert snapshot.content_bytes == sum(info.size_bytes for info in storage.list(f"{PREFIX}/files/"))


def test_objects_hold_the_state_compressed_and_readable_by_any_arrow_reader(
    shard: Shard, storage: ObjectStorage
) -> None:
    base = shard.grow(None, 1)
    data = storage.get(f"{PREFIX}/commits/{base}")
    batch = pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()
    assert batch.to_pylist() == [{"hash": batch["hash"][0].as_py(), "deleted": False, "key.user": "u0", "value.n": 0}]
    stored = stored_file.decode(data, source="it", kind="commit")
    assert stored.header == {
        "pointer": str(base),
        "shard": PREFIX,
        "rows": {"counts": 1},
        "plain_bytes": {"counts": pa.ipc.get_record_batch_size(batch)},
        "chain": [],
        "since": [str(base)],
        "last": None,
    }
    assert len(merge_runs([Run.read(stored.sections["counts"], COUNTS, source="it")], drop_deletes=True)) == 1
