"""What is read without Spark is what Spark reads, at every micro-batch that is kept, by the query's location alone."""

from __future__ import annotations

import datetime as dt
import json
import math
import shutil
import threading
from collections.abc import Iterator
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast import savepoints
from holdfast.cli import group
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.lookup.places import find_state_dir
from holdfast.spark_integration.lookup.query_pointers import QueryPointers
from tests.faults.executor_process import eventually
from tests.spark.conftest import Lab, count
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import CASES, Case, read_by_spark
from tests.tiers import cases

pytestmark = pytest.mark.spark

STORE = "spark.sql.streaming.stateStore"
ROCKSDB = {f"{STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"}
CHANGELOG = ROCKSDB | {f"{STORE}.rocksdb.changelogCheckpointing.enabled": "true", f"{STORE}.minDeltasForSnapshot": "3"}
OFTEN = {f"{STORE}.maintenanceInterval": "500ms", f"{STORE}.minDeltasForSnapshot": "3"}
STORES = {
    "files": OFTEN,
    "files, zstd": {f"{STORE}.compression.codec": "zstd"},
    "rocksdb": ROCKSDB,
    "rocksdb, changelog": CHANGELOG | OFTEN,
}


class Holding(StatefulProcessor):
    """Has a variable of each kind."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", "n long, s string")
        self.seen = handle.getListState("seen", "v long")
        self.counts = handle.getMapState("counts", "v long", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.value.update((row.v, f"v{row.v}"))
            self.seen.appendValue((row.v,))
            self.counts.updateValue((row.v,), (1 + (self.counts.getValue((row.v,)) or (0,))[0],))
        if self.value.get()[0] % 5 == 0:
            self.value.clear()
        yield Row(key=key[0])


def feed(lab: Lab, files: int) -> None:
    for file in range(files):
        lab.feed([(f"u{(file * 7 + i) % 20}" if i else None, file + i) for i in range(10)])


def of_processor(lab: Lab) -> DataFrame:
    return (
        holdfast.stream(lab.source())
        .groupBy("key")
        .transformWithState(Holding(), "key string", "update", "None", name="totals")
    )


def require_the_same_pointers(lab: Lab) -> None:
    with open_storage(str(lab.folder / "query")) as location:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(4) as executor:
            pointers = QueryPointers(location, executor)
            committed = pointers.log.committed()
            for batch_id in {committed[0], committed[len(committed) // 2], committed[-1]}:
                by_spark = read_by_spark(lab.spark, lab.folder / "query", batch_id)
                wanted = {number: rows for number, _, _, rows in by_spark if rows is not None}
                found = {held.operator.number: sorted(held.rows) for held in pointers.held(batch_id)}
                assert found == wanted
                # One shard's is in one partition.
                (rows,) = wanted.values()
                (part,) = pointers.of_shards(batch_id, [rows[0].shard])
                assert rows[0] in part.rows


def require_the_same_rows(lab: Lab, operator: str, table: str, batch_id: int | None = None) -> pa.Table:
    """Look up every key of a table, one by one and together; return the table."""
    whole = holdfast.read_state(lab.spark, lab.folder / "query", operator, table=table, batchId=batch_id)
    with holdfast.open_query(lab.folder / "query", lab.folder / "durable") as query:
        grouping = query.operator(operator, batch_id).grouping
        keys = [
            json.loads(text)
            for text in {json.dumps(key, default=str) for key in whole.select(list(grouping)).to_pylist()}
        ]
        (found,) = query.get(operator, keys, table=table, batch_id=batch_id).values()
        assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, whole.to_pylist()))
        for key in keys[:5]:
            (one,) = query.get(operator, key, table=table, batch_id=batch_id).values()
            wanted = [
                row
                for row in whole.to_pylist()
                if {name: json.loads(json.dumps(row[name], default=str)) for name in grouping} == key
            ]
            assert sorted(map(repr, one.to_pylist())) == sorted(map(repr, wanted))
    return whole


@pytest.mark.all
@pytest.mark.parametrize("store", cases(list(STORES)))
def test_pointers_and_rows_of_functions(lab: Lab, store: str) -> None:
    """Whichever state store Spark keeps the pointers in, with several shards and one, after maintenance."""
    feed(lab, 9)
    lab.configure({"shards": "5", "commit.carriedBytes": "600"})
    with configured(lab.spark, STORES[store]):
        lab.run(lab.totals())
        require_the_same_pointers(lab)
    for batch_id in (0, 4, None):
        require_the_same_rows(lab, "totals", "state", batch_id)
    rows = holdfast.read_state(
        lab.spark, lab.folder / "query", "totals", keys=[{"key": "u3"}, {"key": None}, {"key": "no"}]
    )
    whole = holdfast.read_state(lab.spark, lab.folder / "query", "totals").to_pylist()
    assert sorted(map(repr, rows.to_pylist())) == sorted(repr(row) for row in whole if row["key"] in ("u3", None))


# Spark 4.0 writes the second format, and its own reader of state fails on it.
@pytest.mark.parametrize("version", cases(["1", pytest.param("2", marks=pytest.mark.since("4.1"))]))
def test_pointers_and_rows_of_processors(lab: Lab, version: str) -> None:
    """Families of columns, changelogs, and the ids that state stores have in the second checkpoint format."""
    feed(lab, 7)
    with configured(lab.spark, CHANGELOG | {f"{STORE}.checkpointFormatVersion": version}):
        lab.run(of_processor(lab))
        require_the_same_pointers(lab)
        # Spark's own reader needs the settings of the session, look-ups have what Spark has pinned.
        for table, batch_id in cases(list(product(("value", "seen", "counts"), (2, None))), quick=4):
            require_the_same_rows(lab, "totals", table, batch_id)


@pytest.mark.all
@pytest.mark.parametrize("case", cases([CASES[1], CASES[2], CASES[3]]), ids=str)
def test_timers_are_rows_like_others(lab: Lab, case: Case) -> None:
    """Timers and timeouts of each API; Spark keeps a timeout of its own beside the pointer."""
    for file in case.files():
        lab.feed(file)
    with configured(lab.spark, dict(case.settings)):
        lab.run(case.query(lab.source(case.schema)), mode=case.mode)
        require_the_same_pointers(lab)
    require_the_same_rows(lab, case.operator, case.table)
    assert require_the_same_rows(lab, case.operator, "timers").num_rows


def test_what_a_key_held(lab: Lab) -> None:
    """A history is what each micro-batch says, and a difference is what changed between two."""
    feed(lab, 8)
    lab.run(lab.totals())
    by_batch = [
        {
            row["key"]: row
            for row in holdfast.read_state(lab.spark, lab.folder / "query", "totals", batchId=n).to_pylist()
        }
        for n in range(8)
    ]
    with holdfast.open_query(lab.folder / "query", lab.folder / "durable") as query:
        for key in (None, "u3", "u19", "nobody"):
            versions = list(query.history("totals", {"key": key}))
            assert [one.is_oldest for one in versions] == [False] * (len(versions) - 1) + [True]
            for batch_id, rows in enumerate(by_batch):
                held = next(one for one in versions if one.batch_id <= batch_id)
                assert held.tables["state"].to_pylist() == ([rows[key]] if key in rows else [])
        (changes,) = query.diff("totals", 2, 6, rows_each=1000)
        one, other = by_batch[2], by_batch[6]
        assert {row.key["key"]: row.kind for row in changes.rows} == {
            **dict.fromkeys(other.keys() - one.keys(), "added"),
            **{key: "changed" for key in other.keys() & one.keys() if one[key] != other[key]},
        }
        (back,) = query.diff("totals", 6, 2, rows_each=0)
        assert (back.removed, back.changed, back.rows) == (changes.added, changes.changed, [])
        pages: list[Any] = []
        operator = query.operator("totals")
        for shard in range(operator.shards):
            after: str | None = ""
            while after is not None:
                page = query.page("totals", "state", shard, after=after or None, limit=3)
                pages += page.rows.to_pylist()
                after = page.after
        assert sorted(map(repr, pages)) == sorted(map(repr, by_batch[7].values()))


@pytest.mark.all
def test_an_operator_that_had_no_rows_yet(lab: Lab) -> None:
    """Its state after such a micro-batch is empty, as in a full read: it is not lost, and nothing was purged."""
    lab.feed(pa.table({"key": pa.array([], pa.string()), "v": pa.array([], pa.int64())}))
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    with holdfast.open_query(lab.folder / "query", lab.folder / "durable") as query:
        assert query.get("totals", {"key": "a"}, batch_id=0)["state"].num_rows == 0
        versions = list(query.history("totals", {"key": "a"}))
        assert [(one.batch_id, one.tables["state"].num_rows) for one in versions] == [(1, 1), (0, 0)]
        (changes,) = query.diff("totals", 0, 1)
        assert (changes.added, changes.changed, changes.removed) == (1, 0, 0)
        with pytest.raises(NotFoundError, match="operators=none"):
            query.get("others", {"key": "a"}, batch_id=0)


NESTED = {
    "array<string>": [["a", None, ""], []],
    "struct<x:double,y:array<int>>": [{"x": -0.0, "y": [1, None]}, {"x": math.nan, "y": None}],
    "decimal(30,2)": [Decimal("-1.50"), Decimal("1e20")],
    "timestamp": [dt.datetime(2026, 11, 25, 1, 2, 3, 4, dt.UTC), dt.datetime(1969, 12, 31, tzinfo=dt.UTC)],
    "binary": [b"", b"\0\xff"],
    "boolean": [True, False],
}


def test_keys_of_every_kind(lab: Lab) -> None:
    """Keys in Python's own values, nested ones and nulls, find what Spark has hashed."""
    columns = ", ".join(f"c{n} {kind}" for n, kind in enumerate(NESTED))
    rows = [tuple(values[n % 2] for values in NESTED.values()) for n in range(2)] + [(None,) * len(NESTED)]
    lab.spark.createDataFrame(rows, columns).coalesce(1).write.parquet(str(lab.folder / "input"))

    names = [f"c{n}" for n in range(len(NESTED))]
    frame = holdfast.stream(lab.source(columns)).groupBy(*names)
    lab.run(frame.applyInArrowWithState(count, f"{columns}, n long", "n long", "update", name="totals"))
    with holdfast.open_query(lab.folder / "query", lab.folder / "durable") as query:
        for row in rows:
            (found,) = query.get("totals", dict(zip(names, row, strict=True))).values()
            assert found.num_rows == 1
        assert query.get("totals", dict.fromkeys(names, None), batch_id=0)["state"]["n"].to_pylist() == [1]


