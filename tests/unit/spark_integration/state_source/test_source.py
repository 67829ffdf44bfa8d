"""The data source of savepoints without Spark: what the driver says of a table, and what executors read."""

from __future__ import annotations

import decimal
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.executor import local_dirs, takeover
from holdfast.spark_integration.lookup.keys import key_option, shards_option
from holdfast.spark_integration.savepoints.restoring_shards import HashRange
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.spark_types import arrow_schema, spark_type
from holdfast.spark_integration.state_source import source
from holdfast.spark_integration.state_source.source import (
    QueryTable,
    ReadOptions,
    ShardPart,
    ShownTable,
    StateSource,
    StoragePlace,
    TableReader,
    columns_option,
    storage_options,
)
from holdfast.spark_integration.timers import timers_schema
from tests.faults.elsewhere import run_elsewhere
from tests.unit.snapshotter.savepoints.conftest import KEY, STATE, a_savepoint

ALL_TYPES = pa.schema(
    [
        ("s", pa.string()),
        ("b", pa.binary()),
        ("d", pa.decimal128(10, 2)),
        ("t", pa.timestamp("us", "UTC")),
        ("l", pa.list_(pa.field("element", pa.string()))),
        ("m", pa.map_(pa.string(), pa.list_(pa.field("element", pa.int32())))),
        ("r", pa.struct([("x", pa.float32()), ("y", pa.list_(pa.field("element", pa.binary())))])),
        ("i", pa.duration("us")),
        ("n", pa.int8()),
    ]
)
ROWS = [
    {
        "s": "a",
        "b": b"\0",
        "d": decimal.Decimal("1.50"),
        "t": 5,
        "l": ["x", None],
        "m": [("k", [1, None])],
        "r": {"x": 0.5, "y": [b"z"]},
        "i": 7,
        "n": -1,
    },
    dict.fromkeys(ALL_TYPES.names),
]


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target)
    return tmp_path / "one"


def rows_of(source: StateSource) -> list[dict[str, Any]]:
    reader = source.reader(source.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]  # type: ignore[union-attr]


def test_a_table_has_its_keys_values_and_shard(savepoint: Path) -> None:
    source = StateSource({"path": f"{savepoint}/", "operator": "totals"})
    assert source.schema().simpleString() == "struct<user:string,n:bigint,shard:int>"
    found = rows_of(source)
    assert len(found) == 200
    assert found[0] == {"user": "u0", "n": 0, "shard": 0}
    reader = source.reader(source.schema())
    (batch, *_) = reader.read(reader.partitions()[0])
    assert batch.schema == arrow_schema(source.schema(), "x")  # type: ignore[union-attr]


def test_every_type_of_state_goes_to_spark_and_keeps_its_values(tmp_path: Path) -> None:
    schema = TableSchema.of("state", pa.schema([("user", pa.int64())]), ALL_TYPES)
    values = pa.RecordBatch.from_pylist(ROWS, schema=schema.value)
    keys = Keys(np.arange(2, dtype=np.uint64), pa.record_batch([pa.array([1, 2])], schema=schema.key))
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target, tables=(schema,), run=Run.build(schema, keys, values))
    source = StateSource({"path": str(tmp_path / "one")})
    kept = [{name: row[name] for name in ALL_TYPES.names} for row in rows_of(source)[:2]]
    assert kept == pa.RecordBatch.from_pylist(ROWS, schema=ALL_TYPES).to_pylist()


def test_names_that_are_taken(tmp_path: Path) -> None:
    schema = TableSchema.of("state", KEY, pa.schema([("user", pa.int64()), ("shard", pa.int64())]))
    no_keys = Keys(np.zeros(0, np.uint64), pa.record_batch([pa.array([], pa.large_string())], schema=KEY))
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target, tables=(schema,), run=Run.build(schema, no_keys, None))
    names = StateSource({"path": str(tmp_path / "one")}).schema().names
    assert names == ["user", "value.user", "shard", "_shard"]


