"""Savepoints made while the query runs on, and by commands without Spark."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import holdfast
from holdfast import savepoints
from holdfast.cli import group
from holdfast.commands import own_spark
from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.savepoints import Savepoint
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints import creating
from holdfast.spark_integration.savepoints.creating import save
from holdfast.spark_integration.savepoints.tasks import OwnProcess, SparkTasks
from holdfast.spark_integration.spark_state import pointers
from holdfast.spark_integration.spark_state.pointers import stored_steps
from holdfast.spark_integration.spark_state.query_location import QueryLocation
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import CASES, UNCHECKED, Case, read_by_spark, restored, run, state, without_spark
from tests.spark.savepoints.queries import saved as saved_case
from tests.spark.savepoints.test_copies import begun, clone, of_spark_and_ours
from tests.spark.savepoints.totals import expected, feed, saved, start, totals
from tests.tiers import cases, repetitions

pytestmark = pytest.mark.spark


# Spark keeps two micro-batches, and cleans up what it keeps of files as soon as it can.
SHORT = {
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.fileSource.log.compactInterval": "3",
    "spark.sql.streaming.fileSource.log.cleanupDelay": "0",
}


@contextmanager
def running(lab: Lab) -> Iterator[Any]:
    with configured(lab.spark, SHORT):
        query = start(lab.spark, lab.folder)
        try:
            query.processAllAvailable()
            yield query
        finally:
            query.stop()


@contextmanager
def feeding(lab: Lab) -> Iterator[None]:
    enough = threading.Event()

    def feed_on() -> None:
        while not enough.wait(1):
            feed(lab, 1)

    thread = threading.Thread(target=feed_on)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def create(lab: Lab, name: str, by: type[SparkTasks | OwnProcess] = SparkTasks, **options: Any) -> savepoints.Savepoint:
    places = lab.folder / "query", lab.folder / "savepoints", name
    if by is SparkTasks:
        return savepoints.create(lab.spark, *places, **options)
    with without_spark(lab, str(lab.folder / "durable")) as alone:
        return save(alone, *places, batch_id=options.pop("batchId", None), **options)


BY = [OwnProcess, SparkTasks]


@pytest.mark.timeout(600)
@pytest.mark.all
@pytest.mark.parametrize("by", cases(BY))
def test_each_savepoint_is_the_state_after_one_micro_batch(lab: Lab, by: type[SparkTasks | OwnProcess]) -> None:
    """Or there is none, with an error, if Spark has cleaned up twice meanwhile."""
    feed(lab)
    with running(lab) as query, feeding(lab):
        for number in repetitions(1, 20):
            try:
                made = create(lab, f"round-{number}", by)
            except HoldfastError as exc:
                assert any(words in str(exc) for words in ("moved past two", "try again")), exc  # noqa: PT017
                assert all(
                    found.savepoint is None
                    for found in savepoints.listed(lab.folder / "savepoints")
                    if found.name == f"round-{number}"
                )
            else:
                assert saved(lab, f"round-{number}")
                assert made.query.batch_id > 0
        assert query.exception() is None
    create(lab, "last", by)
    assert saved(lab, "last")


@pytest.mark.timeout(600)
@pytest.mark.all
@pytest.mark.parametrize("times", cases([1, 2]))
def test_a_micro_batch_is_purged_meanwhile(lab: Lab, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Once: a later one is saved. Again, or where a micro-batch was asked for: an error, and no savepoint."""
    feed(lab)
    purges = iter(range(times))
    steps = creating.stored_steps

    def late(*arguments: Any) -> Any:
        if next(purges, None) is not None:
            feed(lab, 5)
            query.processAllAvailable()
            raise NotFoundError("the state is purged")  # as where Spark's maintenance comes at once
        return steps(*arguments)

    with running(lab) as query:
        last = query.lastProgress["batchId"]
        monkeypatch.setattr(creating, "stored_steps", late)
        if times == 1:
            assert create(lab, "one").query.batch_id == last + 5
            assert saved(lab)
            return
        with pytest.raises(UnavailableError, match="moved past two micro-batches"):
            create(lab, "one")
        purges = iter(range(1))
        with pytest.raises(NotFoundError, match="purged"):
            create(lab, "two", batchId=query.lastProgress["batchId"])
    assert not [found for found in savepoints.listed(lab.folder / "savepoints") if found.savepoint]


