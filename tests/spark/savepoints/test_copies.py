"""Queries that are rescaled or cloned go on as the original does; what is interrupted leaves a whole query or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from holdfast import savepoints
from holdfast.errors import ConflictError, InvalidArgumentError, NotFoundError
from holdfast.spark_integration import copies
from holdfast.spark_integration.savepoints import creating, new_query, restoring, stub
from holdfast.spark_integration.savepoints.new_query import shards_to_set
from tests.power import NEVER, Killed, Power
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.spark.savepoints.queries import CASES, UNCHECKED, Appending, Case, restored, rows, run, saved, state, totals
from tests.tiers import cases

pytestmark = pytest.mark.spark


def begun(lab: Lab, case: Case) -> list[pa.Table]:
    """Run a query over the first files, and return the others."""
    files = case.files()
    for file in files[:2]:
        lab.feed(file)
    run(lab, case)
    return files[2:]


def clone(lab: Lab, query: str = "again", original: str = "query", durable: str = "durable", **options: Any) -> str:
    lab.configure({"state.dir": str(lab.folder / durable)})
    where = lab.folder / f"durable-{query}"
    return savepoints.clone(lab.spark, lab.folder / original, lab.folder / query, to_state_dir=where, **options)


def rescale(lab: Lab, shards: int, query: str = "again", **options: Any) -> str:
    lab.configure({"state.dir": str(lab.folder / "durable")})
    where = {"to_state_dir": lab.folder / f"durable-{query}"} | options
    return savepoints.rescale(lab.spark, lab.folder / "query", lab.folder / query, shards=shards, **where)


@pytest.mark.parametrize(("case", "how"), cases(list(product(CASES[3:] + CASES[:3], [5, 1, "clone"]))), ids=str)
def test_a_copy_goes_on_as_the_original(lab: Lab, case: Case, how: str | int) -> None:
    """Micro-batch by micro-batch: rows, late rows and timers; whether or not commits are objects of their own."""
    lab.configure({"commit.carriedBytes": cases(["0", "16k"])[0], "backend": cases(["memory", "filesystem"])[0]})
    with configured(lab.spark, dict(case.settings)):
        later = begun(lab, case)
        query_id = clone(lab) if how == "clone" else rescale(lab, int(how))
        for file in later:
            lab.feed(file)
        original = run(lab, case)
        assert run(lab, case, "again", "durable-again") == original
        assert state(lab, case, "again", "durable-again") == state(lab, case, "query", "durable")
    assert query_id in (lab.folder / "again/metadata").read_text()
    assert sorted(path.name for path in lab.folder.glob("again*")) == ["again"]
    assert not list(lab.folder.rglob("_rescaling/*"))


class Counting(Appending):
    """Spark runs this one itself."""


def of_spark_and_ours(frame: DataFrame) -> DataFrame:
    """Our operator behind deduplication, and before Spark's own processor and aggregation."""
    once = frame.dropDuplicates(["seq"])
    counted = totals(once).withColumnRenamed("n", "seq")
    processed = counted.groupBy("carrier").transformWithState(
        Counting(), "carrier string, seen string", "update", "None"
    )
    return processed.groupBy("carrier").agg(F.count("*").alias("n"), F.max("seen").alias("seen"))


@pytest.mark.all
@pytest.mark.since("4.1")
def test_state_of_sparks_own_operators_is_cloned_too(lab: Lab) -> None:
    """Deduplication, processors and aggregation, whose metadata names files by path: none of them is the original's."""
    case = replace(CASES[0], query=of_spark_and_ours, settings={**NEEDED, **UNCHECKED})
    with configured(lab.spark, dict(case.settings)):
        later = begun(lab, case)
        clone(lab)
        for file in [case.files()[0], *later]:
            lab.feed(file)
        original = run(lab, case)
        assert original[0] == []
        for folder in ("query", "durable"):
            (lab.folder / folder).rename(lab.folder / f"{folder}-elsewhere")
        assert run(lab, case, "again", "durable-again") == original
    named = [path for path in (lab.folder / "again").rglob("*") if path.is_file()]
    assert not [path for path in named if f"{lab.folder}/query/".encode() in path.read_bytes()]