def test_names_that_are_taken_in_another_case(tmp_path: Path) -> None:
    """Spark does not tell them apart: no two columns of a read are the same to it."""
    value = pa.schema([(name, pa.int64()) for name in ("USER", "Shard", "n", "N", "Batch_ID")])
    key = pa.schema([(name, pa.int64()) for name in ("user", "User", "key.user")])
    schema = TableSchema.of("state", key, value)
    assert ShownTable.of(schema, changes=True).struct.names == [
        *("_batch_id", "change_type", "user", "key.User", "key.key.user"),
        *("value.USER", "Shard", "n", "value.N", "Batch_ID", "_shard"),
    ]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, InvalidArgumentError, "load the path of a savepoint"),
        ({"path": "one"}, InvalidArgumentError, "load the path of a savepoint"),
        ({"path": "{}", "batchid": "1"}, InvalidArgumentError, r"holdfast\.state.*option=batchId"),
        ({"path": "{}", "operatr": "totals"}, InvalidArgumentError, "no such option.*near=operator"),
        ({"path": "{}", "tabel": "1"}, InvalidArgumentError, "no such option.*near=table"),
        ({"path": "{}", "table": "a", "statevarname": "a"}, InvalidArgumentError, "one option"),
        ({"path": "{}", "columns": "n,n"}, InvalidArgumentError, "twice"),
        ({"path": "{}", "columns": "[1]"}, InvalidArgumentError, "the option columns must be"),
        ({"path": "{}", "columns": "[]"}, InvalidArgumentError, "names no column"),
        ({"path": "{}", "shards": "0-2"}, InvalidArgumentError, "no such shard"),
        ({"path": "{}", "shards": "1-0"}, InvalidArgumentError, "the option shards must look like"),
        ({"path": "{}", "shards": ","}, InvalidArgumentError, "the option shards must look like"),
        ({"path": "{}", "storage": "anon=true"}, InvalidArgumentError, "a JSON object"),
        ({"path": "{}", "columns": "n,m"}, NotFoundError, "no such column.*columns='user, n, shard'"),
        ({"path": "{}", "readchangefeed": "true"}, InvalidArgumentError, "needs changeStartBatchId"),
        ({"path": "{}", "readchangefeed": "true", "changestartbatchid": "0"}, InvalidArgumentError, "one version"),
        ({"path": "{}", "changestartbatchid": "0"}, InvalidArgumentError, "needs readChangeFeed"),
        ({"path": "{}", "statedir": "{}"}, InvalidArgumentError, "needs the options operator and stateDir"),
        ({"path": "{}", "statedir": "{}", "operator": "totals"}, InvalidArgumentError, "not the checkpoint location"),
        ({"path": "{}", "statedir": "{}", "batchid": "-1"}, InvalidArgumentError, "a whole number, 0 or more"),
        ({"path": "{}", "operator": "total"}, NotFoundError, "no such operator.*operators=totals"),
        ({"path": "{}", "table": "stat"}, NotFoundError, "no such table.*tables='state, v.a/b:c'"),
        ({"path": "{}-two"}, NotFoundError, r"no savepoint of this name.*holdfast\.state"),
    ],
)
def test_what_is_not_there_is_said(
    savepoint: Path, options: dict[str, str], error: type[HoldfastError], said: str
) -> None:
    with pytest.raises(error, match=said):
        StateSource({name: value.format(savepoint) for name, value in options.items()}).schema()


def test_shards_are_those_that_were_named(savepoint: Path) -> None:
    def read(**options: str) -> set[int]:
        return {row["shard"] for row in rows_of(StateSource({"path": str(savepoint), **options}))}

    assert [read(), read(shards="1"), read(shards="0-1"), read(shards="")] == [{0, 1}, {1}, {0, 1}, set()]
    assert read(shards=shards_option(np.arange(1))) == {0}


@pytest.mark.parametrize("given", ["0", 3, [-1], [True], [0.5], ["0"], None])
def test_what_is_no_list_of_shards(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="a list of whole numbers"):
        shards_option(given)


@pytest.mark.parametrize("given", ["n", 3, [], [1], None])
def test_what_is_no_list_of_columns(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="a list of names"):
        columns_option(given)


@pytest.mark.parametrize("given", [["user"], {1: "ann"}, "ann"])
def test_what_is_no_key(given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must name its columns"):
        key_option(given)


def test_names_of_storage_keep_their_case() -> None:
    """Spark hands names of options over in lower case; stores refuse such arguments."""
    given = {"key": "AKIA", "s3_additional_kwargs.ServerSideEncryption": "aws:kms", "client_kwargs.verify": "false"}
    options = storage_options(given)
    assert options["storage.key"] == "AKIA"
    handed_over = {name.lower(): value for name, value in options.items()}
    assert ReadOptions.parse({"path": "a/b", **handed_over}).storage == given


def test_columns_are_the_savepoints(savepoint: Path) -> None:
    source = StateSource({"path": str(savepoint)})
    with pytest.raises(InvalidArgumentError, match="has its own schema"):
        source.reader(StructType([StructField("user", StringType())]))


def test_columns_can_be_chosen(savepoint: Path) -> None:
    for columns in ("n , user", '["n", "user"]'):
        source = StateSource({"path": str(savepoint), "operator": "totals", "columns": columns})
        assert source.schema().names == ["n", "user"]
        assert rows_of(source)[3] == {"n": 3, "user": "u3"}


def test_a_variable_has_the_name_that_its_processor_gave_it(savepoint: Path) -> None:
    for name in ("table", "stateVarName"):
        assert StateSource({"path": str(savepoint), name: "a/b:c"}).schema().names == ["user", "n", "shard"]


def test_tables_by_time_are_holdfasts_own() -> None:
    """Their numbers have no type in Spark."""
    with pytest.raises(InvalidArgumentError, match="Spark has no type"):
        spark_type(timers_schema("t", STATE.key).value.field(0).type)


QUERY_STATE = TableSchema.of("state", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64())]))
ROW = PointerRow("5d1f", "totals", 0, 1, Pointer(7, "aa"), None, None, 0)


def killed_reading(state_dir: Path, local: Path) -> None:
    os.environ["SPARK_LOCAL_DIRS"] = str(local)
    source.read_tables = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]
    part = ShardPart(0, HashRange.of_shard(0, 1), "totals", ROW)
    stored = {"totals": StoredTables.of_first_run({"state": QUERY_STATE})}
    table = QueryTable(StoragePlace(str(state_dir), {}), stored, QUERY_STATE, ("user",), None, (part,))
    reader = TableReader(table, ShownTable.of(QUERY_STATE), None, None)
    list(reader.read(reader.partitions()[0]))


@pytest.mark.slow(1)
def test_what_a_killed_task_read_goes(tmp_path: Path) -> None:
    """A shard's snapshot, as large as that is, stayed on the executor's disk for good."""
    local = tmp_path / "local"
    local.mkdir()
    (tmp_path / "state").mkdir()
    process = run_elsewhere(killed_reading, tmp_path / "state", local)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(local.rglob("*"))
    takeover.remove_dead_executors(local, clock.now_ms())
    assert list(local.rglob("*")) == [local_dirs.user_directory(local)]
