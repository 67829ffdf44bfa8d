"""State as a table, one key of it, its changes, and its export to files and Delta tables."""

from __future__ import annotations

import datetime as dt
import math
import shutil
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructField, StructType, TimestampType

import holdfast
from holdfast import savepoints
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.commands.export import errors_of_spark, write
from holdfast.errors import ConflictError, InvalidArgumentError, NotFoundError, SchemaMismatchError, UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.lookup.keys import hash_of_key
from holdfast.spark_integration.sinks.delta import exporting
from holdfast.spark_integration.spark_types import arrow_schema
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import CASES, Case, run
from tests.tiers import cases
from tests.unit.snapshotter.savepoints.conftest import a_savepoint

pytestmark = pytest.mark.spark


def rows(table: pa.Table) -> list[str]:
    return sorted(map(repr, table.to_pylist()))


def shown(frame: DataFrame) -> list[str]:
    return rows(frame.drop("shard").toArrow())


@pytest.mark.parametrize("case", cases(CASES), ids=str)
def test_every_micro_batch_that_the_query_can_return_to(lab: Lab, case: Case) -> None:
    """State and timers, of every operator's kind, as `read_state` has them."""
    with configured(lab.spark, dict(case.settings)):
        for file in case.files()[:3]:
            lab.feed(file)
        batches = len(run(lab, case))
        where = (lab.spark, lab.folder / "query", case.operator)
        for table in (case.table, *(["timers"] if case.has_timers else [])):
            for batch in (0, batches - 1, None):
                expected = holdfast.read_state(*where, table=table, batchId=batch)
                assert shown(holdfast.state(*where, table=table, batchId=batch)) == rows(expected)


@pytest.mark.all
def test_a_read_stays_while_the_query_runs_and_cleans_up(lab: Lab) -> None:
    """A DataFrame is of one micro-batch; one that Spark has purged is an error."""
    case = CASES[0]
    files = case.files()
    with configured(lab.spark, {"spark.sql.streaming.minBatchesToRetain": "2"}):
        lab.feed(files[0])
        frame = case.query(lab.source(case.schema))
        writer = frame.writeStream.format("noop").outputMode("update")
        query = writer.option("checkpointLocation", str(lab.folder / "query")).start()
        try:
            query.processAllAvailable()
            first = holdfast.state(lab.spark, lab.folder / "query", "totals")
            before = shown(first)
            for file in files[1:]:
                lab.feed(file)
                query.processAllAvailable()
                assert shown(first) == before
            for file in files:
                lab.feed(file)
            query.processAllAvailable()
            last = holdfast.state(lab.spark, lab.folder / "query", "totals")
        finally:
            query.stop()
        assert shown(last) == rows(holdfast.read_state(lab.spark, lab.folder / "query", "totals"))
        assert shown(last) != before
        with pytest.raises(NotFoundError, match="Spark has purged it"):
            holdfast.state(lab.spark, lab.folder / "query", "totals", batchId=0)


@pytest.mark.all
def test_an_operator_without_state(lab: Lab) -> None:
    """No key that is left, in either of the shards: no rows, with all columns."""

    def forget(batch: holdfast.ShardBatch) -> pa.Table:
        batch.state.put(n=batch.groups.count(), total=batch.groups.sum("v"))
        batch.state.delete()
        return batch.keys.append_column("n", batch.groups.count()).append_column("total", batch.groups.sum("v"))

    lab.feed([("a", 1), ("b", 2)])
    lab.run(lab.totals(func=forget))
    found = holdfast.state(lab.spark, lab.folder / "query", "totals")
    assert (found.columns, found.count()) == (["key", "n", "total", "shard"], 0)


