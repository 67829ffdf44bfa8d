"""State whose tables and columns come, go, widen, move and are renamed and dropped from run to run, on every backend.

Against a dictionary, whose columns have numbers: rows of any age are read as they are declared now, whatever was
merged, stored, restored, thawed or opened meanwhile, and what was dropped is never read again.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from holdfast.backends import run_stack
from holdfast.backends.base import Pointer
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.run import TableSchema
from holdfast.backends.run_files import backend as run_files
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.stored_tables import StoredTables, declare_tables, stored_tables
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.state_rows import keys_of
from tests.model.built_in import BUILT_IN, open_backend, ram_directory
from tests.tiers import LONG, cases, examples

KEY = pa.schema([("k", pa.string())])
KEYS = [None, "", *"abcde"]
INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
NUMBERS = [pa.int16(), pa.int32(), pa.float32(), pa.float64()]
DECIMALS = [pa.decimal128(1, 0), pa.decimal128(3, 2), pa.decimal128(9, 2), pa.decimal128(38, 9)]


def _struct(width: int, fields: frozenset[str]) -> pa.DataType:
    return pa.struct([(name, INTEGERS[width]) for name in sorted(fields)])


# By column: its type for a width and for fields, if it has any; in ascending widths.
COLUMNS: dict[str, Callable[[int, frozenset[str]], pa.DataType]] = {
    "n": lambda width, _: INTEGERS[width],
    "x": lambda width, _: NUMBERS[width],
    "m": lambda width, _: INTEGERS[width],
    "d": lambda width, _: DECIMALS[width],
    "s": lambda _, __: pa.string(),
    "t": lambda _, __: pa.string(),
    "place": _struct,
    "where": _struct,
    "places": lambda width, fields: pa.list_(_struct(width, fields)),
    "by_name": lambda width, fields: pa.map_(pa.string(), _struct(width, fields)),
}
# Columns that may take each other's name.
LIKE = [{"n", "m"}, {"s", "t"}, {"place", "where"}]
FIELDS = st.sets(st.sampled_from("pqr"), min_size=1).map(frozenset)
_PLACE = st.one_of(st.none(), st.fixed_dictionaries(dict.fromkeys("pqr", st.one_of(st.none(), st.integers(-9, 9)))))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "n": st.one_of(st.none(), st.integers(-9, 9)),
    "x": st.one_of(st.none(), st.integers(-9, 9)),
    "m": st.one_of(st.none(), st.integers(-9, 9)),
    "d": st.one_of(st.none(), st.integers(-9, 9)),
    "s": st.sampled_from([None, "", "ü", "text"]),
    "t": st.sampled_from([None, "", "ü", "text"]),
    "place": _PLACE,
    "where": _PLACE,
    "places": st.one_of(st.none(), st.lists(_PLACE, max_size=3)),
    "by_name": st.one_of(
        st.none(), st.dictionaries(st.sampled_from("uv"), _PLACE, max_size=2).map(lambda d: [*d.items()])
    ),
}
Row = dict[int, Any]
"""Values by the numbers of columns."""
Asked = dict[str, tuple[int, frozenset[str]]]
"""By column its width, and which fields its structs have."""


def with_fields(value: Any, fields: frozenset[str], names: str) -> Any:
    """Return a value whose structs have these fields: null where they are new."""
    if isinstance(value, dict):
        return {name: value.get(name) if name in fields else None for name in names}
    if isinstance(value, list):
        return [with_fields(element, fields, names) for element in value]
    if isinstance(value, tuple):
        return value[0], with_fields(value[1], fields, names)
    return value


def shown(value: Any, fields: frozenset[str]) -> Any:
    return with_fields(value, fields, "".join(sorted(fields)))


class ChangingTables(RuleBasedStateMachine):
    """One shard, with an operator's record beside it, as a query has them."""

    def __init__(self, backend_name: str) -> None:
        super().__init__()
        self.name = backend_name

    @initialize(
        data=st.data(), limit_bytes=st.sampled_from([0, 150, 1 << 20]), carried_bytes=st.sampled_from([0, 1 << 16])
    )
    def begin(self, data: st.DataObject, limit_bytes: int, carried_bytes: int) -> None:
        self.cleanup = ExitStack()
        patch = self.cleanup.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(run_files, "COMMIT_MERGE_LIMIT_BYTES", limit_bytes)
        patch.setattr(run_stack, "GROWTH", 1)
        self.folder = self.cleanup.enter_context(ram_directory())
        self.threads = self.cleanup.enter_context(ThreadPoolExecutor(2))
        self.storage = self.cleanup.enter_context(open_storage(str(self.folder / "durable")))
        self.carried_bytes = carried_bytes
        self.carried: dict[Pointer, bytes] = {}
        self.runs = itertools.count(1)
        self.numbers = itertools.count()
        self.columns: dict[str, dict[str, int]] = {"one": {}, "two": {}}
        self.widths: dict[int, int] = {}
        self.changes: dict[str, ColumnChanges] = {}
        self.states: dict[Pointer | None, dict[tuple[str, str | None], Row]] = {None: {}}
        self.last: Pointer | None = None
        self.asked: dict[str, Asked] = {}
        self.opened: ExitStack = ExitStack()
        self.restart(data)

    def teardown(self) -> None:
        if hasattr(self, "cleanup"):
            try:
                for pointer in self.states:
                    self.check(pointer)
            finally:
                self.opened.close()
                self.cleanup.close()

    # Runs.

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """Declare other tables and columns, none narrower than before, and open the shard for them."""
        tables = data.draw(st.sets(st.sampled_from(["one", "two"]), min_size=1))
        self.changes = {}
        self.asked = {table: self.ask(data, table) for table in sorted(tables)}
        self.open()

    def ask(self, data: st.DataObject, table: str) -> Asked:
        names = data.draw(st.lists(st.sampled_from(list(COLUMNS)), unique=True))
        columns = self.columns[table] = self.changed(data, table, names)
        asked: Asked = {}
        for name in names:
            number = columns.setdefault(name, next(self.numbers))
            width = data.draw(st.integers(self.widths.get(number, 0), 3))
            asked[name] = (width, data.draw(FIELDS))
            self.widths[number] = width
        return asked

    def changed(self, data: st.DataObject, table: str, names: list[str]) -> dict[str, int]:
        """Drop and rename columns that are not declared; return the numbers of those that are left, by name."""
        columns = dict(self.columns[table])
        drop, rename = set(), {}
        for old in sorted(columns.keys() - {*names}):
            alike = {name for like in LIKE if old in like for name in like} & {*names} - columns.keys()
            match data.draw(st.sampled_from(["keep", "drop", "rename"])):
                case "drop":
                    drop.add(old)
                    del columns[old]
                case "rename" if alike:
                    rename[old] = min(alike)
                    columns[rename[old]] = columns.pop(old)
        # What was never there, or is gone by now, may be named too.
        drop |= data.draw(st.sets(st.sampled_from(sorted({*COLUMNS, "never"} - {*names} - columns.keys())), max_size=1))
        self.changes[table] = ColumnChanges(frozenset(drop - rename.keys()), rename)
        return columns

    def declared(self) -> Mapping[str, TableSchema]:
        return {
            table: TableSchema.of(table, KEY, pa.schema([(name, COLUMNS[name](*how)) for name, how in asked.items()]))
            for table, asked in self.asked.items()
        }

    def open(self) -> None:
        self.opened.close()
        run = f"run-{next(self.runs)}"
        declared = self.declared()
        self.record = OperatorRecord("op", "query", run, run, 1, declared, 100)
        stored = declare_operator(self.storage, self.record)
        before = stored_tables(self.storage, stored)
        self.tables: StoredTables = before.with_changes(self.changes).with_declared(declared)
        declare_tables(self.storage, stored, self.tables)
        after = stored_tables(self.storage, stored)
        assert after == self.tables
        assert after.with_changes(self.changes) == after, "made once"
        self.opened = ExitStack()
        directory = self.folder / self.name
        self.backend = self.opened.enter_context(open_backend(self.name, directory, self.tables.held))
        self.log = ObjectCommitLog(
            self.storage,
            "op/shard-0000",
            self.tables.held,
            self.threads,
            directory,
            self.name,
            self.carried_bytes,
            self.carried,
        )
        self.store = VersionedStore(self.backend, self.log, self.tables.declared, self.tables.names)

    # Micro-batches.

    @rule(data=st.data(), is_dropped=st.booleans())
    def micro_batch(self, data: st.DataObject, is_dropped: bool) -> None:
        """Put and delete rows of declared columns; Spark may drop the attempt."""
        state = dict(self.states[self.last])
        with self.store.begin(self.last) as transaction:
            for table, schema in self.declared().items():
                for key in data.draw(st.sets(st.sampled_from(KEYS), max_size=4)):
                    keys = keys_of(schema, [(key,)])
                    if data.draw(st.integers(0, 3)) == 0:
                        transaction.delete(table, keys)
                        state.pop((table, key), None)
                        continue
                    row = {name: data.draw(VALUES[name]) for name in self.asked[table]}
                    given = {name: shown(row[name], fields) for name, (_, fields) in self.asked[table].items()}
                    columns = [pa.array([given[f.name]], f.type) for f in schema.value]
                    values = pa.table(columns, schema=schema.value) if columns else _no_columns()
                    transaction.put(table, keys, values)
                    state[table, key] = {
                        self.columns[table][name]: with_fields(row[name], fields, "pqr")
                        for name, (_, fields) in self.asked[table].items()
                    }
            self.compare(transaction, state)
            pointer = transaction.commit()
        if not is_dropped or self.last is None:
            self.last = pointer
        self.states[pointer] = state

    def check(self, pointer: Pointer | None) -> None:
        if pointer is not None and (self.carried_bytes == 0 or pointer in self.carried):
            with self.store.begin(pointer) as transaction:
                self.compare(transaction, self.states[pointer])

    def compare(self, transaction: Any, state: dict[tuple[str, str | None], Row]) -> None:
        for table, schema in self.declared().items():
            expected = {}
            for key in KEYS:
                if (table, key) in state:
                    row = state[table, key]
                    expected[key] = {
                        name: shown(row.get(self.columns[table][name]), fields)
                        for name, (_, fields) in self.asked[table].items()
                    }
            scanned = {}
            for run in transaction.scan(table):
                assert run.values.schema.equals(schema.value)
                found = run.values.to_pylist() or [{}] * len(run)
                scanned |= dict(zip(run.keys.column(0).to_pylist(), found, strict=True))
            assert scanned == expected
            found = transaction.get(table, keys_of(schema, [(key,) for key in KEYS]))
            rows = found.values.to_pylist() or [{}] * len(KEYS)
            assert {
                key: row for key, row, is_there in zip(KEYS, rows, found.exists, strict=True) if is_there
            } == expected
            prefixed = transaction.scan_prefix(table, keys_of(schema, [("a",), ("",)]))
            assert sum(len(run) for run in prefixed) == len(expected.keys() & {"a", ""})

    # What happens beside them.

    @rule()
    def maintain(self) -> None:
        if self.last is not None and self.last in self.backend.versions():
            self.backend.maintain(self.last)

    @rule()
    def snapshot(self) -> None:
        if self.last is not None and not self.carried_bytes:
            with self.store.read_at(self.last):
                self.log.write_snapshot(self.backend, self.last)

    @rule()
    def open_elsewhere(self) -> None:
        """On another machine, where everything is restored."""
        self.opened.close()
        shutil.rmtree(self.folder / self.name)
        self.open()

    @rule(name=st.sampled_from(BUILT_IN))
    def change_the_backend(self, name: str) -> None:
        self.name = name
        self.open()

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        self.last = data.draw(st.sampled_from([p for p in self.states if p is not None] or [None]))


def _no_columns() -> pa.RecordBatch:
    marker = pa.StructArray.from_buffers(pa.struct([]), 1, [None])
    return pa.RecordBatch.from_struct_array(marker)


_settings = settings(max_examples=examples(6, 25, 400), stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(3600 if LONG else 600)
@pytest.mark.parametrize("backend_name", cases(BUILT_IN))
def test_rows_of_any_age_are_read_as_declared_now(backend_name: str) -> None:
    """After any sequence of restarts, micro-batches, merges, snapshots, restores and moves."""
    run_state_machine_as_test(lambda: ChangingTables(backend_name), settings=_settings)
