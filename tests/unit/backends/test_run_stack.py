"""Stacks of runs: look-ups, merges and scans; and files of many stretches."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import clock
from holdfast.backends import run_stack
from holdfast.backends.arrow import crowds
from holdfast.backends.arrow import rows as arrow_rows
from holdfast.backends.base import Pointer
from holdfast.backends.local.page_cache import MappedFile
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs, read_stretches
from holdfast.backends.run_files import backend as run_files
from holdfast.backends.run_files import written_run
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.backends.run_files.written_run import WrittenRun
from holdfast.backends.run_stack import (
    GROWTH,
    first_to_merge,
    look_up,
    merge_in_stretches,
    merge_over,
    merge_prefixes,
    prefixes_above,
)
from holdfast.backends.schema import KeyRanges
from holdfast.backends.stretched_run import StretchedRun
from holdfast.errors import InvalidArgumentError
from holdfast.testing.state_rows import COUNTS, PAIRS, TABLES, Row, contents, counts, keys_of, no_counts, run_of, users
from tests.tiers import cases

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
    """A commit never merges more than the limit, and of what the background will merge again only a small part."""
    start, of_background = first_to_merge(sizes_bytes, limit), first_to_merge(sizes_bytes)
    assert of_background <= start < len(sizes_bytes)
    if start < len(sizes_bytes) - 1:
        assert sum(sizes_bytes[start:]) <= limit
        assert start == of_background or sum(sizes_bytes[start:]) <= sum(sizes_bytes[of_background:]) / 8


def test_a_stack_stays_low_and_rows_are_rewritten_rarely() -> None:
    """Many commits of one size: the stack is logarithmic, and so is the work a row causes."""
    stack: list[int] = []
    written = 0
    for _ in range(2000):
        start = first_to_merge([*stack, 1])
        merged = sum(stack[start:]) + 1
        written += merged
        stack = [*stack[:start], merged]
        assert len(stack) <= 11
    assert written <= 2000 * 7


@pytest.mark.parametrize(
    "limit", [None, 20, 0], ids=["by the commit", "large ones in the background", "in the background"]
)
def test_what_one_per_cent_of_changes_writes(limit: int | None) -> None:
    """All that is written goes into the next snapshot: at most 5 % of the state, and the state at most three times."""
    keys, changed = 100_000, 1_000
    commits_in: list[float] = [math.inf]
    written = 0
    commits = 1000

    def sizes(commits_in: list[float]) -> list[int]:
        return [round(keys * (1 - (1 - changed / keys) ** n)) for n in commits_in]

    def merged(start: int) -> int:
        commits_in[start:] = [sum(commits_in[start:])]
        return sizes(commits_in)[start]

    for _ in range(commits):
        commits_in.append(1)
        written += merged(first_to_merge(sizes(commits_in), None if limit is None else limit * changed))
        if first_to_merge(sizes(commits_in)) < len(commits_in) - 1:
            written += merged(first_to_merge(sizes(commits_in)))
        assert sum(sizes(commits_in)) <= 1.8 * keys
    assert written <= 0.05 * keys * commits


def test_a_look_up_of_nothing_in_nothing() -> None:
    assert look_up([], keys_of(COUNTS, []), COUNTS).values.num_rows == 0
    found = look_up([], keys_of(COUNTS, [("a",)]), COUNTS)
    assert not found.exists.any()
    assert found.values.num_rows == 1


def numbered(hashes: Sequence[int], sign: int = 1) -> Run:
    """Return a run whose row for hash h is named after it, and has h, or -h, as its value."""
    return run_of(COUNTS, [((str(h),), (sign * h,)) for h in hashes], hashes)


def test_stretches_grow_from_small_to_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """First rows come soon, all rows come once, and no stretch is much larger than it may be."""
    monkeypatch.setattr(run_stack, "STRETCH_BYTES", 64_000)
    runs = [numbered(range(0, 40_000, 2)), numbered(range(0, 40_000, 3), -1), numbered(range(39_000, 41_000))]
    found = list(merge_in_stretches(runs, drop_deletes=False, first_bytes=1_000))
    sizes = [run.size_bytes for run in found]
    assert 100 < sizes[0] <= 1_000
    assert all(size <= 64_000 for size in sizes)
    assert sizes[4] > 20_000
    assert (
        np.concatenate([run.hashes for run in found]).tolist() == merge_runs(runs, drop_deletes=False).hashes.tolist()
    )


@pytest.mark.parametrize("crowd", [7, 2**64 - 1, 0])
def test_all_rows_of_a_prefix_are_never_held_at_once(monkeypatch: pytest.MonkeyPatch, crowd: int) -> None:
    """However many it has: they come in pieces, each row once, the newest of it, and none that is deleted."""
    monkeypatch.setattr(run_stack, "STRETCH_BYTES", 200_000)
    small = [h for h in (3, 7, 9) if h != crowd]

    def run(names: range, note: str | None) -> Run:
        rows: list[tuple[Row, Row | None]] = [((1, 0.0, str(i)), note and (note, None)) for i in names]
        others: list[tuple[Row, Row | None]] = [((h, 0.0, "a"), (note, None)) for h in small]
        return run_of(PAIRS, [*rows, *others], [*[crowd] * len(rows), *small])

    runs = [run(range(20_000), "old"), run(range(5_000, 12_000), None), run(range(11_000, 21_000), "new")]
    assert sum(part.size_bytes for part in runs) > 5 * 200_000
    wanted = keys_of(PAIRS.prefix(1), [(1,), (9,)], [crowd, 9])
    found = list(merge_prefixes(runs, wanted))
    assert max(part.size_bytes for part in found) < 2 * 200_000
    assert not any(part.deleted.any() for part in found)
    rows = [row for part in found for row in zip(*[c.to_pylist() for c in part.keys.columns], strict=True)]
    notes = [note for part in found for note in part.values.column(0).to_pylist()]
    expected = {(1, 0.0, str(i)): "old" if i < 5_000 else "new" for i in [*range(5_000), *range(11_000, 21_000)]}
    assert len(rows) == len(set(rows))
    assert dict(zip(rows, notes, strict=True)) == expected | {(9, 0.0, "a"): "new"}


VISITS = TableSchema.of("t", pa.schema([("user", pa.string()), ("at", pa.int64()), ("n", pa.int64())]), pa.schema([]))
visit = st.tuples(st.sampled_from(["ann", "ann", "bob", None]), st.none() | st.integers(0, 30), st.integers(0, 2))
span = st.tuples(st.sampled_from(["ann", "bob", None]), st.integers(-1, 6), st.integers(-2, 4))
HASH_OF = {"ann": 3, "bob": 4, None: 4}


def visits(rows: Sequence[Row], value: Row | None = (), schema: TableSchema = VISITS) -> Run:
    """Return a run of visits; `value` None for deletes."""
    return run_of(schema, [(row, value) for row in rows], [HASH_OF[row[0]] for row in rows])


def as_type(of_time: pa.DataType, rows: Sequence[Row]) -> list[Row]:
    """Return visits with their times as values of a type."""
    times = [str(time) if time is not None and pa.types.is_string(of_time) else time for _, time, _ in rows]
    return [(user, time, n) for (user, _, n), time in zip(rows, pa.array(times, of_time).to_pylist(), strict=True)]


def ranges_of(spans: Sequence[tuple[str | None, int, int]]) -> KeyRanges:
    keys = keys_of(VISITS.prefix(1), [row[:1] for row in spans], [HASH_OF[user] for user, *_ in spans])
    first, last = (np.array([row[end] for row in spans], np.int64) for end in (1, 2))
    return KeyRanges(keys.hashes, keys.columns, first, last)


@given(
    st.lists(st.tuples(st.lists(visit, max_size=30), st.sampled_from([(), None])), max_size=4),
    st.lists(span, max_size=6),
    st.sampled_from([100, 1_000_000]),
)
def test_ranges_of_keys_are_as_if_all_rows_were_read(
    history: list[tuple[list[Row], Row | None]], spans: list[tuple[str | None, int, int]], stretch_bytes: int
) -> None:
    """Crowds of one key and of several, in order or with nulls; ranges that are empty, repeat, or hold everything."""
    # 5 apart, so that those of one key do not overlap, though they may be the wrong way round.
    spans = [(user, 5 * place, 5 * place + length) for user, place, length in spans]
    spans = list({row[:2]: row for row in spans}.values())
    model: dict[Row, Row | None] = {row: value for rows, value in history for row in rows}
    runs = [visits(rows, value) for rows, value in history]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(crowds, "CROWD_ROWS", 3)
        patched.setattr(run_stack, "STRETCH_BYTES", stretch_bytes)
        found = list(merge_prefixes(runs, ranges_of(spans)))
        above = list(prefixes_above(iter(()), runs, ranges_of(spans)))
        again = [run.find(Keys(run.hashes, run.keys)) for run in runs]
    expected = {
        row
        for row, value in model.items()
        if value is not None
        if row[1] is not None and any(row[0] == user and first <= row[1] <= last for user, first, last in spans)
    }
    for parts in (found, above):
        rows = [row for part in parts for row in zip(*(c.to_pylist() for c in part.keys.columns), strict=True)]
        assert len(rows) == len(set(rows))
        assert set(rows) == expected
    assert [rows.tolist() for rows in again] == [list(range(len(run))) for run in runs]


@pytest.mark.parametrize("of_time", [pa.timestamp("us", "UTC"), pa.string(), pa.date32()], ids=str)
@given(
    st.lists(st.tuples(st.lists(visit, max_size=30), st.sampled_from([(), None])), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([100, 1_000, 1_000_000]),
)
def test_stretches_of_few_hashes_are_the_merged_rows_in_order(
    of_time: pa.DataType, history: list[tuple[list[Row], Row | None]], drop: bool, stretch_bytes: int
) -> None:
    """Crowds of one key and of several, with equal times and nulls; a file has all rows of a hash in one stretch."""
    schema = TableSchema.of("t", VISITS.key.set(1, pa.field("at", of_time)), pa.schema([]))
    runs = [visits(as_type(of_time, rows), value, schema) for rows, value in history]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_stack, "STRETCH_BYTES", stretch_bytes)
        patched.setattr(written_run, "STRETCH_BYTES", stretch_bytes)
        found = list(merge_in_stretches(runs, drop_deletes=drop))
        expected = merge_runs(runs, drop_deletes=drop).batch.to_pylist()
        assert [row for part in found for row in part.batch.to_pylist()] == expected
        sink = pa.BufferOutputStream()
        WrittenRun(schema).write(found, sink)
    stretches = read_stretches(sink.getvalue(), schema, source="it")
    assert [row for stretch in stretches for row in stretch.batch.to_pylist()] == expected
    assert all(before.ends[1] < after.ends[0] for before, after in pairwise(stretches))


def test_a_merge_reads_a_key_with_very_many_rows_in_ranges_of_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run as old as the key, deletes all over it, and a few new rows: what is sorted at once is bounded."""
    monkeypatch.setattr(run_stack, "STRETCH_BYTES", 64_000)
    sorted_bytes: list[int] = []

    def watched(runs: Sequence[Run], *, drop_deletes: bool) -> Run:
        sorted_bytes.append(sum(run.size_bytes for run in runs))
        return merge_runs(runs, drop_deletes=drop_deletes)

    monkeypatch.setattr(run_stack, "merge_runs", watched)
    runs = [
        visits([*(("ann", i, 0) for i in range(-5_000, 20_000)), ("bob", 1, 1)]),
        visits([("ann", i, 0) for i in range(0, 20_000, 3)], None),
        visits([("ann", 30_000, 0)]),
    ]
    rows = [row for part in merge_in_stretches(runs, drop_deletes=True) for row in part.batch.to_pylist()]
    assert rows == merge_runs(runs, drop_deletes=True).batch.to_pylist()
    assert len(sorted_bytes) > 10
    assert max(sorted_bytes) < 1.2 * 64_000


