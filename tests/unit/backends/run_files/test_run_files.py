"""Folders of runs: links and merges, what is frozen, which files stay open, and memory that is counted."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.frozen_files import FrozenFiles
from holdfast.backends.local_files import StagedFolder, folder_bytes
from holdfast.backends.run import Run, TableSchema
from holdfast.backends.run_files import run_reader, written_run
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.backends.run_files.memory import MemoryBackend, MemoryUsage
from holdfast.backends.run_files.run_reader import KEPT
from holdfast.backends.run_files.version_file import RunFile
from holdfast.backends.run_files.view import FrozenRuns
from holdfast.backends.run_files.written_run import WrittenRun
from holdfast.errors import CorruptionError, UnavailableError
from holdfast.testing.state_rows import COUNTS, P1, P2, P3, TABLES, contents, counts, users
from tests.damage import flip
from tests.faults.elsewhere import finish, run_elsewhere

MANY = counts(*((f"user {i}", i) for i in range(20_000)))


def test_a_snapshot_reads_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state server freezes a version every few commits; most of its runs it has frozen before."""
    read: list[int] = []
    decode = stored_file.decode

    def counted(data: Any, **how: Any) -> Any:
        if how.get("verify", True):
            read.append(len(memoryview(data)))
        return decode(data, **how)

    with FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id) as worker:
        worker.apply(None, P1, MANY, {})
        worker.apply(P1, P2, counts(("ann", 1)), {})
    server = FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id)
    monkeypatch.setattr(stored_file, "decode", counted)
    files = server.freeze(P2)
    assert sum(read) > 0.9 * sum(path.stat().st_size for path in files)
    read.clear()
    worker.apply(P2, P3, counts(("bob", 2)), {})
    read.clear()
    assert {path.name for path in server.freeze(P3)} & {path.name for path in files}
    assert sum(read) < 10_000


def test_what_was_just_made_is_measured_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a shard ends with its figures; those of a newer version that another process made are read."""
    worker, other = (FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id) for _ in range(2))
    worker.apply(None, P1, counts(("ann", 1), ("bob", 1)), {})
    read = other.statistics()
    with monkeypatch.context() as patched:
        patched.setattr(stored_file, "decode", None)
        assert worker.statistics() == read
    other.apply(P1, P2, counts(("cem", 2)), {})
    assert worker.statistics() == other.statistics() != read
    other.drop([P2])
    assert worker.statistics() == read


def test_what_was_written_to_since_the_last_snapshot_is_read_again(tmp_path: Path) -> None:
    """A run that was frozen once may be damaged later, like any other."""
    backend = FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id)
    backend.apply(None, P1, MANY, {})
    run = next(path for path in backend.freeze(P1) if path.suffix == ".arrow")
    run.touch()
    assert backend.freeze(P1), "touched, and whole"
    with run.open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff\x00\xff")
    with pytest.raises(CorruptionError):
        backend.freeze(P1)


def test_a_shard_opens_though_it_is_let_go_at_this_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state server moves its directory away between two steps of a worker that opens it: no call fails for it."""
    taken: list[Path] = []
    mkdir = Path.mkdir

    def racing(path: Path, *args: Any, **how: Any) -> None:
        if path.name == "merges" and not taken:
            taken.append(path.parent.rename(tmp_path / "going"))
        mkdir(path, *args, **how)

    monkeypatch.setattr(Path, "mkdir", racing)
    backend = MemoryBackend(tmp_path / "query" / "totals" / "shard-0000", TABLES, clock.new_id)
    backend.load(P1, counts(("ann", 1)), {})
    assert taken
    assert backend.versions() == [P1]


ROWS = counts(*((f"user {i}", 0) for i in range(3000)))["counts"]


