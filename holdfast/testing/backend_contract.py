"""The promises of `holdfast.backends.base.Backend`, as tests that every backend must pass.

Subclass it in your own tests and say how to make a backend::

    class TestMine(BackendContract):
        @pytest.fixture
        def make_backend(self) -> MakeBackend:
            return lambda directory, tables: MyBackend(directory, tables, clock.new_id)

The tests use nothing but the methods of `Backend`, so they hold for any kind of working state.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.backends.base import Backend, Pointer
from holdfast.errors import ClosedError, ConflictError, NotFoundError
from holdfast.testing.backend_files_contract import BackendFilesContract
from holdfast.testing.backend_rows_contract import MakeBackend
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
        """The basic step: what was not written stays, what was written changes, what was deleted goes."""
        backend.apply(None, P1, counts(("ann", 1), ("bob", 2), ("cem", 3)), {})
        backend.apply(P1, P2, {"counts": run_of(COUNTS, [(("ann",), (5,)), (("bob",), None), (("dan",), (4,))])}, {})
        with backend.view(P1) as old, backend.view(P2) as new:
            assert contents(old, "counts") == {("ann",): (1,), ("bob",): (2,), ("cem",): (3,)}
            assert contents(new, "counts") == {("ann",): (5,), ("cem",): (3,), ("dan",): (4,)}
            assert users(new, "dan", "bob", "ann", "eve", "ann") == [(4,), None, (5,), None, (5,)]

    def test_two_attempts_stand_side_by_side(self, backend: Backend) -> None:
        """Isolation: an attempt that was dropped is never seen by the one that was kept."""
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
        """Immutability: a version that someone may hold is never replaced."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        with pytest.raises(ConflictError):
            backend.apply(None, P1, counts(("ann", 2)), {})
        with backend.view(P1) as view:
            assert users(view, "ann") == [(1,)]

    def test_an_open_view_stays_good_when_its_version_is_dropped(self, backend: Backend) -> None:
        """Immutability of views: readers and uploads are not torn by retention."""
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
        """Retention: what is dropped is gone, its descendants and siblings stay, unknown pointers are fine."""
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
        """Atomicity: an unknown table in one write keeps all its tables out."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        before = backend.statistics()
        with pytest.raises(NotFoundError):
            backend.apply(P1, P2, counts(("ann", 2)) | {"no such table": counts(("a", 1))["counts"]}, {})
        assert backend.versions() == [P1]
        assert backend.statistics() == before

    def test_a_closed_view_says_so(self, backend: Backend) -> None:
        """A view used after close is an error, not an empty answer; closing twice is fine."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        view = backend.view(P1)
        view.close()
        view.close()
        with pytest.raises(ClosedError):
            users(view, "ann")
        with pytest.raises(ClosedError):
            contents(view, "counts")

    def test_a_table_that_the_shard_lacks_is_an_error(self, backend: Backend) -> None:
        """A misspelt table is not an empty one."""
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
        """The commit log finds the chain of a version where it left it."""
        properties = {"chain": [{"kind": "commit", "size_bytes": 2**53}], "text": "ü", "none": None, "float": 0.1}
        backend.apply(None, P1, {}, properties)
        backend.apply(P1, P2, {}, {})
        backend.load(P3, {}, properties)
        for pointer, expected in ((P1, properties), (P2, {}), (P3, properties)):
            with backend.view(pointer) as view:
                assert view.properties == expected

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
        """Figures that a person sees: versions, bytes, rows of the newest version."""
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
        """The next task of an executor, in another process perhaps, finds what the last one left."""
        with make_backend(tmp_path / "shard", TABLES) as backend:
            backend.apply(None, P1, counts(("ann", 1)), {"step": 1})
        with make_backend(tmp_path / "shard", TABLES) as backend, backend.view(P1) as view:
            assert contents(view, "counts") == {("ann",): (1,)}
            assert view.properties == {"step": 1}