def command(lab: Lab, *arguments: object) -> Any:
    name, *rest = arguments
    where = ["--state-dir", str(lab.folder / "durable"), str(lab.folder / "query")]
    return CliRunner().invoke(group, [str(name), *where, *map(str, rest)], catch_exceptions=True)


def test_the_command_line_shows_hostile_state_harmlessly(lab: Lab) -> None:
    """Markup, terminal control characters and formulas in keys come out as text."""
    hostile = ["=cmd|'/c calc'!A1", "\x1b[31mred\x07", "<script>[bold]x[/bold]", "-1+2", "@x", "a\r\nb"]
    lab.feed([(key, 1) for key in hostile])
    lab.run(lab.totals())
    for key in hostile:
        text = json.dumps({"key": key})
        for arguments in (("get", "totals", text), ("history", "totals", text), ("get", "totals", text, "--csv")):
            result = command(lab, *arguments)
            assert result.exit_code == 0, result.output
            assert not set(result.output) & {"\x1b", "\x07", "\r"} - ({"\r"} if "--csv" in arguments else set())
        assert json.loads(command(lab, "get", "totals", text, "--json").output)["tables"]["state"][0]["key"] == key
        cell = command(lab, "get", "totals", text, "--csv").output.splitlines()[1]
        assert cell.lstrip('"')[0] not in "=+-@\t\r"
    assert "[bold]x" in command(lab, "get", "totals", json.dumps({"key": hostile[2]})).output