@pytest.mark.all
def test_what_cannot_be_is_said(lab: Lab) -> None:
    lab.feed([("a", 1)])
    lab.run(lab.totals())

    def of(operator: str = "totals", **options: Any) -> DataFrame:
        return holdfast.state(lab.spark, lab.folder / "query", operator, **options)

    changes: dict[str, Any] = {"readChangeFeed": True, "changeStartBatchId": 0}
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (NotFoundError, "no state of this operator.*did you mean 'totals'", {"operator": "total"}),
        (NotFoundError, "Spark has purged it", {"batchId": 7}),
        (InvalidArgumentError, "a whole number, 0 or more", {"batchId": -1}),
        (InvalidArgumentError, "need readChangeFeed", {"changeStartBatchId": 1}),
        (InvalidArgumentError, "needs changeStartBatchId", {"readChangeFeed": True}),
        (InvalidArgumentError, "instead of batchId", changes | {"batchId": 0}),
        (InvalidArgumentError, "ends before it begins", changes | {"changeStartBatchId": 1, "changeEndBatchId": 0}),
        (InvalidArgumentError, "changeEndBatchId must be a whole number", changes | {"changeEndBatchId": "1"}),
        (InvalidArgumentError, "a list of names", {"columns": "key"}),
        (InvalidArgumentError, "a list of names", {"columns": []}),
        (InvalidArgumentError, "a list of whole numbers", {"shards": [-1]}),
        (InvalidArgumentError, "no such shard", {"shards": [99]}),
        (NotFoundError, "^no such table", {"table": "timers"}),
        (NotFoundError, "^no such column", {"columns": ["k"]}),
    ]
    for error, message, options in refused:
        with pytest.raises(error, match=message):
            of(**options)
    assert of(shards=[]).collect() == []
    with pytest.raises(InvalidArgumentError, match="not the checkpoint location of a query"):
        holdfast.state(lab.spark, lab.folder / "input", "totals")


def test_a_key_is_read_from_its_shard(lab: Lab) -> None:
    """The other shards' objects are gone, so whoever reads one of them fails."""
    lab.configure({"shards": "8", "commit.carriedBytes": "0"})
    lab.feed([(f"k{i}", i) for i in range(200)] + [(None, 7)])
    lab.run(lab.totals())

    def state(**options: Any) -> DataFrame:
        return holdfast.state(lab.spark, lab.folder / "query", "totals", **options)

    everything = state()
    (row,) = everything.where("key = 'k7'").collect()
    (nobody,) = everything.where("key is null").collect()
    stored = list((lab.folder / "durable/totals").glob("shard-*"))

    assert len(stored) == 8
    for shard in stored:
        if shard.name not in (f"shard-{row['shard']:04d}", f"shard-{nobody['shard']:04d}"):
            shard.rename(lab.folder / shard.name)
    assert state(key={"key": "k7"}).collect() == [row]
    assert state(key={"key": None}, columns=["total"]).collect() == [(7,)]
    assert state(key={"key": "nobody's"}, shards=[row["shard"]]).collect() == []
    assert row in (found := state(shards=[row["shard"]]).collect())
    assert {one["shard"] for one in found} == {row["shard"]}
    with pytest.raises(PySparkException, match="not in the state directory"):
        everything.collect()
    for key in ({"k": "k7"}, {"key": "k7", "n": 1}, {"key": 7}):
        with pytest.raises(InvalidArgumentError, match="key"):
            state(key=key)


def test_spark_finds_the_source_by_itself(lab: Lab) -> None:
    """In a session where nobody has registered it, in SQL too."""
    case = CASES[0]
    lab.feed(case.files()[0])
    run(lab, case)
    from holdfast import savepoints

    savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    session = lab.spark.newSession()
    path = str(lab.folder / "savepoints/one")
    found = session.read.format("holdfast").option("operator", "totals").load(path)
    expected = rows(holdfast.read_state(lab.spark, lab.folder / "query", "totals"))
    assert shown(found) == expected
    session.sql(f"CREATE TEMPORARY VIEW saved USING holdfast OPTIONS (path '{path}', columns 'carrier,n')")
    assert rows(session.table("saved").toArrow()) == expected
    holdfast.register(session)
    holdfast.register(session)
    assert shown(session.read.format("holdfast").load(path)) == expected


