"""The promises of `holdfast.backends.base.Backend`, as tests that every backend must pass.

Subclass it in your tests and create a backend in a fixture::

    class TestMine(BackendContract):
        @pytest.fixture
        def make_backend(self) -> MakeBackend:
            return lambda directory, tables: MyBackend(directory, tables, clock.new_id)

The tests use only the methods of `Backend`, so they apply to any kind of working state.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.backends.base import MAX_HASH, Backend, Pointer, View
from holdfast.backends.frozen_files import FrozenFiles
from holdfast.backends.run import TableSchema
from holdfast.errors import ClosedError, ConflictError, CorruptionError, NotFoundError, SchemaMismatchError
from holdfast.testing.backend_rows_contract import BackendRowsContract, MakeBackend
from holdfast.testing.state_rows import (
    COUNTS,
    INSTANT,
    MEMBERS,
    P1,
    P2,
    P3,
    PAIRS,
    TABLES,
    answers,
    contents,
    counts,
    keys_of,
    no_counts,
    run_of,
    users,
)

MANY = tuple((f"user {i}", i) for i in range(1000))
#: The same names with different columns, and fewer names.
OTHER_VALUE = TABLES | {"counts": TableSchema.of("counts", COUNTS.key, pa.schema([("n", pa.string())]))}
OTHER_KEY = TABLES | {"counts": TableSchema.of("counts", pa.schema([("user", pa.int64())]), COUNTS.value)}
FEWER = {"members": MEMBERS, "pairs": PAIRS}
#: A table before and after a change.
_NARROW = TableSchema.of("t", COUNTS.key, pa.schema([("n", pa.int32())]))
_WIDE = TableSchema.of("t", COUNTS.key, pa.schema([("n", pa.int64()), ("note", pa.string())]))
_NAMES = [(f"user {i}",) for i in range(300)]
CopyOf = Callable[[Pointer, Backend], Path]


def copy_frozen(backend: Backend, pointer: Pointer, target: Backend) -> Path:
    """Copy a version's frozen files, as a download would, to a folder for another backend."""
    folder = target.directory.with_name(f"{target.directory.name}-{target.new_id()}")
    folder.mkdir(parents=True)
    for path in backend.freeze(pointer):
        shutil.copyfile(path, folder / path.name)
    return folder


def make_versions(backend: Backend) -> None:
    """Make P1 and P2, which differ in every table, in several writes."""
    backend.apply(None, P1, counts(*MANY) | {"pairs": run_of(PAIRS, [((1, -0.0, None), ("x", INSTANT))])}, {"step": 1})
    write = counts(("user 1", -1), ("new", None)) | {"members": run_of(MEMBERS, [((b"",), ())])}
    backend.apply(P1, P2, write | {"pairs": run_of(PAIRS, [((2, 0.5, "n"), (None, None))])}, {"step": [2, "ü", None]})