def test_bad_input_says_what_to_do(lab: Lab) -> None:
    """A directory that is none, keys that are none, a micro-batch that is not kept: each its own error."""
    feed(lab, 3)
    lab.run(lab.totals())
    where = lab.folder / "query", lab.folder / "durable"
    with holdfast.open_query(*where) as query:
        for bad, error, says in (
            (lambda: query.get("totals", {"user": "ann"}), InvalidArgumentError, "columns=key"),
            (lambda: query.get("totals", {"key": "a", "b": 1}), InvalidArgumentError, "columns=key"),
            (lambda: query.get("totals", {"key": 5.5}), InvalidArgumentError, "has the wrong type"),
            (lambda: query.get("totals", {"key": "a"}, table="none"), NotFoundError, "tables=state"),
            (lambda: query.get("others", {"key": "a"}), NotFoundError, "operators=totals"),
            (lambda: query.get("totals", {"key": "a"}, batch_id=9), NotFoundError, "last=2"),
            (lambda: query.get("totals", {"key": "a"}, batch_id=-1), InvalidArgumentError, "0 or more"),
            (lambda: query.page("totals", "state", 99), InvalidArgumentError, "no such shard"),
            (lambda: query.page("totals", "state", 0, after="../x"), InvalidArgumentError, "previous page"),
        ):
            with pytest.raises(error, match=says):
                bad()
    with (
        holdfast.open_query(lab.folder / "input", where[1]) as query,
        pytest.raises(InvalidArgumentError, match="metadata"),
    ):
        query.batches(), query.operators()
    purge(lab.folder / "query/state/0", 2)
    with holdfast.open_query(*where) as query, pytest.raises(NotFoundError, match="oldest=1"):
        query.get("totals", {"key": "u3"}, batch_id=0)


def purge(state: Path, below: int) -> None:
    """Leave of Spark's state what it needs for a version, and no older one."""
    for partition in state.glob("[0-9]*"):
        for file in partition.glob("*.delta"):
            if int(file.stem) < below:
                file.unlink()
            elif int(file.stem) == below:
                file.rename(file.with_suffix(".snapshot"))