UTC = dt.UTC
#: By type: values that hashes, or their way through filters, might get wrong.
VALUES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "tinyint": [-128, 127],
    "smallint": [-32768, 5],
    "int": [-(2**31), 2**31 - 1],
    "bigint": [-(2**63), 2**63 - 1, 0],
    "float": [-0.0, math.nan, 1.1, math.inf],
    "double": [-0.0, math.nan, 1.1, -math.inf],
    "string": ["", "a", "日本語" * 20, "\0x"],
    "binary": [b"", b"\0\xff" * 40],
    "date": [dt.date(1969, 12, 31), dt.date(2026, 11, 23)],
    "timestamp": [dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), dt.datetime(2026, 11, 23, 1, 2, 3, 4, UTC)],
    "timestamp_ntz": [dt.datetime(1969, 12, 31, 23, 59, 59, 1), dt.datetime(2026, 11, 23, 1, 2, 3, 4)],  # noqa: DTZ001
    "decimal(10,2)": [Decimal("-1.50"), Decimal("12345678.90")],
    "decimal(18,0)": [Decimal(10**18 - 1), Decimal(-1)],
    "decimal(38,3)": [Decimal("-0.128"), Decimal("0.128"), Decimal("12345678901234567890.125"), Decimal("-1e30")],
    "decimal(38,0)": [Decimal(12345678901234567890123456789012345678), Decimal(1 - 10**38)],
    "interval day to second": [dt.timedelta(days=-3, microseconds=7)],
    "array<string>": [["a", None, ""], [], [None]],
    "struct<x:double,y:array<int>>": [{"x": -0.0, "y": [1, None]}, {"x": math.nan, "y": None}, {"x": None, "y": []}],
}


#: Spark keeps filters on intervals to itself, rounds long decimals in them, and nested columns are left to it.
LEFT_TO_SPARK = ("interval", "decimal(38,0)", "array", "struct")
FILTERED = {kind: values for kind, values in VALUES.items() if not kind.startswith(LEFT_TO_SPARK)}


def keys_of(spark: SparkSession) -> tuple[pa.Schema, pa.RecordBatch, list[int]]:
    """Return keys with a column of each type, in storage types, and Spark's hashes of them."""
    types = [StructType.fromDDL(f"c {kind}")["c"].dataType for kind in FILTERED]
    schema = StructType([StructField(f"c{i}", t) for i, t in enumerate(types)])
    rows = [tuple(values[n % len(values)] for values in FILTERED.values()) for n in range(12)]
    rows.append(tuple(None for _ in types))
    frame = spark.createDataFrame(rows, schema)
    hashes = [row[0] & (2**64 - 1) for row in frame.select(F.xxhash64(*frame.columns)).collect()]
    table = TableSchema.of("state", arrow_schema(schema, "keys"), pa.schema([("n", pa.int64())]))
    given = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], arrow_schema(schema, "k"))
    return table.key, Keys.of(table, np.array(hashes, np.uint64), given).columns, hashes


def test_hashes_are_sparks(spark: SparkSession) -> None:
    for kind, values in VALUES.items():
        schema = StructType.fromDDL(f"c {kind}")
        frame = spark.createDataFrame([(value,) for value in [*values, None]], schema)
        expected = [row[0] & (2**64 - 1) for row in frame.select(F.xxhash64("c")).collect()]
        table = TableSchema.of("t", arrow_schema(schema, "t"), pa.schema([]))
        given = pa.table({"c": pa.array([*values, None], arrow_schema(schema, "t").field("c").type)})
        column = table.conform(given, "key").column(0)
        assert [hash_of_key([value]) for value in column] == expected, kind
    _, keys, hashes = keys_of(spark)
    assert [hash_of_key([column[row] for column in keys.columns]) for row in range(len(hashes))] == hashes


def test_what_spark_does_not_hash_is_not_hashed_here() -> None:
    """Grouping by maps is refused."""
    assert hash_of_key([pa.scalar([("a", 1)], pa.map_(pa.large_string(), pa.int64()))]) is None
    assert hash_of_key([pa.scalar(None, pa.map_(pa.large_string(), pa.int64()))]) is None


