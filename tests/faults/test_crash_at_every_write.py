"""A SIGKILL at any write to disk, on every backend: what the query was told is there, and nothing is mixed.

The victim commits, deletes, rolls back, restores, merges, prunes, freezes, closes and opens again. It is killed
before or after one of its system calls, and what it leaves is opened by another process, as a new worker does.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd  # noqa: F401  pyarrow imports it when it is first needed: once here, not in every victim
import pyarrow as pa
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.rocksdb import backend as rocksdb
from holdfast.backends.run import TableSchema
from holdfast.backends.run_files import backend as run_files
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.shard_call import claiming
from holdfast.testing.faulty_storage import Fault, FaultyStorage, Kind
from holdfast.testing.state_rows import COUNTS, contents, keys_of, values_of
from tests.faults.elsewhere import run_elsewhere
from tests.faults.stopped_process import kills, traced  # noqa: F401  a fixture
from tests.model.built_in import BUILT_IN, copy_directory, open_backend
from tests.model.steps import STEPS, TABLES, commit_log, look_after, state_after, step_of, take_step, version_of
from tests.model.test_at_once import Declaring
from tests.tiers import LONG, cases


def work(backend_name: str, folder: Path) -> None:
    """The victim; tells each pointer as the query would keep it, in a file outside of `folder`."""
    run_files.COMMIT_MERGE_LIMIT_BYTES = 0
    rocksdb.RocksDBBackend.share_bytes = lambda _: 0
    pointers: dict[int, Pointer] = {}
    told = os.open(f"{folder}.told", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with commit_log(folder, backend_name) as log:
        for first, last in ((1, 19), (20, STEPS)):
            with open_backend(backend_name, folder / "shard", TABLES) as backend:
                for step in range(first, last + 1):
                    take_step(backend, log, step, pointers)
                    os.write(told, f"{step} {pointers[step]}\n".encode())
                    look_after(backend, log, step, pointers[step])


# What is left.


def told_by(path: Path) -> dict[Pointer, int]:
    """Return the steps that the query knows of, by pointer, oldest first."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {Pointer.parse(pointer): int(step) for step, pointer in lines}


def check_alone(backend_name: str, directory: Path, told: dict[Pointer, int]) -> str:
    """Without the commit log: what is claimed is whole, and of a step that was taken; tell what is held."""
    last_step = max(told.values(), default=0)
    with open_backend(backend_name, directory, TABLES) as backend:
        assert backend.verify() == [], "a killed process damages nothing"
        held = backend.versions()
        for pointer in held:
            with backend.view(pointer) as view:
                step = step_of(view)
            assert told.get(pointer, last_step + 1) == step
            assert pointer.version == version_of(step)
        for pointer in list(told)[-1:]:
            assert pointer in held, "files that are in place are not lost by a kill"
    return "newest" if set(list(told)[-1:]) <= set(held) else "older" if held else "nothing"


def check_with_log(backend_name: str, folder: Path, told: dict[Pointer, int]) -> None:
    """With the commit log: the query goes on at exactly the state it was told of."""
    pointer = list(told)[-1] if told else None
    with commit_log(folder, backend_name) as log:
        elsewhere = open_backend(backend_name, folder / "elsewhere", TABLES)
        with elsewhere, VersionedStore(elsewhere, log).begin(pointer) as transaction:
            assert step_of(transaction) == (told[pointer] if pointer else 0), "what was told is durable"
        with open_backend(backend_name, folder / "shard", TABLES) as backend:
            assert backend.verify() == []
            with VersionedStore(backend, log).begin(pointer) as transaction:
                assert step_of(transaction) == (told[pointer] if pointer else 0)
                transaction.put("counts", keys_of(COUNTS, [("new",)]), values_of(COUNTS, [(-1,)]))
                new = transaction.commit()
            assert new is not None
            backend.maintain(new)
            assert backend.freeze(new)
            VersionedStore(backend, log).prune(new)
            backend.remove_leftovers(2**63)
            assert not list((folder / "shard" / "staging").iterdir())
            assert new in backend.versions()
            assert not [p for p in backend.versions() if p.version <= new.version and p != new]
        expected = state_after(told[pointer] if pointer else 0)
        with open_backend(backend_name, folder / "shard", TABLES) as backend:
            view = VersionedStore(backend, log).read_at(new)
            assert contents(view, "counts") == expected["counts"] | {("new",): (-1,)}
            assert contents(view, "members") == expected["members"]
            view.close()


