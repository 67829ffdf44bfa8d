"""Long chains are restored step by step, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import CorruptionError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.version_reader import read_tables
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.unit.snapshotter.commits.shard import PREFIX, Shard, lineage_of, with_header


class Steps:
    """Watches a restore: how many bytes of commits each version that is made brings in, and what stands meanwhile."""

    def __init__(self, shard: Shard, step_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Pointer] = []
        self.most_held = 0
        shard.log.step_bytes = step_bytes
        backend = shard.backend
        for name in ("apply", "load"):
            monkeypatch.setattr(backend, name, self._watched(backend, getattr(backend, name), name))

    def _watched(self, backend: MemoryBackend, make: Callable[..., None], name: str) -> Callable[..., None]:
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
    chain = [e for e in lineage_of(shard, last).chain if e.kind == "commit"]
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
        entry = shard.snapshot(base)
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
    storage.delete([f"{PREFIX}/{shard.snapshot(base).key}"])
    last = shard.grow(base, 1)
    newer = lineage_of(shard, shard.grow(last, 3)).chain[-1]
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