@pytest.mark.all
def test_a_key_of_every_type_finds_its_row(lab: Lab) -> None:
    """Reading only the piece that may have the key."""
    key, columns, hashes = keys_of(lab.spark)
    schema = TableSchema.of("state", key, pa.schema([("n", pa.int64())]))
    run = Run.build(
        schema,
        Keys(np.array(hashes, np.uint64), columns),
        pa.record_batch([pa.array(range(len(hashes)), pa.int64())], schema=schema.value),
    )
    with open_storage(str(lab.folder)) as target:
        made = a_savepoint(target, tables=(schema,), run=run)
    everything = savepoints.load(lab.spark, lab.folder, "one")
    by_n = {row["n"]: row for row in everything.collect() if row["shard"] == 0}
    for n in (0, 1, 2, len(hashes) - 1):
        others = [
            lab.folder / "one" / piece.key
            for piece in made.operators[0].pieces
            if not piece.first_hash <= hashes[n] <= piece.last_hash
        ]
        assert others
        for path in others:
            path.rename(path.with_suffix(".away"))
        looked_up = {name: by_n[n][name] for name in key.names}
        for name, value in looked_up.items():  # `collect` shows times in the zone of this process
            if isinstance(value, dt.datetime) and isinstance(everything.schema[name].dataType, TimestampType):
                looked_up[name] = value.astimezone(UTC)
        assert {row["n"] for row in savepoints.load(lab.spark, lab.folder, "one", key=looked_up).collect()} == {n}
        for path in others:
            path.with_suffix(".away").rename(path)


State = dict[Any, tuple[Any, ...]]


def last_or_forget(batch: holdfast.ShardBatch) -> pa.Table:
    """Keep count and sum of each key, and forget those whose rows are negative."""
    total = batch.groups.sum("v")
    batch.state.put(n=batch.groups.count(), total=total)
    batch.state.delete(where=pa.compute.less(total, 0))
    return batch.keys.append_column("n", batch.groups.count()).append_column("total", total)


def feed(lab: Lab, first: int, last: int | None = None, **options: Any) -> DataFrame:
    options |= {"readChangeFeed": True, "changeStartBatchId": first, "changeEndBatchId": last}
    return holdfast.state(lab.spark, lab.folder / "query", "totals", **options)


def state(lab: Lab, batch: int) -> State:
    rows = holdfast.state(lab.spark, lab.folder / "query", "totals", batchId=batch).collect() if batch >= 0 else []
    return {row["key"]: (row["n"], row["total"], row["shard"]) for row in rows}


def applied(before: State, changes: list[Any]) -> State:
    after = dict(before)
    for row in sorted(changes, key=lambda row: row["batch_id"]):
        assert row["change_type"] in ("update", "delete")
        if row["change_type"] == "update":
            after[row["key"]] = (row["n"], row["total"], row["shard"])
        else:
            assert (row["n"], row["total"]) == (None, None)
            after.pop(row["key"], None)
    return after


@pytest.mark.parametrize("carried", cases(["0", "64k"], quick=1))
def test_changes_applied_to_a_state_give_the_next(lab: Lab, carried: str) -> None:
    """Between any two micro-batches, with commits of their own and with those that travel together."""
    lab.configure({"commit.carriedBytes": carried})
    chance = Random(0)
    keys = [None, "", *(f"k{i}" for i in range(10))]
    batches = 5
    for _ in range(batches):
        lab.feed([(chance.choice(keys), chance.choice([-5, 1, 2])) for _ in range(chance.randint(1, 9))])
    lab.run(lab.totals(func=last_or_forget))
    states = {batch: state(lab, batch) for batch in range(-1, batches)}
    ranges = [(first, last) for first in range(batches) for last in range(first, batches)]
    for first, last in cases(ranges, quick=6):
        changes = feed(lab, first, last)
        assert changes.columns == ["batch_id", "change_type", "key", "n", "total", "shard"]
        rows = changes.collect()
        assert applied(states[first - 1], rows) == states[last], (first, last)
        assert all(first <= row["batch_id"] <= last for row in rows)
        if carried == "0":
            # Each micro-batch by itself: exactly the keys that it wrote.
            for batch in range(first, last + 1):
                names = {row["key"] for row in rows if row["batch_id"] == batch}
                written = {key for key in keys if states[batch].get(key) != states[batch - 1].get(key)}
                assert written <= names


