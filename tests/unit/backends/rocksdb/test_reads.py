"""Reading a version: point reads and scans give the same, and every range has an end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.backends.rocksdb import reads as rocksdb_reads
from holdfast.backends.rocksdb import view as rocksdb_view
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.testing.state_rows import (
    COUNTS,
    P1,
    P2,
    PAIRS,
    Row,
    contents,
    counts,
    keys_of,
    run_of,
    users,
)


@pytest.mark.slow(0.5)
def test_few_of_many_keys_and_many_of_few(shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point reads where keys are sparse, a scan where they are dense: the same answers."""
    names = [f"user {i}" for i in range(20_000)]
    shard.apply(None, P1, counts(*((name, i) for i, name in enumerate(names))), {})
    scanned: list[int] = []
    by_scan = rocksdb_reads.TableReader._get_by_scan

    def spied(reader: Any, keys: list[bytes], first: int, last: int) -> list[bytes | None]:
        scanned.append(len(keys))
        return by_scan(reader, keys, first, last)

    monkeypatch.setattr(rocksdb_reads.TableReader, "_get_by_scan", spied)
    with shard.view(P1) as view:
        assert users(view, *names[::100]) == [(i,) for i in range(0, 20_000, 100)]
        assert users(view, *names[:500]) == [(i,) for i in range(500)]
        assert not scanned
        assert users(view, *names[::2]) == [(i,) for i in range(0, 20_000, 2)]
        assert users(view, *names[::-1]) == [(i,) for i in range(19_999, -1, -1)]
        assert sum(scanned) == 30_000