@pytest.mark.timeout(600)
@pytest.mark.all
@pytest.mark.parametrize("batch_id", cases([1, 4]))
def test_sparks_log_of_files_was_compacted_since(lab: Lab, batch_id: int) -> None:
    """Spark keeps fewer micro-batches than before, and is stopped when it has cleaned up one of its logs of two."""

    def fail(_rows: DataFrame, _batch_id: int) -> None:
        raise RuntimeError("the sink is away")

    feed(lab, 8)
    with configured(lab.spark, SHORT | {"spark.sql.streaming.minBatchesToRetain": "100"}):
        lab.run(totals(lab.spark, lab.folder))
    feed(lab, 1)
    logs = ("offsets", "commits")
    for name in logs:
        shutil.copytree(lab.folder / "query" / name, lab.folder / name)
    with configured(lab.spark, SHORT):
        writer = totals(lab.spark, lab.folder).writeStream.foreachBatch(fail).outputMode("update")
        query = writer.option("checkpointLocation", str(lab.folder / "query")).trigger(availableNow=True).start()
        with pytest.raises(StreamingQueryException, match="the sink is away"):
            query.awaitTermination()
    for name in logs:  # it cleans these up next
        shutil.copytree(lab.folder / name, lab.folder / "query" / name, dirs_exist_ok=True)
    left = {path.name for path in (lab.folder / "query/sources/0").iterdir() if path.suffix != ".crc"}
    assert left == {"5.compact", "6", "7", "8.compact"}
    made = create(lab, "one", batchId=batch_id)
    assert made.query.batch_id == batch_id
    assert saved(lab) == expected(range(batch_id + 1))
    restored(lab)
    lab.run(totals(lab.spark, lab.folder), "again")
    assert lab.state(query="again") == expected(range(lab.files))


STORE = "spark.sql.streaming.stateStore."
STORES = ["HDFSBackedStateStoreProvider", "RocksDBStateStoreProvider"]


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a command starts Spark."""
    monkeypatch.setattr(own_spark, "started_spark", lambda *_: pytest.fail("the command starts Spark"))


def command(*arguments: object) -> Any:
    done = CliRunner().invoke(group, [*map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done


def require_the_same_steps(lab: Lab) -> None:
    """Spark's own reader of its state, and ours, for operators of all kinds."""
    query = lab.folder / "query"
    with open_storage(str(query)) as location:
        batch = QueryLocation(location).batch()
        steps = stored_steps(location, batch)
    found = [
        (
            step.number,
            step.host,
            step.has_timeout,
            sorted(row for of in step.pointers.values() for rows in of.values() for row in rows)
            if step.is_ours
            else None,
        )
        for step in steps
    ]
    assert found == read_by_spark(lab.spark, query, batch.batch_id)


def described(made: Savepoint) -> list[Any]:
    """Return what a savepoint says of its query and operators, but for the names of its objects."""
    sources = [(source.name, source.offset, len(source.logs)) for source in made.query.sources]
    operators = [
        (replace(one, pieces=()), [(piece.table, piece.shard, piece.rows, piece.digest) for piece in one.pieces])
        for one in made.operators
    ]
    return [replace(made.query, sources=()), sources, operators, made.left_out, made.comment]