@pytest.mark.all
def test_nothing_has_changed_after_the_last_micro_batch(lab: Lab) -> None:
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    assert feed(lab, 1).collect() == []
    assert [row["key"] for row in feed(lab, 0, columns=["key"]).collect()] == ["a"]


def test_a_feed_that_begins_too_early_says_where_it_may(lab: Lab) -> None:
    """Commits that were cleaned up are named before any task runs, and in the task if they go meanwhile."""
    lab.configure({"commit.carriedBytes": "0", "shards": "1"})
    for batch in range(4):
        lab.feed([("a", batch), (f"k{batch}", 1)])
    lab.run(lab.totals())
    early = feed(lab, 0)
    commits: list[Path] = lab.commits()
    assert len(commits) == 4
    for commit in commits[:2]:
        commit.unlink()
    with pytest.raises(NotFoundError, match="begin with micro-batch 2 or a later one"):
        feed(lab, 0)
    with pytest.raises(PySparkException, match="begin with micro-batch 2 or a later one"):
        early.collect()
    assert {row["key"] for row in feed(lab, 2).collect()} == {"a", "k2", "k3"}


def files(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.glob(f"*.{ending}"))


def test_parquet_and_csv_hold_the_state(lab: Lab) -> None:
    """Text with line ends, quotes and commas too; a directory that is there is not written to."""
    lab.feed([("a,b", 1), ('"quoted"', 2), ("two\nlines", -3)])
    lab.run(lab.totals())
    expected = sorted(map(repr, holdfast.read_state(lab.spark, lab.folder / "query", "totals").to_pylist()))
    state = holdfast.state(lab.spark, lab.folder / "query", "totals", columns=["key", "n", "total"])
    write(state, str(lab.folder / "parquet"), "parquet")
    assert sorted(map(repr, pq.read_table(lab.folder / "parquet").to_pylist())) == expected
    write(state.coalesce(1), str(lab.folder / "csv"), "csv")
    (file,) = files(lab.folder / "csv", "csv")
    parsed = csv.read_csv(file, parse_options=csv.ParseOptions(newlines_in_values=True, escape_char="\\"))
    assert sorted(map(repr, parsed.to_pylist())) == expected
    with pytest.raises(InvalidArgumentError, match="already exists"), errors_of_spark():
        write(state, str(lab.folder / "csv"), "csv")


@pytest.mark.all
def test_a_delta_table_holds_the_state(lab: Lab) -> None:
    """In one transaction, with what lets readers pass over files; a directory that is not empty is left alone."""
    lab.feed([("a,b", 1), ("two\nlines", -3), (None, 4)])
    lab.run(lab.totals())
    state = holdfast.state(lab.spark, lab.folder / "query", "totals")
    where = lab.folder / "delta"
    write(state, str(where), "delta")
    expected = holdfast.read_state(lab.spark, lab.folder / "query", "totals").to_pylist()
    table = DeltaTable(str(where))
    shown = pa.table(table.to_pyarrow_table()).drop_columns(["shard"])
    assert sorted(map(repr, shown.to_pylist())) == sorted(map(repr, expected))
    assert table.version() == 0
    described = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    assert sum(file["num_records"] for file in described) == 3
    assert min(file["min.n"] for file in described) == 1
    before = sorted(where.rglob("*"))
    with pytest.raises(ConflictError, match="is not empty"):
        write(state, str(where), "delta")
    assert sorted(where.rglob("*")) == before


