"""Single steps of a shard call of job A with two shards. Run with ``make bench-micro``.

The call has 500,000 rows of about 316,000 keys; the state has 500,000 keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends import stored_file
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs
from holdfast.spark_integration.transport.output import pack_output, unpack_output
from holdfast.spark_integration.transport.packed import HASH, pack_rows, write_blob
from holdfast.spark_integration.vectorised.batch import group_rows

Step = Callable[[], Any]
ROWS, KEYS = 500_000, 500_000
_INT = pa.int64()
_SCHEMA = TableSchema.of("state", pa.schema([("key", _INT)]), pa.schema([("n", _INT), ("s", _INT)]))


@cache
def _rows() -> tuple[pa.Table, np.ndarray, np.ndarray]:
    """Return rows, their hashes, and the hashes of all keys."""
    chance = np.random.default_rng(0)
    space = chance.permutation(np.unique(chance.integers(0, 2**63, KEYS, dtype=np.uint64)))
    picked = chance.integers(0, len(space), ROWS)
    return pa.table({"key": pa.array(picked), "v": pa.array(picked % 100)}), space[picked], space


def _group_rows() -> Step:
    rows, hashes, _ = _rows()
    keys = _SCHEMA.conform(pa.table({"key": rows.column("key")}), "key")
    return partial(group_rows, rows, keys, hashes, _SCHEMA.key)


@cache
def _keys() -> Keys:
    keys: Keys = _group_rows()()[0]
    return keys


@cache
def _state() -> Run:
    space = _rows()[2]
    return _run(Keys.of(_SCHEMA, space, pa.table({"key": np.arange(len(space))})))


def _run(keys: Keys) -> Run:
    numbers = np.arange(len(keys))
    return Run.build(_SCHEMA, keys, _SCHEMA.conform(pa.table({"n": numbers, "s": numbers}), "value"))


def _encode(compression: str | None) -> Step:
    return partial(stored_file.encode, "commit", {}, {"state": partial(_run(_keys()).write, compression=compression)})


def _pack() -> Step:
    rows, hashes, _ = _rows()
    batches = rows.add_column(0, HASH, pa.array(hashes.view(np.int64))).to_batches(max_chunksize=100_000)
    return lambda: list(pack_rows(iter(batches), [0, 2], None))


def _pack_output_and_unpack() -> Step:
    out = _run(_keys()).values

    def there_and_back() -> None:
        for _ in pack_output([out]):
            blob = pa.RecordBatch.from_pydict({"blob": [write_blob(out.schema, [out])]})
            list(unpack_output([blob], 100_000))

    return there_and_back


def _find_of_one_hash() -> Step:
    numbers = np.arange(4_000)
    keys = Keys.of(_SCHEMA, np.full(len(numbers), 7, np.uint64), pa.table({"key": numbers}))
    return partial(_run(keys).find, keys)


# Factories of the steps by name, so that only selected steps are prepared.
STEPS: dict[str, Callable[[], Step]] = {
    "group rows": _group_rows,
    "find": lambda: partial(_state().find, _keys()),
    "find, all keys of one hash": _find_of_one_hash,
    "merge": lambda: partial(merge_runs, [_state(), _run(_keys())], drop_deletes=True),
    "encode": lambda: _encode(None),
    "encode, lz4": lambda: _encode("lz4"),
    "pack": _pack,
    "pack output and unpack": _pack_output_and_unpack,
}


@pytest.mark.parametrize("step", STEPS)
def test_step(benchmark: Any, step: str) -> None:
    benchmark.extra_info["operation"] = step
    benchmark(STEPS[step]())