@pytest.mark.all
def test_a_running_query_is_cloned_and_goes_on(lab: Lab) -> None:
    """The clone is as of its micro-batch; neither sees what the other does afterwards."""
    case = CASES[0]
    files = case.files()
    lab.feed(files[0])
    frame = case.query(lab.source(case.schema))
    writer = frame.writeStream.format("noop").outputMode("update")
    running = writer.option("checkpointLocation", str(lab.folder / "query")).start()
    try:
        running.processAllAvailable()
        clone(lab)
        for file in files[1:3]:
            lab.feed(file)
        running.processAllAvailable()
        clone(lab, "later")
        clone(lab, "earlier", batchId=1)
        lab.configure({"state.dir": str(lab.folder / "durable-again")})
        batches = lab.run(case.query(lab.source(case.schema)), "again")
        lab.feed(files[3])
        running.processAllAvailable()
        assert running.exception() is None
    finally:
        running.stop()
    ends = {}
    for query, durable in (("query", "durable"), ("again", "durable-again"), ("later", "durable-later")):
        if query != "query":
            run(lab, case, query, durable)
        ends[query] = state(lab, case, query, durable)
    assert ends["again"] == ends["later"] == ends["query"]
    run(lab, case, "earlier", "durable-earlier")
    assert state(lab, case, "earlier", "durable-earlier") == ends["query"]
    assert len(batches) == 2
    assert {path.name for path in (lab.folder / "earlier/commits").iterdir() if path.name.isdigit()} == set("0123")


@pytest.mark.all
def test_a_clone_can_be_cloned_and_its_new_shards_begin_in_it(lab: Lab) -> None:
    """Pointers keep the first one's id; a shard that gets its first rows in a clone goes where the others are."""
    lab.configure({"shards": "64"})
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    clone(lab)
    second = clone(lab, "third", "again", "durable-again")
    for folder in ("query", "durable", "again", "durable-again"):
        shutil.rmtree(lab.folder / folder)
    lab.configure({"state.dir": str(lab.folder / "durable-third")})
    lab.feed([(key, 1) for key in "abcdefgh"])
    lab.run(lab.totals(), "third")
    assert lab.state(query="third") == {"a": (2, 2), **dict.fromkeys("bcdefgh", (1, 1))}
    assert [path.name for path in (lab.folder / "durable-third").glob("*/operator")] == ["operator"]
    made = savepoints.create(lab.spark, lab.folder / "third", lab.folder / "savepoints", "of-a-clone")
    assert made.query.query_id == second
    assert made.operators[0].rows == {"state": 8}


def test_a_clone_in_the_originals_state_directory_is_refused(lab: Lab) -> None:
    """A setting that is easily forgotten: the original would lose its state to it."""
    lab.configure({"commit.carriedBytes": "0"})
    lab.feed([("a", 1), ("b", 1)])
    lab.run(lab.totals())
    query_id = clone(lab)
    before = {path for path in (lab.folder / "durable").rglob("*") if path.is_file()}
    lab.feed([("a", 1), ("b", 1)])
    with pytest.raises(StreamingQueryException, match=rf"was cloned into.*query={query_id}"):
        lab.run(lab.totals(), "again")
    assert {path for path in (lab.folder / "durable").rglob("*") if path.is_file()} == before
    lab.run(lab.totals())
    lab.configure({"state.dir": str(lab.folder / "durable-again")})
    lab.run(lab.totals(), "again")
    assert lab.state(query="again") == {"a": (2, 2), "b": (2, 2)}
    lab.configure({"state.dir": str(lab.folder / "durable")})
    assert lab.state() == {"a": (2, 2), "b": (2, 2)}


