"""The versioned store against a dictionary of dictionaries: pointer → key → value.

Two machines: one with a commit log, whose local files may vanish at any moment; one without, where a dropped version is
lost and must be reported as lost. Keys share a few hashes, so that almost every look-up meets a collision.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from holdfast.backends import run_files, run_stack
from holdfast.backends.base import Pointer
from holdfast.backends.memory import MemoryBackend
from holdfast.errors import ClosedError, NotFoundError, StateLostError
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage import open_storage
from holdfast.testing.state_rows import COUNTS, answers, contents, keys_of, values_of
from tests.repetitions import LONG

USERS: list[str | None] = [None, "", *"abcdef"]
HASHES = {name: (0, 2**63, 2**64 - 1)[i % 3] for i, name in enumerate(USERS)}
TABLES = {"counts": COUNTS, "other": run_files.TableSchema.of("other", COUNTS.key, COUNTS.value)}
State = dict[tuple[str, str | None], int | None]

tables = st.sampled_from(sorted(TABLES))
users = st.sampled_from(USERS)
numbers = st.one_of(st.none(), st.integers(-3, 3))
row = st.tuples(tables, users, st.one_of(numbers, st.just("delete")))
_roots = itertools.count()


def keys(names: list[str | None]) -> Any:
    return keys_of(COUNTS, [(n,) for n in names], [HASHES[n] for n in names])


class Open:
    """A transaction, and what the model says it sees."""

    def __init__(self, transaction: Transaction, state: State) -> None:
        self.transaction = transaction
        self.state = dict(state)
        self.has_written = False


class StoreWithoutLog(RuleBasedStateMachine):
    """Dropped versions are lost, and say so."""

    has_log = False

    @initialize(limit_bytes=st.sampled_from([0, 150]), growth=st.sampled_from([1, 4]))
    def open_everything(self, limit_bytes: int, growth: int) -> None:
        self.cleanup = ExitStack()
        patch = self.cleanup.enter_context(pytest.MonkeyPatch.context())
        # So small that a handful of rows is a large merge, and a stack grows high.
        patch.setattr(run_files, "COMMIT_MERGE_LIMIT_BYTES", limit_bytes)
        patch.setattr(run_stack, "GROWTH", growth)
        self.directory = Path(tempfile.mkdtemp(prefix="holdfast-model-"))
        self.cleanup.callback(shutil.rmtree, self.directory)
        self.ids = itertools.count(1)
        self.model: dict[Pointer, State] = {}
        self.open: list[Open] = []
        self.last: Pointer | None = None
        self.pins: list[tuple[Pointer, Any]] = []
        self.log = self.make_log()
        self.reopen()

    def make_log(self) -> ObjectCommitLog | None:
        return None

    def new_id(self) -> str:
        return f"{next(self.ids):04x}"

    def teardown(self) -> None:
        if hasattr(self, "cleanup"):
            for pointer in self.model:
                self.check(pointer)
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
        everyone = [*USERS[::-1], USERS[0]]
        for table in TABLES:
            expected = {(name,): (n,) for (t, name), n in state.items() if t == table}
            assert contents(reader, table) == expected
            assert answers(reader, table, keys(everyone)) == [expected.get((name,)) for name in everyone]

    # Transactions.

    def draw_pointer(self, data: st.DataObject, *others: None) -> Any:
        """The last one made, half of the time: chains grow long, and have branches."""
        return data.draw(st.one_of(st.just(self.last), st.sampled_from([*others, *sorted(self.model)])))

    def draw_open(self, data: st.DataObject) -> Open:
        return self.open[data.draw(st.integers(0, len(self.open) - 1))]

    @rule(data=st.data(), rows=st.one_of(st.lists(row, max_size=2), st.lists(row, min_size=8, max_size=15)))
    def whole_transaction(self, data: st.DataObject, rows: list[tuple[str, str | None, Any]]) -> None:
        """What a micro-batch does, in one step; so that long histories are likely."""
        pointer = self.draw_pointer(data, None)
        if pointer is not None and data.draw(st.booleans()):
            self.maintain_at(pointer)
        if attempt := self.begin_at(pointer, None):
            for table in TABLES:
                puts = [(name, n) for t, name, n in rows if t == table and n != "delete"]
                self.put_rows(attempt, table, puts)
                self.delete_rows(attempt, table, [name for t, name, n in rows if t == table and n == "delete"])
            self.end(attempt)

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
    @rule(data=st.data(), table=tables, rows=st.lists(st.tuples(users, numbers), max_size=12))
    def put(self, data: st.DataObject, table: str, rows: list[tuple[str | None, int | None]]) -> None:
        self.put_rows(self.draw_open(data), table, rows)

    def put_rows(self, attempt: Open, table: str, rows: list[tuple[str | None, int | None]]) -> None:
        attempt.transaction.put(table, keys([name for name, _ in rows]), values_of(COUNTS, [(n,) for _, n in rows]))
        attempt.state.update({(table, name): n for name, n in rows})
        attempt.has_written |= bool(rows)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), table=tables, names=st.lists(users, max_size=6))
    def delete(self, data: st.DataObject, table: str, names: list[str | None]) -> None:
        self.delete_rows(self.draw_open(data), table, names)

    def delete_rows(self, attempt: Open, table: str, names: list[str | None]) -> None:
        attempt.transaction.delete(table, keys(names))
        for name in names:
            attempt.state.pop((table, name), None)
        attempt.has_written |= bool(names)

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

    def end(self, attempt: Open) -> None:
        base, version = attempt.transaction.base, attempt.transaction.version
        if attempt.has_written and base is not None and self.is_lost(base):
            with pytest.raises(StateLostError):
                attempt.transaction.commit()
            return
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
            attempt.transaction.get("counts", keys(USERS))

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

    @precondition(lambda self: self.model and len(self.pins) < 3)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        pointer = self.draw_pointer(data)
        if not self.is_lost(pointer):
            pin = ExitStack()
            view = pin.enter_context(self.store.pin(pointer))
            self.pins.append((pointer, (pin, view)))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        pointer, (pin, view) = self.pins.pop(0)
        self.compare(view, self.model[pointer])
        pin.close()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        """The accepted version stays, with all later ones and what is pinned."""
        accepted = self.draw_pointer(data)
        before = self.backend.versions()
        kept = {p for p in before if p == accepted or p.version > accepted.version}
        kept |= {p for p, _ in self.pins} & set(before)
        assert set(self.store.prune(accepted)) == set(before) - kept
        assert set(self.backend.versions()) == kept

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
        """However old: whole versions and merges are no leftovers."""
        before = self.backend.versions()
        assert self.backend.remove_leftovers(2**63) == 0
        assert self.backend.versions() == before

    @rule()
    def reopen(self) -> None:
        """Another process of the executor goes on; the first one's transactions too, but pins end with it."""
        while self.pins:
            self.unpin()
        self.backend = MemoryBackend(self.directory / "shard", TABLES, self.new_id)
        self.store = VersionedStore(self.backend, self.log)


