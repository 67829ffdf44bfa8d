"""The commit log on object storage: what is restored in bounded memory, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends import stored_file
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.run import Run, merge_runs
from holdfast.errors import (
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    SchemaMismatchError,
    StateLostError,
    UnavailableError,
)
from holdfast.mvcc.store import RestoredVersion
from holdfast.snapshotter.commits import COMMIT_BYTES_MAX, CommitObjects, ObjectCommitLog
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.version_reader import read_tables
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.testing.state_rows import COUNTS, PAIRS, counts, run_of
from tests.damage import flipped
from tests.fuzz.forge import with_header
from tests.unit.snapshotter.conftest import PREFIX, TABLES, Shard


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


def test_a_base_that_vanishes_is_no_error(shard: Shard, elsewhere: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_commits_made_while_a_snapshot_was_written_stay_in_the_chain(shard: Shard, elsewhere: Shard) -> None:
    """The background snapshots an accepted version, on which newer commits stand by the time it is done."""
    accepted = shard.grow(None, 2)
    first = shard.commit(accepted, ("ann", 1))
    second = shard.commit(first, ("bob", 2))
    snapshot, _ = shard.snapshot(accepted)
    last = shard.commit(second, ("cem", 3))
    assert shard.chain(last) == [snapshot.key, *(f"commits/{p}" for p in (first, second, last))]
    assert elsewhere.state(last) == {"u0": 0, "u1": 1, "ann": 1, "bob": 2, "cem": 3}


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
        newest, _ = shard.snapshot(base)
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


def test_two_executors_may_snapshot_one_version(shard: Shard, elsewhere: Shard, storage: ObjectStorage) -> None:
    base = shard.grow(None, 3)
    elsewhere.state(base)
    snapshots = [one.snapshot(base)[0] for one in (shard, elsewhere)]
    assert snapshots[0].key != snapshots[1].key
    for one, other, snapshot in zip((shard, elsewhere), (elsewhere, shard), snapshots, strict=True):
        after = one.commit(base, ("ann", 1))
        assert one.chain(after) == [snapshot.key, f"commits/{after}"]
        assert other.state(after) == {"u0": 0, "u1": 1, "u2": 2, "ann": 1}


def test_a_chain_says_how_much_comes_with_each_object(shard: Shard, storage: ObjectStorage) -> None:
    base = shard.grow(None, 2)
    shard.snapshot(base)
    last = shard.grow(base, 1)
    snapshot, commit = shard.lineage(last).chain
    batch = pa.ipc.open_stream(pa.py_buffer(storage.get(f"{PREFIX}/{commit.key}"))).read_next_batch()
    assert batch.nbytes <= commit.content_bytes <= batch.nbytes + 1024
    assert snapshot.content_bytes == sum(info.size_bytes for info in storage.list(f"{PREFIX}/files/"))


def test_objects_are_compressed_and_any_arrow_reader_reads_them(shard: Shard, storage: ObjectStorage) -> None:
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


class Steps:
    """Watches a restore: how many bytes of commits each version that is made brings in, and what stands meanwhile."""

    def __init__(self, shard: Shard, step_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Pointer] = []
        self.most_held = 0
        shard.log.step_bytes = step_bytes
        backend = shard.backend
        for name in ("apply", "load"):
            monkeypatch.setattr(backend, name, self._watched(backend, getattr(backend, name), name))

    def _watched(self, backend: Backend, make: Callable[..., None], name: str) -> Callable[..., None]:
        def watched(*args: Any) -> None:
            make(*args)
            self.made.append(args[1] if name == "apply" else args[0])
            self.most_held = max(self.most_held, len(backend.versions()))

        return watched


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_long_chain_is_restored_in_steps(
    shard: Shard, elsewhere: Shard, monkeypatch: pytest.MonkeyPatch, has_snapshot: bool
) -> None:
    """What a restore holds follows the step, not the chain; each version on the way is one of the lineage, and goes."""
    base = shard.grow(None, 3)
    if has_snapshot:
        shard.snapshot(base)
    last = shard.commit(shard.grow(base, 9), delete=["u1", "u5"])
    chain = [e for e in shard.lineage(last).chain if e.kind == "commit"]
    step_bytes = sum(entry.content_bytes for entry in chain[:3])
    steps = Steps(elsewhere, step_bytes, monkeypatch)
    assert elsewhere.state(last) == shard.state(last) == {f"u{i}": i for i in range(12) if i not in (1, 5)}
    assert len(steps.made) == -(-len(chain) // 3)
    assert {str(p) for p in steps.made} <= {str(entry.pointer) for entry in chain}
    assert steps.most_held == 2 + has_snapshot
    assert set(elsewhere.backend.versions()) == {last, *([base] if has_snapshot else [])}
    assert elsewhere.chain(last) == shard.chain(last)


def test_a_version_on_the_way_is_that_version(
    shard: Shard, elsewhere: Shard, storage: ObjectStorage, executor: Executor, tmp_path: Path
) -> None:
    """Whoever begins at one finds its state and its chain; a restore that fails leaves it to the next one."""
    last = shard.grow(None, 9)
    faulty = FaultyStorage(storage, [Fault("fail", action="get", key="*/commits/8-*", times=1)])
    elsewhere.log.storage, elsewhere.log.step_bytes = faulty, 1
    with pytest.raises(UnavailableError):
        elsewhere.store.begin(last)
    faulty.assert_all_hit()
    (held,) = elsewhere.backend.versions()
    assert held.version == 7
    before = len(faulty.operations)
    assert elsewhere.state(last) == {f"u{i}": i for i in range(9)}
    assert len(faulty.operations) - before <= 4, "what was restored is not read again"
    third = Shard(storage, executor, tmp_path / "third")
    assert elsewhere.store.prune(last) == [held]
    assert third.state(held) == {f"u{i}": i for i in range(7)}
    assert third.chain(held) == shard.chain(held)


def test_a_version_that_was_held_before_stays(shard: Shard, elsewhere: Shard) -> None:
    """What a restore passes by goes only if the restore has made it."""
    three = shard.grow(None, 3)
    last = shard.grow(three, 3)
    elsewhere.log.step_bytes = 1
    elsewhere.state(three)
    elsewhere.state(last)
    assert elsewhere.backend.versions() == [three, last]


def test_a_version_on_the_way_that_has_lost_files_is_made_anew(shard: Shard, elsewhere: Shard) -> None:
    """Its folder stands where the step wants to be, and no number of tries would have gone past it."""
    middle = shard.grow(None, 3)
    last = shard.grow(middle, 3)
    elsewhere.state(middle)
    (version_file,) = (elsewhere.backend.directory / "versions").glob("*/version")
    version_file.unlink()
    elsewhere.log.step_bytes = 1
    assert elsewhere.state(last) == {f"u{i}": i for i in range(6)}


def test_steps_go_around_a_damaged_snapshot(shard: Shard, elsewhere: Shard, storage: ObjectStorage) -> None:
    """Two damaged ones after each other, and no more than a commit at a time."""
    base: Pointer | None = None
    for number in range(3):
        base = shard.grow(base, 3)
        entry, _ = shard.snapshot(base)
        if number:
            storage.delete([f"{PREFIX}/{entry.key}"])
    last = shard.grow(base, 3)
    elsewhere.log.step_bytes = 1
    assert elsewhere.state(last) == {f"u{i}": i for i in range(12)}


def test_a_damaged_snapshot_is_read_once(shard: Shard, elsewhere: Shard, storage: ObjectStorage) -> None:
    """It may be as large as the state, and the way around it may have many steps."""
    middle = shard.grow(shard.grow(None, 3), 5)
    shard.snapshot(middle)
    parts = [info.key for info in storage.list(f"{PREFIX}/files/")]
    storage.delete(parts[-1:])
    last = shard.grow(middle, 3)
    watched = FaultyStorage(storage, [])
    elsewhere.log.storage, elsewhere.log.step_bytes = watched, 1
    assert elsewhere.state(last) == {f"u{i}": i for i in range(11)}
    read = [key for operation in watched.operations if operation.action == "get" for key in operation.keys]
    assert {read.count(key) for key in parts} <= {0, 1}
    assert read.count(parts[-1]) == 1


def test_a_history_in_a_circle_ends(shard: Shard, elsewhere: Shard, storage: ObjectStorage) -> None:
    """Around a damaged snapshot each commit must be older than the one before."""
    base = shard.grow(None, 2)
    storage.delete([f"{PREFIX}/{shard.snapshot(base)[0].key}"])
    last = shard.grow(base, 1)
    newer = shard.lineage(shard.grow(last, 3)).chain[-1]
    path = f"{PREFIX}/commits/{last}"
    altered = with_header(bytes(storage.get(path)), lambda header: header.update(last=newer.to_json()))
    storage.delete([path])
    storage.put(path, altered)
    with pytest.raises(CorruptionError, match="builds on a snapshot that is older than the commit it follows"):
        elsewhere.store.begin(last)


def test_reading_state_goes_in_steps_too(shard: Shard, elsewhere: Shard) -> None:
    """A reader without a backend of its own merges a long chain step by step, deletes included."""
    base = shard.grow(None, 4)
    shard.snapshot(base)
    last = shard.commit(shard.grow(base, 5), ("u2", 7), delete=["u1", "u8"])
    elsewhere.log.backend_name, elsewhere.log.step_bytes = None, 1
    run = read_tables(elsewhere.log, last, ["counts", "other"])["counts"]
    rows = dict(zip(run.keys.column(0).to_pylist(), run.values.column(0).to_pylist(), strict=True))
    assert rows == shard.state(last)
    assert read_tables(elsewhere.log, last, ["other"]) == {}


def test_a_commit_that_is_not_there_is_lost_state(shard: Shard, elsewhere: Shard, storage: ObjectStorage) -> None:
    """Never an empty state: the error names the object, and the setting to check."""
    base = shard.grow(None, 1)
    storage.delete([f"{PREFIX}/commits/{base}"])
    with pytest.raises(StateLostError, match=r"spark\.holdfast\.state\.dir") as caught:
        elsewhere.store.begin(base)
    assert caught.value.facts["key"] == f"{PREFIX}/commits/{base}"


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
        made = {
            "cut": data[: len(data) // 2],
            "altered": flipped(data),
            "replaced": bytes(storage.get(f"{PREFIX}/{donor}")),
        }[damage]
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


def test_a_commit_that_no_reader_would_take_is_not_written(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before Spark is told that the version exists, and says what helps."""
    monkeypatch.setattr("holdfast.snapshotter.commits.COMMIT_BYTES_MAX", 2_000)
    commits = CommitObjects(PrefixedStorage(storage, PREFIX), TABLES)
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


@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
def test_a_commit_that_could_not_be_stored_leaves_no_local_version(shard: Shard, kind: str) -> None:
    """Else a pointer could name what no other executor can restore."""
    base = shard.grow(None, 1)
    shard.log.storage = FaultyStorage(shard.log.storage, [Fault(kind, action="put")])  # type: ignore[arg-type]
    with pytest.raises(UnavailableError):
        shard.commit(base, ("ann", 1))
    assert shard.backend.versions() == [base]
    assert shard.state(shard.commit(base, ("ann", 2))) == {"u0": 0, "ann": 2}


def test_a_note_that_cannot_be_written_says_so_as_ours(shard: Shard, tmp_path: Path) -> None:
    """The state server goes on after errors of holdfast, and dies of others."""
    base = shard.grow(None, 1)
    (tmp_path / "here" / "snapshots").write_text("in the way")
    with pytest.raises(UnavailableError, match="snapshots"):
        shard.snapshot(base)


@pytest.mark.parametrize("field", ["content_bytes", "size_bytes"])
def test_objects_of_other_sizes_are_refused(shard: Shard, elsewhere: Shard, storage: ObjectStorage, field: str) -> None:
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
