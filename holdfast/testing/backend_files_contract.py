"""What a backend promises of a version as files: freeze, thaw, refuse what is not it; part of `BackendContract`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.backends.base import MAX_HASH, Backend, Pointer, View
from holdfast.backends.frozen_files import FrozenFiles
from holdfast.backends.run import TableSchema
from holdfast.errors import CorruptionError, NotFoundError, SchemaMismatchError
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
#: The same names with other columns, and fewer names.
OTHER_VALUE = TABLES | {"counts": TableSchema.of("counts", COUNTS.key, pa.schema([("n", pa.string())]))}
OTHER_KEY = TABLES | {"counts": TableSchema.of("counts", pa.schema([("user", pa.int64())]), COUNTS.value)}
FEWER = {"members": MEMBERS, "pairs": PAIRS}
#: A table as it was, and as it is later.
_NARROW = TableSchema.of("t", COUNTS.key, pa.schema([("n", pa.int32())]))
_WIDE = TableSchema.of("t", COUNTS.key, pa.schema([("n", pa.int64()), ("note", pa.string())]))
_NAMES = [(f"user {i}",) for i in range(300)]


def make_versions(backend: Backend) -> None:
    """Make P1 and P2, which differ in every table, in several writes."""
    backend.apply(None, P1, counts(*MANY) | {"pairs": run_of(PAIRS, [((1, -0.0, None), ("x", INSTANT))])}, {"step": 1})
    write = counts(("user 1", -1), ("new", None)) | {"members": run_of(MEMBERS, [((b"",), ())])}
    backend.apply(P1, P2, write | {"pairs": run_of(PAIRS, [((2, 0.5, "n"), (None, None))])}, {"step": [2, "ü", None]})


def same(one: View, other: View) -> bool:
    """Tell whether two views answer every kind of question alike."""
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
    """Frozen files as a look-up has them: nothing is here before it is asked for.

    Attributes
    ----------
    stored : dict of str to bytes
        What is there.
    """

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
    """The part of `BackendContract` on versions as files."""

    @pytest.fixture
    def other(self, make_backend: MakeBackend, tmp_path: Path) -> Iterator[Backend]:
        """Make a second backend with the tables `TABLES`, as on another machine."""
        with make_backend(tmp_path / "other", TABLES) as backend:
            yield backend

    @pytest.fixture
    def copy_of(self, backend: Backend) -> Callable[[Pointer, Backend], Path]:
        """Return a function that copies a version's frozen files, as a download would, to where a backend takes it."""
        make_versions(backend)

        def copy(pointer: Pointer, target: Backend) -> Path:
            folder = target.directory.with_name(f"{target.directory.name}-{target.new_id()}")
            folder.mkdir(parents=True)
            for path in backend.freeze(pointer):
                shutil.copyfile(path, folder / path.name)
            return folder

        return copy

    # Opening frozen files where they lie.

    def test_a_frozen_version_is_read_where_it_lies(self, backend: Backend, tmp_path: Path) -> None:
        """Look-ups answer as an open version does, whatever they fetch of it, and fetch no other files."""
        make_versions(backend)
        for pointer in (P1, P2):
            files = StoredElsewhere(backend.freeze(pointer), tmp_path / f"elsewhere-{pointer}")
            with (
                self.kind(backend).open_frozen(pointer, TABLES, files, backend.new_id) as there,
                backend.view(pointer) as here,
            ):
                assert same(there, here)

    def test_another_version_or_a_damaged_one_is_refused_where_it_lies(self, backend: Backend, tmp_path: Path) -> None:
        """A look-up never answers from files that are not what they should be."""
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
        """An upload reads files that later commits and maintenance leave alone."""
        backend.apply(None, P1, counts(*((str(i), i) for i in range(100))), {})
        frozen = {path: path.read_bytes() for path in backend.freeze(P1)}
        assert frozen
        assert len({path.name for path in frozen}) == len(frozen)
        backend.apply(P1, P2, counts(("1", None)), {})
        backend.maintain(P2)
        assert {path: path.read_bytes() for path in backend.freeze(P1)} == frozen

    def test_links_to_frozen_files_stay_when_the_version_goes(self, backend: Backend) -> None:
        """A slow upload has linked what it reads: commits, retention and clean-up do not tear it."""
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
        self, backend: Backend, other: Backend, copy_of: Callable[[Pointer, Backend], Path], pointer: Pointer
    ) -> None:
        """A restore from a snapshot of files: every read, the properties, and what is built on it are the same."""
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
        self, backend: Backend, other: Backend, copy_of: Callable[[Pointer, Backend], Path]
    ) -> None:
        """State travels on: from the machine that restored it to the next one, and back."""
        other.thaw(P2, copy_of(P2, other))
        other.apply(P2, P3, counts(("dan", 4)), {"step": 3})
        folder = backend.directory.with_name("back")
        folder.mkdir()
        for path in other.freeze(P3):
            shutil.copyfile(path, folder / path.name)
        backend.thaw(P3, folder)
        assert backend.versions() == [P1, P2, P3]
        with backend.view(P3) as one, other.view(P3) as two, backend.view(P1) as old:
            assert same(one, two)
            assert users(one, "dan", "user 1", "new") == [(4,), (-1,), (None,)]
            assert users(old, "dan", "user 1") == [None, (1,)]

    def test_thawing_twice_does_no_harm(self, other: Backend, copy_of: Callable[[Pointer, Backend], Path]) -> None:
        """Two attempts restore one version, also while somebody reads it and after somebody built on it."""
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

    def test_many_thaw_the_same_version_side_by_side(
        self, other: Backend, copy_of: Callable[[Pointer, Backend], Path]
    ) -> None:
        """All of them find it afterwards, and there is one."""
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

    def test_a_version_is_loaded_or_thawed_whichever_comes_first(
        self, other: Backend, copy_of: Callable[[Pointer, Backend], Path]
    ) -> None:
        """A restore from commits and one from a snapshot may meet; so may a thaw and a version made here."""
        other.load(P1, counts(*MANY), {"step": 1})
        other.thaw(P1, copy_of(P1, other))
        other.thaw(P2, copy_of(P2, other))
        other.load(P2, counts(("never", 0)), {})
        assert other.versions() == [P1, P2]
        with other.view(P1) as first, other.view(P2) as second:
            assert users(first, "user 1") == [(1,)]
            assert users(second, "user 1", "never") == [(-1,), None]

    def test_a_dropped_version_can_be_thawed_again(
        self, backend: Backend, copy_of: Callable[[Pointer, Backend], Path]
    ) -> None:
        """Where its files come from, some of them may still be in use."""
        folder = copy_of(P1, backend)
        backend.drop([P1])
        backend.thaw(P1, folder)
        assert backend.versions() == [P1, P2]
        with backend.view(P1) as view:
            assert contents(view, "counts") == {(name,): (n,) for name, n in MANY}

    def test_a_thawed_version_is_there_when_the_directory_is_opened_again(
        self, make_backend: MakeBackend, copy_of: Callable[[Pointer, Backend], Path], tmp_path: Path
    ) -> None:
        """The next process need not restore it, and finds its files in order."""
        with make_backend(tmp_path / "other", TABLES) as other:
            other.thaw(P2, copy_of(P2, other))
        with make_backend(tmp_path / "other", TABLES) as other:
            assert other.verify() == []
            with other.view(P2) as view:
                assert users(view, "user 1", "user 2") == [(-1,), (2,)]

    # What is refused.

    @pytest.mark.parametrize("wanted", [P1, Pointer(P2.version, "ffff"), P3], ids=str)
    def test_files_of_another_version_are_refused(
        self, other: Backend, copy_of: Callable[[Pointer, Backend], Path], wanted: Pointer
    ) -> None:
        """A snapshot under a wrong name would take the query back, or to an attempt that was dropped."""
        self._is_refused(other, wanted, copy_of(P2, other), CorruptionError)

    def test_a_missing_file_is_refused(
        self, backend: Backend, other: Backend, copy_of: Callable[[Pointer, Backend], Path]
    ) -> None:
        """Any missing file is noticed; so is an empty folder."""
        for name in [path.name for path in backend.freeze(P2)]:
            folder = copy_of(P2, other)
            (folder / name).unlink()
            self._is_refused(other, P2, folder, CorruptionError)
        empty = other.directory.with_name("empty")
        empty.mkdir()
        self._is_refused(other, P2, empty, CorruptionError)

    def test_a_cut_file_is_refused_or_lacks_nothing_that_counts(
        self, backend: Backend, other: Backend, copy_of: Callable[[Pointer, Backend], Path]
    ) -> None:
        """Any file cut anywhere is noticed, or harmless: never another state."""
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
        self,
        make_backend: MakeBackend,
        copy_of: Callable[[Pointer, Backend], Path],
        tmp_path: Path,
        tables: dict[str, TableSchema],
    ) -> None:
        """State is never read as something that it was not written as."""
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
        """The code changed and the directory is an older one: an error that names the table, and nothing is lost."""
        with make_backend(tmp_path / "shard", TABLES) as backend:
            make_versions(backend)
        with (
            make_backend(tmp_path / "shard", tables) as backend,
            pytest.raises(SchemaMismatchError, match="counts"),
        ):
            backend.view(P2)
        with make_backend(tmp_path / "shard", TABLES) as backend, backend.view(P2) as view:
            assert users(view, "user 1", "user 2") == [(-1,), (2,)]

    def test_a_table_that_was_declared_later_is_empty(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        """More tables than were written are no other schema."""
        with make_backend(tmp_path / "shard", {"counts": COUNTS}) as backend:
            backend.apply(None, P1, counts(("ann", 1)), {})
        with make_backend(tmp_path / "shard", TABLES) as backend, backend.view(P1) as view:
            assert contents(view, "members") == {}
            assert users(view, "ann") == [(1,)]

    def test_rows_of_any_age_are_read_with_the_columns_of_now(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        """A table gets a column, and another becomes wider: nothing is rewritten for it, and nothing is lost."""
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
                folder = other.directory.with_name(f"{other.directory.name}-{other.new_id()}")
                folder.mkdir(parents=True)
                for path in backend.freeze(P1):
                    shutil.copyfile(path, folder / path.name)
                other.thaw(P1, folder)
                with other.view(P1) as view:
                    assert contents(view, "t") == before
