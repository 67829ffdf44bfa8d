"""What tasks store of DataFrames, and what they refuse, without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, DataType, LongType, StringType, StructField, StructType

from holdfast.backends.schema import TableSchema, encode_schemas
from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.settings import Settings
from holdfast.snapshotter.savepoints.manifest import Piece
from holdfast.snapshotter.savepoints.pieces import read_piece
from holdfast.snapshotter.savepoints.savepoints import savepoint_folder
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.plan.grouping_keys import Grouping, Key
from holdfast.spark_integration.processor.state.timers import timer_tables
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.savepoints.writing import tables as writing_tables
from holdfast.spark_integration.savepoints.writing.tables import grouping_width
from holdfast.spark_integration.savepoints.writing.write import PieceCopier, TableWriter, run_of
from holdfast.spark_integration.timers import KeyTimers, first_due_ms, hashes_of_keys
from holdfast.spark_integration.ttl.expiry import expiring_tables

KEYS = pa.schema([("user", pa.string()), ("place", pa.int64())])
VALUES = pa.schema([("n", pa.int64())])


def sent(schema: TableSchema, shard: int, rows: list[tuple[object, ...]]) -> pa.RecordBatch:
    """Return rows as Spark sends them: hash, shard, and columns whose names say nothing."""
    columns = [pa.array(column) for column in zip(*rows, strict=True)]
    hashes = [pa.array(np.arange(len(rows), 0, -1)), pa.array([shard] * len(rows), pa.int32())]
    names = ["hash", "shard", *(f"c{i}" for i in range(len(columns)))]
    assert len(columns) == len(schema.key) + len(schema.value)
    return pa.record_batch([*hashes, *columns], names)


def written(folder: Path, tables: dict[str, TableSchema], *batches: pa.RecordBatch) -> list[dict[str, object]]:
    writer = TableWriter(Settings.parse({}, ["memory"]), str(folder), "one", "totals", encode_schemas(tables))
    return [row for batch in writer(iter(batches)) for row in batch.to_pylist()]


def pieces_of(row: dict[str, object]) -> list[Piece]:
    return [Piece.read(piece, "a piece") for piece in json.loads(str(row["pieces"]))]


def test_rows_are_sorted_and_stored_by_shard(tmp_path: Path) -> None:
    """A task may get two shards, in any order; each has its own pieces."""
    table = TableSchema.of("state", KEYS, VALUES)
    batches = [sent(table, shard, [("b", 1, 10), ("a", 2, None)]) for shard in (3, 1)]
    rows = written(tmp_path, {"state": table}, *batches)
    assert [(row["shard"], row["error"]) for row in rows] == [(1, None), (3, None)]
    assert [row["not_null"] for row in rows] == ['["key.user", "key.place"]'] * 2
    with open_storage(str(tmp_path)) as storage:
        (piece,) = pieces_of(rows[0])
        run = read_piece(savepoint_folder(storage, "one"), "totals", piece, table)
    assert run.batch.to_pydict() == {
        "hash": [1, 2],
        "deleted": [False, False],
        "key.user": ["a", "b"],
        "key.place": [2, 1],
        "value.n": [None, 10],
    }


def test_expiring_rows_are_also_stored_by_their_time(tmp_path: Path) -> None:
    """Those that never expire are not in the index."""
    tables = dict(expiring_tables("state", KEYS, VALUES))
    never = np.iinfo(np.int64).max
    rows = [("a", 1, 1, 900), ("b", 1, 1, 500), ("c", 1, 1, never), ("d", 1, 1, None)]
    (row,) = written(tmp_path, tables, sent(tables["state"], 0, rows))
    with open_storage(str(tmp_path)) as storage:
        folder = savepoint_folder(storage, "one")
        runs = [read_piece(folder, "totals", piece, tables[piece.table]) for piece in pieces_of(row)]
    assert [len(run) for run in runs] == [4, 2]
    assert (first_due_ms(runs[1]), hashes_of_keys(runs[1]).tolist()) == (500, [3, 4])
    assert runs[1].keys.column(0).to_pylist() == ["b", "a"]
    assert row["earliest_ms"] is None


def test_timers_of_both_kinds_get_their_order(tmp_path: Path) -> None:
    """One for each key, and any number of them."""
    one, many = dict(KeyTimers.tables(KEYS, "EventTimeTimeout")), dict(timer_tables(KEYS, "EventTime"))
    for name, tables in (("one", one), ("many", many)):
        rows = [("a", 1, 900), ("b", 1, 500)]
        (row,) = written(tmp_path / name, tables, sent(tables["timers"], 0, rows))
        assert (row["error"], row["earliest_ms"], len(pieces_of(row))) == (None, 500, 2)


def test_what_is_wrong_names_the_key(tmp_path: Path) -> None:
    table = TableSchema.of("state", KEYS, VALUES)
    hashes = np.array([7, 7, 7])
    rows = pa.table({"c0": ["a", "b", "a"], "c1": [1, 1, 1], "c2": [1, 2, 3]})
    with pytest.raises(InvalidArgumentError, match=r"occurs twice.*user='a', place=1"):
        run_of(table, hashes, rows)
    with pytest.raises(SchemaMismatchError, match="column 'n'"):
        run_of(table, hashes[:1], pa.table({"c0": ["a"], "c1": [1], "c2": ["many"]}))
    timers = dict(KeyTimers.tables(KEYS, "EventTimeTimeout"))
    (row,) = written(tmp_path, timers, sent(timers["timers"], 0, [("a", 1, 5), ("b", 1, None)]))
    assert "a timer has no time" in str(row["error"])
    assert row["pieces"] is None


def test_how_many_columns_an_operator_groups_by() -> None:
    """Whatever the variables and the columns are called."""
    keys = pa.schema([("entry.user", pa.string()), ("seq", pa.int64())])
    number = StructType().add("n", "integer")
    entry = StructType().add("a", "string").add("b", "string")
    variables = [
        StateVariable("a.b", "value", number),
        StateVariable("l.x", "list", number, ttl_ms=5),
        StateVariable("m", "map", number, entry),
    ]
    tables = {name: table for one in variables for name, table in one.tables(keys).items()}
    with_timers = tables | dict(timer_tables(keys, "EventTime"))
    for name in ("v.a.b", "l.l.x", "m.m"):
        assert grouping_width(with_timers[name], with_timers) == 2
    for name in ("v.a.b", "l.l.x"):
        assert grouping_width(tables[name], tables) == 2
    plain = StateVariable("m", "map", number, entry).tables(KEYS)
    assert grouping_width(plain["m.m"], plain) == 2


def test_what_may_be_null_inside_of_keys_may_differ_from_table_to_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One frame was computed and the other read from a file, say; other types are refused as before."""

    def keyed(data_type: DataType, is_nullable: bool) -> Any:
        return StructField("k", ArrayType(data_type, is_nullable))

    def resolved(frame: Any, _: object) -> Grouping:
        return Grouping([Key(frame, frame, "k")], [0])  # a frame is its only key

    monkeypatch.setattr(writing_tables, "resolve_keys", resolved)
    monkeypatch.setattr(writing_tables, "_state", lambda name, *_, **__: name)
    frames = {"a": keyed(LongType(), False), "b": keyed(LongType(), True)}
    assert writing_tables.tables_of_frames(frames, ["k"], "None") == ["a", "b"]
    with pytest.raises(InvalidArgumentError, match="the same keys"):
        writing_tables.tables_of_frames({**frames, "c": keyed(StringType(), True)}, ["k"], "None")


def test_a_damaged_piece_is_not_copied(tmp_path: Path) -> None:
    """Nor one that is gone; nothing of it appears in the copy."""
    table = TableSchema.of("state", KEYS, VALUES)
    (row,) = written(tmp_path, {"state": table}, sent(table, 0, [("a", 1, 1)]))
    (piece,) = pieces_of(row)
    copier = PieceCopier(Settings.parse({}, ["memory"]), str(tmp_path), "one", "two")
    task = pa.table([["totals"], [0], [json.dumps(piece.to_json())]], ["operator", "shard", "piece"])
    path = tmp_path / "one" / piece.key
    good = path.read_bytes()

    def error() -> str | None:
        (found,) = [row["error"] for batch in copier(iter(task.to_batches())) for row in batch.to_pylist()]
        return found

    path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    assert "CorruptionError" in str(error())
    path.unlink()
    assert "is missing" in str(error())
    assert not (tmp_path / "two").exists()
    path.write_bytes(good)
    assert error() is None
    assert (tmp_path / "two" / piece.key).read_bytes() == good