@pytest.mark.slow(0.5)
def test_prefixes_are_sought_or_scanned(shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of few maps among many, and of most of them; at an older version too."""
    written: list[tuple[Row, Row | None]] = [((i % 300, float(i), "x"), (str(i), None)) for i in range(3000)]
    hashes = [(i % 300) << 55 for i in range(3000)]
    shard.apply(None, P1, {"pairs": run_of(PAIRS, written, hashes)}, {})
    gone: list[tuple[Row, Row | None]] = [(key, None) for key, _ in written[:600]]
    new: list[tuple[Row, Row | None]] = [((7, -1.0, None), ("new", None)), ((400, 1.0, "x"), ("other", None))]
    shard.apply(P1, P2, {"pairs": run_of(PAIRS, [*gone, *new], [*hashes[:600], 7 << 55, 400 << 55])}, {})
    for per_prefix in (0, 10**6):
        monkeypatch.setattr(rocksdb_view, "SCAN_ROWS_PER_PREFIX", per_prefix)
        for wanted in ([7], [299, 7, 7, 500], list(range(300))):
            prefixes = keys_of(PAIRS.prefix(1), [(i,) for i in wanted], [i << 55 for i in wanted])
            found = {}
            for pointer in (P1, P2):
                with shard.view(pointer) as view:
                    runs = list(view.scan_prefix("pairs", prefixes))
                hashes_found = np.concatenate([run.hashes for run in runs])
                assert (hashes_found[1:] >= hashes_found[:-1]).all()
                found[pointer] = sorted(note for run in runs for note in run.values.column(0).to_pylist())
            assert found[P1] == sorted(str(i) for i in range(3000) if i % 300 in wanted)
            kept = [str(i) for i in range(600, 3000) if i % 300 in wanted]
            assert found[P2] == sorted([*kept, "new"])


def test_one_prefix_may_have_any_number_of_rows(shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of millions of elements does not come at once: it would be all in the memory of the state server."""
    written: list[tuple[Row, Row | None]] = [((i % 2, float(i), "x"), (str(i), None)) for i in range(200)]
    shard.apply(None, P1, {"pairs": run_of(PAIRS, written, [(i % 2) << 55 for i in range(200)])}, {})
    changed: list[tuple[Row, Row | None]] = [(key, None) for key, _ in written[:60]]
    changed += [((1, float(i), "y"), (f"new {i}", None)) for i in range(200)]
    shard.apply(P1, P2, {"pairs": run_of(PAIRS, changed, [int(key[0]) << 55 for key, _ in changed])}, {})
    monkeypatch.setattr(rocksdb_view, "SCAN_ROWS_PER_PREFIX", 0)
    monkeypatch.setattr(rocksdb_reads, "RUN_ROWS", 16)
    prefixes = keys_of(PAIRS.prefix(1), [(0,), (1,), (2,)], [0, 1 << 55, 2 << 55])
    kept = [str(i) for i in range(60, 200)]
    for pointer, wanted in ((P1, [str(i) for i in range(200)]), (P2, [*kept, *(f"new {i}" for i in range(200))])):
        with shard.view(pointer) as view:
            runs = list(view.scan_prefix("pairs", prefixes))
        assert sorted(note for run in runs for note in run.values.column(0).to_pylist()) == sorted(wanted)
        hashes = np.concatenate([run.hashes for run in runs])
        assert (hashes[1:] >= hashes[:-1]).all()
    assert max(map(len, runs)) == 16


@pytest.mark.parametrize(("name", "note"), [("x", "a note" * 100), ("a name" * 100, "x")], ids=["value", "key"])
def test_a_run_of_large_rows_has_few_of_them(
    shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch, name: str, note: str
) -> None:
    """Of rows of 1 MB, as of long arrays, the first thousand came at once; a timer is nothing but a key."""
    written: list[tuple[Row, Row | None]] = [((7, i / 8, name), (note, None)) for i in range(50)]
    shard.apply(None, P1, {"pairs": run_of(PAIRS, written, [7] * 50)}, {})
    monkeypatch.setattr(rocksdb_view, "SCAN_ROWS_PER_PREFIX", 0)
    monkeypatch.setattr(rocksdb_reads, "RUN_BYTES", 6000)
    with shard.view(P1) as view:
        assert [len(run) for run in view.scan("pairs")] == [10] * 5
        assert [len(run) for run in view.scan_prefix("pairs", keys_of(PAIRS.prefix(1), [(7,)], [7]))] == [10] * 5


def test_the_largest_hash_and_the_last_table_have_an_end(shard: RocksDBBackend) -> None:
    """Bounds of ranges: nothing of a neighbouring table is taken in, and nothing left out."""
    top = 2**64 - 1
    rows_: list[tuple[Row, Row | None]] = [((None, None, "z" * i), ("n", None)) for i in range(5)]
    shard.apply(
        None,
        P1,
        {
            "counts": run_of(COUNTS, [(("a",), (1,)), (("b",), (2,))], [0, top]),
            "pairs": run_of(PAIRS, rows_, [0, 0, top, top, top]),
        },
        {},
    )
    with shard.view(P1) as view:
        assert len(contents(view, "counts", top, top)) == 1
        assert len(contents(view, "pairs", top, top)) == 3
        assert len(contents(view, "pairs", 1, top - 1)) == 0
        assert len(contents(view, "counts", 1, 0)) == 0
        assert len(contents(view, "members")) == 0


@pytest.mark.slow(0.5)
def test_rows_are_estimated_from_few_of_them(shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each call of a shard, for a metric: meanwhile the state server reads nothing else."""
    read: list[int] = []
    keys_now = rocksdb_reads._keys

    def spied(*arguments: Any) -> list[bytes]:
        found = keys_now(*arguments)
        read.append(len(found))
        return found

    monkeypatch.setattr(rocksdb_reads, "_keys", spied)
    shard.apply(None, P1, counts(*((f"user {i}", i) for i in range(1000))), {})
    assert shard.statistics().rows == {"counts": 1000, "pairs": 0, "members": 0}
    shard.apply(P1, P2, counts(*((f"user {i}", i) for i in range(40_000))), {})
    read.clear()
    assert shard.statistics().rows["counts"] == pytest.approx(40_000, rel=0.2)
    assert sum(read) <= 1024


@pytest.mark.parametrize(("elements", "estimated"), [(3000, 3020), (20_000, 1024 * 16)])
def test_rows_that_share_a_hash_are_no_measure_of_the_others(
    shard: RocksDBBackend, elements: int, estimated: int
) -> None:
    """A long list in the first key would make it a number beyond all integers, which no metric can carry."""
    written: list[tuple[Row, Row | None]] = [((0, float(i), "x"), ("", None)) for i in range(elements)]
    written += [((1, float(i), "x"), ("", None)) for i in range(20)]
    shard.apply(None, P1, {"pairs": run_of(PAIRS, written, [int(key[0]) << 63 for key, _ in written])}, {})
    assert shard.statistics().rows["pairs"] == estimated
