"""Keys of structs and lists: what may be null inside of them is no part of a table's schema, declared or stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends import schema
from holdfast.backends.base import Backend
from holdfast.backends.evolution import key_changes
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs, schema_of
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.backends.schema import decode_schemas, encode_schemas
from holdfast.mvcc import VersionedStore

A: dict[str, Any] = {"point": {"a": 1, "note": "x"}, "pairs": [{"a": 1.5}, {"a": 2.5}]}
B: dict[str, Any] = {"point": {"a": 2, "note": ""}, "pairs": []}
NULLS: dict[str, Any] = {"point": {"a": None, "note": "x"}, "pairs": [None, {"a": None}]}


def table(*, nullable: bool) -> TableSchema:
    point = pa.struct([pa.field("a", pa.int64(), nullable), pa.field("note", pa.string(), nullable)])
    pair = pa.struct([pa.field("a", pa.float64(), nullable)])
    key = pa.schema([("point", point), ("pairs", pa.list_(pa.field("element", pair, nullable)))])
    return TableSchema.of("t", key, pa.schema([("n", pa.int64())]))


def keys_of(*keys: dict[str, Any]) -> Keys:
    of = table(nullable=True)
    # Equal hashes, so that keys are compared.
    return Keys.of(of, np.zeros(len(keys), np.int64), pa.Table.from_pylist(list(keys), schema=of.key))


def values(*numbers: int) -> pa.Table:
    return pa.table({"n": numbers})


@pytest.fixture
def of_earlier_releases(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a context in which schemas are as releases had them that told such tables apart."""

    @contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr(schema, "_nullable_within", lambda field: field)
            yield

    return context


def test_it_is_one_schema(of_earlier_releases: Any) -> None:
    loose, strict = table(nullable=True), table(nullable=False)
    assert loose == strict
    assert not key_changes(loose, strict)
    assert keys_of(NULLS).columns.to_pylist() == [NULLS]
    with of_earlier_releases():
        stored = encode_schemas({"t": table(nullable=False)})
        columns = table(nullable=False).columns
    assert columns != loose.columns
    assert decode_schemas(stored) == {"t": loose}
    assert TableSchema.of_columns("t", columns) == loose


@pytest.mark.parametrize("trusted", [True, False])
def test_a_run_of_an_earlier_release_is_read(of_earlier_releases: Any, trusted: bool) -> None:
    """Its Arrow schema says where no null may be; keys are found in it, and it is merged with new ones."""
    sink = pa.BufferOutputStream()
    with of_earlier_releases():
        strict = table(nullable=False)
        rows = pa.Table.from_pylist([A, B], schema=strict.key)
        stored = Keys.of(strict, np.zeros(2, np.int64), rows)
        Run.build(strict, stored, values(1, 2).to_batches()[0]).write(sink)
    held = table(nullable=True)
    run = Run.read(sink.getvalue(), held, source="it", trusted=trusted)
    assert run.schema == held
    assert run.batch.schema == held.columns
    found = run.find(keys_of(B, NULLS, A))
    assert [run.values.column(0)[row].as_py() if row >= 0 else None for row in found] == [2, None, 1]
    merged = merge_runs([run, Run.build(held, keys_of(NULLS, A), values(3, 4).to_batches()[0])], drop_deletes=True)
    assert sorted(merged.values.column(0).to_pylist()) == [2, 3, 4]


def test_a_plug_in_reads_runs_of_an_earlier_release(of_earlier_releases: Any) -> None:
    """It keeps their columns in files of its own, and reads them as docs/backends.md says."""
    with of_earlier_releases():
        strict = table(nullable=False)
        rows = pa.Table.from_pylist([A, B], schema=strict.key)
        keys = Keys.of(strict, np.zeros(2, np.int64), rows)
        columns = Run.build(strict, keys, values(1, 2).to_batches()[0]).batch
    same = table(nullable=True)
    for held in (same, TableSchema.of("t", same.key, pa.schema([("n", pa.int64()), ("more", pa.int64())]))):
        run = Run(schema_of(columns.schema, held, source="it"), columns).projected(held)
        assert run.batch.schema == held.columns
        newer = Run.build(same, keys_of(NULLS, A), values(3, 4).to_batches()[0])
        merged = merge_runs([run, newer], drop_deletes=True)
        assert sorted(merged.values.column("n").to_pylist()) == [2, 3, 4]


@pytest.mark.parametrize("backend_class", [MemoryBackend, FilesystemBackend, RocksDBBackend])
def test_state_of_an_earlier_release_goes_on(
    tmp_path: Path, of_earlier_releases: Any, backend_class: type[Backend]
) -> None:
    """Old keys are found and written again, and new ones may have nulls where those had none."""
    with of_earlier_releases():
        strict = table(nullable=False)
        backend = backend_class(tmp_path / "shard", {"t": strict}, clock.new_id)
        with VersionedStore(backend).begin(None) as transaction:
            rows = pa.Table.from_pylist([A, B], schema=strict.key)
            transaction.put("t", Keys.of(strict, np.zeros(2, np.int64), rows), values(1, 2))
            pointer = transaction.commit()
        backend.close()
    backend = backend_class(tmp_path / "shard", {"t": table(nullable=True)}, clock.new_id)
    store = VersionedStore(backend)
    with store.begin(pointer) as transaction:
        found = transaction.get("t", keys_of(B, NULLS, A))
        assert found.values.column("n").to_pylist() == [2, None, 1]
        transaction.put("t", keys_of(NULLS, A), values(3, 4))
        pointer = transaction.commit()
    assert pointer is not None
    with store.read_at(pointer) as view:
        kept = [
            k | v for run in view.scan("t") for k, v in zip(run.keys.to_pylist(), run.values.to_pylist(), strict=True)
        ]
    assert sorted(kept, key=lambda row: row["n"]) == [B | {"n": 2}, NULLS | {"n": 3}, A | {"n": 4}]
    backend.close()
