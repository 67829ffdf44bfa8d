"""All backends side by side: after any steps they agree on every read, with each other and with the model.

Each side has a shard and a commit log of its own, and goes through the same steps: transactions, several attempts at
one version, rollbacks, deletes, retention, open views, snapshots, merges, clean restarts, kills, and losses of local
files. What a side still holds locally may differ; what it answers may not. One machine writes keys whose hashes
collide, one keys and values of every type.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.backends import run_stack
from holdfast.backends.base import Pointer, View
from holdfast.backends.run_files import backend as run_files
from holdfast.errors import NotFoundError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from tests.model.built_in import BUILT_IN, copy_directory, open_backend, ram_directory
from tests.model.transactions import Open, Writes, prefixes_to, writes_to
from tests.model.universe import COLLIDING, TYPED, State, Table, check_reads
from tests.ram import storage_in_ram
from tests.tiers import LONG, cases, examples


class Side:
    """One backend with its shard, its store and its log; versions have numbers that all sides share."""

    def __init__(self, backend_name: str, tables: Sequence[Table], root: Path, cleanup: ExitStack) -> None:
        self.name = backend_name
        self.schemas = {table.name: table.schema for table in tables}
        self.root = root
        self.places = (root / f"{backend_name}-{n}" for n in itertools.count())
        self.directory = next(self.places)
        executor = cleanup.enter_context(ThreadPoolExecutor(2))
        storage = cleanup.enter_context(storage_in_ram())
        directory = root / f"{backend_name}-log"
        self.log = ObjectCommitLog(storage, "op/shard-0000", self.schemas, executor, directory, backend_name)
        self.pointers: list[Pointer] = []
        self.views: list[View] = []
        self.open()

    def open(self) -> None:
        self.backend = open_backend(self.name, self.directory, self.schemas)
        self.store = VersionedStore(self.backend, self.log)

    def close(self) -> None:
        self.close_views()
        self.backend.close()

    def close_views(self) -> None:
        while self.views:
            self.views.pop().close()

    def view(self, number: int) -> View:
        return self.store.read_at(self.pointers[number])

    def open_view(self, number: int) -> None:
        self.views.append(self.view(number))

    def maintain(self, number: int) -> None:
        try:
            self.backend.maintain(self.pointers[number])
            assert self.backend.freeze(self.pointers[number])
        except NotFoundError:
            assert self.pointers[number] not in self.backend.versions()

    def snapshot(self, number: int) -> None:
        with self.view(number):
            self.log.write_snapshot(self.backend, self.pointers[number])

    def prune(self, number: int) -> None:
        accepted = self.pointers[number]
        pruned = self.store.prune(accepted)
        assert all(p.version <= accepted.version and p != accepted for p in pruned)

    def crash(self) -> None:
        """Go on with a copy of the files as they are, as after a kill: what is in memory only is gone."""
        copy = next(self.places)
        while not _copy_unchanged(self.directory, copy):
            shutil.rmtree(copy)
        self.close()
        shutil.rmtree(self.directory)
        self.directory = copy
        self.open()
        assert self.backend.verify() == []

    def lose(self, share: float) -> None:
        """Lose the one file that stands so far in the list of all, or, at the end of it, everything."""
        self.close()
        files = sorted(p for p in self.directory.rglob("*") if p.is_file())
        if share == 1.0:
            shutil.rmtree(self.directory)
        elif files:
            files[int(share * len(files))].unlink()
        self.open()
        self.backend.verify()


def _copy_unchanged(source: Path, target: Path) -> bool:
    """Copy a directory; tell whether it stood still meanwhile."""

    def seen() -> list[tuple[Path, int, int]]:
        found = [(path, path.stat()) for path in sorted(source.rglob("*"))]
        return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found]

    try:
        before = seen()
        copy_directory(source, target)
        return seen() == before
    except (FileNotFoundError, shutil.Error):  # a background thread removed a file
        return False


class Version(NamedTuple):
    """What the model knows of a version."""

    version: int
    state: State


class Mirror(RuleBasedStateMachine):
    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self.tables = tables

    @initialize(limit_bytes=st.sampled_from([0, 150]), growth=st.sampled_from([1, 4]))
    def open_everything(self, limit_bytes: int, growth: int) -> None:
        self.cleanup = ExitStack()
        patch = self.cleanup.enter_context(pytest.MonkeyPatch.context())
        # So small that a handful of rows is a large merge, and a stack grows high.
        patch.setattr(run_files, "COMMIT_MERGE_LIMIT_BYTES", limit_bytes)
        patch.setattr(run_stack, "GROWTH", growth)
        root = self.cleanup.enter_context(ram_directory())
        self.model: list[Version] = []
        self.viewed: list[int] = []
        self.turns = itertools.count()
        self.sides = [Side(name, self.tables, root, self.cleanup) for name in BUILT_IN]

    def teardown(self) -> None:
        if hasattr(self, "sides"):
            try:
                for number in range(len(self.model)):
                    self.check(number, self.tables)
                self.check_views()
            finally:
                for side in self.sides:
                    side.close()
                self.cleanup.close()

    def on_all_sides(self, step: Callable[[Side], object]) -> None:
        for side in self.sides:
            try:
                step(side)
            except Exception as exc:
                exc.add_note(f"on the side of {side.name}, in {side.directory}")
                raise

    def check(self, number: int, tables: Sequence[Table]) -> None:
        """The heart of it: on every side, a version has what the model says."""

        def compare(side: Side) -> None:
            with side.view(number) as view:
                for table in tables:
                    check_reads(view, table, self.model[number].state)

        self.on_all_sides(compare)

    def check_views(self) -> None:
        for i, number in enumerate(self.viewed):
            for side, table in itertools.product(self.sides, self.tables):
                check_reads(side.views[i], table, self.model[number].state)

    @invariant()
    def the_last_version_and_one_other_agree(self) -> None:
        """The others and the tables take turns; in the end all are looked at."""
        if getattr(self, "model", None):
            turn = next(self.turns)
            table = self.tables[turn % len(self.tables)]
            self.check(len(self.model) - 1, [table])
            self.check(turn % len(self.model), [table])

    def draw_number(self, data: st.DataObject) -> int:
        """The last one made, half of the time."""
        return data.draw(st.one_of(st.just(len(self.model) - 1), st.integers(0, len(self.model) - 1)))

    @rule(data=st.data(), from_nothing=st.integers(0, 9), skip=st.integers(0, 2), commits=st.booleans())
    def transaction(self, data: st.DataObject, from_nothing: int, skip: int, commits: bool) -> None:
        """At the last version, at one that has others beside or above it, or from nothing."""
        base = self.draw_number(data) if self.model and from_nothing else None
        old = Version(0, {}) if base is None else self.model[base]
        version = old.version + 1 + skip
        table = data.draw(st.sampled_from(self.tables))
        other = data.draw(st.sampled_from(self.tables))
        steps: list[Writes] = [data.draw(writes_to(table)), data.draw(writes_to(other))]
        prefixes = data.draw(prefixes_to(table))
        states: list[State] = []
        made: list[Pointer | None] = []

        def attempt(side: Side) -> None:
            pointer = None if base is None else side.pointers[base]
            one = Open(side.store.begin(pointer, version), old.state)
            one.write(*steps[0])
            one.delete_prefix(table, prefixes)
            one.write(*steps[1])
            for each in {table.name: table, other.name: other}.values():
                check_reads(one.transaction, each, one.state)
            if not (commits and one.has_written):
                one.transaction.abort()
                return
            made.append(one.transaction.commit())
            states.append(one.state)
            assert made[-1] is not None
            assert made[-1].version == version
            side.pointers.append(made[-1])

        self.on_all_sides(attempt)
        assert len(made) in {0, len(self.sides)}
        if made:
            self.model.append(Version(version, states[0]))
            self.check(len(self.model) - 1, self.tables)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        number = self.draw_number(data)
        self.on_all_sides(lambda side: side.prune(number))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Of any version: the newest one goes so where its commit could not be made durable."""
        number = self.draw_number(data)
        self.on_all_sides(lambda side: side.backend.drop([side.pointers[number]]))

    @precondition(lambda self: self.model and len(self.viewed) < 2)
    @rule(data=st.data())
    def open_view(self, data: st.DataObject) -> None:
        number = self.draw_number(data)
        self.on_all_sides(lambda side: side.open_view(number))
        self.viewed.append(number)

    @precondition(lambda self: self.viewed)
    @rule()
    def close_views(self) -> None:
        """What was open still reads the same, though its version was dropped meanwhile."""
        self.check_views()
        self.on_all_sides(lambda side: side.close_views())
        self.viewed.clear()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        number = self.draw_number(data)
        self.on_all_sides(lambda side: side.snapshot(number))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def maintain(self, data: st.DataObject) -> None:
        number = self.draw_number(data)
        self.on_all_sides(lambda side: side.maintain(number))

    @rule()
    def remove_leftovers(self) -> None:
        self.on_all_sides(lambda side: side.backend.remove_leftovers(2**63))

    @rule()
    def restart(self) -> None:
        """A clean one."""
        self.check_views()
        self.viewed.clear()
        self.on_all_sides(lambda side: (side.close(), side.open()))

    @precondition(lambda self: self.model)
    @rule()
    def crash(self) -> None:
        self.check_views()
        self.viewed.clear()
        self.on_all_sides(lambda side: side.crash())

    @precondition(lambda self: self.model)
    @rule(share=st.one_of(st.floats(0, 0.999), st.just(1.0)))
    def lose_files(self, share: float) -> None:
        self.check_views()
        self.viewed.clear()
        self.on_all_sides(lambda side: side.lose(share))


_settings = settings(max_examples=examples(4, 12, 100), stateful_step_count=50 if LONG else 20, deadline=None)


@pytest.mark.slow
# Hypothesis may look for a shorter example for five minutes.
@pytest.mark.timeout(3600 if LONG else 600)
@pytest.mark.parametrize("tables", cases([pytest.param(COLLIDING, id="colliding"), pytest.param(TYPED, id="typed")]))
def test_all_backends_agree(tables: Sequence[Table]) -> None:
    run_state_machine_as_test(lambda: Mirror(tables), settings=_settings)


def test_every_kind_of_column_is_met() -> None:
    from holdfast.testing.state_rows import TYPES, VALUE_TYPES

    keys: list[Any] = [f.type for table in TYPED for f in table.schema.key]
    values = [f.type for table in TYPED for f in table.schema.value]
    assert len(keys) == len(TYPES)
    assert len({str(t) for t in values}) == len({str(t) for t in keys}) + len(VALUE_TYPES)