class StoreWithLog(StoreWithoutLog):
    """Whatever happens to local files, every version ever committed is read right."""

    has_log = True

    def make_log(self) -> ObjectCommitLog:
        executor = self.cleanup.enter_context(ThreadPoolExecutor(2))
        storage = self.cleanup.enter_context(open_storage(f"memory://holdfast-model/{next(_roots)}"))
        return ObjectCommitLog(storage, "op/shard-0000", TABLES, executor, self.directory / "notes")

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def lose_a_file(self, data: st.DataObject) -> None:
        files = sorted(p for p in (self.directory / "shard").rglob("*") if p.is_file())
        if files:
            data.draw(st.sampled_from(files)).unlink()

    @precondition(lambda self: self.model)
    @rule(everything=st.booleans())
    def lose_a_folder(self, everything: bool) -> None:
        shutil.rmtree(self.directory / "shard" / ("." if everything else "versions"), ignore_errors=True)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def write_snapshot(self, data: st.DataObject) -> None:
        """A new beginning of the chain, for the commits that follow."""
        pointer = self.draw_pointer(data)
        assert isinstance(self.log, ObjectCommitLog)
        with self.store.pin(pointer) as view:
            self.log.write_snapshot(pointer, view)


_settings = settings(max_examples=600 if LONG else 50, stateful_step_count=60 if LONG else 30, deadline=None)
TestStoreWithoutLog = StoreWithoutLog.TestCase
TestStoreWithoutLog.settings = _settings
TestStoreWithLog = StoreWithLog.TestCase
TestStoreWithLog.settings = _settings


def test_hashes_collide() -> None:
    """What the machines rely on."""
    assert max(Counter(HASHES.values()).values()) >= 3