def test_a_few_rows_of_a_key_with_very_many_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """By time or by their whole keys, in a stack with deletes: what is read follows them, once a run is known."""
    runs = [
        visits([("ann", i, i % 3) for i in range(20_000)]),
        visits([("ann", i, i % 3) for i in range(0, 20_000, 5)], None),
        visits([("ann", i, 9) for i in range(10_000, 12_000)]),
    ]
    asked = ranges_of([("ann", 41, 44), ("ann", 11_000, 11_002)])
    wanted = visits([("ann", i, i % 3) for i in (4, 7, 9)])
    keys = Keys(wanted.hashes, wanted.keys)
    look_up(runs, keys, VISITS)
    read: list[int] = []
    with_prefixes, find_in_crowds = Run.with_prefixes, arrow_rows._find_in_crowds

    def counted(run: Run, prefixes: Keys) -> Run:
        read.append(len(run))
        return with_prefixes(run, prefixes)

    def counted_crowd(*given: Any) -> Any:
        read.append(len(given[-1]))
        return find_in_crowds(*given)

    monkeypatch.setattr(Run, "with_prefixes", counted)
    monkeypatch.setattr(arrow_rows, "_find_in_crowds", counted_crowd)
    monkeypatch.setattr(crowds, "column_in_order", refuse)
    found = [row for run in merge_prefixes(runs, asked) for row in run.keys.column("at").to_pylist()]
    assert found == [41, 42, 43, 44, 11_000, 11_001, 11_001, 11_002, 11_002]
    assert look_up(runs, keys, VISITS).exists.tolist() == [True, True, True]
    assert 0 < sum(read) < 50