# The kills.


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("backend_name", cases(BUILT_IN))
def test_a_process_killed_at_any_write_loses_nothing(backend_name: str, ram_path: Path) -> None:
    """Evenly chosen system calls of every kind; all of them in the long tier."""
    killed: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    held: Counter[str] = Counter()
    missed = 0
    for record in kills(f"{__name__}:work", backend_name, ram_path, how_many=400 if LONG else 36):
        folder = Path(record["folder"])
        if record["killed_at"] is None:
            assert record["status"] == 0
            missed += record["place"] is not None
        else:
            name, number, path = record["killed_at"]
            assert record["status"] == -9
            assert [name, number] == record["place"][:2], "killed where it was meant"
            killed[name] += 1
            folders[path.split("/")[0]] += 1
        told = told_by(Path(f"{folder}.told"))
        (folder / "shard").mkdir(exist_ok=True)
        copy_directory(folder / "shard", folder / "alone")
        held[check_alone(backend_name, folder / "alone", told)] += 1
        check_with_log(backend_name, folder, told)
        shutil.rmtree(folder)
    # With several threads the same work makes a call more or less.
    assert missed <= killed.total() // 10
    assert killed.total() >= 30
    assert {"write", "mkdir", "fsync"} <= killed.keys()
    assert {"rename", "unlink", "unlinkat"} & killed.keys()
    assert folders.keys() >= {"shard", "durable"}
    assert held["newest"] >= 5


# The tool.


def touch_files(_: str, folder: Path) -> None:
    """A victim with a second thread, and names of every form."""
    (folder / "a").write_bytes(b"data")
    os.rename(folder / "a", folder / "b")
    os.chdir(folder)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(os.mkdir, "folder").result()
    descriptor = os.open(folder, os.O_RDONLY)
    os.unlink("b", dir_fd=descriptor)
    Path(f"{folder}.told").write_text("alive")


@pytest.mark.usefixtures("traced")
def test_a_process_is_killed_exactly_where_it_was_meant(ram_path: Path) -> None:
    """A call that was killed on its way in did nothing, and one on its way out did all."""
    found = {}
    for record in kills(f"{__name__}:touch_files", "", ram_path, how_many=0):
        folder = Path(record["folder"])
        files = {p.name: p.read_bytes() if p.is_file() else None for p in folder.iterdir()}
        found[folder.name] = files
        assert Path(f"{folder}.told").exists() == (record["place"] is None)
        assert record["status"] == (-9 if record["place"] else 0)
        assert record["killed_at"] is None or record["killed_at"][:2] == record["place"][:2]
    assert found == {
        "whole": {"folder": None},
        "openat-1-before": {},
        "write-1-before": {"a": b""},
        "rename-1-before": {"a": b"data"},
        "mkdir-1-before": {"b": b"data"},
        "unlinkat-1-before": {"b": b"data", "folder": None},
        "unlinkat-1-after": {"folder": None},
    }


KEY = pa.schema([("k", pa.string())])


def tables(**columns: Mapping[str, pa.DataType]) -> dict[str, TableSchema]:
    return {name: TableSchema.of(name, KEY, pa.schema(list(types.items()))) for name, types in columns.items()}


OLD = tables(a={"n": pa.int32(), "gone": pa.string()}, left={"x": pa.int64()})
NEW = tables(a={"n": pa.int64(), "note": pa.string()}, added={"y": pa.string()})
RENAMED = tables(a={"total": pa.int64(), "gone": pa.string()}, added={"y": pa.string()})
#: By name what the killed run declares, and what it does to columns: the dropped name is another column's later.
HOW = {
    "by name": (NEW, {}),
    "by consent": (
        tables(a={"total": pa.int64(), "note": pa.string()}, added={"y": pa.string()}),
        {"a": ColumnChanges(frozenset({"gone"}), {"n": "total"})},
    ),
}
OLD_AGAIN = tables(a={"n": pa.int64(), "gone": pa.string()}, left={"x": pa.int64()})


def micro_batch(
    folder: Path,
    storage: ObjectStorage,
    run: str,
    declared: Mapping[str, TableSchema],
    pointer: Pointer | None,
    rows: Mapping[str, list[tuple[Any, Any]]],
    *,
    backend_name: str = "filesystem",
    shard: int = 0,
    changes: Mapping[str, ColumnChanges] = {},
) -> tuple[Pointer | None, dict[str, dict[Any, Any]]]:
    """Do what a shard's call does in a run; return its pointer, and what it has seen before it wrote."""
    record = OperatorRecord("op", "query", run, run, 2, declared, 100)
    stored = claiming.tables_once(storage, record, Declaring(declared, changes))  # type: ignore[arg-type]
    with ExitStack() as cleanup:
        directory = folder / f"{backend_name}-{shard}"
        backend = cleanup.enter_context(open_backend(backend_name, directory, stored.held))
        threads = cleanup.enter_context(ThreadPoolExecutor(1))
        log = ObjectCommitLog(storage, f"op/shard-{shard:04d}", stored.held, threads, directory, backend_name)
        with VersionedStore(backend, log, stored.declared, stored.names).begin(pointer) as transaction:
            seen = {table: contents(transaction, table) for table in declared}  # type: ignore[arg-type]
            for table, written in rows.items():
                schema = declared[table]
                values = values_of(schema, [value for _, value in written])
                transaction.put(table, keys_of(schema, [key for key, _ in written]), values)
            claiming.declare_once(storage, record, stored)
            return transaction.commit(), seen


