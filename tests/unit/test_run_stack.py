"""Stacks of runs: which are merged when, and that background merges keep every promise."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import clock
from holdfast.backends import run_files
from holdfast.backends.base import Pointer
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.run_stack import GROWTH, first_to_merge, look_up
from holdfast.testing.state_rows import COUNTS, TABLES, contents, counts, keys_of, no_counts, users

sizes = st.lists(st.integers(0, 10_000), min_size=1, max_size=12)


@given(sizes)
def test_what_stays_below_is_large(sizes_bytes: list[int]) -> None:
    """The rule of the stack: after a merge each run below is more than `GROWTH` times all above it."""
    start = first_to_merge(sizes_bytes)
    assert 0 <= start < len(sizes_bytes)
    if start:
        assert sizes_bytes[start - 1] > GROWTH * sum(sizes_bytes[start:])


@given(sizes, st.integers(0, 20_000))
def test_a_limited_merge_is_limited(sizes_bytes: list[int], limit: int) -> None:
    """A commit never merges more than the limit, and never more than the background would."""
    start = first_to_merge(sizes_bytes, limit)
    assert first_to_merge(sizes_bytes) <= start < len(sizes_bytes)
    if start < len(sizes_bytes) - 1:
        assert sum(sizes_bytes[start:]) <= limit


def test_a_stack_stays_low_and_rows_are_rewritten_rarely() -> None:
    """Many commits of one size: the stack is logarithmic, and so is the work a row causes."""
    stack: list[int] = []
    written = 0
    for _ in range(2000):
        start = first_to_merge([*stack, 1])
        merged = sum(stack[start:]) + 1
        written += merged
        stack = [*stack[:start], merged]
        assert len(stack) <= 7
    assert written <= 2000 * 40


def test_a_look_up_of_nothing_in_nothing() -> None:
    """No runs, no keys: empty answers of the right shape."""
    assert look_up([], keys_of(COUNTS, []), COUNTS).values.num_rows == 0
    found = look_up([], keys_of(COUNTS, [("a",)]), COUNTS)
    assert not found.exists.any()
    assert found.values.num_rows == 1


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryBackend:
    """A backend whose commits merge nothing: all merging is the background's."""
    monkeypatch.setattr(run_files, "COMMIT_MERGE_LIMIT_BYTES", 0)
    return MemoryBackend(tmp_path / "shard", TABLES, clock.new_id)


def commit(backend: MemoryBackend, base: Pointer | None, write: object) -> Pointer:
    pointer = Pointer(base.version + 1 if base else 1, clock.new_id())
    backend.apply(base, pointer, write, {})
    return pointer


def test_a_partial_background_merge_keeps_deletes(backend: MemoryBackend) -> None:
    """A merge above a large run must carry tombstones, or deleted rows rise again."""
    everyone = [(f"user {i}", i) for i in range(200)]
    first = commit(backend, None, counts(*everyone))
    second = commit(backend, first, no_counts("user 1", "user 2"))
    third = commit(backend, second, counts(("user 2", -2)))
    assert backend.maintain(third) == 1
    assert backend.maintain(third) == 0, "what is merged is not merged again"
    fourth = commit(backend, third, counts(("user 3", -3)))
    assert backend.statistics().runs["counts"] == 3, "large, merged, new"
    with backend.view(third) as before, backend.view(fourth) as after:
        assert users(before, "user 1", "user 2", "user 3") == [None, (-2,), (3,)]
        assert users(after, "user 1", "user 2", "user 3") == [None, (-2,), (-3,)]
        assert len(contents(after, "counts")) == 199


def test_a_full_background_merge_forgets_deletes(backend: MemoryBackend) -> None:
    """State that was deleted does not occupy memory for ever."""
    first = commit(backend, None, counts(("a", 1), ("b", 2)))
    second = commit(backend, first, no_counts("a", "b"))
    assert backend.maintain(second) == 1
    third = commit(backend, second, counts())
    assert backend.statistics().rows["counts"] == 0
    with backend.view(third) as view:
        assert contents(view, "counts") == {}


def test_merges_of_merged_runs_are_found(backend: MemoryBackend) -> None:
    """A commit that missed one merge uses it together with the next; records need no order."""
    pointer = commit(backend, None, counts(("a", 1)))
    for step in range(2, 12):
        pointer = commit(backend, pointer, counts((f"user {step}", step)))
    late = pointer
    for _ in range(3):
        assert backend.maintain(late) in (0, 1)
        late = commit(backend, late, counts(("late", late.version)))
        backend.maintain(late)
    again = commit(backend, pointer, counts(("again", 1)))
    with backend.view(again) as view:
        assert len(contents(view, "counts")) == 12
        assert len(view.stack("counts")) <= 3


def test_merges_go_when_no_version_needs_them(backend: MemoryBackend, tmp_path: Path) -> None:
    """What background merges write is freed like everything else."""
    pointer = commit(backend, None, counts(("a", 1)))
    for step in range(2, 6):
        pointer = commit(backend, pointer, counts((f"user {step}", step)))
        backend.maintain(pointer)
    last = commit(backend, pointer, counts(("z", 1)))
    backend.drop([p for p in backend.versions() if p != last])
    assert not list((tmp_path / "shard" / "merges").iterdir())
    files = {p.stat().st_ino for p in (tmp_path / "shard").rglob("*.arrow")}
    assert len(files) == backend.statistics().runs["counts"]
    with backend.view(last) as view:
        assert len(contents(view, "counts")) == 6
