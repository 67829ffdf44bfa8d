"""The log of changes: every key that a branch must undo, and no more memory than is allowed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.rocksdb import writes as rocksdb_writes
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.rocksdb.writes import ChangeLog, Written
from holdfast.backends.run import Run
from holdfast.errors import InvalidArgumentError
from holdfast.testing.state_rows import (
    COUNTS,
    P1,
    P2,
    P3,
    PAIRS,
    contents,
    counts,
    run_of,
)


def written(keys: list[bytes]) -> list[Written]:
    return Written.of(pa.array(keys, pa.large_binary()))


def keys_of_all(log: ChangeLog) -> list[bytes]:
    """In the order of hashes, which here is that of keys."""
    return [key for part in log.different_since(0) for key in part.keys.to_pylist()]


def is_mapped(folder: Path) -> bool:
    """Whether this process has files of a folder in its memory."""
    return f" {folder}/" in Path("/proc/self/maps").read_text()


def test_a_row_that_rocksdb_would_leave_out_is_refused(shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 GiB, each of whose columns is smaller: RocksDB takes the batch without it, and says nothing."""
    monkeypatch.setattr(rocksdb_writes, "ROW_BYTES_MAX", 120)
    shard.apply(None, P1, counts(("a" * 80, 1), ("b" * 80, 2)), {})
    for base, new in ((P1, P2), (None, P3)):
        with pytest.raises(InvalidArgumentError, match="larger than the backend 'rocksdb' takes"):
            shard.apply(base, new, counts(("c" * 100, 3)), {})
    assert shard.versions() == [P1]
    pairs = {"pairs": run_of(PAIRS, [((1, 0.5, "x"), ("n" * 100, None))])}
    with pytest.raises(InvalidArgumentError, match="larger than the backend 'rocksdb' takes"):
        shard.apply(P1, P2, pairs, {})
    shard.apply(P1, P2, counts(("c", 3)), {})
    with shard.view(P2) as view:
        assert len(contents(view, "counts")) == 3
        assert not contents(view, "pairs")


def test_a_row_that_could_not_travel_to_a_worker_is_refused(shard: RocksDBBackend) -> None:
    """It could be written, and never read: Arrow Flight refuses a batch of 2 GiB. (Nothing touches this memory.)"""
    size = 2**31
    offsets, zeros = np.array([0, size], np.int64), np.zeros(size, np.uint8)
    note = pa.Array.from_buffers(pa.large_string(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(zeros)])
    columns = run_of(PAIRS, [((1, 0.5, "x"), ("", None))]).batch.columns
    columns[PAIRS.columns.get_field_index("value.note")] = note
    row = Run(PAIRS, pa.RecordBatch.from_arrays(columns, schema=PAIRS.columns))
    shard.apply(None, P1, counts(("ann", 1)), {})
    with pytest.raises(InvalidArgumentError, match=r"keep less under one key.*size_bytes=2147.*limit_bytes=2146435072"):
        shard.apply(P1, P2, {"pairs": row}, {})
    assert shard.versions() == [P1]


