"""``holdfast log`` and ``holdfast inspect``; how far long work has come; where the Spark of a command runs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from click.testing import CliRunner

from holdfast import clock
from holdfast.cli import group
from holdfast.commands import progress
from holdfast.commands.own_spark import log_errors_only, use_own_python
from holdfast.errors import CorruptionError, UnavailableError
from holdfast.snapshotter.ownership.queries import QueryOrigin, declare_origin
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.troubles import report_trouble
from tests.model.shard_history import ShardHistory
from tests.unit.holdfast.commands.conftest import age, document, files, put_record, run
from tests.unit.holdfast.health.in_four_states import claim


def test_log_lists_versions_and_snapshots_newest_first(root: Path, shard: ShardHistory) -> None:
    made = shard.commit(shard.grow(None, 30)[-1], carried=True)
    shard.snapshot(made)
    shard.commit(made)
    (found,) = document("log", root, "--limit", 4)["shards"]
    assert [(r["kind"], r["version"].partition("-")[0]) for r in found["newest"]][:2] == [
        ("commit", "32"),
        ("snapshot", "31"),
    ]
    newest, snapshot = found["newest"][:2]
    assert [p.partition("-")[0] for p in newest["covers"]] == ["31", "32"]
    assert newest["begins"].startswith("snapshots/31-")
    assert snapshot["files"] >= 2
    assert snapshot["stored_bytes"] >= snapshot["new_bytes"] > 0
    assert len(found["newest"]) == 4
    assert found["commits"] == 61
    shown = run("log", root, "--limit", 2).stdout
    assert "2 versions" in shown
    assert "snapshot" in shown


def test_where_nothing_is_stored_yet_it_is_said_where_the_commits_are(root: Path, storage: ObjectStorage) -> None:
    """A query may have run for hours: neither an empty answer nor "all intact" would tell that."""
    put_record(storage)
    for command in ("log", "verify", "inspect"):
        shown = run(command, root)
        assert shown.exit_code == 0
        assert "small commits stay in the query's checkpointLocation" in " ".join(shown.stdout.split()), command


def test_log_shows_a_damaged_object_as_such(root: Path, shard: ShardHistory) -> None:
    (victim,) = (root / shard.prefix / "commits").glob("30-*")
    victim.write_bytes(b"")
    row = next(
        r for r in document("log", root)["shards"][0]["newest"] if r["version"] == victim.name and r["kind"] == "commit"
    )
    assert "not a whole holdfast file" in row["error"]
    assert document("log", root, "--shard", 2)["shards"] == []


def test_a_shard_that_no_operator_has_is_refused(root: Path, storage: ObjectStorage) -> None:
    """It was "nothing is stored", as of a shard that has not written yet."""
    put_record(storage)
    put_record(storage, "sessions", 2)
    assert run("log", root, "--shard", 3).exit_code == 0
    refused = run("log", root, "--shard", 4)
    assert "no operator has this shard" in str(refused.exception)
    assert "totals has 4" in str(refused.exception)
    storage.put("totals/operator", b"no record")
    assert run("log", root, "--shard", 4).exit_code == 0


def test_a_restored_query_that_was_never_started_is_not_running(storage: ObjectStorage, root: Path) -> None:
    """Its newest commit is what the restore has written; one without an origin was seen at work by it."""
    put_record(storage)
    ShardHistory(storage).grow(None, 1)
    assert document("inspect", root)["queries"][0]["state"] == "running"
    declare_origin(storage, QueryOrigin("query-1", "query-1", "original", 7, {"totals": "query-1"}))
    (query,) = document("inspect", root)["queries"]
    assert (query["state"], query["why"]) == (
        "stopped",
        "Created from another query, and not started yet.",
    )
    claim(root, clock.now_ms())
    assert document("inspect", root)["queries"][0]["state"] == "running"


def test_inspect_shows_operators_and_sizes(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    storage.put("mine.txt", b"?")
    found = document("inspect", root)
    (operator,) = found["operators"]
    assert operator["operator"] == "totals"
    assert operator["query_id"] == "query-1"
    assert operator["shard_count"] == 4
    assert operator["tables"]["counts"]["key"][0].keys() == {"name", "type"}
    (facts,) = operator["shards"]
    assert facts["shard"] == shard.prefix
    assert facts["objects"]["commit"] == 30
    assert facts["objects"]["snapshot"] == 3
    assert sum(facts["bytes"].values()) == sum((root / key).stat().st_size for key in files(root) if "shard" in key)
    assert facts["newest_version"].startswith("30-")
    assert found["unknown_objects"] == 1
    shown = run("inspect", root, "--shards").stdout
    assert "1 of 4 shards have objects here" in shown
    assert shard.prefix in shown


def test_inspect_shows_what_fails_in_the_background(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """How far behind snapshots are, and why; nothing that is over."""
    folder = PrefixedStorage(storage, shard.prefix)
    report_trouble(folder, "snapshot", UnavailableError("over [red]long[/] ago"), 3, "host-1", 0)
    age(root)
    last = shard.grow(None, 3)[-1]
    shard.snapshot(last)
    (operator,) = document("inspect", root)["operators"]
    assert operator["troubles"] == [], "a newer snapshot was stored"
    assert operator["shards"][0]["commits_since_snapshot"] == 0
    time.sleep(0.01)  # the store's clock has milliseconds
    shard.grow(last, 7)
    for n in (1, 2):
        report_trouble(folder, "snapshot", UnavailableError("the disk of [red]moon[/] is full"), n, "host-2", 0)
    report_trouble(folder, "clean-up", CorruptionError("commits/7-aa is missing"), 9, "host-3", 0)
    (operator,) = document("inspect", root, status=1)["operators"]
    assert operator["shards"][0]["commits_since_snapshot"] == 7
    told = {t["what"]: (t["in_a_row"], t["host"], t["error"]) for t in operator["troubles"]}
    assert told == {
        "snapshot": (2, "host-2", "the disk of [red]moon[/] is full"),
        "clean-up": (9, "host-3", "commits/7-aa is missing"),
    }
    shown = run("inspect", root, "--shards").stdout
    assert f"{shard.prefix}: snapshot failed, 2 times in a row, last " in shown
    assert "the disk of [red]moon[/] is full" in shown
    assert "at most 7 commits since a shard's newest snapshot" in shown
    storage.put(f"{shard.prefix}/troubles/snapshot-00000000", b"no stored file")
    (operator,) = document("inspect", root, status=1)["operators"]
    assert any("not a whole holdfast file" in t["error"] for t in operator["troubles"])


def test_a_name_in_other_digits_is_no_shard(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """Only what holdfast would have written counts as its own."""
    storage.put("totals/shard-\u0660\u0660\u0660\u0661/commits/1-aa", b"?")
    (operator,) = document("inspect", root)["operators"]
    assert [s["shard"] for s in operator["shards"]] == [shard.prefix]
    assert document("verify", root)["damages"] == []


def test_an_operator_whose_commits_still_travel_looks_like_none_that_was_lost(tmp_path: Path) -> None:
    """A newcomer's first query has stored nothing yet: no object is said to be no state."""
    with open_storage(str(tmp_path)) as storage:
        put_record(storage)
    shown = run("inspect", tmp_path).stdout
    assert "0 of 4 shards have objects here" in shown
    assert "small commits stay in the query's checkpointLocation until enough have accumulated" in shown