@pytest.mark.all
def test_a_delta_table_of_no_rows_and_of_every_type(lab: Lab) -> None:
    """A reader finds the columns even where there is no file."""
    frame = lab.spark.sql(
        "SELECT 1 AS n, array(1) AS list, named_struct('a', 1) AS inner, map('k', 2) AS by, X'00' AS raw, "
        "timestamp'2026-01-01 00:00:00' AS at, timestamp_ntz'2026-01-01 00:00:00' AS clock, 1.5BD AS amount, "
        "5 AS `value.n`"
    )
    write(frame, str(lab.folder / "typed"), "delta")
    write(frame.where("n > 1"), str(lab.folder / "empty"), "delta")
    typed, empty = (DeltaTable(str(lab.folder / name)) for name in ("typed", "empty"))
    assert typed.schema() == empty.schema()
    assert (empty.file_uris(), len(typed.file_uris())) == ([], 1)
    (row,) = pa.table(typed.to_pyarrow_table()).to_pylist()
    (sparks,) = frame.toArrow().to_pylist()
    assert repr(row) == repr(sparks)


def test_an_export_that_fails_takes_its_files_away(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its table is there, because only the reply to the commit was lost."""
    frame, make = lab.spark.range(3), exporting.create_table_with_add_actions

    def lose(*given: object, **options: object) -> None:
        if where.name == "made":
            make(*given, **options)  # type: ignore[arg-type]
        if where.name == "taken":
            DeltaTable.create(where, pa.schema([("id", pa.int64())]))
            make(*given, **options)  # type: ignore[arg-type]
        raise KeyboardInterrupt if where.name == "interrupted" else OSError("the connection was closed")

    monkeypatch.setattr(exporting, "create_table_with_add_actions", lose)
    where = lab.folder / "failed"
    with pytest.raises(UnavailableError, match="the connection was closed"):
        write(frame, str(where), "delta")
    assert not list(where.rglob("*.parquet"))
    where = lab.folder / "taken"
    with pytest.raises(ConflictError, match="another writer"):
        write(frame, str(where), "delta")
    assert (DeltaTable(str(where)).version(), list(where.rglob("*.parquet"))) == (0, [])
    where = lab.folder / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        write(frame, str(where), "delta")
    assert not list(where.rglob("*.parquet"))
    where = lab.folder / "made"
    write(frame, str(where), "delta")
    assert DeltaTable(str(where)).to_pyarrow_table().num_rows == 3
    with pytest.raises(SchemaMismatchError, match="column=d type=duration"):
        write(lab.spark.sql("SELECT interval '1' day AS d"), str(lab.folder / "typed"), "delta")
    assert not (lab.folder / "typed").exists()


def test_what_a_repeated_task_has_left_is_taken_away(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no part of the table, and nobody else would delete it. The URL is one as Spark writes them."""
    make = exporting.create_table_with_add_actions

    def make_later(*given: object, **options: object) -> None:
        (written,) = where.glob("*.parquet")
        shutil.copy(written, written.with_stem(f"{written.stem}-again"))
        make(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(exporting, "create_table_with_add_actions", make_later)
    where = lab.folder / "repeated"
    write(lab.spark.range(3).coalesce(1), f"file:{where}", "delta")
    assert [Path(file) for file in DeltaTable(str(where)).file_uris()] == list(where.glob("*.parquet"))


@pytest.mark.all
def test_errors_of_spark_say_what_went_wrong_in_a_worker(lab: Lab) -> None:
    """Of a traceback the last line; Spark's own first line only says that there was one."""

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        raise ModuleNotFoundError("No module named 'deltalake'")

    with (
        pytest.raises(UnavailableError, match=r"^ModuleNotFoundError: No module named 'deltalake'$"),
        errors_of_spark(),
    ):
        lab.spark.range(1).mapInArrow(fail, "id long").collect()


def test_errors_say_what_holdfast_said(lab: Lab) -> None:
    with pytest.raises(NotFoundError, match=r"^no savepoint of this name exists"), errors_of_spark():
        lab.spark.read.format("holdfast").load(str(lab.folder / "nothing"))