class WholeFiles(FrozenFiles):
    """Files that are here already."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes = {path.name: path.stat().st_size for path in folder.iterdir()}

    def require(self, name: str, start: int = 0, end: int | None = None) -> None:
        assert name in self.sizes


def frozen(folder: Path, header: Mapping[str, Any], section: stored_file.SectionWriter) -> WholeFiles:
    folder.mkdir()
    data, digest = stored_file.encode("run", header, {"counts": section})
    (folder / "a1.arrow").write_bytes(data)
    run = RunFile("a1", data.size, ROWS.size_bytes, len(ROWS), digest, 0)
    version = {"pointer": str(P1), "stacks": {"counts": [asdict(run)]}, "properties": {}}
    (folder / "version").write_bytes(stored_file.encode("version", version)[0])
    return WholeFiles(folder)


def test_an_index_that_leaves_out_a_stretch_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is right, and its stretches hold more than the index says."""
    monkeypatch.setattr(written_run, "STRETCH_BYTES", 20_000)
    written = WrittenRun(COUNTS)
    stored_file.encode("run", {}, {"counts": partial(written.write, [ROWS])})
    index = written.header["stretches"]
    assert len(index) > 3
    for left_out in ([], [1]):
        header = {**written.header, "stretches": [one for i, one in enumerate(index) if i not in left_out]}
        files = frozen(tmp_path / f"{left_out}", header, partial(WrittenRun(COUNTS).write, [ROWS]))
        if left_out:
            with pytest.raises(CorruptionError, match="one batch"):
                list(FrozenRuns(P1, TABLES, files).scan("counts"))
        else:
            assert sum(map(len, FrozenRuns(P1, TABLES, files).scan("counts"))) == len(ROWS)


def test_a_version_file_of_any_size_takes_no_memory(tmp_path: Path) -> None:
    """It is read as a whole, so its size is looked at before."""
    files = frozen(tmp_path / "frozen", {"table": "counts"}, partial(WrittenRun(COUNTS).write, [ROWS]))
    with (files.folder / "version").open("ab") as version:
        version.truncate(32 << 20)
    with pytest.raises(CorruptionError, match="wrong size"):
        FrozenRuns(P1, TABLES, WholeFiles(files.folder))
    with (
        FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id) as backend,
        pytest.raises(CorruptionError, match="too large for a file without sections"),
    ):
        backend.thaw(P1, files.folder)


def test_a_run_takes_no_more_memory_than_its_file(tmp_path: Path) -> None:
    """Runs are stored as they lie in memory: one that would unpack to a multiple of that is refused before it does."""

    def packed(run: Run, file: pa.NativeFile) -> None:
        run.write(file, compression="lz4")

    files = frozen(tmp_path / "frozen", {"table": "counts"}, partial(packed, ROWS))
    assert 2 * files.sizes["a1.arrow"] < ROWS.size_bytes
    with pytest.raises(CorruptionError, match="larger than declared"):
        list(FrozenRuns(P1, TABLES, files).scan("counts"))
    with (
        FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id) as backend,
        pytest.raises(CorruptionError, match="larger than declared"),
    ):
        backend.thaw(P1, files.folder)


MANY_KEPT = counts(*((f"user {i}", i) for i in range(10_000)))


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """What earlier tests have opened is not counted."""
    KEPT.forget()
    yield
    KEPT.forget()


@pytest.fixture
def shard(tmp_path: Path) -> FilesystemBackend:
    """Return a shard of one large run."""
    backend = FilesystemBackend(tmp_path / "shard", TABLES, clock.new_id)
    backend.apply(None, P1, MANY_KEPT, {})
    return backend


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are mapped from now on."""
    names: list[str] = []
    map_stored_file = run_reader.map_stored_file

    def noted(path: Path, *args: object, **how: object) -> object:
        names.append(path.name)
        return map_stored_file(path, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(run_reader, "map_stored_file", noted)
    return names


def test_properties_are_read_without_the_rows(shard: FilesystemBackend, mapped: list[str]) -> None:
    """A state server asks for those of every commit: runs that it mapped filled its memory, and kept deleted files."""
    assert shard.properties(P1) == {}
    assert not mapped


def maps_of(directory: Path) -> list[str]:
    """Return the run files below a directory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(directory) in line and ".arrow" in line]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def read(backend: FilesystemBackend, pointer: Pointer) -> dict[tuple[object, ...], tuple[object, ...]]:
    with backend.view(pointer) as view:
        return contents(view, "counts")


def test_a_run_is_mapped_once_also_by_the_next_call_of_its_shard(shard: FilesystemBackend, mapped: list[str]) -> None:
    """Each micro-batch opens the shard anew, and finds the run in another folder."""
    read(shard, P1)
    shard.apply(P1, P2, counts(("ann", 1)), {})
    shard.drop([P1])
    again = FilesystemBackend(shard.directory, TABLES, clock.new_id)
    assert len(read(again, P2)) == 10_001
    read(again, P2)
    assert len(mapped) == len(set(mapped)) == 2


def test_the_space_of_a_run_that_nobody_needs_is_freed(shard: FilesystemBackend) -> None:
    """On a RAM file system a mapping holds the memory of a file without a name; whoever took the name away."""
    read(shard, P1)
    assert maps_of(shard.directory)
    finish(run_elsewhere(replace_version, shard.directory))
    read(shard, P2)
    assert [line for line in maps_of(shard.directory) if "(deleted)" in line] == []
    shard.drop([P2])
    assert maps_of(shard.directory) == []


