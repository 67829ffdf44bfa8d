"""The versioned store on every backend against a dictionary of dictionaries: pointer → (table, key) → value.

Machines: one with a commit log, whose local files may vanish at any moment, and which moves among executors; one
without, where a dropped version is lost and must be reported as lost. Keys share a few hashes, so that almost every
look-up meets a collision; those of a third machine, and its values, are of every type. All backends agree with the
model, and so with each other.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from holdfast.backends import run_stack
from holdfast.backends.base import Pointer, View
from holdfast.backends.rocksdb import backend as rocksdb
from holdfast.backends.rocksdb import reads
from holdfast.backends.run_files import backend as run_files
from holdfast.errors import ClosedError, NotFoundError, StateLostError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.testing import state_rows
from tests.model.built_in import BUILT_IN, copy_at_rest, open_backend, ram_directory
from tests.model.transactions import Open, Writes, prefixes_to, writes_to
from tests.model.universe import COLLIDING, TYPED, State, check_reads
from tests.ram import storage_in_ram
from tests.tiers import LONG, cases, examples


class StoreWithoutLog(RuleBasedStateMachine):
    """Dropped versions are lost, and say so."""

    has_log = False
    universe = COLLIDING

    def __init__(self, backend_name: str) -> None:
        super().__init__()
        self.backend_name = backend_name
        self.tables = {table.name: table.schema for table in self.universe}
        self.writes = st.sampled_from(self.universe).flatmap(writes_to)

    @initialize(
        limit_bytes=st.sampled_from([0, 150]), growth=st.sampled_from([1, 4]), scan_density=st.sampled_from([0.0, 5.0])
    )
    def open_everything(self, limit_bytes: int, growth: int, scan_density: float) -> None:
        self.cleanup = ExitStack()
        patch = self.cleanup.enter_context(pytest.MonkeyPatch.context())
        # So small that a handful of rows is a large merge, and a stack grows high.
        patch.setattr(run_files, "COMMIT_MERGE_LIMIT_BYTES", limit_bytes)
        patch.setattr(run_stack, "GROWTH", growth)
        patch.setattr(rocksdb.RocksDBBackend, "share_bytes", lambda _: limit_bytes)
        for name, value in (("SCAN_ROWS_PER_KEY", scan_density), ("RUN_ROWS", 11), ("CHUNK_KEYS", 7)):
            patch.setattr(reads, name, value)
        self.directory = self.cleanup.enter_context(ram_directory())
        self.shard = self.directory / "shard"
        self.ids = itertools.count(1)
        self.model: dict[Pointer, State] = {}
        self.open: list[Open] = []
        self.last: Pointer | None = None
        self.views: list[tuple[Pointer, View]] = []
        self.log = self.make_log()
        self.open_shard()

    def make_log(self) -> ObjectCommitLog | None:
        return None

    def new_id(self) -> str:
        return f"{next(self.ids):04x}"

    def teardown(self) -> None:
        if hasattr(self, "cleanup"):
            try:
                for pointer in self.model:
                    self.check(pointer)
            finally:
                self.close_shard()
                self.cleanup.close()

    def is_lost(self, pointer: Pointer) -> bool:
        return not self.has_log and pointer not in self.backend.versions()

    def check(self, pointer: Pointer) -> None:
        """The heart of it: a version has what the model says, or is reported as lost."""
        if self.is_lost(pointer):
            with pytest.raises(StateLostError):
                self.store.read_at(pointer)
            return
        with self.store.read_at(pointer) as view:
            self.compare(view, self.model[pointer])

    def compare(self, reader: Any, state: State) -> None:
        for table in self.universe:
            check_reads(reader, table, state)

    # Transactions.

    def draw_pointer(self, data: st.DataObject, *others: None) -> Any:
        """The last one made, half of the time: chains grow long, and have branches."""
        if self.last is not None and self.is_lost(self.last):
            self.last = max(self.backend.versions(), default=None)
        newest = [self.last] if self.last is not None or others else []
        return data.draw(st.one_of(*map(st.just, newest), st.sampled_from([*others, *sorted(self.model)])))

    def draw_open(self, data: st.DataObject) -> Open:
        return self.open[data.draw(st.integers(0, len(self.open) - 1))]

    @rule(data=st.data())
    def whole_transactions(self, data: st.DataObject) -> None:
        """What micro-batches do, in one step; so that long histories are likely."""
        pointer = self.draw_pointer(data, None)
        for batch in data.draw(st.lists(st.lists(self.writes, max_size=2), min_size=1, max_size=3)):
            if pointer is not None and data.draw(st.booleans()):
                self.maintain_at(pointer)
            if attempt := self.begin_at(pointer, None):
                for table, rows in batch:
                    attempt.write(table, rows)
                pointer = self.end(attempt) or pointer

    @precondition(lambda self: len(self.open) < 2)
    @rule(data=st.data(), skip=st.integers(0, 2))
    def begin(self, data: st.DataObject, skip: int) -> None:
        """At any version ever committed, older and dropped ones included; two transactions may be open."""
        pointer = self.draw_pointer(data, None)
        version = None if not skip else (pointer.version if pointer else 0) + skip
        if attempt := self.begin_at(pointer, version):
            self.open.append(attempt)

    def begin_at(self, pointer: Pointer | None, version: int | None) -> Open | None:
        if pointer is not None and self.is_lost(pointer):
            with pytest.raises(StateLostError):
                self.store.begin(pointer, version)
            return None
        state: State = {} if pointer is None else self.model[pointer]
        return Open(self.store.begin(pointer, version), state)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        some: Writes = data.draw(self.writes)
        self.draw_open(data).write(*some)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def delete_prefix(self, data: st.DataObject) -> None:
        """All entries of some maps."""
        table = data.draw(st.sampled_from(self.universe))
        self.draw_open(data).delete_prefix(table, data.draw(prefixes_to(table)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def read_own_writes(self, data: st.DataObject) -> None:
        attempt = self.draw_open(data)
        self.compare(attempt.transaction, attempt.state)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        attempt = self.draw_open(data)
        self.open.remove(attempt)
        self.end(attempt)

    def end(self, attempt: Open) -> Pointer | None:
        base, version = attempt.transaction.base, attempt.transaction.version
        if attempt.has_written and base is not None and self.is_lost(base):
            with pytest.raises(StateLostError):
                attempt.transaction.commit()
            return None
        pointer = attempt.transaction.commit()
        if attempt.has_written:
            assert pointer is not None
            assert pointer.version == version
            assert pointer not in self.model
            self.model[pointer] = attempt.state
            self.last = pointer
            self.check(pointer)
        else:
            assert pointer == base
        with pytest.raises(ClosedError):
            attempt.transaction.scan(self.universe[0].name)
        return pointer

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        attempt = self.draw_open(data)
        self.open.remove(attempt)
        attempt.transaction.abort()
        with pytest.raises(ClosedError):
            attempt.transaction.commit()

    # Readers and retention.

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.check(self.draw_pointer(data))

    @precondition(lambda self: self.model and len(self.views) < 3)
    @rule(data=st.data())
    def open_view(self, data: st.DataObject) -> None:
        pointer = self.draw_pointer(data)
        if not self.is_lost(pointer):
            self.views.append((pointer, self.store.read_at(pointer)))

    @precondition(lambda self: self.views)
    @rule()
    def close_view(self) -> None:
        """It still reads the same, though its version was dropped meanwhile."""
        pointer, view = self.views.pop(0)
        with view:
            self.compare(view, self.model[pointer])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        """The accepted version stays, with all later ones."""
        accepted = self.draw_pointer(data)
        before = self.backend.versions()
        kept = {p for p in before if p == accepted or p.version > accepted.version}
        assert set(self.store.prune(accepted)) == set(before) - kept
        assert set(self.backend.versions()) == kept

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Of any version: the newest one goes so where its commit could not be made durable."""
        pointer = self.draw_pointer(data)
        before = self.backend.versions()
        self.backend.drop([pointer])
        assert self.backend.versions() == [p for p in before if p != pointer]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def maintain(self, data: st.DataObject) -> None:
        """A background merge, which a later commit may use; it may lose a race against drop."""
        self.maintain_at(self.draw_pointer(data))

    def maintain_at(self, pointer: Pointer) -> None:
        try:
            self.backend.maintain(pointer)
        except NotFoundError:
            assert self.has_log or self.is_lost(pointer)

    @rule()
    def remove_leftovers(self) -> None:
        """However old: whole versions and merges are no leftovers.

        Damaged files are, and a generation that somebody still read when its last version was dropped.
        """
        before = self.backend.versions()
        removed = self.backend.remove_leftovers(2**63)
        assert not removed or self.has_log or self.backend_name == "rocksdb"
        assert self.backend.versions() == before

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        """An upload in the background, of a version that may be dropped."""
        pointer = self.draw_pointer(data)
        if pointer in self.backend.versions():
            with suppress_not_found(self.has_log):
                files = self.backend.freeze(pointer)
                assert files
                assert all(file.is_file() for file in files)

    @rule()
    def reopen(self) -> None:
        """Another process of the executor goes on. The first one's transactions too; but open views end with it."""
        before = self.backend.versions()
        self.close_shard()
        self.open_shard()
        assert self.backend.versions() == before

    @precondition(lambda self: self.shard.exists())
    @rule()
    def crash(self) -> None:
        """Go on with a copy of the files as they are, as after a kill: what is in memory only is gone."""
        before, copy = self.backend.versions(), self.directory / self.new_id()
        copy_at_rest(self.shard, copy)
        left, self.shard = self.shard, copy
        self.begin_elsewhere()
        shutil.rmtree(left)
        assert self.backend.versions() == before
        assert self.has_log or self.backend.verify() == []

    def begin_elsewhere(self) -> None:
        """Open the directory that is `shard` by now; what was open in the one before ends."""
        while self.open:
            self.open.pop().transaction.abort()
        self.close_shard()
        self.open_shard()

    def close_shard(self) -> None:
        while self.views:
            self.close_view()
        self.backend.close()

    def open_shard(self) -> None:
        self.backend = open_backend(self.backend_name, self.shard, self.tables, self.new_id)
        self.store = VersionedStore(self.backend, self.log)