@pytest.mark.parametrize(("case", "store"), cases([(case, STORES[i % 2]) for i, case in enumerate(CASES)]), ids=str)
def test_a_command_saves_and_clones_what_spark_does(lab: Lab, no_spark: None, case: Case, store: str) -> None:
    """Rows, timers, positions and settings are the same in the savepoint, and each file is in the clone."""
    provider = f"org.apache.spark.sql.execution.streaming.state.{store}"
    settings = dict(case.settings) or {"spark.sql.streaming.stateStore.providerClass": provider}
    target = lab.folder / "savepoints"
    with configured(lab.spark, settings):
        begun(lab, case)
        require_the_same_steps(lab)
        savepoints.create(lab.spark, lab.folder / "query", target, "by-spark", comment="why")
        clone(lab, "by-spark")
    saved = command("savepoint", "create", lab.folder / "query", "--to", target, "--name", "alone", "--comment", "why")
    assert "after micro-batch" in saved.output
    assert savepoints.diff(target, "by-spark", "alone")[0] == []
    assert described(savepoints.read(target, "alone")) == described(savepoints.read(target, "by-spark"))
    assert savepoints.verify(target, "alone") == savepoints.leftovers(target, "alone") == []
    places = "--to-state-dir", lab.folder / "durable-alone", "--checkpoint-location", lab.folder / "alone"
    made = json.loads(command("clone", lab.folder / "query", *places, "--json").output)
    assert made["query_id"] in (lab.folder / "alone/metadata").read_text()
    for alone, by_spark in (("alone", "by-spark"), ("durable-alone", "durable-by-spark")):
        assert files(lab.folder / alone, "alone") == files(lab.folder / by_spark, "by-spark")


@pytest.mark.all
@pytest.mark.since("4.1")
def test_state_of_sparks_own_is_cloned_and_refused_alike(lab: Lab, no_spark: None) -> None:
    case = replace(CASES[0], query=of_spark_and_ours, settings={**CASES[4].settings, **UNCHECKED})
    with configured(lab.spark, dict(case.settings)):
        begun(lab, case)
        require_the_same_steps(lab)
        clone(lab, "by-spark")
    places = "--to-state-dir", lab.folder / "durable-alone", "--checkpoint-location", lab.folder / "alone"
    command("clone", lab.folder / "query", *places)
    assert files(lab.folder / "alone", "alone") == files(lab.folder / "by-spark", "by-spark")
    with pytest.raises(InvalidArgumentError, match="an operator's state is Spark's own"):
        command("savepoint", "create", lab.folder / "query", "--to", lab.folder / "savepoints", "--name", "one")


def files(folder: Path, name: str) -> dict[str, bytes]:
    """Return a folder's files, but for what names the clone."""
    every = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".crc")
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in every}
    own = {key for key in found if key == "metadata" or key.startswith("_queries/")}
    assert own
    # Spark's metadata of its own operators names files by path.
    return {key: data.replace(f"/{name}/".encode(), b"//") for key, data in found.items() if key not in own}


def spark_of_lab(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let a command that starts Spark take the test's; return a list that is as long as it did so often."""
    asked: list[object] = []

    @contextmanager
    def started(*arguments: object) -> Iterator[SparkSession]:
        asked.append(arguments)
        yield lab.spark

    monkeypatch.setattr(own_spark, "started_spark", started)
    return asked


# In the order in which `make test` takes them: the first one has timers, and is asked for on each version.
IN_GROUPS = [CASES[2], CASES[1], CASES[0], CASES[6]]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("case", "shards"), cases([(case, shards) for case in IN_GROUPS for shards in (3, None)]), ids=str
)
def test_a_query_goes_on_from_a_command(lab: Lab, no_spark: None, case: Case, shards: int | None) -> None:
    """Spark opens the state that it has not written: rows, timers and late rows, micro-batch by micro-batch."""
    with configured(lab.spark, dict(case.settings)):
        later = saved_case(lab, case)
        for file in later:
            lab.feed(file)
        original = run(lab, case)
        assert len(original) >= len(later)
        restored_by_command(lab, *(("--shards", shards) if shards else ()))
        assert run(lab, case, "again", "durable-again") == original
        assert state(lab, case, "again", "durable-again") == state(lab, case, "query", "durable")


