"""Several attempts restore one version on one executor at once: a zombie, a speculative task, the one that counts.

Each of them gets the version; none is told that it is not there because another was restoring it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.backends.base import Backend, Pointer, View
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.clock import new_id
from holdfast.errors import UnavailableError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.state_rows import COUNTS, contents, keys_of, values_of
from tests.tiers import repetitions

TABLES = {"counts": COUNTS}
COMMITS = 3
EXPECTED = {(f"u{i}",): (i,) for i in range(COMMITS)}
PATIENCE_SECONDS = 60.0


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[ObjectStorage]:
    with open_storage(f"file://{tmp_path}/durable") as opened:
        yield opened


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


StoreOf = Callable[[Backend], VersionedStore]


@pytest.fixture
def store_of(storage: ObjectStorage, executor: Executor) -> StoreOf:
    """Give stores of one shard that share its durable commits."""

    def make(backend: Backend) -> VersionedStore:
        return VersionedStore(
            backend, ObjectCommitLog(storage, "totals/shard-0003", TABLES, executor, backend.directory, "any", 0)
        )

    return make


@pytest.fixture
def pointers(store_of: StoreOf, tmp_path: Path) -> list[Pointer]:
    """Return versions that are in durable storage, and nowhere else."""
    store, made = store_of(MemoryBackend(tmp_path / "writer", TABLES, new_id)), [Pointer(0, "")]
    for i in range(COMMITS):
        with store.begin(made[-1] if i else None) as transaction:
            transaction.put("counts", keys_of(COUNTS, [(f"u{i}",)]), values_of(COUNTS, [(i,)]))
            pointer = transaction.commit()
            assert pointer is not None
            made.append(pointer)
    return made[1:]


class Interleaved(MemoryBackend):
    """A worker that stops where a test wants it to: `before` has what it does before its calls."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, TABLES, new_id)
        self.before: dict[str, list[Callable[[], object]]] = {}

    def _stop(self, call: str) -> None:
        waiting = self.before.get(call, [])
        if waiting:
            waiting.pop(0)()

    def view(self, pointer: Pointer):  # type: ignore[no-untyped-def]
        self._stop("view")
        return super().view(pointer)

    def versions(self) -> list[Pointer]:
        self._stop("versions")
        return super().versions()

    def load(self, *version):  # type: ignore[no-untyped-def]
        self._stop("load")
        super().load(*version)


def test_what_another_has_just_restored_is_not_dropped(
    tmp_path: Path, store_of: StoreOf, pointers: list[Pointer]
) -> None:
    """The second looks before the first has restored, and lists versions after: what it finds there is whole."""
    first, second = Interleaved(tmp_path / "shard"), Interleaved(tmp_path / "shard")
    restored, looked, dropped = threading.Event(), threading.Event(), threading.Event()

    def restored_then_wait() -> None:
        restored.set()
        dropped.wait(PATIENCE_SECONDS)

    # It looks, looks again before it loads, and opens what it has loaded.
    first.before = {"view": [lambda: None, lambda: None, restored_then_wait]}
    second.before = {
        "versions": [lambda: (looked.set(), restored.wait(PATIENCE_SECONDS))],
        "load": [lambda: (dropped.set(), finished.wait(PATIENCE_SECONDS))],
    }
    finished = threading.Event()
    found: list[object] = []

    def work(store: VersionedStore, end: threading.Event) -> None:
        try:
            with store.read_at(pointers[-1]) as view:
                found.append(contents(view, "counts"))
        except BaseException as exc:  # noqa: BLE001  shown below
            found.append(exc)
        end.set()

    behind = threading.Thread(target=work, args=(store_of(second), dropped))
    behind.start()
    looked.wait(PATIENCE_SECONDS)
    ahead = threading.Thread(target=work, args=(store_of(first), finished))
    ahead.start()
    for thread in (ahead, behind):
        thread.join(PATIENCE_SECONDS)
    assert found == [EXPECTED, EXPECTED]
    assert (first.before["view"], second.before["versions"]) == ([], []), "they have met where they were to"


@pytest.mark.parametrize("kind", [MemoryBackend, RocksDBBackend])
@pytest.mark.parametrize("held", [0, 1], ids=["all of it", "on an older version"])
def test_many_restores_at_once(
    tmp_path: Path, kind: type[Backend], held: int, store_of: StoreOf, pointers: list[Pointer]
) -> None:
    """Each worker opens the directory for itself."""
    backends = [kind(tmp_path / "shard", TABLES, new_id) for _ in range(4)]
    stores = [store_of(backend) for backend in backends]
    with ThreadPoolExecutor(len(stores)) as threads:
        for _ in repetitions(15, 500):
            backends[0].drop(backends[0].versions())
            if held:
                stores[0].read_at(pointers[0]).close()
            together = threading.Barrier(len(stores))

            def read(store: VersionedStore, together: threading.Barrier = together) -> object:
                together.wait(PATIENCE_SECONDS)
                with store.read_at(pointers[-1]) as view:
                    return contents(view, "counts")

            assert list(threads.map(read, stores)) == [EXPECTED] * len(stores)
    backends[0].close()


@pytest.mark.parametrize("kind", [MemoryBackend, RocksDBBackend])
def test_a_version_that_others_keep_dropping_is_told_so(
    tmp_path: Path, kind: type[Backend], store_of: StoreOf, pointers: list[Pointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded number of tries, and an error that a task is tried again on; never one that says it is lost."""
    with kind(tmp_path / "shard", TABLES, new_id) as backend:
        store, looked = store_of(backend), []
        really_view = type(backend).view

        def drop_first(self: Backend, pointer: Pointer) -> View:
            looked.append(pointer)
            backend.drop([pointer])
            return really_view(self, pointer)

        monkeypatch.setattr(type(backend), "view", drop_first)
        with pytest.raises(UnavailableError, match="another process dropped this version each time it was restored"):
            store.read_at(pointers[-1])
        assert len(looked) <= 10
        monkeypatch.undo()
        with store.read_at(pointers[-1]) as view:
            assert contents(view, "counts") == EXPECTED
