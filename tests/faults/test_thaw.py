"""Taking over frozen files under kills, lies and full memory, and many restores at once: a whole version or none."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pandas as pd  # noqa: F401  pyarrow imports it when it is first needed: once here, not in every victim
import pytest

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.base import Backend, Pointer, View
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.run_files.backend import FilesystemBackend, RunFilesBackend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.clock import new_id
from holdfast.errors import CorruptionError, UnavailableError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.state_rows import COUNTS, P1, P2, P3, TABLES, contents, counts, keys_of, values_of
from tests.damage import flip
from tests.faults.stopped_process import kills, traced  # noqa: F401  a fixture
from tests.model.built_in import BUILT_IN, open_backend
from tests.tiers import LONG, cases, repetitions

MANY = {(f"user {i}",): (i,) for i in range(2000)}


def write_frozen(backend_name: str, home: Path) -> None:
    """Make P1 and P2 elsewhere, and leave copies of P2's files in ``frozen``."""
    with open_backend(backend_name, home / "elsewhere", TABLES) as backend:
        backend.apply(None, P1, counts(*((name, n) for (name,), (n,) in MANY.items())), {})
        backend.apply(P1, P2, counts(("user 0", -1)), {"step": 2})
        copy_frozen(backend, P2, home / "frozen")


