"""A run in several stretches answers as the same rows in one piece do."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.local.page_cache import MappedFile
from holdfast.backends.run import Keys, Run, TableSchema, read_stretches
from holdfast.backends.run_files import written_run
from holdfast.backends.run_files.written_run import WrittenRun
from holdfast.backends.run_stack import look_up
from holdfast.backends.stretched_run import StretchedRun
from holdfast.errors import InvalidArgumentError

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


def run_of(key: str, values: list[str], hashes: np.ndarray) -> Run:
    """Return a run with a key of one type; each third row is a delete."""
    n = len(hashes)
    columns = {name: VALUES[name][0] for name in values}
    schema = TableSchema.of("t", pa.schema([("k", VALUES[key][0]), ("i", pa.int64())]), pa.schema(columns))
    keys = keys_of(schema, key, hashes, np.arange(n))
    table = pa.table({name: pa.array([VALUES[name][1](i) for i in range(n)], columns[name]) for name in values})
    return Run.build(schema, keys, schema.conform(table, "value"), np.arange(n) % 3 == 0)


def keys_of(schema: TableSchema, key: str, hashes: np.ndarray, numbers: np.ndarray) -> Keys:
    made = [VALUES[key][1](int(i)) for i in numbers]
    table = pa.table({"k": pa.array(made, VALUES[key][0]), "i": numbers})
    return Keys.of(schema, hashes[numbers % len(hashes)], table)


def require_same(whole: Run, cut: StretchedRun, keys: Keys) -> None:
    expected, found = (look_up([run], keys, whole.schema) for run in (whole, cut))
    assert found.exists.tolist() == expected.exists.tolist()
    found.values.validate(full=True)
    assert found.values.to_pylist() == expected.values.to_pylist()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("key", [name for name in VALUES if name != "map"])
def test_values_of_every_type_are_found_by_keys_of_every_type(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Present, absent, beyond the last, several times, in any order, and none at all."""
    chance = np.random.default_rng(0)
    hashes = chance.integers(1 << 20, 1 << 62, ROWS).astype(np.uint64)
    whole = run_of(key, list(VALUES), hashes)
    cut = stretched(whole, tmp_path, whole.size_bytes // 37, monkeypatch)
    assert len(cut.parts) > 20
    assert len(cut) == len(whole) == ROWS
    numbers = chance.integers(0, ROWS, 500)
    require_same(whole, cut, keys_of(whole.schema, key, hashes, numbers))
    require_same(whole, cut, keys_of(whole.schema, key, hashes, np.unique(numbers)))
    require_same(whole, cut, keys_of(whole.schema, key, hashes, numbers + ROWS))  # of these hashes, other keys
    far = Keys(np.array([0, 1 << 63], np.uint64), keys_of(whole.schema, key, hashes, np.arange(2)).columns)
    require_same(whole, cut, far)
    require_same(whole, cut, keys_of(whole.schema, key, hashes, np.arange(0)))


@pytest.mark.usefixtures("place")
def test_rows_that_share_a_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers due at one time, elements of a list: such crowds stand in one stretch each."""
    hashes = np.sort(np.random.default_rng(1).integers(0, 60, ROWS)).astype(np.uint64)
    whole = run_of("text", ["int64", "text"], hashes)
    cut = stretched(whole, tmp_path, whole.size_bytes // 20, monkeypatch)
    assert len(cut.parts) > 10
    for numbers in (np.arange(0, 2 * ROWS, 7), np.arange(ROWS)[::-1]):
        require_same(whole, cut, keys_of(whole.schema, "text", hashes, numbers))


@pytest.mark.usefixtures("place")
def test_hashes_need_not_be_spread_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of timers are times: where they should stand is a guess."""
    chance = np.random.default_rng(2)
    hashes = np.sort(np.concatenate([chance.integers(0, 1 << 20, ROWS - 9), chance.integers(0, 1 << 63, 9)]))
    whole = run_of("text", ["int64", "text"], hashes.astype(np.uint64))
    cut = stretched(whole, tmp_path, whole.size_bytes // 7, monkeypatch)
    require_same(whole, cut, keys_of(whole.schema, "text", hashes.astype(np.uint64), chance.integers(0, ROWS, 900)))


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
    assert sum(mapped.are_cached(everywhere[i : i + 1]) for i in range(200)) < 60
    assert sum(len(part.values.column(0).cast(pa.large_binary())) for part in run.parts) == n


def test_a_floor_answers_for_the_keys_that_no_run_knows() -> None:
    """What a run has deleted is not asked for below; nor is what it has written."""
    hashes = np.arange(10, dtype=np.uint64)
    whole = run_of("int64", ["int64"], hashes)
    above = Run(whole.schema, whole.batch.slice(2, 3))
    asked: list[int] = []

    def floor(keys: Keys) -> Any:
        asked.extend(keys.hashes.tolist())
        return look_up([whole], keys, whole.schema)

    keys = keys_of(whole.schema, "int64", hashes, np.array([9, 3, 4, 1, 2, 0, 7]))
    found = look_up([above], keys, whole.schema, floor)
    expected = look_up([whole], keys, whole.schema)
    assert asked == [0, 1, 7, 9]
    assert (found.exists.tolist(), found.values) == (expected.exists.tolist(), expected.values)
    with pytest.raises(InvalidArgumentError):
        look_up([], keys, whole.schema, refuse)


def refuse(keys: Keys) -> Any:
    raise InvalidArgumentError("an error of the floor is passed on", keys=len(keys))
