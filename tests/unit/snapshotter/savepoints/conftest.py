"""A savepoint made by hand: two shards, small pieces, a table with a name that no key may have."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import xxhash

from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.snapshotter.savepoints.manifest import KEY as KEY_OF_MANIFEST
from holdfast.snapshotter.savepoints.manifest import (
    Piece,
    PlannedBatch,
    SavedOperator,
    SavedQuery,
    SavedSink,
    SavedSource,
    Savepoint,
    ShardTimes,
    SourceLog,
)
from holdfast.snapshotter.savepoints.savepoints import savepoint_folder, write_pieces
from holdfast.snapshotter.storage.object_storage import ObjectStorage

STATE = TableSchema.of("state", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64())]))
ODD = TableSchema.of("v.a/b:c", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64())]))
KEY = STATE.key


def a_run(schema: TableSchema, rows: int, first: int = 0) -> Run:
    hashes = np.arange(first, first + rows, dtype=np.uint64) << np.uint64(40)
    users = pa.record_batch([pa.array([f"u{i}" for i in range(rows)], pa.large_string())], schema=schema.key)
    return Run.build(
        schema, Keys(hashes, users), pa.record_batch([pa.array(range(rows), pa.int64())], schema=schema.value)
    )


def a_savepoint(
    target: ObjectStorage,
    name: str = "one",
    tables: tuple[TableSchema, ...] = (STATE, ODD),
    run: Run | None = None,
    maker: str = "",
) -> Savepoint:
    """Store a savepoint of two shards, whose pieces hold a few rows each: 100, or those of a run."""
    folder = savepoint_folder(target, name)
    pieces: list[Piece] = []
    for schema, shard in itertools.product(tables, range(2)):
        rows = a_run(schema, 100, 100 * shard) if run is None else run
        pieces += write_pieces(folder, "totals", shard, rows, 1000, maker)
    log = b'v1\n{"path":"a.parquet"}'
    folder.put("sources/0/3-0123456789abcdef", log)
    logs = (SourceLog("sources/0/3-0123456789abcdef", "3", len(log), xxhash.xxh3_128_hexdigest(log)),)
    folder.put("sources/0/4-0123456789abcdef", log)
    more = (SourceLog("sources/0/4-0123456789abcdef", "4", len(log), xxhash.xxh3_128_hexdigest(log)),)
    read, to_read = (
        (SavedSource("0", f'{{"logOffset":{n}}}', of), SavedSource("1", "-", ())) for n, of in ((3, logs), (4, more))
    )
    planned = PlannedBatch("v1", '{"conf":{}}', to_read)
    sinks = SavedSink("shown", 17, 8), SavedSink("new", 0, -1)
    query = SavedQuery("5d1f", 7, "v1", '{"conf":{}}', 1000, read, planned, sinks)
    schemas, times = {schema.name: schema for schema in tables}, (ShardTimes(0, None, 5), ShardTimes(1, -7, 6))
    declared = {schema.name: schema for schema in tables[:1]}
    about = schemas, declared, True, {"timeMode": "None"}, times, tuple(pieces)
    operator = SavedOperator("totals", 0, "applyInPandasWithState", True, 2, *about)
    made = Savepoint(name, "before the upgrade", 1_700_000_000_000, {"holdfast": "1"}, query, (operator,), ("dedupe",))
    folder.put(KEY_OF_MANIFEST, made.encode())
    return made