def test_tasks_on_this_machine_run_in_the_commands_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment need not be activated; a cluster has paths of its own, and who names a Python is asked for it."""
    monkeypatch.setenv("PYSPARK_PYTHON", "named")
    use_own_python({"spark.master": "local[2]"})
    assert os.environ["PYSPARK_PYTHON"] == "named"
    monkeypatch.delenv("PYSPARK_PYTHON")
    use_own_python({"spark.master": "spark://host:7077"})
    use_own_python({})
    assert "PYSPARK_PYTHON" not in os.environ
    use_own_python({"spark.master": "local[*,4]"})
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_spark_logs_errors_alone_unless_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warnings of host names and native code hide what a command says; options of the user's come later and win."""
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Dlog4j2.configurationFile=theirs")
    log_errors_only()
    ours, theirs = os.environ["SPARK_SUBMIT_OPTS"].split()
    assert theirs == "-Dlog4j2.configurationFile=theirs"
    _, _, url = ours.partition("-Dlog4j2.configurationFile=")
    assert "rootLogger.level = error" in Path(url2pathname(urlsplit(url).path)).read_text()
    monkeypatch.setenv("SPARK_CONF_DIR", "/etc/spark")
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "")
    log_errors_only()
    assert os.environ["SPARK_SUBMIT_OPTS"] == ""


@pytest.mark.parametrize("command", ["export", "rescale", "clone", "savepoint create", "savepoint restore"])
def test_help_says_where_spark_runs(command: str) -> None:
    """A master in spark-defaults.conf does not count, so who has one there must learn what does."""
    told = CliRunner().invoke(group, [*command.split(), "--help"], env={"COLUMNS": "200"}).output
    assert "Default for spark.master: local[*,4]." in " ".join(told.split())


def shown() -> None:
    with progress.items_shown("deleting", 2_000) as on_done:
        on_done(1_000)
    with progress.bytes_shown("reading", 5_000_000) as on_done:
        on_done(4_000_000)


def test_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and pipes stay as they are."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    shown()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_how_much_is_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On standard error, so that what a program reads stays clean."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    shown()
    out, err = capsys.readouterr()
    assert out == ""
    assert "deleting" in err
    assert "1000/2000" in err
    assert "4.0/5.0 MB" in err