@pytest.mark.all
def test_a_clone_does_without_a_damaged_snapshot_as_the_original_does(lab: Lab) -> None:
    """Older snapshots and commits are copied, too."""
    lab.configure({"commit.carriedBytes": "0", "snapshot.maxCommits": "2", "shards": "1"})
    for number in range(6):
        lab.feed([("a", number)])
    lab.run(lab.totals())
    clone(lab)
    lab.lose_local_state()
    copied = lab.folder / "durable-again/totals/shard-0000"
    names = {path.relative_to(copied) for path in copied.rglob("*") if path.is_file()}
    stored = lab.folder / "durable/totals/shard-0000"
    assert {name for name in names if name.parts[0] != "files"} == {
        path.relative_to(stored) for path in stored.rglob("*") if path.is_file() and path.parent.name != "files"
    }
    for snapshot in sorted((copied / "snapshots").glob("*"))[-1:]:
        snapshot.write_bytes(b"damaged")
    lab.feed([("a", 100)])
    lab.configure({"state.dir": str(lab.folder / "durable-again")})
    lab.run(lab.totals(), "again")
    assert lab.state(query="again") == {"a": (7, 115)}


def refused(lab: Lab, error: type[Exception], said: str, **options: Any) -> None:
    with pytest.raises(error, match=said):
        clone(lab, **options)
    assert [path for path in lab.folder.glob("again/**/*") if path.is_file()] == []


def test_what_cannot_be_copied(lab: Lab) -> None:
    """Each error says what to do, and leaves nothing behind."""
    begun(lab, CASES[0])
    refused(lab, NotFoundError, "not committed, or Spark has purged it", batchId=7)
    refused(lab, InvalidArgumentError, "not the checkpoint location of a query", original="nowhere")
    refused(lab, NotFoundError, "holds no operator of this name", durable="elsewhere")
    lab.configure({"state.dir": str(lab.folder / "durable")})
    where: Mapping[str, Any] = {"to_state_dir": lab.folder / "durable"}
    with pytest.raises(ConflictError, match=r"needs its own state directory.*operators=totals"):
        savepoints.clone(lab.spark, lab.folder / "query", lab.folder / "again", **where)
    with pytest.raises(ConflictError, match="must be empty"):
        savepoints.clone(lab.spark, lab.folder / "query", lab.folder / "query", **where)
    with pytest.raises(InvalidArgumentError, match="must be a whole number from 1 to"):
        rescale(lab, 0)
    with pytest.raises(InvalidArgumentError, match="not the checkpoint location of a query"):
        savepoints.rescale(lab.spark, lab.folder / "nowhere", lab.folder / "again", shards=2)
    assert [path for path in lab.folder.glob("again/**/*") if path.is_file()] == []
    original = json.loads((lab.folder / "query/metadata").read_text())["id"]
    assert {path.name for path in lab.folder.glob("durable*/_*/*")} == {f"{original}.locations"}


def test_another_querys_state_directory_is_named(lab: Lab) -> None:
    """It has an operator of the same name: the error was about its number of shards."""
    begun(lab, CASES[0])
    lab.configure({"shards": "3"})
    run(lab, CASES[0], "other", "durable-other")
    refused(lab, NotFoundError, r"belongs to a different query.*last_used=\S*/durable$", durable="durable-other")
    with pytest.raises(NotFoundError, match="belongs to a different query"):
        savepoints.rescale(lab.spark, lab.folder / "query", lab.folder / "again", shards=2)


@pytest.mark.all
def test_a_query_is_rescaled_within_its_state_directory(lab: Lab) -> None:
    """Without another directory, state goes to one of the new query's own beside the original's."""
    case = CASES[0]
    later = begun(lab, case)
    query_id = rescale(lab, 4, to_state_dir=None)
    lab.feed(later[0])
    original = run(lab, case)
    assert shards_to_set(str(lab.folder / "durable"), {}, query_id) == 4
    lab.configure({"shards": "4"})
    assert rows(lab.run(case.query(lab.source(case.schema)), "again")) == original
    assert (lab.folder / f"durable/totals@{query_id}/operator").exists()
    assert not list((lab.folder / "durable/_rescaling").iterdir())