few_hashes = st.sampled_from([0, 1, 2, 2**63, 2**64 - 1])
rows_of_few_hashes = st.dictionaries(
    st.tuples(st.sampled_from("abc"), few_hashes), st.one_of(st.none(), st.integers(0, 9)), max_size=12
)


def few(rows: dict[tuple[str, int], int | None]) -> Run:
    """Return a run of rows by (name, hash)."""
    written: list[tuple[Row, Row | None]] = [((n,), None if v is None else (v,)) for (n, _), v in rows.items()]
    return run_of(COUNTS, written, [h for _, h in rows])


@given(rows_of_few_hashes, st.lists(rows_of_few_hashes, max_size=3), st.integers(1, 5))
def test_writes_over_a_scan_are_as_if_all_were_merged(
    below: dict[tuple[str, int], int | None], writes: list[dict[tuple[str, int], int | None]], rows_each: int
) -> None:
    """Wherever the runs of the scan end, also within one hash: nothing doubled, risen again, lost or out of order."""
    scanned = merge_runs([few(below)], drop_deletes=True)
    written = [few(rows) for rows in writes]
    pieces = [Run(COUNTS, scanned.batch.slice(i, rows_each)) for i in range(0, len(scanned) + 1, rows_each)]
    found = list(merge_over(pieces, written))
    assert all(map(len, found))
    expected = merge_runs([scanned, *written], drop_deletes=True)
    assert [row for run in found for row in run.batch.to_pylist()] == expected.batch.to_pylist()