def replace_version(directory: Path) -> None:
    with FilesystemBackend(directory, TABLES, clock.new_id) as backend:
        backend.apply(P1, P2, counts(*((f"user {i}", -i) for i in range(10_000))), {})
        backend.drop([P1])


def test_a_view_outlives_the_file_and_what_keeps_it(shard: FilesystemBackend) -> None:
    """Views are immutable: a clean-up in the middle of a look-up takes nothing away."""
    with shard.view(P1) as view:
        shard.drop([P1])
        KEPT.forget()
        assert users(view, "user 7", "nobody") == [(7,), None]


def test_only_so_many_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with hundreds of shards holds neither their files nor descriptors."""
    monkeypatch.setattr(run_reader, "MOST_KEPT", 3)
    files = open_files()
    for i in range(9):
        with FilesystemBackend(tmp_path / f"shard-{i}", TABLES, clock.new_id) as backend:
            backend.apply(None, P1, counts(("ann", i)), {})
            assert read(backend, P1) == {("ann",): (i,)}
    assert open_files() == files + 2 * 3


def test_little_is_kept_where_addresses_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`spark.executor.pyspark.memory` limits a worker's addresses; what is kept would be missing elsewhere."""
    limits = {resource.RLIMIT_NOFILE: (10_000, 10_000), resource.RLIMIT_AS: (10_000, 10_000)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    for i in range(9):
        with FilesystemBackend(tmp_path / f"shard-{i}", TABLES, clock.new_id) as backend:
            backend.apply(None, P1, counts(("ann", i)), {})
            assert read(backend, P1) == {("ann",): (i,)}
    assert 1 <= len(KEPT._kept) <= 3
    assert sum(kept.size_bytes for kept in KEPT._kept.values()) <= 2_500


def test_what_is_kept_makes_room_for_what_is_read(
    shard: FilesystemBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may open no more files, because of those it keeps, goes on without them."""
    read(shard, P1)
    other = FilesystemBackend(tmp_path / "other", TABLES, clock.new_id)
    other.apply(None, P1, counts(("ann", 1)), {})
    _, hard = limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    free = [number for number in range(hard) if number not in used][2]
    try:
        # One for the view's lock, and one of the two that a run takes.
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        assert read(other, P1) == {("ann",): (1,)}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert len(read(shard, P1)) == 10_000


def test_a_forked_process_begins_with_none(shard: FilesystemBackend) -> None:
    """It may live long, and does not hear of what its parent lets go; nor may it inherit a lock."""
    read(shard, P1)
    with KEPT._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if not KEPT._kept and len(read(shard, P1)) == 10_000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(read(shard, P1)) == 10_000


@pytest.mark.parametrize("damage", ["written to", "cut", "its end, unnoticed", "its middle, unnoticed"])
def test_damage_to_a_kept_file_is_noticed_as_before(shard: FilesystemBackend, damage: str) -> None:
    """What was whole an hour ago may be damaged now; what no time tells would get a new digest by a merge."""
    read(shard, P1)
    (path,) = shard.directory.glob("versions/*/*.arrow")
    size = path.stat().st_size
    if damage == "cut":
        os.truncate(path, size // 2)
    else:
        place = {"written to": 700, "its end, unnoticed": size - 20}.get(damage, size // 2)
        flip(path, place, unnoticed=damage != "written to")
    with pytest.raises(CorruptionError, match="arrow"):
        shard.apply(P1, P2, MANY_KEPT, {}) if damage == "its middle, unnoticed" else shard.view(P1)
    assert shard.versions() == []


def test_a_table_with_new_columns_reads_its_old_runs(shard: FilesystemBackend) -> None:
    """A restarted query in a reused worker declares other columns than the run was opened with."""
    read(shard, P1)
    wider = TableSchema.of("counts", COUNTS.key, COUNTS.value.append(pa.field("note", pa.string())))
    backend = FilesystemBackend(shard.directory, {**TABLES, "counts": wider}, clock.new_id)
    assert read(backend, P1)[("user 7",)] == (7, None)
    assert read(shard, P1)[("user 7",)] == (7,)
    assert P3 not in backend.versions()


def shard_of(executor: Path, number: int, limit: str | None = "100m") -> MemoryBackend:
    directory = executor / "memory" / "query" / "totals" / f"shard-{number:04d}"
    return MemoryBackend(directory, TABLES, clock.new_id, {"limit": limit} if limit else {}, executor)


def noted(executor: Path) -> int:
    return sum(int(name.partition(".")[2]) for name in os.listdir(executor / "memory-held"))


@pytest.fixture
def executor(tmp_path: Path) -> Path:
    return tmp_path / "executor"


def test_a_write_costs_the_same_however_many_shards_there_are(executor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 200 shards on an executor, to look at all of them took longer than everything else."""
    looked: list[str] = []
    walk = os.walk

    def counted(top: Any) -> Iterator[Any]:
        for found in walk(top):
            looked.append(found[0])
            yield found

    def cost(backend: MemoryBackend) -> int:
        backend.apply(None, P1, counts(("ann", 1)), {})
        looked.clear()
        backend.apply(P1, P2, counts(("bob", 2)), {})
        backend.drop([P1])
        return len(looked)

    monkeypatch.setattr(os, "walk", counted)
    few = cost(shard_of(executor, 0))
    for number in range(1, 40):
        shard_of(executor, number).apply(None, P1, counts(("ann", 1)), {})
    assert cost(shard_of(executor, 40)) <= 2 * few + 20


@pytest.mark.parametrize("limit", ["100m", None], ids=["with a limit", "of a query without a limit"])
def test_what_is_noted_is_what_is_held(executor: Path, limit: str | None) -> None:
    """Through commits, restores, drops and merges, of queries that have a limit and of others beside them."""
    shard_of(executor, 0).apply(None, P1, counts(("ann", 1)), {})
    backend = shard_of(executor, 1, limit)

    def check() -> None:
        held = sum(folder_bytes(path) for path in executor.glob("memory/query/totals/*"))
        assert noted(executor) == held

    backend.apply(None, P1, MANY, {})
    check()
    backend.apply(P1, P2, counts(("bob", 2)), {})
    check()
    backend.load(P3, MANY, {})
    check()
    backend.drop([P1, P2])
    check()
    backend.maintain(P3)
    check()
    backend.drop([P3])
    check()


@pytest.mark.parametrize("at", ["publish", "write"])
def test_a_killed_process_leaves_no_room_that_is_not_there(
    executor: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was about to write stays noted until the shard is looked at again; then it is right."""
    backend = shard_of(executor, 0, "2m")
    backend.apply(None, P1, MANY, {})
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(StagedFolder, at, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        backend.apply(P1, P2, MANY, {})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    held = folder_bytes(backend.directory)
    assert noted(executor) >= held
    assert backend.remove_leftovers(2**63) == 1
    assert noted(executor) == folder_bytes(backend.directory)


def test_shards_that_are_gone_do_not_count(executor: Path) -> None:
    """Their query was stopped, or they moved to another executor; nobody tells the shards that are left."""
    for number in range(5):
        shard_of(executor, number, "4m").apply(None, P1, MANY, {})
    for number in range(1, 5):
        shutil.rmtree(shard_of(executor, number, "4m").directory)
    backend, pointers = shard_of(executor, 0, "4m"), [P1, *(Pointer(version, "aa") for version in range(2, 9))]
    for base, new in pairwise(pointers[:4]):
        backend.apply(base, new, MANY, {})
    with backend.view(pointers[3]) as view:
        assert users(view, "user 7") == [(7,)]
    with pytest.raises(UnavailableError, match="limit"):  # noqa: PT012  one of them has to
        for pointer in pointers[4:]:
            backend.load(pointer, MANY, {})


def test_entries_of_shards_that_are_gone_go_too(executor: Path) -> None:
    """Each write looks at one entry, so they do not gather, though no limit is ever met."""
    shards = [shard_of(executor, number) for number in range(20)]
    for shard in shards:
        shard.apply(None, P1, counts(("ann", 1)), {})
    for shard in shards[1:]:
        shutil.rmtree(shard.directory)
    for _ in range(400):
        shards[0].drop([])
    assert len(os.listdir(executor / "memory-held")) == 1


def test_entries_are_read_whatever_else_lies_there(tmp_path: Path) -> None:
    """A file that a user or a program has put there is no entry."""
    shard = tmp_path / "memory" / "shard"
    (shard / "versions").mkdir(parents=True)
    (shard / "versions" / "file").write_bytes(b"x" * 1000)
    held = MemoryUsage(tmp_path / "held", tmp_path / "memory", shard, clock.new_id)
    assert held.recount() == 1000
    for name in ("README", "a.b", ".hidden", "x."):
        (tmp_path / "held" / name).touch()
    assert held.note(24) == 1024
    assert held.note() == held.recount() == 1000
