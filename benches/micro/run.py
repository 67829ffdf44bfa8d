"""Single steps of a micro-batch of job A, one shard of two: 500,000 rows, some 316,000 keys, 500,000 in the state.

Run with ``make bench-micro``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends import stored_file
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs
from holdfast.spark_integration.transport.blobs import write_blob
from holdfast.spark_integration.transport.output import pack_output, unpack_output
from holdfast.spark_integration.transport.packed import pack_rows
from holdfast.spark_integration.transport.transport import HASH
from holdfast.spark_integration.vectorised.batch import group_rows

ROWS, KEYS = 500_000, 500_000
Benchmark = Callable[..., Any]
_INT = pa.int64()
_SCHEMA = TableSchema.of("state", pa.schema([("key", _INT)]), pa.schema([("n", _INT), ("s", _INT)]))


@dataclass(frozen=True)
class Data:
    """What the steps work on."""

    rows: pa.Table
    hashes: np.ndarray
    keys: Keys
    written: Run
    state: Run


@cache
def data() -> Data:
    """Return the same rows each time."""
    chance = np.random.default_rng(0)
    space = chance.permutation(np.unique(chance.integers(0, 2**63, KEYS, dtype=np.uint64)))
    picked = chance.integers(0, len(space), ROWS)
    rows = pa.table({"key": pa.array(picked), "v": pa.array(picked % 100)})
    keys, _, _ = group_rows(rows, _keys(rows.column("key")), space[picked], _SCHEMA.key)
    everything = Keys.of(_SCHEMA, space, pa.table({"key": np.arange(len(space))}))
    return Data(rows, space[picked], keys, _run(keys), _run(everything))


def _keys(column: pa.ChunkedArray) -> pa.RecordBatch:
    return _SCHEMA.conform(pa.table({"key": column}), "key")


def _run(keys: Keys) -> Run:
    numbers = np.arange(len(keys))
    return Run.build(_SCHEMA, keys, _SCHEMA.conform(pa.table({"n": numbers, "s": numbers}), "value"))


def test_group_rows(benchmark: Benchmark) -> None:
    """Sort rows by key and find the distinct keys."""
    rows = data().rows
    benchmark(group_rows, rows, _keys(rows.column("key")), data().hashes, _SCHEMA.key)


def test_find(benchmark: Benchmark) -> None:
    """Look the micro-batch's keys up in the state."""
    benchmark(data().state.find, data().keys)


def test_merge(benchmark: Benchmark) -> None:
    """Merge what was written into the state."""
    benchmark(merge_runs, [data().state, data().written], drop_deletes=True)


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_encode(benchmark: Benchmark, compression: str | None) -> None:
    """Encode what was written as a commit object."""
    write = partial(data().written.write, compression=compression)
    benchmark(stored_file.encode, "commit", {}, {"state": write})


def test_pack(benchmark: Benchmark) -> None:
    """Split rows by shard and write them as blobs."""
    rows = data().rows.add_column(0, HASH, pa.array(data().hashes.view(np.int64)))
    batches = rows.to_batches(max_chunksize=100_000)
    benchmark(lambda: list(pack_rows(iter(batches), [0, 2], None)))


def test_pack_output_and_unpack(benchmark: Benchmark) -> None:
    """Write the output as a blob and read it back as rows."""
    out = data().written.values

    def there_and_back() -> None:
        for _ in pack_output([out]):
            blob = pa.RecordBatch.from_pydict({"blob": [write_blob(out.schema, [out])]})
            list(unpack_output([blob], 100_000))

    benchmark(there_and_back)


def test_find_of_one_hash(benchmark: Benchmark) -> None:
    """Look up keys that all share one hash, as the elements of a list do."""
    n = 4_000
    numbers = np.arange(n)
    keys = Keys.of(_SCHEMA, np.full(n, 7, np.uint64), pa.table({"key": numbers}))
    benchmark(_run(keys).find, keys)