class StoreWithLog(StoreWithoutLog):
    """Whatever happens to local files, every version ever committed is read right."""

    has_log = True

    def make_log(self) -> ObjectCommitLog:
        executor = self.cleanup.enter_context(ThreadPoolExecutor(2))
        self.storage = self.cleanup.enter_context(storage_in_ram())
        shard = "op/shard-0000", self.tables, executor, self.directory / "log", self.backend_name
        return ObjectCommitLog(self.storage, *shard, CARRIED_BYTES, step_bytes=STEP_BYTES)

    @rule(number=st.integers(0, 2))
    def move(self, number: int) -> None:
        """Another executor goes on, with what it has from before: some versions, or none."""
        self.shard = self.directory / f"executor-{number}"
        self.begin_elsewhere()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def lose_a_file(self, data: st.DataObject) -> None:
        files = sorted(p for p in self.shard.rglob("*") if p.is_file())
        if files:
            files[data.draw(st.integers(0, 10_000)) % len(files)].unlink()

    @precondition(lambda self: self.model)
    @rule(everything=st.booleans())
    def lose_a_folder(self, everything: bool) -> None:
        for folder in [self.shard] if everything else sorted(self.shard.glob("*/"))[-1:]:
            shutil.rmtree(folder, ignore_errors=True)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def write_snapshot(self, data: st.DataObject) -> None:
        """A new beginning of the chain, for the commits that follow."""
        pointer = self.draw_pointer(data)
        assert isinstance(self.log, ObjectCommitLog)
        with self.store.read_at(pointer):
            self.log.write_snapshot(self.backend, pointer)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def lose_a_snapshot(self, data: st.DataObject) -> None:
        """The commits since the one before do as well."""
        stored = sorted(info.key for info in self.storage.list("op/shard-0000/snapshots/"))
        self.storage.delete(data.draw(st.lists(st.sampled_from(stored), max_size=1)) if stored else [])


