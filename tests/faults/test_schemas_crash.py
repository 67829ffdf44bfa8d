"""A kill at any request of a run that changes the schemas: old and new processors go on, and rows are what was told.

The record comes before state, so a kill leaves one of: nothing new; schemas that say more than state holds; a commit
that no pointer names; or all of it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.run import TableSchema
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.shard_call import claiming
from holdfast.testing.faulty_storage import Fault, FaultyStorage, Kind
from holdfast.testing.state_rows import contents, keys_of, values_of
from tests.faults.elsewhere import run_elsewhere
from tests.model.built_in import BUILT_IN, copy_directory, open_backend
from tests.model.declaring import Declaring
from tests.tiers import cases

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
    record = OperatorRecord.of("op", "query", run, run, 2, declared, 100)
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
@pytest.mark.parametrize(("backend_name", "how"), cases([(b, how) for b in BUILT_IN for how in HOW], quick=2))
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
