"""Savepoints in real queries: what is restored goes on as the original does, whatever became of the original."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import holdfast
from holdfast import savepoints
from holdfast.errors import ConflictError, InvalidArgumentError, NotFoundError
from tests.spark.conftest import Lab
from tests.spark.conftest import configured as configured_lab
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import CASES, UNCHECKED, Case, restored, run, saved, state, totals
from tests.tiers import cases

pytestmark = pytest.mark.spark

BACKENDS = ["memory", "filesystem", "rocksdb"]


@pytest.fixture(scope="module")
def saved_once(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, local_state: Path) -> Lab:
    lab = Lab(spark, tmp_path_factory.mktemp("saved"), local_state)
    with configured_lab(lab):
        saved(lab, CASES[0])
    return lab


@pytest.fixture
def half_way(saved_once: Lab) -> Iterator[Lab]:
    """Return the place of a query that was saved half-way, for tests that change nothing there."""
    with configured_lab(saved_once):
        yield saved_once


@pytest.mark.parametrize(("case", "shards"), cases(list(product(CASES, [3, None]))), ids=str)
def test_a_restored_query_goes_on_as_the_original(lab: Lab, case: Case, shards: int | None) -> None:
    """Micro-batch by micro-batch: rows, late rows and timers, on another backend, with other shards."""
    require_the_same(lab, case, shards, *cases([(a, b) for a in BACKENDS for b in BACKENDS if a != b])[0])


@pytest.mark.all
@pytest.mark.parametrize(("before", "after"), list(product(BACKENDS, BACKENDS)))
def test_each_backend_opens_what_each_has_saved(lab: Lab, before: str, after: str) -> None:
    """Of a processor, with timers; the test above has one of the pairs."""
    require_the_same(lab, CASES[3], 3, before, after)


def require_the_same(lab: Lab, case: Case, shards: int | None, before: str, after: str) -> None:
    lab.configure({"backend": before})
    with configured(lab.spark, dict(case.settings)):
        later = saved(lab, case)
        for file in later:
            lab.feed(file)
        original = run(lab, case)
        assert len(original) >= len(later)
        query_id = restored(lab, shards=shards)
        lab.configure({"backend": after})
        assert run(lab, case, "again", "durable-again") == original
        assert state(lab, case, "again", "durable-again") == state(lab, case, "query", "durable")
    assert query_id in (lab.folder / "again/metadata").read_text()
    assert not list(lab.folder.glob("again-restoring-*"))


def test_a_savepoint_outlives_its_query(lab: Lab) -> None:
    """It refers to nothing of the original, nor does what was restored to the savepoint."""
    case = CASES[0]
    later = saved(lab, case)
    shutil.rmtree(lab.folder / "query")
    shutil.rmtree(lab.folder / "durable")
    (lab.folder / "savepoints").rename(lab.folder / "moved")
    assert savepoints.verify(lab.folder / "moved", "one") == []
    lab.configure({"state.dir": str(lab.folder / "durable-again")})
    savepoints.restore(lab.spark, lab.folder / "moved", "one", lab.folder / "again")
    shutil.rmtree(lab.folder / "moved")
    lab.feed(later[0])
    (batch,) = lab.run(case.query(lab.source(case.schema)), "again", case.mode)
    expected = {
        key: sum(table["carrier"].to_pylist().count(key) for table in case.files()[:3])
        for key in set(later[0]["carrier"].to_pylist())
    }
    assert {row["carrier"]: row["n"] for row in batch} == expected


def test_what_a_savepoint_says_of_itself(half_way: Lab) -> None:
    found = savepoints.read(half_way.folder / "savepoints", "one")
    (operator,) = found.operators
    state = holdfast.read_state(half_way.spark, half_way.folder / "query", "totals")
    assert (found.comment, found.query.batch_id, operator.rows) == ("half-way", 1, {"state": state.num_rows})
    found_host = (operator.name, operator.number, operator.host, operator.shards)
    assert found_host == ("totals", 0, "applyInPandasWithState", 2)
    (source,) = found.query.sources
    assert source.offset == '{"logOffset":1}'
    assert [log.name for log in source.logs] == ["0", "1"]
    assert [one.name for one in savepoints.listed(half_way.folder / "savepoints")] == ["one"]
    tables = []
    for piece in operator.pieces:
        with ipc.open_stream(half_way.folder / "savepoints/one" / piece.key) as reader:
            tables.append(reader.read_all())
    columns = pa.concat_tables(tables).select(["key.carrier", "value.n"]).rename_columns(["carrier", "n"])
    assert sorted(map(repr, columns.to_pylist())) == sorted(map(repr, state.to_pylist()))


def test_a_savepoint_is_a_table_in_spark(half_way: Lab) -> None:
    """Read by executors; errors say what there is."""
    found = savepoints.load(half_way.spark, half_way.folder / "savepoints", "one")
    expected = holdfast.read_state(half_way.spark, half_way.folder / "query", "totals")
    assert found.columns == ["carrier", "n", "shard"]
    assert sorted(map(repr, found.drop("shard").toArrow().to_pylist())) == sorted(map(repr, expected.to_pylist()))
    assert {row["shard"] for row in found.select("shard").distinct().collect()} == {0, 1}
    with pytest.raises(NotFoundError, match=r"^no such table"):
        savepoints.load(half_way.spark, half_way.folder / "savepoints", "one", table="timers")
    with pytest.raises(NotFoundError, match=r"^no savepoint of this name"):
        savepoints.load(half_way.spark, half_way.folder / "savepoints", "two")


def test_a_running_query_is_saved_and_stopped(lab: Lab) -> None:
    """`create` beside a query that commits and cleans up, then `stop`: each is the state after its micro-batch."""
    case = CASES[0]
    files = case.files()
    lab.feed(files[0])
    frame = case.query(lab.source(case.schema))
    query = (
        frame.writeStream.format("noop").outputMode("update").option("checkpointLocation", str(lab.folder / "query"))
    )
    running = query.start()
    running.processAllAvailable()
    beside = savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "beside")
    for file in files[1:]:
        lab.feed(file)
    running.processAllAvailable()
    with pytest.raises(NotFoundError, match="no operator with state of this name"):
        savepoints.stop(lab.spark, running, lab.folder / "query", lab.folder / "savepoints", "last", without=["total"])
    assert running.isActive
    last = savepoints.stop(lab.spark, running, lab.folder / "query", lab.folder / "savepoints", "last")
    assert not running.isActive
    assert (beside.query.batch_id, last.query.batch_id) == (0, 3)
    assert sum(last.operators[0].rows.values()) == len(set(pa.concat_tables(files)["carrier"].to_pylist()))
    assert [savepoints.verify(lab.folder / "savepoints", name) for name in ("beside", "last")] == [[], []]


@pytest.mark.all
def test_another_operator_does_not_begin_with_what_was_restored(lab: Lab) -> None:
    """The typo in a name is an error, not a query that silently begins empty."""
    case = CASES[0]
    (later, *_) = saved(lab, case)
    restored(lab)
    lab.feed(later)
    with pytest.raises(StreamingQueryException, match="a different operator's pointer"):
        lab.run(totals(lab.source(case.schema), "totls"), "again")


def test_nothing_that_is_there_is_written_over(half_way: Lab) -> None:
    """A location that a query has used, a savepoint of the name, and a file of somebody's."""
    with pytest.raises(ConflictError, match="a savepoint of this name exists"):
        savepoints.create(half_way.spark, half_way.folder / "query", half_way.folder / "savepoints", "one")
    before = sorted((half_way.folder / "query").rglob("*"))
    with pytest.raises(ConflictError, match="must be empty"):
        restored(half_way, "query")
    assert sorted((half_way.folder / "query").rglob("*")) == before
    (half_way.folder / "mine/state").mkdir(parents=True)
    (half_way.folder / "mine/state/thesis.tex").write_text("years of work")
    with pytest.raises(ConflictError, match=r"thesis\.tex"):
        restored(half_way, "mine")
    assert (half_way.folder / "mine/state/thesis.tex").read_text() == "years of work"


def test_state_of_sparks_own_must_be_left_out_by_name(lab: Lab) -> None:
    case = replace(CASES[0], query=lambda frame: totals(frame.dropDuplicates(["carrier", "tailnum"])))
    lab.feed(case.files()[0])
    with configured(lab.spark, UNCHECKED):
        run(lab, case)
    with pytest.raises(InvalidArgumentError, match=r"state is Spark's own.*operator=dedupe"):
        savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    made = savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one", without=["dedupe"])
    assert made.left_out == ("dedupe",)
    with pytest.raises(InvalidArgumentError, match="cannot start without state"):
        restored(lab)
    assert not (lab.folder / "again").exists() or not list(Path(lab.folder / "again").iterdir())


def test_no_savepoint_without_a_query(lab: Lab) -> None:
    with pytest.raises(InvalidArgumentError, match="not the checkpoint location of a query"):
        savepoints.create(lab.spark, lab.folder / "nowhere", lab.folder / "savepoints", "one")
    with pytest.raises(NotFoundError, match="no savepoint of this name"):
        restored(lab)
