"""The checkpoint location is all that a command needs: the pointers in Spark's state name the state directory."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame

import holdfast
from holdfast import savepoints
from holdfast.cli import group
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.spark_integration.lookup.query_pointers import find_state_dir
from tests.spark.conftest import Lab

pytestmark = pytest.mark.spark


def said(*arguments: object) -> str:
    """Return the error that a command ends with."""
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
    assert "this is a state directory: name the checkpointLocation" in said("get", state_dir, "totals", "key=a")
    told = said("inspect", location)
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
def test_a_restored_query_has_its_directory_before_it_runs(lab: Lab) -> None:
    """So that it can be looked into at once, before it is started for the first time."""
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    lab.configure({"state.dir": str(lab.folder / "restored state")})
    savepoints.restore(lab.spark, lab.folder / "savepoints", "one", lab.folder / "restored")
    assert find_state_dir(lab.folder / "restored", {}) == str(lab.folder / "restored state")


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