def said(*arguments: object) -> str:
    result = CliRunner().invoke(group, [str(one) for one in arguments])
    assert isinstance(result.exception, InvalidArgumentError | NotFoundError), result.output
    return str(result.exception)


def get(*where: object) -> Any:
    result = CliRunner().invoke(group, ["get", *map(str, where), "totals", "key=a", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)["tables"]["state"]


def test_the_location_is_enough(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a query that runs on, that was moved with its state, and whose directories were mixed up."""
    monkeypatch.delenv("HOLDFAST_STATE_DIR", raising=False)
    location, state_dir, moved = lab.folder / "query", lab.folder / "durable", lab.folder / "moved"
    lab.feed([("a", 1), ("b", 2), ("c", 3)])
    lab.run(lab.totals())
    assert get(location) == [{"key": "a", "n": 1, "total": 1}]
    with holdfast.open_query(location) as query:
        assert query.get("totals", {"key": "b"})["state"].to_pylist() == [{"key": "b", "n": 1, "total": 2}]

    # Each for the other.
    eventually(lambda: list(state_dir.glob("_queries/*.locations/*")))[0].unlink()
    assert "this is a state directory, which does not record where its query is: name the checkpointLocation" in said(
        "get", state_dir, "totals", "key=a"
    )
    told = said("verify", location)
    assert "this is the checkpointLocation of a query" in told
    assert f"its state directory is {state_dir}, query={query_id(location)}" in told

    # Moved: by the pointers it is where it was, until the next micro-batch.
    shutil.move(state_dir, moved)
    assert "if it was moved, name the state directory with --state-dir" in said("get", location, "totals", "key=a")
    assert get(location, "--state-dir", moved)[0]["total"] == 1
    lab.configure({"state.dir": str(moved)})
    lab.feed([("a", 5)])
    lab.run(lab.totals())
    assert get(location) == [{"key": "a", "n": 2, "total": 6}]

    # Another query's state lies where the pointers say.
    lab.configure({"state.dir": str(state_dir)})
    lab.run(lab.totals(), "other")
    shutil.rmtree(moved)
    shutil.copytree(state_dir, moved)
    assert f"owner={query_id(lab.folder / 'other')}" in said("get", location, "totals", "key=a")


def query_id(location: Path) -> str:
    found: str = json.loads((location / "metadata").read_text())["id"]
    return found


def test_a_clone_is_told_from_its_original(lab: Lab) -> None:
    """Its pointers name the original's directory until it has run, and state there goes on without it."""
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    target, state_dir = lab.folder / "clone", lab.folder / "state of the clone"
    savepoints.clone(lab.spark, lab.folder / "query", target, to_state_dir=state_dir)
    with pytest.raises(NotFoundError, match="is a clone that has not run yet"):
        find_state_dir(target, {})
    lab.configure({"state.dir": str(state_dir)})
    lab.feed([("a", 2)])
    lab.run(lab.totals(), "clone")
    assert find_state_dir(target, {}) == str(state_dir)
    assert find_state_dir(lab.folder / "query", {}) == str(lab.folder / "durable")


@pytest.mark.all
def test_state_that_began_in_a_users_thread_belongs_to_the_query(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark tells such a task no query, so the state has an id of its own: the pointers say whose it is."""
    monkeypatch.delenv("HOLDFAST_STATE_DIR", raising=False)
    lab.feed([("a", 1)])

    def collect(rows: DataFrame, _batch_id: int) -> None:
        thread = threading.Thread(target=rows.collect)
        thread.start()
        thread.join()

    writer = lab.totals().writeStream.foreachBatch(collect).outputMode("update")
    writer.option("checkpointLocation", str(lab.folder / "query")).trigger(availableNow=True).start().awaitTermination()
    assert get(lab.folder / "query") == [{"key": "a", "n": 1, "total": 1}]
    shown = CliRunner().invoke(
        group,
        ["inspect", str(lab.folder / "durable"), "--checkpoint-location", str(lab.folder / "query"), "--json"],
        catch_exceptions=False,
    )
    (found,) = json.loads(shown.output)["queries"]
    assert found["query_id"] != query_id(lab.folder / "query")
    assert found["committed"] == 0


def test_what_cannot_be_found_says_why(lab: Lab) -> None:
    """A query whose state is not durable has none, and a directory that is none of Spark's is not looked into."""
    lab.spark.conf.unset("spark.holdfast.state.dir")
    lab.feed([("a", 1)])
    with pytest.warns(UserWarning, match="not durable"):
        lab.run(lab.totals())
    with pytest.raises(InvalidArgumentError, match="state that is not durable"):
        find_state_dir(lab.folder / "query", {})
    with pytest.raises(InvalidArgumentError, match="lacks the file metadata"):
        find_state_dir(lab.folder / "input", {})
