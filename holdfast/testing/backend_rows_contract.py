"""A backend's promises about single rows: keys, values, types, deletes, scans; part of `BackendContract`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.arrow.rows import IntArray
from holdfast.backends.base import MAX_HASH, Backend, Pointer, View
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.backends.schema import KeyRanges
from holdfast.testing.state_rows import (
    COUNTS,
    P1,
    P2,
    P3,
    PAIRS,
    TABLES,
    TYPES,
    VALUE_TYPES,
    Row,
    answers,
    contents,
    counts,
    keys_of,
    no_counts,
    plain,
    run_of,
    users,
)

MakeBackend = Callable[[Path, Mapping[str, TableSchema]], Backend]
#: Several rows per key, ordered by time.
VISITS = TableSchema.of(
    "visits",
    pa.schema([("user", pa.string()), ("at", pa.timestamp("us", "UTC")), ("n", pa.int64())]),
    pa.schema([("note", pa.string())]),
)
HASH_OF_USER = {"ann": 5, "bob": 5, None: 5, "cem": 9}
#: A user, and the first and the last of some times.
Span = tuple[str | None, int, int]


def visits(rows: list[Row], value: Row | None) -> dict[str, Run]:
    """Return a write of `value` to rows of `VISITS`, or a delete if it is None."""
    return {"visits": run_of(VISITS, [(row, value) for row in rows], [HASH_OF_USER[row[0]] for row in rows])}


def is_near(row: Row, spans: list[Span]) -> bool:
    """Return whether a row of `VISITS` is in one of the spans."""
    return row[1] is not None and any(row[0] == user and first <= row[1] <= last for user, first, last in spans)


def visits_near(view: View, spans: list[Span]) -> list[Row]:
    """Return the keys of `VISITS` in spans; fails if a scan repeats a key or yields a delete."""
    users = [(user,) for user, _, _ in spans]
    keys = keys_of(VISITS.prefix(1), users, [HASH_OF_USER[user] for (user,) in users])
    first, last = (np.array([span[end] for span in spans], np.int64) for end in (1, 2))
    runs = list(view.scan_prefix("visits", KeyRanges(keys.hashes, keys.columns, first, last)))
    assert not any(run.deleted.any() for run in runs)
    found = pa.Table.from_batches([run.keys for run in runs], VISITS.key)
    columns = [found["user"], found["at"].cast(pa.int64()), found["n"]]
    rows: list[Row] = list(zip(*(column.to_pylist() for column in columns), strict=True))
    assert len(set(rows)) == len(rows)
    return sorted((row for row in rows if is_near(row, spans)), key=repr)


class BackendRowsContract:
    """The tests of `BackendContract` that read and write rows."""

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        """Return a function that makes a backend for a directory and tables."""
        raise NotImplementedError("override the fixture make_backend")

    @pytest.fixture
    def backend(self, make_backend: MakeBackend, tmp_path: Path) -> Iterator[Backend]:
        """Make a backend with the tables `TABLES` in an empty directory."""
        with make_backend(tmp_path / "shard", TABLES) as backend:
            yield backend

    # Values and deletes.

    def test_a_null_value_is_a_value_and_not_an_absence(self, backend: Backend) -> None:
        """A state that was set to null exists."""
        backend.apply(None, P1, counts(("ann", None), ("bob", 1)), {})
        backend.apply(P1, P2, counts(("bob", None)), {})
        with backend.view(P2) as view:
            assert users(view, "ann", "bob", "cem") == [(None,), (None,), None]
            assert contents(view, "counts") == {("ann",): (None,), ("bob",): (None,)}

    def test_delete_then_put_and_put_then_delete(self, backend: Backend) -> None:
        """Of several writes to a key in one run, the last wins."""
        both = [(("ann",), None), (("ann",), (2,)), (("bob",), (3,)), (("bob",), None)]
        backend.apply(None, P1, counts(("ann", 1)), {})
        backend.apply(P1, P2, {"counts": run_of(COUNTS, both)}, {})
        with backend.view(P2) as view:
            assert contents(view, "counts") == {("ann",): (2,)}
        backend.apply(P2, P3, no_counts("ann", "never there"), {})
        with backend.view(P3) as view:
            assert contents(view, "counts") == {}
            assert users(view, "ann", "never there") == [None, None]

    def test_the_last_of_many_duplicates_counts(self, backend: Backend) -> None:
        """A write may name a key many times, in any order of hashes."""
        rows = [(f"user {i % 7}", i) for i in range(1000)]
        backend.apply(None, P1, counts(*rows), {})
        with backend.view(P1) as view:
            assert contents(view, "counts") == {(name,): (i,) for name, i in rows[-7:]}

    def test_deletes_hide_older_rows_through_all_merges(self, backend: Backend) -> None:
        """Tombstones: a deleted row never returns, in any order of merges."""
        everyone = [(f"user {i}", i) for i in range(500)]
        model: dict[Row, Row] = {(name,): (i,) for name, i in everyone}
        pointer = P1
        backend.apply(None, pointer, counts(*everyone), {})
        for step in range(2, 30):
            gone, back = f"user {step}", f"user {step - 2}"
            after = Pointer(step, f"{step}aa")
            backend.apply(pointer, after, {"counts": run_of(COUNTS, [((gone,), None), ((back,), (-step,))])}, {})
            pointer = after
            del model[gone,]
            model[back,] = (-step,)
            if step % 3 == 0:
                backend.maintain(pointer)
            if step % 4 == 0:
                backend.drop([p for p in backend.versions() if p != pointer])
            with backend.view(pointer) as view:
                assert users(view, gone, back) == [None, (-step,)]
                assert contents(view, "counts") == model

    def test_maintenance_changes_no_answer(self, backend: Backend) -> None:
        """Background merges do not affect views opened before or after."""
        backend.apply(None, P1, counts(*((f"user {i}", i) for i in range(300))), {})
        backend.apply(P1, P2, {"counts": run_of(COUNTS, [(("user 1",), None), (("user 2",), (None,))])}, {})
        with backend.view(P2) as before:
            expected = contents(before, "counts")
            backend.maintain(P2)
            backend.maintain(P2)
            assert contents(before, "counts") == expected
        with backend.view(P2) as after:
            assert contents(after, "counts") == expected
        backend.apply(P2, P3, counts(("user 1", 1)), {})
        with backend.view(P3) as view:
            assert contents(view, "counts") == expected | {("user 1",): (1,)}

    # Keys.

    def test_different_keys_of_one_hash_are_different(self, backend: Backend) -> None:
        """Hash collisions: forced, among several keys, over several runs, with deletes."""
        names = ["a", "", None, "b", "aa"]
        keys = keys_of(COUNTS, [(n,) for n in names], [7] * 5)
        rows: list[tuple[Row, Row | None]] = [((n,), (i,)) for i, n in enumerate(names)]
        backend.apply(None, P1, {"counts": run_of(COUNTS, rows, [7] * 5)}, {})
        backend.apply(P1, P2, {"counts": run_of(COUNTS, [(("",), None), (("b",), (9,))], [7, 7])}, {})
        backend.apply(P2, P3, {"counts": run_of(COUNTS, [((None,), None), (("z",), (1,))], [7, 6])}, {})
        with backend.view(P1) as first, backend.view(P2) as second, backend.view(P3) as third:
            assert answers(first, "counts", keys) == [(0,), (1,), (2,), (3,), (4,)]
            assert answers(second, "counts", keys) == [(0,), None, (2,), (9,), (4,)]
            assert answers(third, "counts", keys) == [(0,), None, None, (9,), (4,)]
            assert contents(third, "counts") == {("a",): (0,), ("b",): (9,), ("aa",): (4,), ("z",): (1,)}

    def test_keys_of_several_columns_with_nulls_and_floats(self, backend: Backend) -> None:
        """Every column counts; null equals null, NaN equals NaN, -0.0 equals 0.0, as in Spark's groupBy."""
        nan = math.nan
        rows: list[Row] = [(1, 0.0, "a"), (1, 0.0, None), (1, None, "a"), (None, nan, ""), (None, None, None)]
        backend.apply(None, P1, {"pairs": run_of(PAIRS, [(row, (str(i), None)) for i, row in enumerate(rows)])}, {})
        other_nan = np.frombuffer(b"\x01\x00\x00\x00\x00\x00\xf8\xff")[0]
        same: list[Row] = [(1, -0.0, "a"), (1, -0.0, None), (1, None, "a"), (None, other_nan, ""), (None, None, None)]
        backend.apply(P1, P2, {"pairs": run_of(PAIRS, [(same[0], ("new", None)), (same[3], None)])}, {})
        with backend.view(P1) as old, backend.view(P2) as new:
            assert answers(old, "pairs", keys_of(PAIRS, same)) == [(str(i), None) for i in range(5)]
            assert [a and a[0] for a in answers(new, "pairs", keys_of(PAIRS, rows))] == ["new", "1", "2", None, "4"]
            assert answers(new, "pairs", keys_of(PAIRS, [(1, 1.0, "a"), (2, 0.0, "a"), (None, 0.0, "")])) == [None] * 3

    @pytest.mark.parametrize("collide", [False, True], ids=["hashed", "one hash"])
    @pytest.mark.parametrize("case", TYPES, ids=lambda case: str(case[0])[:40])
    def test_every_type_of_key(
        self, make_backend: MakeBackend, tmp_path: Path, case: tuple[pa.DataType, Any, Any], collide: bool
    ) -> None:
        """Keys of every type are found, even if they share a hash with others and with null."""
        kind, one, other = case
        table = TableSchema.of("state", pa.schema([("k", kind)]), pa.schema([("n", pa.int32())]))
        rows: list[Row] = [(one,), (other,), (None,)]
        hashes = [5] * 3 if collide else None
        with make_backend(tmp_path / "typed", {"state": table}) as backend:
            first = run_of(table, [(row, (i,)) for i, row in enumerate(rows)], hashes)
            backend.apply(None, P1, {"state": first}, {})
            backend.apply(P1, P2, {"state": run_of(table, [((other,), None)], hashes and [5])}, {})
            with backend.view(P1) as old, backend.view(P2) as new:
                keys = keys_of(table, rows, hashes)
                assert answers(old, "state", keys) == [(0,), (1,), (2,)]
                assert answers(new, "state", keys) == [(0,), None, (2,)]
                assert contents(new, "state") == {(plain(one),): (0,), (None,): (2,)}

    @pytest.mark.parametrize("case", [*TYPES, *VALUE_TYPES], ids=lambda case: str(case[0])[:40])
    def test_every_type_of_value(
        self, make_backend: MakeBackend, tmp_path: Path, case: tuple[pa.DataType, Any, Any]
    ) -> None:
        """Values of every type come back unchanged from a merge, a scan and a look-up."""
        kind, one, other = case
        table = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("v", kind), ("n", pa.int8())]))
        with make_backend(tmp_path / "typed", {"state": table}) as backend:
            rows: list[tuple[Row, Row | None]] = [((1,), (one, 1)), ((2,), (None, None)), ((3,), (one, 3))]
            backend.apply(None, P1, {"state": run_of(table, rows)}, {})
            backend.apply(P1, P2, {"state": run_of(table, [((3,), (other, None)), ((4,), None)])}, {})
            backend.load(P3, {"state": run_of(table, rows)}, {})
            expected = {(1,): (plain(one), 1), (2,): (None, None), (3,): (plain(other), None)}
            with backend.view(P2) as view, backend.view(P3) as loaded:
                assert contents(view, "state") == expected
                found = answers(view, "state", keys_of(table, [(3,), (2,), (1,), (4,)]))
                assert found == [expected[3,], expected[2,], expected[1,], None]
                assert answers(loaded, "state", keys_of(table, [(3,)])) == [(plain(one), 3)]

    # Scans.

    def test_a_scan_of_a_range_of_hashes(self, backend: Backend) -> None:
        """Ranges of any version are inclusive at both ends, up to the largest hash: rescaling intersects them."""
        hashes = [0, 1, 1 << 63, (1 << 63) + 1, MAX_HASH]
        rows: list[tuple[Row, Row | None]] = [((str(i),), (i,)) for i in range(5)]
        backend.apply(None, P1, {"counts": run_of(COUNTS, rows, hashes)}, {})
        backend.apply(P1, P2, {"counts": run_of(COUNTS, [(("3",), None), (("new",), (9,))], [hashes[3], 1])}, {})
        with backend.view(P1) as old:
            assert contents(old, "counts", 1, (1 << 63) + 1) == {("1",): (1,), ("2",): (2,), ("3",): (3,)}
        with backend.view(P2) as view:

            def names(first: int, last: int) -> set[str]:
                return {key[0] for key in contents(view, "counts", first, last)}

            assert names(0, MAX_HASH) == {"0", "1", "new", "2", "4"}
            assert names(0, 0) == {"0"}
            assert names(1, 1 << 63) == {"1", "new", "2"}
            assert names((1 << 63) + 1, MAX_HASH - 1) == set()
            assert names(MAX_HASH, MAX_HASH) == {"4"}

    def test_the_first_rows_of_a_scan_cost_little(self, backend: Backend) -> None:
        """Finding the first live row at or after a hash does not read the whole table."""
        many = 60_000
        hashes = np.arange(many, dtype=np.uint64)
        keys = Keys.of(COUNTS, hashes, pa.record_batch({"user": pa.array(hashes).cast(pa.string())}))
        backend.apply(
            None, P1, {"counts": Run.build(COUNTS, keys, pa.record_batch({"n": pa.array(hashes, pa.int64())}))}, {}
        )
        backend.apply(P1, P2, {"counts": Run.build(COUNTS, keys.slice(500, 1_000), None)}, {})
        with backend.view(P2) as view:
            for wanted, found in ((0, 0), (499, 499), (500, 1_000), (999, 1_000), (30_000, 30_000)):
                first = next(run for run in view.scan("counts", wanted) if len(run))
                assert (first.hashes[0], first.keys.column(0)[0].as_py()) == (found, str(found))
                assert len(first) < many / 4
            rest = [run.hashes for run in view.scan("counts", 30_000)]
            assert np.array_equal(np.concatenate(rest), hashes[30_000:])
            assert next(view.scan("counts", many), None) is None

    def test_the_first_rows_of_one_hash_cost_little(self, backend: Backend) -> None:
        """Timers due at the same time share a hash: checking whether one is left does not read all."""
        many = 60_000
        numbers = np.arange(many)

        def run(rows: IntArray, value: int | None) -> Run:
            keys = Keys.of(COUNTS, np.full(len(rows), 7, np.uint64), pa.table({"user": rows.astype(str)}))
            values = None if value is None else pa.record_batch({"n": pa.array(np.full(len(rows), value))})
            return Run.build(COUNTS, keys, values)

        backend.apply(None, P1, {"counts": run(numbers, 1)}, {})
        backend.apply(P1, P2, {"counts": run(numbers[:20_000], None)}, {})
        backend.apply(P2, P3, {"counts": run(numbers[19_000:21_000], 2)}, {})
        with backend.view(P3) as view:
            scan = view.scan("counts", 7, 7)
            assert 0 < len(next(scan)) < many / 4
            found = contents(view, "counts")
            assert found == {(str(i),): (2 if i < 21_000 else 1,) for i in range(19_000, many)}
            assert sum(map(len, view.scan("counts"))) == len(found)

    def test_a_scan_of_prefixes(self, backend: Backend) -> None:
        """Entries of a map, elements of a list: exactly the rows with the requested hash and first columns."""
        rows: list[Row] = [
            (1, 0.0, "a"),
            (1, 0.0, None),
            (1, None, "a"),
            (None, 0.0, "a"),
            (2, 0.0, "b"),
            (3, 0.0, "c"),
        ]
        hashes = [5, 5, 5, 5, 5, 9]
        written: list[tuple[Row, Row | None]] = [(row, (str(i), None)) for i, row in enumerate(rows)]
        backend.apply(None, P1, {"pairs": run_of(PAIRS, written, hashes)}, {})
        change: list[tuple[Row, Row | None]] = [((1, 0.0, None), None), ((1, 7.0, "new"), ("new", None))]
        backend.apply(P1, P2, {"pairs": run_of(PAIRS, change, [5, 5])}, {})

        def notes(view: View, columns: int, wanted: list[Row], hashes: list[int]) -> set[str]:
            keys = keys_of(PAIRS.prefix(columns), [row[:columns] for row in wanted], hashes)
            found = [run for run in view.scan_prefix("pairs", keys) if len(run)]
            notes = [note for run in found for note in run.values.column(0).to_pylist()]
            assert len(set(notes)) == len(notes)
            assert not any(run.deleted.any() for run in found)
            return set(notes)

        with backend.view(P1) as old, backend.view(P2) as new:
            assert notes(old, 1, [(1,), (1,)], [5, 5]) == {"0", "1", "2"}
            assert notes(new, 1, [(1,)], [5]) == {"0", "2", "new"}
            assert notes(new, 1, [(None,), (3,)], [5, 9]) == {"3", "5"}
            assert notes(new, 2, [(1, 0.0), (1, None)], [5, 5]) == {"0", "2"}
            assert notes(new, 3, [(2, 0.0, "b")], [5]) == {"4"}
            assert notes(new, 1, [(1,), (3,), (4,)], [9, 5, 5]) == set()
            assert notes(new, 1, [], []) == set()

    @pytest.mark.parametrize("others", [[], ["bob", None]], ids=["alone", "with others of its hash"])
    def test_a_scan_of_ranges(self, make_backend: MakeBackend, tmp_path: Path, others: list[str | None]) -> None:
        """A scan returns the rows of keys in ranges of times, each once, without deleted rows."""
        rows: list[Row] = [("ann", 10 * i, i % 7) for i in range(3_000)]
        rows += [(user, 10 * i, 1) for user in ("cem", *others) for i in range(20)]
        rows += [(user, None, 1) for user in others]
        gone: list[Row] = [row for row in rows if row[1] is not None and row[1] % 30 == 0]
        new: list[Row] = [("ann", 15, 1), ("cem", 15, 1)]
        live = [*(row for row in rows if row not in gone), *new]
        ends = -(2**63), 2**63 - 1
        requests: list[list[Span]] = [
            [("ann", 100, 200)],
            [("ann", 100, 200), ("ann", 20_000, 20_100), ("cem", 0, 15), ("ann", 15, 15), ("ann", 201, 240)],
            [("ann", 30, 30), ("ann", 101, 109), ("ann", 300, 200), ("cem", 1_000, 2_000), ("ann", 101, 109)],
            [("ann", *ends), ("cem", *ends)],
            [("bob", 0, 100), ("ann", 0, 100), (None, 50, 60)],
            [],
        ]
        with make_backend(tmp_path / "visits", {"visits": VISITS}) as backend:
            backend.apply(None, P1, visits(rows, ("old",)), {})
            backend.apply(P1, P2, visits(gone, None), {})
            backend.apply(P2, P3, visits(new, ("new",)), {})
            with backend.view(P3) as view:
                for spans in requests:
                    expected = [row for row in live if is_near(row, spans)]
                    assert visits_near(view, spans) == sorted(expected, key=repr)

    def test_tables_without_values_and_lookups_of_nothing(self, backend: Backend) -> None:
        """A table that was never written is empty; a look-up of no keys returns nothing."""
        backend.apply(None, P1, counts(("ann", 1)), {})
        with backend.view(P1) as view:
            assert contents(view, "members") == contents(view, "pairs") == {}
            assert answers(view, "pairs", keys_of(PAIRS, [])) == []
            assert answers(view, "pairs", keys_of(PAIRS, [(1, 1.0, "a")])) == [None]
            assert users(view) == []

    def test_look_ups_in_any_order(self, backend: Backend) -> None:
        """Unsorted and repeated needles, present and absent, over several runs."""
        rows = [(f"user {i}", i) for i in range(2000)]
        backend.apply(None, P1, counts(*rows[:1500]), {})
        backend.apply(P1, P2, counts(*rows[1500:1600]), {})
        backend.apply(P2, P3, no_counts(*(name for name, _ in rows[:10])), {})
        random = np.random.default_rng(0)
        wanted = [f"user {i}" for i in random.integers(0, 2000, 5000)]
        expected = [(i,) if 10 <= (i := int(name[5:])) < 1600 else None for name in wanted]
        with backend.view(P3) as view:
            assert users(view, *wanted) == expected
            order = np.argsort(wanted)
            assert users(view, *(wanted[i] for i in order)) == [expected[i] for i in order]