class TypedStoreWithLog(StoreWithLog):
    """The same, of keys and values of every type."""

    universe = TYPED


def suppress_not_found(may_be_lost: bool) -> Any:
    return suppress(NotFoundError) if may_be_lost else nullcontext()


# Some commits of the machine are smaller, some are larger.
CARRIED_BYTES = 1500
#: So little that a restore of a few commits goes in steps.
STEP_BYTES = 1500

_settings = settings(max_examples=examples(8, 15, 150), stateful_step_count=60 if LONG else 30, deadline=None)
# A database is opened for each example.
_fewer = _settings if LONG else settings(_settings, max_examples=examples(4, 8))


MACHINES = (StoreWithoutLog, StoreWithLog, TypedStoreWithLog)
# Each machine begins with another backend: ``make test`` has each of both once.
PAIRS = [(machine, (BUILT_IN * 2)[i + j]) for i, machine in enumerate(MACHINES) for j in range(len(BUILT_IN))]


@pytest.mark.slow
# Hypothesis may look for a shorter example for five minutes.
@pytest.mark.timeout(3600 if LONG else 600)
@pytest.mark.parametrize(("machine", "backend_name"), cases(PAIRS, quick=3))
def test_the_store_agrees_with_the_model(machine: type[StoreWithoutLog], backend_name: str) -> None:
    """After any sequence of steps, every version has what the model says, or is reported as lost."""
    chosen = _fewer if backend_name == "rocksdb" else _settings
    run_state_machine_as_test(lambda: machine(backend_name), settings=chosen)


@pytest.mark.parametrize("backend_name", BUILT_IN)
def test_what_stands_below_a_dropped_version_is_the_same_after_a_restart(backend_name: str, tmp_path: Path) -> None:
    """A clean close right after a commit that could not be made durable: found by the machine, and rare there."""
    pointers = [Pointer(1, "aa"), Pointer(2, "bb"), Pointer(3, "cc")]
    with open_backend(backend_name, tmp_path / "shard", state_rows.TABLES) as backend:
        for base, pointer in zip([None, *pointers], pointers, strict=False):
            backend.apply(base, pointer, state_rows.counts((f"user {pointer.version}", pointer.version)), {})
        backend.drop(pointers[-1:])
    with open_backend(backend_name, tmp_path / "shard", state_rows.TABLES) as backend:
        assert backend.versions() == pointers[:-1]
        for pointer in backend.versions():
            with backend.view(pointer) as view:
                expected = {(f"user {v}",): (v,) for v in range(1, pointer.version + 1)}
                assert state_rows.contents(view, "counts") == expected


def test_hashes_collide_and_every_kind_of_column_is_met() -> None:
    """What the machines write is what they are for."""
    for table in COLLIDING:
        assert max(Counter(map(table.hash, table.rows)).values()) >= 3
    keys = [field.type for table in TYPED for field in table.schema.key]
    values = {str(field.type) for table in TYPED for field in table.schema.value}
    assert len(keys) == len(state_rows.TYPES)
    assert len(values) == len({str(kind) for kind in keys}) + len(state_rows.VALUE_TYPES)