# ``make test-all`` stops at every operation.

CASE = CASES[0]


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Any:
    def cut(after: int) -> Power:
        found = Power(after)
        for module in (creating, restoring, new_query, copies, stub):
            monkeypatch.setattr(module, "open_storage", found.open)
        return found

    return cut


@pytest.mark.timeout(1200)
def test_a_savepoint_is_there_as_a_whole_or_not_at_all(lab: Lab, power: Any) -> None:
    for file in CASE.files()[:2]:
        lab.feed(file)
    run(lab, CASE)
    target = lab.folder / "savepoints"
    whole = power(NEVER)
    savepoints.create(lab.spark, lab.folder / "query", target, "whole")
    for after in cases(whole.stops(), quick=2):
        power(after)
        with pytest.raises(Killed):
            savepoints.create(lab.spark, lab.folder / "query", target, "one")
        assert "one" not in {found.name for found in savepoints.listed(target) if found.savepoint}
    power(NEVER)
    savepoints.create(lab.spark, lab.folder / "query", target, "one")
    assert savepoints.verify(target, "one") == []


@pytest.mark.timeout(1200)
def test_a_query_starts_from_whole_restores(lab: Lab, power: Any) -> None:
    """Stopped at any step, and at another one of the next try, it leaves no location that Spark would start from."""
    (later, *_) = saved(lab, CASE)
    lab.feed(later)
    original = run(lab, CASE)
    whole = power(NEVER)
    restored(lab, "first")
    for after in cases(whole.stops(), quick=3):
        power(after)
        with pytest.raises(Killed):
            restored(lab, shards=3)
        assert not (lab.folder / "again/metadata").exists()
    power(NEVER)
    restored(lab, shards=3)
    assert sorted(path.name for path in (lab.folder / "again").iterdir() if path.is_file()) == ["metadata"]
    assert not list(lab.folder.glob("again-restoring-*"))
    assert run(lab, CASE, "again", "durable-again") == original
    require_one_query(lab, "durable-again")


def require_one_query(lab: Lab, durable: str) -> None:
    """Nothing is left of those that were stopped."""
    (query,) = [path for path in (lab.folder / durable / "_queries").iterdir() if not path.suffix]
    assert query.name in (lab.folder / "again/metadata").read_text()
    assert all(path.read_text() == query.name for path in query.parent.glob("*.fills"))
    assert {path.relative_to(lab.folder / durable).parts[0] for path in contents(lab.folder / durable)} == {
        "_queries",
        "totals",
    }


@pytest.mark.timeout(1200)
@pytest.mark.all
@pytest.mark.parametrize("how", cases(["rescale", "clone"]))
def test_a_query_starts_from_a_whole_copy_only(lab: Lab, power: Any, how: str) -> None:
    def copied(query: str = "again") -> str:
        return clone(lab, query) if how == "clone" else rescale(lab, 3, query)

    files = CASE.files()
    for file in files[:2]:
        lab.feed(file)
    lab.configure({"commit.carriedBytes": "0"})
    run(lab, CASE)
    whole = power(NEVER)
    copied("first")
    before = contents(lab.folder / "durable") | contents(lab.folder / "query")
    for after in cases(whole.stops(), quick=3):
        power(after)
        with pytest.raises(Killed):
            copied()
        assert not (lab.folder / "again/metadata").exists()
    power(NEVER)
    copied()
    assert sorted(path.name for path in (lab.folder / "again").iterdir() if path.is_file()) == ["metadata"]
    assert contents(lab.folder / "durable") | contents(lab.folder / "query") == before
    require_one_query(lab, "durable-again")
    lab.feed(files[2])
    original = run(lab, CASE)
    assert run(lab, CASE, "again", "durable-again") == original


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "claims" not in path.parts}