def test_writes_over_a_scan_read_no_more_than_is_asked_for() -> None:
    """The first rows of a large state cost little, also once something was written."""
    read: list[int] = []

    def scan() -> Iterator[Run]:
        for start in range(0, 1_000, 10):
            read.append(start)
            yield numbered(range(start, start + 10))

    found = merge_over(scan(), [numbered([5, 500], -1)])
    first = next(found)
    assert first.values.column(0).to_pylist() == [0, 1, 2, 3, 4, -5, 6, 7, 8, 9]
    assert read == [0]
    assert sum(map(len, found)) == 1_000 - len(first)


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
    third = commit(backend, second, counts(("user 2", -2), ("user 4", 4)))
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


ROWS = 3_000
#: Of each type a function from a row's number to its value; some are null, some empty.
VALUES: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "int64": (pa.int64(), lambda i: i - 7),
    "int8": (pa.int8(), lambda i: i % 100 if i % 3 else None),
    "int16": (pa.int16(), lambda i: i),
    "float32": (pa.float32(), lambda i: i / 2 if i > ROWS // 2 else None),
    "bool": (pa.bool_(), lambda i: None if i % 7 == 0 else i % 2 == 0),
    "date": (pa.date32(), lambda i: date(2020, 1, 1 + i % 28)),
    "instant": (pa.timestamp("us", "UTC"), lambda i: datetime.fromtimestamp(i, UTC)),
    "decimal": (pa.decimal128(30, 2), lambda i: Decimal(i) / 4 if i % 4 else None),
    "fixed": (pa.binary(5), lambda i: b"%05d" % i),
    "text": (pa.string(), lambda i: None if i % 5 == 0 else "x" * (i % 9)),
    "bytes": (pa.binary(), lambda i: bytes([i % 256]) * (i % 4)),
    "empty": (pa.string(), lambda i: ""),
    "null": (pa.null(), lambda i: None),
    "list": (pa.list_(pa.string()), lambda i: None if i % 6 == 0 else [str(i)] * (i % 3)),
    "map": (pa.map_(pa.string(), pa.int32()), lambda i: [(str(i), i)] if i % 2 else None),
    "struct": (pa.struct([("a", pa.int32()), ("b", pa.string())]), lambda i: {"a": i, "b": str(i)} if i % 3 else None),
}