def copy_frozen(backend: Backend, pointer: Pointer, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for path in backend.freeze(pointer):
        shutil.copyfile(path, folder / path.name)
    return folder


def check(backend: Backend) -> None:
    assert backend.verify() == []
    with backend.view(P2) as view:
        assert contents(view, "counts") == MANY | {("user 0",): (-1,)}
        assert view.properties == {"step": 2}


# Kills.


def thaw_and_go_on(backend_name: str, folder: Path) -> None:
    """The victim: downloads, thaws, commits, and tells how far it came, in a file outside of `folder`."""
    told = os.open(f"{folder}.told", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open_backend(backend_name, folder / "shard", TABLES) as backend:
        backend.apply(None, P1, counts(("before", 1)), {})
        shutil.copytree(folder.parent / "frozen", folder / "shard" / "download")
        os.write(told, b"copied\n")
        backend.thaw(P2, folder / "shard" / "download")
        os.write(told, b"thawed\n")
        backend.apply(P2, P3, counts(("new", 3)), {})


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("backend_name", cases([*BUILT_IN[1:], *BUILT_IN[:1]]))
def test_a_process_killed_while_it_thaws_leaves_a_whole_version_or_none(backend_name: str, ram_path: Path) -> None:
    """And what it was told is there is there: a thawed version needs no flush."""
    write_frozen(backend_name, ram_path)
    found: Counter[str] = Counter()
    for record in kills(f"{__name__}:thaw_and_go_on", backend_name, ram_path, how_many=0 if LONG else 40):
        folder = Path(record["folder"])
        told = Path(f"{folder}.told").read_text()
        with open_backend(backend_name, folder / "shard", TABLES) as backend:
            if P2 in backend.versions():
                check(backend)
            else:
                assert "thawed" not in told
            found["held" if P2 in backend.versions() else "none" if "copied" in told else "no download"] += 1
            again = folder / "shard" / "again"
            shutil.copytree(ram_path / "frozen", again)
            backend.thaw(P2, again)
            check(backend)
            shutil.rmtree(folder / "shard" / "download", ignore_errors=True)
            backend.remove_leftovers(2**63 - 1)
            assert not list((folder / "shard" / "staging").iterdir())
        shutil.rmtree(folder)
    assert found["held"] >= 3
    assert found["none"] >= 1


# Files that lie.


@pytest.fixture(params=[MemoryBackend, FilesystemBackend])
def shard(request: pytest.FixtureRequest, tmp_path: Path) -> RunFilesBackend:
    """Make an empty shard beside ``frozen``, the copies of P2's files that another one froze."""
    write_frozen("memory", tmp_path)
    backend: RunFilesBackend = request.param(tmp_path / "shard", TABLES, clock.new_id)
    return backend


def test_thawed_run_files_are_as_if_written_here(shard: RunFilesBackend, tmp_path: Path) -> None:
    """Private to the user, and sealed: a reader need not compute the digest of each, as of one that was touched."""
    for path in (tmp_path / "frozen").iterdir():
        path.chmod(0o644)
    (tmp_path / "frozen").chmod(0o755)
    (tmp_path / "frozen" / "something else").write_bytes(b"not part of it")
    shard.thaw(P2, tmp_path / "frozen")
    (folder,) = (shard.directory / "versions").iterdir()
    files = {path.name: path.stat() for path in folder.iterdir()}
    assert files.keys() == {path.name for path in shard.freeze(P2)}
    assert {stat.S_IMODE(file.st_mode) for file in files.values()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    header = stored_file.decode((folder / "version").read_bytes(), source="x", kind="version").header
    notes = {f"{run['id']}.arrow": run["modified_ns"] for runs in header["stacks"].values() for run in runs}
    assert notes == {name: file.st_mtime_ns for name, file in files.items() if name != "version"}
    assert not list((shard.directory / "staging").iterdir())


def test_a_version_that_lost_files_is_replaced(shard: RunFilesBackend, tmp_path: Path) -> None:
    """Somebody cleaned the directory: the pointer is there, the state is not, and thawing brings it back."""
    shutil.copytree(tmp_path / "frozen", tmp_path / "again")
    shard.thaw(P2, tmp_path / "frozen")
    next(path for path in shard.freeze(P2) if path.suffix == ".arrow").unlink()
    shard.thaw(P2, tmp_path / "again")
    check(shard)


def test_a_flipped_byte_of_a_run_is_refused_before_anything_is_made(shard: RunFilesBackend, tmp_path: Path) -> None:
    """At any place of any file, whatever the caller has checked; and no healthy version is blamed."""
    shutil.copytree(tmp_path / "frozen", tmp_path / "healthy")
    with open_backend("memory", tmp_path / "elsewhere", TABLES) as backend:
        shard.thaw(P1, copy_frozen(backend, P1, tmp_path / "first"))
    for name in sorted(os.listdir(tmp_path / "frozen")):
        size = (tmp_path / "frozen" / name).stat().st_size
        for place in (0, size // 3, size // 2, size - 40, size - 1):
            folder = tmp_path / "flipped"
            shutil.copytree(tmp_path / "frozen", folder)
            flip(folder / name, place)
            with pytest.raises(CorruptionError, match=name):
                shard.thaw(P2, folder)
            assert shard.versions() == [P1]
    shard.thaw(P2, tmp_path / "healthy")
    check(shard)


@pytest.mark.parametrize(
    "change",
    [
        *({"id": wrong} for wrong in ("../../../secret", "", 7)),
        *({"modified_ns": "now"}, {"modified_ns": 2**64}, {"rows": -1}, {"more": 1}, {}),
    ],
    ids=["path", "empty", "number", "time", "no time", "negative", "more", "less"],
)
def test_a_version_file_that_names_no_run_is_refused(
    shard: RunFilesBackend, tmp_path: Path, change: dict[str, object]
) -> None:
    """Its digest is right, so somebody made it so: no path in it is followed, and no other error comes out."""
    path = tmp_path / "frozen" / "version"
    header = json.loads(json.dumps(stored_file.decode(path.read_bytes(), source="x", kind="version").header))
    run = header["stacks"]["counts"][0]
    run |= change
    if not change:
        del run["digest"]
    path.write_bytes(stored_file.encode("version", header)[0])
    secret = tmp_path / "secret.arrow"
    secret.write_bytes(b"untouched")
    before = secret.stat()
    with pytest.raises(CorruptionError, match="version is not a file that this release"):
        shard.thaw(P2, tmp_path / "frozen")
    assert secret.stat() == before
    assert shard.versions() == []


# Where it cannot be.


def test_a_folder_that_is_not_there_is_an_error_and_no_version(shard: RunFilesBackend, tmp_path: Path) -> None:
    """Another program cleaned up: trying again, with another download, may help."""
    with pytest.raises(UnavailableError, match="vanished"):
        shard.thaw(P2, tmp_path / "nowhere")
    assert shard.versions() == []


def test_a_version_that_passes_the_memory_limit_is_refused_and_removed(tmp_path: Path) -> None:
    """The limit holds for what is restored, too: with all shards of the executor, and the download itself."""
    write_frozen("memory", tmp_path)
    place = tmp_path / "memory" / "query" / "totals" / "shard-0000"

    def thaw(limit: str) -> MemoryBackend:
        backend = MemoryBackend(place, TABLES, clock.new_id, {"limit": limit}, tmp_path)
        shutil.copytree(tmp_path / "frozen", place / "download")
        backend.thaw(P2, place / "download")
        return backend

    with pytest.raises(UnavailableError, match=r"spark\.holdfast\.memory\.limit.*raise the limit"):
        thaw("50k")
    assert not [path for path in place.rglob("*") if path.is_file()]
    check(thaw("1m"))


ALL_TABLES = {"counts": COUNTS}
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
            backend, ObjectCommitLog(storage, "totals/shard-0003", ALL_TABLES, executor, backend.directory, "any", 0)
        )

    return make


@pytest.fixture
def pointers(store_of: StoreOf, tmp_path: Path) -> list[Pointer]:
    """Return versions that are in durable storage, and nowhere else."""
    store, made = store_of(MemoryBackend(tmp_path / "writer", ALL_TABLES, new_id)), [Pointer(0, "")]
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
        super().__init__(directory, ALL_TABLES, new_id)
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


def test_what_another_just_restored_is_kept(tmp_path: Path, store_of: StoreOf, pointers: list[Pointer]) -> None:
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
    backends = [kind(tmp_path / "shard", ALL_TABLES, new_id) for _ in range(4)]
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
    with kind(tmp_path / "shard", ALL_TABLES, new_id) as backend:
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