@pytest.mark.slow(0.5)
def test_large_rows_are_undone_in_batches(shard: RocksDBBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of 100 KB, as of long arrays, 8,192 came at once: by a branch, a frozen older version, a clean end."""
    batches: list[int] = []
    write = rocksdb_writes.RowWriter._write

    def spied(writer: rocksdb_writes.RowWriter, marker: bytes | None) -> None:
        batches.append(writer._batch.size_in_bytes())
        write(writer, marker)

    monkeypatch.setattr(rocksdb_writes.RowWriter, "_write", spied)
    monkeypatch.setattr(rocksdb_writes, "BATCH_BYTES", 2000)
    monkeypatch.setattr(rocksdb_writes, "CHUNK_BYTES", 1000)

    def notes(text: str) -> dict[str, Run]:
        return {"pairs": run_of(PAIRS, [((i, 0.5, "x"), (text * 500, None)) for i in range(40)])}

    shard.apply(None, P1, notes("a"), {})
    shard.apply(P1, P2, notes("b"), {})
    shard.freeze(P1)
    shard.apply(P1, P3, counts(("ann", 1)), {})
    for pointer, texts in ((P1, {"a" * 500}), (P2, {"b" * 500}), (P3, {"a" * 500})):
        with shard.view(pointer) as view:
            assert {note for note, _ in contents(view, "pairs").values()} == texts
    shard.close()
    assert max(batches) < 4000


@pytest.mark.slow(1)
def test_a_long_run_is_not_kept_for_its_keys(shard: RocksDBBackend) -> None:
    """The log holds copies: a commit's columns go when it has ended, however long its version is read."""
    shard.apply(None, P1, counts(("ann", 0)), {})
    many = counts(*((f"user {i}", i) for i in range(100_000)))
    before = pa.total_allocated_bytes()
    shard.apply(P1, P2, many, {})
    (database,) = shard._shard.opened
    columns = many["counts"].batch.column(0)
    starts = {part.hashes.ctypes.data for part in database._log.since(0)}
    assert not any(columns.buffers()[1].address <= at < columns.buffers()[1].address + columns.nbytes for at in starts)
    assert pa.total_allocated_bytes() - before < rocksdb_writes.LOG_BYTES


@pytest.mark.slow(0.5)
def test_many_branches_of_one_version_do_not_multiply_their_changes(shard: RocksDBBackend) -> None:
    """Each undoes what all before it wrote, and notes each key once."""
    shard.apply(None, P1, counts(("ann", 0)), {})
    for i in range(100):
        shard.apply(P1, Pointer(2, f"b{i}"), counts(("ann", i), (f"u{i % 7}", i)), {})
    (database,) = shard._shard.opened
    assert max(len(part.keys) for part in database._log.since(0)) == 8
    assert len(database._log.since(0)) == 199
    with shard.view(P1) as view:
        assert contents(view, "counts") == {("ann",): (0,)}


def test_keys_without_those_that_are_written_again() -> None:
    """By table and by key: equal hashes of other keys, and ranges that touch, overlap or lie apart."""
    keys = [bytes([table]) + (i // 3).to_bytes(8, "big") + b"%d" % (i % 3) for table in (1, 2) for i in range(60)]
    first, second = written(keys)
    for rows in ([], [0], [59], range(10, 40), range(1, 60, 7), range(60)):
        again = [part for i in rows for part in written([keys[i]])] + written([b"\1" + b"\xff" * 9])
        expected = [key for i, key in enumerate(keys[:60]) if i not in rows]
        assert first.keys_without(again).to_pylist() == expected
        assert first.keys_without(written([keys[i] for i in rows])).to_pylist() == expected
        assert second.keys_without(again).to_pylist() == keys[60:]


@pytest.mark.usefixtures("small")
def test_a_repeated_attempt_leaves_nothing_of_the_dropped_one(shard: RocksDBBackend) -> None:
    """Some keys are written by both, some by one of them, some are deleted by either, in a version of many batches."""
    shard.apply(None, P1, counts(*((f"u{i}", i) for i in range(60))), {})
    dropped, kept = Pointer(2, "dropped"), Pointer(2, "kept")
    shard.apply(
        P1, dropped, {"counts": run_of(COUNTS, [((f"u{i}",), (-i,) if i % 4 else None) for i in range(50)])}, {}
    )
    shard.apply(dropped, P3, counts(*((f"new {i}", i) for i in range(20))), {})
    write = [((f"u{i}",), (1000,) if i % 3 else None) for i in range(20, 60)]
    shard.apply(P1, kept, {"counts": run_of(COUNTS, [*write, (("new 3",), (3,))])}, {})
    expected = {(f"u{i}",): (i if i < 20 else 1000,) for i in range(60) if i < 20 or i % 3} | {("new 3",): (3,)}
    with shard.view(kept) as view, shard.view(P1) as base, shard.view(P3) as other:
        assert contents(view, "counts") == expected
        assert contents(base, "counts") == {(f"u{i}",): (i,) for i in range(60)}
        assert len(contents(other, "counts")) == 60 + 20 - 13


def test_changes_beyond_the_limit_lie_in_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that stays for hours does not fill the memory, and its files go with the process."""
    log = ChangeLog(tmp_path)
    keys = [bytes([1]) + i.to_bytes(8, "big") + b"x" for i in range(100)]
    log.append(log.hold(written(keys[:50])))
    assert not is_mapped(tmp_path)
    monkeypatch.setattr(rocksdb_writes, "LOG_BYTES", 10)
    log.append(log.hold([*written(keys[50:60]), *written([]), *written(keys[60:])]))
    assert is_mapped(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert sorted(log.keys_since(0, 1, 40, 60)) == keys[40:61]
    assert sorted(log.keys_since(1, 1, 40, 60)) == keys[50:61]
    assert log.keys_since(2, 1, 0, 100) == log.keys_since(0, 2, 0, 100) == []
    log.append(log.hold(written(keys[:10] * 2)))
    assert keys_of_all(log) == keys
    log.trim(2)
    assert keys_of_all(log) == keys[:10]
    assert log.position == 3
    log.trim(3)
    assert not is_mapped(tmp_path)


def test_changes_are_forgotten_when_nobody_needs_them(shard: RocksDBBackend) -> None:
    """Versions that are dropped and closed leave nothing behind."""
    shard.apply(None, P1, counts(("ann", 0)), {})
    view = shard.view(P1)
    for version in range(2, 10):
        shard.apply(Pointer(version - 1, P1.commit_id) if version > 2 else P1, Pointer(version, P1.commit_id), {}, {})
        shard.drop([p for p in shard.versions() if p.version < version])
    (database,) = shard._shard.opened
    assert len(database._log._changes) == 8
    view.close()
    assert len(database._log._changes) == 0