def stretched(run: Run, tmp_path: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> StretchedRun:
    """Return a run as a file of many stretches holds it."""
    monkeypatch.setattr(written_run, "STRETCH_BYTES", size_bytes)
    path = tmp_path / "run.arrow"
    with pa.OSFile(str(path), "wb") as file:
        WrittenRun(run.schema).write([run], file)
    mapped = MappedFile(path)
    parts = read_stretches(mapped.data, run.schema, source=str(path), trusted=True)
    return StretchedRun(parts, mapped.data, mapped)


@pytest.fixture(params=["in memory", "on disk"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take files for what they are, or all for such as are not in memory."""
    if request.param == "on disk":
        monkeypatch.setattr(MappedFile, "are_cached", lambda *_: False)


def row_run(key: str, values: list[str], hashes: np.ndarray) -> Run:
    """Return a run with a key of one type; each third row is a delete."""
    n = len(hashes)
    columns = {name: VALUES[name][0] for name in values}
    schema = TableSchema.of("t", pa.schema([("k", VALUES[key][0]), ("i", pa.int64())]), pa.schema(columns))
    keys = row_keys(schema, key, hashes, np.arange(n))
    table = pa.table({name: pa.array([VALUES[name][1](i) for i in range(n)], columns[name]) for name in values})
    return Run.build(schema, keys, schema.conform(table, "value"), np.arange(n) % 3 == 0)


def row_keys(schema: TableSchema, key: str, hashes: np.ndarray, numbers: np.ndarray) -> Keys:
    made = [VALUES[key][1](int(i)) for i in numbers]
    table = pa.table({"k": pa.array(made, VALUES[key][0]), "i": numbers})
    return Keys.of(schema, hashes[numbers % len(hashes)], table)


def require_same(whole: Run, cut: StretchedRun, keys: Keys) -> None:
    expected, found = (look_up([run], keys, whole.schema) for run in (whole, cut))
    assert found.exists.tolist() == expected.exists.tolist()
    found.values.validate(full=True)
    assert found.values.to_pylist() == expected.values.to_pylist()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("key", cases([name for name in VALUES if name != "map"], quick=6))
def test_values_of_every_type_are_found_by_keys_of_every_type(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Present, absent, beyond the last, several times, in any order, and none at all."""
    chance = np.random.default_rng(0)
    hashes = chance.integers(1 << 20, 1 << 62, ROWS).astype(np.uint64)
    whole = row_run(key, list(VALUES), hashes)
    cut = stretched(whole, tmp_path, whole.size_bytes // 37, monkeypatch)
    assert len(cut.parts) > 20
    assert len(cut) == len(whole) == ROWS
    numbers = chance.integers(0, ROWS, 500)
    require_same(whole, cut, row_keys(whole.schema, key, hashes, numbers))
    require_same(whole, cut, row_keys(whole.schema, key, hashes, np.unique(numbers)))
    require_same(whole, cut, row_keys(whole.schema, key, hashes, numbers + ROWS))  # of these hashes, other keys
    far = Keys(np.array([0, 1 << 63], np.uint64), row_keys(whole.schema, key, hashes, np.arange(2)).columns)
    require_same(whole, cut, far)
    require_same(whole, cut, row_keys(whole.schema, key, hashes, np.arange(0)))


@pytest.mark.usefixtures("place")
def test_rows_that_share_a_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers due at one time, elements of a list: such crowds stand in one stretch each."""
    hashes = np.sort(np.random.default_rng(1).integers(0, 60, ROWS)).astype(np.uint64)
    whole = row_run("text", ["int64", "text"], hashes)
    cut = stretched(whole, tmp_path, whole.size_bytes // 20, monkeypatch)
    assert len(cut.parts) > 10
    for numbers in (np.arange(0, 2 * ROWS, 7), np.arange(ROWS)[::-1]):
        require_same(whole, cut, row_keys(whole.schema, "text", hashes, numbers))


@pytest.mark.usefixtures("place")
def test_hashes_need_not_be_spread_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of timers are times: where they should stand is a guess."""
    chance = np.random.default_rng(2)
    hashes = np.sort(np.concatenate([chance.integers(0, 1 << 20, ROWS - 9), chance.integers(0, 1 << 63, 9)]))
    whole = row_run("text", ["int64", "text"], hashes.astype(np.uint64))
    cut = stretched(whole, tmp_path, whole.size_bytes // 7, monkeypatch)
    require_same(whole, cut, row_keys(whole.schema, "text", hashes.astype(np.uint64), chance.integers(0, ROWS, 900)))


def test_a_look_up_on_disk_reads_the_pages_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State is larger than memory, and systems read up to 8 MiB around a page that is missing; a scan may have that."""
    n = 150_000
    hashes = np.sort(np.random.default_rng(3).integers(0, 1 << 63, n).astype(np.uint64))
    schema = TableSchema.of("t", pa.schema([("i", pa.int64())]), pa.schema([("text", pa.string())]))
    texts = pa.table({"text": [f"{i:0200}" for i in range(n)]})
    keys = Keys.of(schema, hashes, pa.table({"i": np.arange(n)}))
    cut = stretched(Run.build(schema, keys, schema.conform(texts, "value")), tmp_path, 8 << 20, monkeypatch)
    path = tmp_path / "run.arrow"
    del cut
    gc.collect()  # pages that are mapped stay
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = MappedFile(path)
    everywhere = np.linspace(0, path.stat().st_size - 1, 200).astype(np.int64)
    if mapped.are_cached(everywhere[:1]):
        pytest.skip("files here are always in memory")
    mapped.expect_look_ups()
    run = StretchedRun(read_stretches(mapped.data, schema, source=str(path), trusted=True), mapped.data, mapped)
    wanted = np.array([7, 70_000, 149_000])
    found = look_up([run], keys.take(wanted), schema)
    assert [int(text) for text in found.values.column(0).to_pylist()] == wanted.tolist()
    look_up([run], keys.take(wanted), schema)  # now what it needs is in memory
    hashes = run.parts[0].hashes
    assert not mapped.are_cached(np.array([hashes[len(hashes) // 2 :].ctypes.data - mapped.data.address]))
    assert sum(mapped.are_cached(everywhere[i : i + 1]) for i in range(200)) < 60
    assert sum(len(part.values.column(0).cast(pa.large_binary())) for part in run.parts) == n


def test_a_floor_answers_for_the_keys_that_no_run_knows() -> None:
    """What a run has deleted is not asked for below; nor is what it has written."""
    hashes = np.arange(10, dtype=np.uint64)
    whole = row_run("int64", ["int64"], hashes)
    above = Run(whole.schema, whole.batch.slice(2, 3))
    asked: list[int] = []

    def floor(keys: Keys) -> Any:
        asked.extend(keys.hashes.tolist())
        return look_up([whole], keys, whole.schema)

    keys = row_keys(whole.schema, "int64", hashes, np.array([9, 3, 4, 1, 2, 0, 7]))
    found = look_up([above], keys, whole.schema, floor)
    expected = look_up([whole], keys, whole.schema)
    assert asked == [0, 1, 7, 9]
    assert (found.exists.tolist(), found.values) == (expected.exists.tolist(), expected.values)
    with pytest.raises(InvalidArgumentError):
        look_up([], keys, whole.schema, refuse)


def refuse(keys: Keys) -> Any:
    raise InvalidArgumentError("an error of the floor is passed on", keys=len(keys))