def victim(folder: Path, backend_name: str, pointer: Pointer, kind: Kind, nth: int, how: str) -> None:
    """The run with the new processor; killed at one of its requests."""
    storage = FaultyStorage(open_storage(str(folder / "durable")), [Fault(kind, nth=nth)])
    rows = {"a": [(("u",), (2**40, "new"))], "added": [(("u",), ("y",))]}
    declared, changes = HOW[how]
    committed, _ = micro_batch(
        folder, storage, "run-2", declared, pointer, rows, backend_name=backend_name, changes=changes
    )
    (folder / "told").write_text(str(committed))


@pytest.mark.slow
@pytest.mark.parametrize(("backend_name", "how"), cases([(b, how) for b in BUILT_IN for how in HOW]))
def test_a_kill_while_schemas_change(backend_name: str, how: str, tmp_path: Path) -> None:
    """Before and after each request: both processors read what the last accepted pointer names, and write on.

    Once columns are renamed or dropped, there is only the new one.
    """
    begun = tmp_path / "begun"
    pointers: list[Pointer] = []
    with open_storage(str(begun / "durable")) as storage:
        rows = {"a": [((k,), (n, k)) for n, k in enumerate("uv")], "left": [(("u",), (7,))]}
        for shard in range(2):
            begin, _ = micro_batch(begun, storage, "run-1", OLD, None, rows, backend_name=backend_name, shard=shard)
            assert begin is not None
            pointers.append(begin)
    killed, nth, kinds = 0, 1, ("stop", "stop_after")
    while True:
        statuses = []
        for kind in kinds:
            folder = tmp_path / f"{kind}-{nth}"
            copy_directory(begun, folder)
            process = run_elsewhere(victim, folder, backend_name, pointers[0], kind, nth, how)
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            statuses.append(process.exitcode)
            (go_on if how == "by name" else go_on_renamed)(folder, backend_name, pointers, f"{kind}-{nth}")
        killed += sum(status != 0 for status in statuses)
        if not any(statuses):
            break
        nth += 1
    assert killed >= 8, "the schemas and the commit were stored by several requests"


def go_on(folder: Path, backend_name: str, pointers: list[Pointer], name: str) -> None:
    """Go on from the last pointer that was told: with the old processor, then with the new one."""
    told = folder / "told"
    pointer, is_new = (Pointer.parse(told.read_text()), True) if told.exists() else (pointers[0], False)
    with open_storage(str(folder / "durable")) as storage:

        def once_more(run: str, declared: Mapping[str, TableSchema], at: Pointer | None, **more: int) -> Any:
            return micro_batch(folder, storage, f"{run} {name}", declared, at, {}, backend_name=backend_name, **more)

        # A column that is wider by now stays so.
        _, seen = once_more("run-3", OLD_AGAIN, pointer)
        assert seen["a"] == {("u",): (2**40, None) if is_new else (0, "u"), ("v",): (1, "v")}
        assert seen["left"] == {("u",): (7,)}
        for shard, at in ((0, pointer), (1, pointers[1])):
            _, seen = once_more("run-4", NEW, at, shard=shard)
            has_new = is_new and shard == 0
            assert seen["a"] == {("u",): (2**40, "new") if has_new else (0, None), ("v",): (1, None)}
            assert seen["added"] == ({("u",): ("y",)} if has_new else {})


def go_on_renamed(folder: Path, backend_name: str, pointers: list[Pointer], name: str) -> None:
    """Go on with the new processor, its consent still there; then with one whose columns have an old name."""
    told = folder / "told"
    pointer, is_new = (Pointer.parse(told.read_text()), True) if told.exists() else (pointers[0], False)
    declared, changes = HOW["by consent"]
    with open_storage(str(folder / "durable")) as storage:
        for run, tables_now, changes_now in (("run-3", declared, changes), ("run-4", RENAMED, {})):
            for shard, at in ((0, pointer), (1, pointers[1])):
                _, seen = micro_batch(
                    folder,
                    storage,
                    f"{run} {name}",
                    tables_now,
                    at,
                    {},
                    backend_name=backend_name,
                    shard=shard,
                    changes=changes_now,
                )
                has_new = is_new and shard == 0
                text = "new" if has_new and run == "run-3" else None
                assert seen["a"] == {("u",): (2**40 if has_new else 0, text), ("v",): (1, None)}, run