@pytest.mark.all
def test_a_query_that_a_command_rescales_goes_on_as_the_original(lab: Lab, no_spark: None) -> None:
    """In as many partitions as shards, which Spark keeps from then on."""
    case = CASES[1]
    later = begun(lab, case)
    places = "--to-state-dir", lab.folder / "durable-again", "--checkpoint-location", lab.folder / "again"
    command("rescale", lab.folder / "query", *places, "--shards", 5)
    for file in later:
        lab.feed(file)
    original = run(lab, case)
    assert run(lab, case, "again", "durable-again") == original
    assert state(lab, case, "again", "durable-again") == state(lab, case, "query", "durable")
    assert {path.name for path in (lab.folder / "again/state/0").iterdir()} == {*"01234", "_metadata"}


def restored_by_command(lab: Lab, *options: object) -> Any:
    places = "--state-dir", lab.folder / "durable-again", "--checkpoint-location", lab.folder / "again"
    return command("savepoint", "restore", lab.folder / "savepoints", "one", *places, *options)


@pytest.mark.all
def test_state_that_only_spark_writes_starts_spark(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says so, and the query goes on."""
    case, asked = CASES[3], spark_of_lab(lab, monkeypatch)
    with configured(lab.spark, dict(case.settings)):
        later = saved_case(lab, case)
        for file in later:
            lab.feed(file)
        original = run(lab, case)
        lab.configure({"state.dir": str(lab.folder / "durable-again")})
        done = restored_by_command(lab)
        assert "starting Spark, which this query's state needs: the state store RocksDBStateStoreP" in done.stderr
        assert run(lab, case, "again", "durable-again") == original
    assert len(asked) == 1


@pytest.mark.all
def test_state_in_an_unknown_form_is_refused(lab: Lab, no_spark: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever saves the query, or looks into it, is told which form it is."""
    begun(lab, CASES[0])
    monkeypatch.setattr(pointers, "CODECS", frozenset())
    places = "--to", lab.folder / "savepoints", "--name", "one", "--state-dir", lab.folder / "durable"
    with pytest.raises(InvalidArgumentError, match="this form of Spark's state: compressed by lz4"):
        command("savepoint", "create", lab.folder / "query", *places)
    with pytest.raises(InvalidArgumentError, match="compressed by lz4"):
        holdfast.read_state(lab.spark, lab.folder / "query", "totals")


ROCKSDB = {f"{STORE}providerClass": f"org.apache.spark.sql.execution.streaming.state.{STORES[1]}"}
CHECKSUMS = {f"{STORE}rowChecksum.enabled": "true"}
AVRO = ROCKSDB | {f"{STORE}encodingFormat": "avro"}
CHANGES = {f"{STORE}rocksdb.changelogCheckpointing.enabled": "true"}
SINCE_4_1 = pytest.mark.since("4.1")


@pytest.mark.all
@pytest.mark.parametrize(
    ("case", "form"),
    [
        pytest.param(CASES[0], {f"{STORE}compression.codec": "lzf"}, id="lzf"),
        pytest.param(CASES[2], {f"{STORE}compression.codec": "snappy"}, id="snappy"),
        pytest.param(CASES[1], CHECKSUMS, id="checksums", marks=SINCE_4_1),
        pytest.param(CASES[2], ROCKSDB | CHECKSUMS, id="checksums on RocksDB", marks=SINCE_4_1),
        pytest.param(CASES[3], CHECKSUMS | CHANGES, id="checksums in families and changes", marks=SINCE_4_1),
        pytest.param(CASES[3], AVRO, id="Avro"),
        pytest.param(CASES[4], AVRO | CHECKSUMS | CHANGES, id="Avro with checksums", marks=SINCE_4_1),
    ],
)
def test_every_form_of_state_is_read(lab: Lab, no_spark: None, case: Case, form: dict[str, str]) -> None:
    """As Spark's own reader reads it; and it is saved and looked up without Spark."""
    with configured(lab.spark, dict(case.settings) | form):
        for file in begun(lab, case):
            lab.feed(file)
        run(lab, case)
        require_the_same_steps(lab)
    command("savepoint", "create", lab.folder / "query", "--to", lab.folder / "savepoints", "--name", "one")
    with holdfast.open_query(lab.folder / "query") as query:
        assert [one.name for one in query.operators()] == [case.operator]