def same(one: View, other: View) -> bool:
    """Return whether two views give the same answer to every kind of query."""
    names = keys_of(COUNTS, [("user 1",), ("user 999",), ("new",), ("nobody",), ("user 1",)])
    prefixes = keys_of(TABLES["pairs"].prefix(1), [(1,), (2,)])

    def read(view: View) -> list[object]:
        found = view.get("counts", names)
        return [
            view.properties,
            [contents(view, table) for table in TABLES],
            [contents(view, "counts", 0, MAX_HASH // 2), contents(view, "counts", MAX_HASH // 2 + 1)],
            found.exists.tolist(),
            found.values.to_pylist(),
            [run.batch.to_pylist() for run in view.scan_prefix("pairs", prefixes)],
        ]

    return read(one) == read(other)


class StoredElsewhere(FrozenFiles):
    """Frozen files that a look-up fetches on demand. `stored`: the files at their source."""

    def __init__(self, paths: list[Path], folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.stored = {path.name: path.read_bytes() for path in paths}
        self.sizes = {name: len(data) for name, data in self.stored.items()}
        for path in paths:
            (folder / path.name).write_bytes(b"")
            os.truncate(folder / path.name, self.sizes[path.name])
            self._keep_time(path.name, path.stat().st_mtime_ns)

    def require(self, name: str, start: int = 0, end: int | None = None) -> None:
        end = self.sizes[name] if end is None else min(end, self.sizes[name])
        modified_ns = (self.folder / name).stat().st_mtime_ns
        with (self.folder / name).open("r+b") as file:
            file.seek(start)
            file.write(self.stored[name][start:end])
        self._keep_time(name, modified_ns)

    def _keep_time(self, name: str, modified_ns: int) -> None:
        os.utime(self.folder / name, ns=(modified_ns, modified_ns))


class BackendFilesContract(BackendRowsContract):
    """The tests of `BackendContract` that freeze and thaw versions."""

    @pytest.fixture
    def other(self, make_backend: MakeBackend, tmp_path: Path) -> Iterator[Backend]:
        """Make a second backend with the tables `TABLES`, as on another machine."""
        with make_backend(tmp_path / "other", TABLES) as backend:
            yield backend

    @pytest.fixture
    def copy_of(self, backend: Backend) -> CopyOf:
        """Return a copier of frozen files of P1 or P2."""
        make_versions(backend)
        return partial(copy_frozen, backend)

    # Opening frozen files in place.

    def test_a_frozen_version_is_read_where_it_lies(self, backend: Backend, tmp_path: Path) -> None:
        """A look-up in frozen files answers like an open version, whichever parts it fetches."""
        make_versions(backend)
        for pointer in (P1, P2):
            files = StoredElsewhere(backend.freeze(pointer), tmp_path / f"elsewhere-{pointer}")
            with (
                self.kind(backend).open_frozen(pointer, TABLES, files, backend.new_id) as there,
                backend.view(pointer) as here,
            ):
                assert same(there, here)

    def test_another_version_or_a_damaged_one_is_refused_where_it_lies(self, backend: Backend, tmp_path: Path) -> None:
        """A look-up never answers from wrong files."""
        make_versions(backend)
        frozen = backend.freeze(P1)
        files = StoredElsewhere(frozen, tmp_path / "other")
        with pytest.raises(CorruptionError), self.kind(backend).open_frozen(P2, TABLES, files, backend.new_id) as view:
            contents(view, "counts")
        for number, path in enumerate(frozen):
            files = StoredElsewhere(frozen, tmp_path / f"{number}")
            files.stored[path.name] = bytes(len(files.stored[path.name]))
            with pytest.raises((CorruptionError, SchemaMismatchError)):
                self._read_all(backend, files)

    def _read_all(self, backend: Backend, files: FrozenFiles) -> None:
        with self.kind(backend).open_frozen(P1, TABLES, files, backend.new_id) as view:
            for table in TABLES:
                contents(view, table)

    def kind(self, backend: Backend) -> type[Backend]:
        """Return the class that is registered for a backend."""
        return type(backend)

    # Freezing.

    def test_frozen_files_are_there_and_do_not_change(self, backend: Backend) -> None:
        """An upload reads files that later commits and maintenance do not change."""
        backend.apply(None, P1, counts(*((str(i), i) for i in range(100))), {})
        frozen = {path: path.read_bytes() for path in backend.freeze(P1)}
        assert frozen
        assert len({path.name for path in frozen}) == len(frozen)
        backend.apply(P1, P2, counts(("1", None)), {})
        backend.maintain(P2)
        assert {path: path.read_bytes() for path in backend.freeze(P1)} == frozen

    def test_links_to_frozen_files_stay_when_the_version_goes(self, backend: Backend) -> None:
        """A slow upload reads its own links, which commits, retention and clean-up leave intact."""
        make_versions(backend)
        folder = backend.directory.with_name("links")
        folder.mkdir()
        expected = {}
        for path in backend.freeze(P1):
            (folder / path.name).hardlink_to(path)
            expected[path.name] = path.read_bytes()
        backend.drop([P1])
        backend.apply(P2, P3, no_counts(*(name for name, _ in MANY)), {})
        backend.maintain(P3)
        backend.drop([P2])
        backend.remove_leftovers(before_ns=2**63 - 1)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected

    # Thawing.

    @pytest.mark.parametrize("pointer", [P1, P2], ids=str)
    def test_a_thawed_version_answers_as_the_frozen_one(
        self, backend: Backend, other: Backend, copy_of: CopyOf, pointer: Pointer
    ) -> None:
        """After a restore from a snapshot, reads, properties and later versions are the same."""
        folder = copy_of(pointer, other)
        other.thaw(pointer, folder)
        assert not folder.exists()
        assert other.versions() == [pointer]
        with backend.view(pointer) as old, other.view(pointer) as new:
            assert same(old, new)
        for one in (backend, other):
            write = run_of(COUNTS, [(("user 5",), (-5,)), (("dan",), (4,)), (("user 7",), None)])
            one.apply(pointer, P3, {"counts": write}, {"step": 3})
            one.maintain(P3)
        with backend.view(P3) as old, other.view(P3) as new:
            assert same(old, new)
            assert users(new, "user 5", "dan", "user 6", "user 7") == [(-5,), (4,), (6,), None]

    def test_a_thawed_version_can_be_frozen_and_thawed_again(
        self, backend: Backend, other: Backend, copy_of: CopyOf
    ) -> None:
        """State moves from the machine that restored it to the next one, and back."""
        other.thaw(P2, copy_of(P2, other))
        other.apply(P2, P3, counts(("dan", 4)), {"step": 3})
        backend.thaw(P3, copy_frozen(other, P3, backend))
        assert backend.versions() == [P1, P2, P3]
        with backend.view(P3) as one, other.view(P3) as two, backend.view(P1) as old:
            assert same(one, two)
            assert users(one, "dan", "user 1", "new") == [(4,), (-1,), (None,)]
            assert users(old, "dan", "user 1") == [None, (1,)]

    def test_thawing_twice_does_no_harm(self, other: Backend, copy_of: CopyOf) -> None:
        """Two attempts may restore the same version, even while it is read or has descendants."""
        other.thaw(P1, copy_of(P1, other))
        with other.view(P1) as view:
            other.apply(P1, P2, no_counts("user 1"), {})
            second = copy_of(P1, other)
            other.thaw(P1, second)
            assert not second.exists()
            assert users(view, "user 1", "user 2") == [(1,), (2,)]
        assert other.versions() == [P1, P2]
        with other.view(P1) as view, other.view(P2) as child:
            assert users(view, "user 1", "user 2") == [(1,), (2,)]
            assert users(child, "user 1", "user 2") == [None, (2,)]

    def test_many_thaw_the_same_version_side_by_side(self, other: Backend, copy_of: CopyOf) -> None:
        """All threads find the version, which exists once."""
        folders = [copy_of(P2, other) for _ in range(6)]

        def thaw_and_read(folder: Path) -> list[object]:
            other.thaw(P2, folder)
            with other.view(P2) as view:
                return [users(view, "user 1", "user 2"), view.properties]

        with ThreadPoolExecutor(len(folders)) as threads:
            answers = list(threads.map(thaw_and_read, folders))
        assert answers == [[[(-1,), (2,)], {"step": [2, "ü", None]}]] * len(folders)
        assert other.versions() == [P2]
        assert not any(folder.exists() for folder in folders)

    def test_a_version_is_loaded_or_thawed_whichever_comes_first(self, other: Backend, copy_of: CopyOf) -> None:
        """A restore from commits may race with a restore from a snapshot, and a thaw with a commit."""
        other.load(P1, counts(*MANY), {"step": 1})
        other.thaw(P1, copy_of(P1, other))
        other.thaw(P2, copy_of(P2, other))
        other.load(P2, counts(("never", 0)), {})
        assert other.versions() == [P1, P2]
        with other.view(P1) as first, other.view(P2) as second:
            assert users(first, "user 1") == [(1,)]
            assert users(second, "user 1", "never") == [(-1,), None]

    def test_a_dropped_version_can_be_thawed_again(self, backend: Backend, copy_of: CopyOf) -> None:
        """Some of the dropped version's files may still be in use."""
        folder = copy_of(P1, backend)
        backend.drop([P1])
        backend.thaw(P1, folder)
        assert backend.versions() == [P1, P2]
        with backend.view(P1) as view:
            assert contents(view, "counts") == {(name,): (n,) for name, n in MANY}

    def test_a_thawed_version_is_there_when_the_directory_is_opened_again(
        self, make_backend: MakeBackend, copy_of: CopyOf, tmp_path: Path
    ) -> None:
        """The next process finds the version intact, and need not restore it."""
        with make_backend(tmp_path / "other", TABLES) as other:
            other.thaw(P2, copy_of(P2, other))
        with make_backend(tmp_path / "other", TABLES) as other:
            assert other.verify() == []
            with other.view(P2) as view:
                assert users(view, "user 1", "user 2") == [(-1,), (2,)]

    # What is refused.

    @pytest.mark.parametrize("wanted", [P1, Pointer(P2.version, "ffff"), P3], ids=str)
    def test_files_of_another_version_are_refused(self, other: Backend, copy_of: CopyOf, wanted: Pointer) -> None:
        """A misnamed snapshot would return the query to an older version or a dropped attempt."""
        self._is_refused(other, wanted, copy_of(P2, other), CorruptionError)

    def test_a_missing_file_is_refused(self, backend: Backend, other: Backend, copy_of: CopyOf) -> None:
        """A missing file is detected, as is an empty folder."""
        for name in [path.name for path in backend.freeze(P2)]:
            folder = copy_of(P2, other)
            (folder / name).unlink()
            self._is_refused(other, P2, folder, CorruptionError)
        empty = other.directory.with_name("empty")
        empty.mkdir()
        self._is_refused(other, P2, empty, CorruptionError)

    def test_a_cut_file_is_refused_or_lacks_nothing_that_counts(
        self, backend: Backend, other: Backend, copy_of: CopyOf
    ) -> None:
        """A truncated file is detected or harmless: never a different state."""
        for path in backend.freeze(P2):
            for kept_bytes in sorted({0, 1, path.stat().st_size // 2, path.stat().st_size - 1}):
                folder = copy_of(P2, other)
                with (folder / path.name).open("r+b") as file:
                    file.truncate(kept_bytes)
                try:
                    other.thaw(P2, folder)
                except CorruptionError:
                    assert other.versions() == []
                else:
                    assert kept_bytes > path.stat().st_size // 2
                    with backend.view(P2) as old, other.view(P2) as new:
                        assert same(old, new)
                    other.drop([P2])
                assert not folder.exists()

    @pytest.mark.parametrize("tables", [OTHER_VALUE, OTHER_KEY, FEWER], ids=["value", "key", "undeclared"])
    def test_files_of_other_tables_are_refused(
        self, make_backend: MakeBackend, copy_of: CopyOf, tmp_path: Path, tables: dict[str, TableSchema]
    ) -> None:
        """State is never read with a different table's schema."""
        with make_backend(tmp_path / "other", tables) as other:
            self._is_refused(other, P2, copy_of(P2, other), SchemaMismatchError)

    def _is_refused(self, backend: Backend, pointer: Pointer, folder: Path, error: type[Exception]) -> None:
        with pytest.raises(error):
            backend.thaw(pointer, folder)
        assert not folder.exists()
        assert backend.versions() == []
        with pytest.raises(NotFoundError):
            backend.view(pointer)

    @pytest.mark.parametrize("tables", [OTHER_VALUE, OTHER_KEY, FEWER], ids=["value", "key", "undeclared"])
    def test_local_state_of_other_tables_is_refused_and_kept(
        self, make_backend: MakeBackend, tmp_path: Path, tables: dict[str, TableSchema]
    ) -> None:
        """Changed code on an older directory: an error that names the table, and nothing is lost."""
        with make_backend(tmp_path / "shard", TABLES) as backend:
            make_versions(backend)
        with make_backend(tmp_path / "shard", tables) as backend, pytest.raises(SchemaMismatchError, match="counts"):
            backend.view(P2)
        with make_backend(tmp_path / "shard", TABLES) as backend, backend.view(P2) as view:
            assert users(view, "user 1", "user 2") == [(-1,), (2,)]

    def test_a_table_that_was_declared_later_is_empty(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        """Declaring more tables than were written is no mismatch."""
        with make_backend(tmp_path / "shard", {"counts": COUNTS}) as backend:
            backend.apply(None, P1, counts(("ann", 1)), {})
        with make_backend(tmp_path / "shard", TABLES) as backend, backend.view(P1) as view:
            assert contents(view, "members") == {}
            assert users(view, "ann") == [(1,)]

    def test_rows_of_any_age_are_read_with_the_columns_of_now(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        """A table gets a column, and another column is widened: nothing is rewritten, and nothing is lost."""
        directory = tmp_path / "shard"
        many = [(user, (n,)) for n, user in enumerate(_NAMES)]
        with make_backend(directory, {"t": _NARROW}) as backend:
            backend.apply(None, P1, {"t": run_of(_NARROW, many)}, {})
        with make_backend(directory, {"t": _WIDE}) as backend:
            write = run_of(_WIDE, [(("user 1",), (2**40, "new")), (("user 2",), None), (("user 3",), (None, "x"))])
            backend.apply(P1, P2, {"t": write}, {})
            before = {user: (n, None) for n, user in enumerate(_NAMES)}
            after = {**before, ("user 1",): (2**40, "new"), ("user 3",): (None, "x")}
            del after["user 2",]
            backend.maintain(P2)
            for pointer, expected in ((P1, before), (P2, after)):
                with backend.view(pointer) as view:
                    assert contents(view, "t") == expected
                    found = answers(view, "t", keys_of(_WIDE, _NAMES))
                    assert found == [expected.get(user) for user in _NAMES]
                    runs = list(view.scan_prefix("t", keys_of(_WIDE, _NAMES[:9])))
                    assert [run.values.schema for run in runs] == [_WIDE.value] * len(runs)
                    assert sum(map(len, runs)) == len(expected.keys() & set(_NAMES[:9]))
            with make_backend(tmp_path / "other", {"t": _WIDE}) as other:
                other.thaw(P1, copy_frozen(backend, P1, other))
                with other.view(P1) as view:
                    assert contents(view, "t") == before


class BackendContract(BackendFilesContract):
    """See the module; override `make_backend`."""

    # Versions: atomic, immutable, honest.

    def test_an_absent_version_is_an_error_and_never_an_empty_state(self, backend: Backend) -> None:
        """Honesty: a job whose state is gone must stop, not start counting from zero."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        for pointer in (Pointer(1, "bb"), Pointer(0, P1.commit_id), P2):
            for ask in (backend.view, backend.freeze, backend.maintain):
                with pytest.raises(NotFoundError):
                    ask(pointer)
            with pytest.raises(NotFoundError):
                backend.apply(pointer, P3, counts(("ann", 2)), {})
        assert backend.versions() == [P1]

    def test_a_version_adds_its_writes_to_its_base(self, backend: Backend) -> None:
        """The basic step: written rows change, deleted rows disappear, and all others stay."""
        backend.apply(None, P1, counts(("ann", 1), ("bob", 2), ("cem", 3)), {})
        backend.apply(P1, P2, {"counts": run_of(COUNTS, [(("ann",), (5,)), (("bob",), None), (("dan",), (4,))])}, {})
        with backend.view(P1) as old, backend.view(P2) as new:
            assert contents(old, "counts") == {("ann",): (1,), ("bob",): (2,), ("cem",): (3,)}
            assert contents(new, "counts") == {("ann",): (5,), ("cem",): (3,), ("dan",): (4,)}
            assert users(new, "dan", "bob", "ann", "eve", "ann") == [(4,), None, (5,), None, (5,)]

    def test_two_attempts_stand_side_by_side(self, backend: Backend) -> None:
        """Isolation: the kept attempt never sees the dropped one."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        other = Pointer(2, "other")
        backend.apply(P1, P2, counts(("ann", 2), ("bob", 2)), {})
        backend.apply(P1, other, no_counts("ann"), {})
        backend.apply(other, P3, counts(("cem", 3)), {})
        with backend.view(P2) as kept, backend.view(other) as dropped, backend.view(P3) as child:
            assert contents(kept, "counts") == {("ann",): (2,), ("bob",): (2,)}
            assert contents(dropped, "counts") == {}
            assert contents(child, "counts") == {("cem",): (3,)}
        assert sorted(backend.versions()) == sorted([P1, P2, other, P3])

    def test_a_pointer_is_never_made_twice(self, backend: Backend) -> None:
        """Immutability: a version that a reader may hold is never replaced."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        with pytest.raises(ConflictError):
            backend.apply(None, P1, counts(("ann", 2)), {})
        with backend.view(P1) as view:
            assert users(view, "ann") == [(1,)]

    def test_an_open_view_stays_good_when_its_version_is_dropped(self, backend: Backend) -> None:
        """Immutability of views: retention does not disturb readers and uploads."""
        backend.apply(None, P1, counts(*((f"user {i}", i) for i in range(1000))), {})
        with backend.view(P1) as view:
            backend.apply(P1, P2, counts(("user 1", -1)), {})
            backend.drop([P1])
            backend.maintain(P2)
            with pytest.raises(NotFoundError):
                backend.view(P1)
            assert users(view, "user 1", "user 999", "user 1000") == [(1,), (999,), None]
            assert len(contents(view, "counts")) == 1000
        with backend.view(P2) as view:
            assert users(view, "user 1", "user 2") == [(-1,), (2,)]

    def test_dropping_is_final_exact_and_repeatable(self, backend: Backend) -> None:
        """Retention: dropped versions are gone, their descendants and siblings stay, unknown pointers are fine."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        backend.apply(P1, P2, counts(("bob", 2)), {})
        backend.apply(P2, P3, counts(("cem", 3)), {})
        backend.drop([P2, Pointer(9, "no")])
        backend.drop([P2])
        backend.drop([])
        assert backend.versions() == [P1, P3]
        with backend.view(P1) as old, backend.view(P3) as new:
            assert contents(old, "counts") == {("ann",): (1,)}
            assert contents(new, "counts") == {("ann",): (1,), ("bob",): (2,), ("cem",): (3,)}

    def test_a_failed_apply_makes_nothing(self, backend: Backend) -> None:
        """Atomicity: a write that names an unknown table changes no table."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        before = backend.statistics()
        with pytest.raises(NotFoundError):
            backend.apply(P1, P2, counts(("ann", 2)) | {"no such table": counts(("a", 1))["counts"]}, {})
        assert backend.versions() == [P1]
        assert backend.statistics() == before

    def test_a_closed_view_says_so(self, backend: Backend) -> None:
        """Reading a closed view raises an error instead of finding nothing; closing twice is fine."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        view = backend.view(P1)
        view.close()
        view.close()
        with pytest.raises(ClosedError):
            users(view, "ann")
        with pytest.raises(ClosedError):
            contents(view, "counts")

    def test_a_table_that_the_shard_lacks_is_an_error(self, backend: Backend) -> None:
        """A misspelt table is an error, not an empty table."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        with backend.view(P1) as view:
            with pytest.raises(NotFoundError):
                view.get("count", keys_of(COUNTS, [("ann",)]))
            with pytest.raises(NotFoundError):
                list(view.scan("count"))

    def test_an_empty_write_makes_a_version(self, backend: Backend) -> None:
        """Empty commits: no tables, or tables without rows, give the same state under a new name."""
        backend.apply(None, P1, {}, {"step": 1})
        backend.apply(P1, P2, counts(), {"step": 2})
        backend.apply(P2, P3, counts(("ann", 1)), {})
        with backend.view(P1) as first, backend.view(P2) as second:
            assert contents(first, "counts") == contents(second, "counts") == {}
            assert users(second) == []
            assert users(first, "ann") == [None]
            assert (first.properties, second.properties) == ({"step": 1}, {"step": 2})

    def test_several_tables_change_at_once_and_keep_apart(self, backend: Backend) -> None:
        """One version covers all tables of the shard, and a table not written is carried over."""
        key = (1, -0.0, None)
        backend.apply(None, P1, counts(("ann", 1)) | {"pairs": run_of(PAIRS, [(key, ("x", INSTANT))])}, {})
        backend.apply(P1, P2, {"members": run_of(MEMBERS, [((b"ann",), ()), ((b"",), ())])}, {})
        backend.apply(P2, P3, {"members": run_of(MEMBERS, [((b"ann",), None)]), "pairs": run_of(PAIRS, [])}, {})
        with backend.view(P3) as view:
            assert contents(view, "counts") == {("ann",): (1,)}
            assert contents(view, "pairs") == {(1, 0.0, None): ("x", INSTANT)}
            assert contents(view, "members") == {(b"",): ()}
            assert answers(view, "members", keys_of(MEMBERS, [(b"ann",), (b"",)])) == [None, ()]

    def test_properties_are_kept_with_their_version(self, backend: Backend) -> None:
        """The commit log keeps a version's chain in its properties."""
        properties = {"chain": [{"kind": "commit", "size_bytes": 2**53}], "text": "ü", "none": None, "float": 0.1}
        backend.apply(None, P1, {}, properties)
        backend.apply(P1, P2, {}, {})
        backend.load(P3, {}, properties)
        for pointer, expected in ((P1, properties), (P2, {}), (P3, properties)):
            with backend.view(pointer) as view:
                assert view.properties == expected
            assert backend.properties(pointer) == expected
        backend.drop([P1])
        with pytest.raises(NotFoundError):
            backend.properties(P1)

    def test_loading_is_complete_and_idempotent(self, backend: Backend) -> None:
        """Restoring twice, for example by two workers, does no harm, not even to concurrent readers."""
        state = counts(("ann", 1), ("bob", None))
        backend.load(P2, state, {"from": "log"})
        with backend.view(P2) as view:
            backend.load(P2, state, {"from": "log"})
            assert contents(view, "counts") == {("ann",): (1,), ("bob",): (None,)}
        backend.apply(P2, P3, no_counts("ann"), {})
        backend.load(P2, state, {"from": "log"})
        assert backend.versions() == [P2, P3]
        with backend.view(P2) as view, backend.view(P3) as child:
            assert contents(view, "counts") == {("ann",): (1,), ("bob",): (None,)}
            assert contents(child, "counts") == {("bob",): (None,)}

    def test_a_dropped_version_can_be_loaded_again(self, backend: Backend) -> None:
        """Reading an old version restores what retention has dropped locally."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        backend.drop([P1])
        backend.load(P1, counts(("ann", 1)), {})
        with backend.view(P1) as view:
            assert contents(view, "counts") == {("ann",): (1,)}

    def test_statistics_tell_what_is_held(self, backend: Backend) -> None:
        """Figures shown to users: versions, bytes, rows of the newest version."""
        assert backend.statistics().versions == 0
        backend.apply(None, P1, counts(*((str(i), i) for i in range(1000))), {})
        one = backend.statistics()
        assert (one.versions, one.rows["counts"], one.runs["counts"]) == (1, 1000, 1)
        assert one.local_bytes >= 1000 * 8
        backend.apply(P1, P2, counts(("x", 1)), {})
        two = backend.statistics()
        assert two.versions == 2
        assert 1001 <= two.rows["counts"] <= 1002
        backend.drop([P1, P2])
        assert backend.statistics().versions == 0
        assert backend.statistics().local_bytes < one.local_bytes

    def test_the_same_directory_is_opened_again(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        """An executor's next task, perhaps in a different process, finds what the last one left."""
        with make_backend(tmp_path / "shard", TABLES) as backend:
            backend.apply(None, P1, counts(("ann", 1)), {"step": 1})
        with make_backend(tmp_path / "shard", TABLES) as backend, backend.view(P1) as view:
            assert contents(view, "counts") == {("ann",): (1,)}
            assert view.properties == {"step": 1}
