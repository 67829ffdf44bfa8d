"""The commands on savepoints that need no Spark."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.cli import group
from holdfast.commands.savepoint import savepoint, say_new_query
from holdfast.commands.target import size
from holdfast.errors import ConflictError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.query_origin import QueryOrigin, declare_origin
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from tests.unit.snapshotter.savepoints.sample import STATE, a_savepoint


@pytest.fixture
def target(tmp_path: Path) -> Iterator[ObjectStorage]:
    with open_storage(str(tmp_path)) as opened:
        yield opened


def invoke(command: str, *arguments: object, said: str = "", status: int = 0) -> Any:
    result = CliRunner().invoke(savepoint, [command, *map(str, arguments)], input=said)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def test_what_is_there(target: ObjectStorage, tmp_path: Path) -> None:
    """Finished, unfinished and damaged ones, for people and for programs."""
    a_savepoint(target, "one")
    a_savepoint(target, "two")
    target.delete(["two/savepoint"])
    shown = invoke("list", tmp_path).output
    assert "before the upgrade" in shown
    assert "unfinished: delete it, or make it again" in shown
    found = json.loads(invoke("list", tmp_path, "--json").output)["savepoints"]
    assert [(one["name"], one["finished"], one["batch_id"]) for one in found] == [
        ("one", True, 7),
        ("two", False, None),
    ]


def test_a_savepoint_has_one_size(target: ObjectStorage, tmp_path: Path) -> None:
    """That of what it holds, wherever it is shown: its manifest counts nowhere, nor does what others have left."""
    made = a_savepoint(target, "one")
    target.put(f"one/operators/totals/state/0000-0-{'f' * 16}.arrow", b"a piece")
    a_savepoint(target, "two")
    target.delete(["two/savepoint"])
    one, two = json.loads(invoke("list", tmp_path, "--json").output)["savepoints"]
    shown = json.loads(invoke("show", tmp_path, "one", "--json").output)
    assert one["size_bytes"] == shown["size_bytes"] == two["size_bytes"] == made.size_bytes
    of_one = size(made.size_bytes)
    assert of_one in invoke("list", tmp_path).output
    assert of_one in invoke("show", tmp_path, "one").output


@pytest.mark.parametrize("how", [[], ["--json"]], ids=" ".join)
def test_a_directory_without_savepoints_is_said_to_be_none(
    target: ObjectStorage, tmp_path: Path, how: list[str]
) -> None:
    """Misspelt, or one of something else: an empty table would pass for a directory without savepoints yet."""
    target.put("notes/text", b"?")
    for url in (tmp_path, tmp_path / "misspelt"):
        with pytest.raises(NotFoundError, match="there is no savepoint here: check the URL"):
            invoke("list", url, *how)


def test_the_lines_to_paste_set_shards_where_the_name_leads_to_others(
    target: ObjectStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a query that was rescaled within its state directory; elsewhere its own record says how many it has."""
    table = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))
    for directory, query_id, shards in (("totals", "original", 2), ("totals@1-2", "1-2", 4), ("alerts", "3-4", 4)):
        record = OperatorRecord.of(directory, query_id, "def-1", "run-1", shards, {"state": table}, 100)
        declare_operator(target, record)
    declare_origin(target, QueryOrigin("1-2", "1-2", "original", 7, {"totals@1-2": "1-2"}))
    declare_origin(target, QueryOrigin("3-4", "3-4", "original", 7, {"alerts": "3-4"}))
    places = "/data/app-spark-2", str(tmp_path), {}
    say_new_query("app is rescaled", "app", "1-2", *places, as_json=False)
    assert capsys.readouterr().out.splitlines()[2:] == [
        f'    spark.conf.set("spark.holdfast.state.dir", "{tmp_path}")  # before the query is defined',
        '    spark.conf.set("spark.holdfast.shards", "4")',
        '    df.writeStream.option("checkpointLocation", "/data/app-spark-2")',
    ]
    say_new_query("app is restored", "app", "3-4", *places, as_json=False)
    assert "shards" not in capsys.readouterr().out


def test_a_notebook_shows_what_was_saved(target: ObjectStorage) -> None:
    """In a line: the names of thousands of pieces are of no use to people."""
    shown = repr(a_savepoint(target))
    assert shown.startswith("<Savepoint 'one' after micro-batch 7, ")
    assert shown.endswith("rows={'totals': {'state': 200, 'v.a/b:c': 200}}>")


def test_a_misspelt_operator_is_recognised(target: ObjectStorage) -> None:
    """By whoever reads a savepoint's table."""
    with pytest.raises(NotFoundError, match="did you mean 'totals'"):
        a_savepoint(target).find_operator("totls")


def test_what_a_savepoint_holds(target: ObjectStorage, tmp_path: Path) -> None:
    a_savepoint(target)
    shown = invoke("show", tmp_path, "one").output
    for text in ("after micro-batch 7", "totals", "200", 'source 0 at {"logOffset":3}', "not saved: dedupe"):
        assert text in shown
    found = json.loads(invoke("show", tmp_path, "one", "--json").output)
    assert found["operators"][0]["rows"] == {"state": 200, "v.a/b:c": 200}
    with pytest.raises(NotFoundError, match="no savepoint of this name"):
        invoke("show", tmp_path, "none")


def test_damage_ends_with_1(target: ObjectStorage, tmp_path: Path) -> None:
    made = a_savepoint(target)
    assert "one is intact" in invoke("verify", tmp_path, "one").output
    key = made.operators[0].pieces[0].key
    target.delete([f"one/{key}"])
    assert "is missing" in " ".join(invoke("verify", tmp_path, "one", status=1).output.split())
    assert key in json.loads(invoke("verify", tmp_path, "one", "--json", status=1).output)["damages"][0]


def test_what_others_have_left_is_no_damage(target: ObjectStorage, tmp_path: Path) -> None:
    """A job that verifies its savepoints must not fail because of a whole one."""
    key = f"operators/totals/state/0000-0-{'f' * 16}.arrow"
    a_savepoint(target)
    target.put(f"one/{key}", b"a piece")
    shown = invoke("verify", tmp_path, "one").output
    assert "one is intact" in shown
    assert f"leftover of a repeated task or another attempt: {key}" in shown
    found = json.loads(invoke("verify", tmp_path, "one", "--json").output)
    assert found == {"name": "one", "damages": [], "leftovers": [key]}


def test_deleting_asks(target: ObjectStorage, tmp_path: Path) -> None:
    a_savepoint(target)
    invoke("delete", tmp_path, "one", said="n\n", status=1)
    with pytest.raises(InvalidArgumentError, match="pass --yes"):
        invoke("delete", tmp_path, "one", "--json")
    assert "one is intact" in invoke("verify", tmp_path, "one").output
    held = len(list(target.list("")))
    told = invoke("delete", tmp_path, "one", said="y\n").output
    assert f"Delete the savepoint one in {tmp_path}, {held} objects? [y/N]" in told
    assert f"{held} objects deleted" in told
    assert not list(target.list(""))


@pytest.mark.parametrize("how", [[], ["--yes"]], ids=" ".join)
def test_what_is_not_there_needs_no_confirmation(target: ObjectStorage, tmp_path: Path, how: list[str]) -> None:
    """A misspelt name is told at once, and so is a file that is no savepoint."""
    a_savepoint(target, "one")
    target.put("notes/savepoint", b"not ours")
    with pytest.raises(NotFoundError, match="no savepoint of this name is here; did you mean 'one'"):
        invoke("delete", tmp_path, "onee", *how, said="")
    with pytest.raises(InvalidArgumentError, match="this file is not a savepoint"):
        invoke("delete", tmp_path, "notes", *how, said="")


@pytest.mark.parametrize("command", ["create", "from-spark"])
def test_a_name_that_is_taken_is_told_before_a_spark_starts(
    target: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """It takes half a minute to start."""
    a_savepoint(target, "one")
    target.put("query/metadata", b'{"id": "cb5e9d3c-9e6a-4f6e-9a94-0d5d1b6f7b16"}')
    monkeypatch.setattr("holdfast.commands.own_spark.started_spark", _no_spark)
    monkeypatch.setattr("holdfast.commands.savepoint.started_spark", _no_spark)
    own = ["--operator", "totals"] if command == "from-spark" else ["--state-dir", tmp_path / "state"]
    with pytest.raises(ConflictError, match="there is a savepoint of this name"):
        invoke(command, tmp_path / "query", "--to", tmp_path, "--name", "one", *own, "--conf", "spark.app.name=x")


def _no_spark(*_: object) -> None:
    pytest.fail("a Spark was started")


def test_what_differs_ends_with_1(target: ObjectStorage, tmp_path: Path) -> None:
    a_savepoint(target, "one")
    a_savepoint(target, "same")
    assert "200" in invoke("diff", tmp_path, "one", "same").output
    found = json.loads(invoke("diff", tmp_path, "one", "same", "--json").output)
    assert [(table["table"], table["equal"], table["changed"]) for table in found["tables"]] == [
        ("state", 200, 0),
        ("v.a/b:c", 200, 0),
    ]
    made = a_savepoint(target, "other", tables=(STATE,))
    target.delete(["other/savepoint"])
    shard = [piece for piece in made.operators[0].pieces if piece.shard == 0]
    part = replace(made, operators=(replace(made.operators[0], pieces=tuple(shard)),))
    target.put("other/savepoint", part.encode())
    shown = invoke("diff", tmp_path, "one", "other", "--keys", "1", status=1).output
    assert "removed in totals/state: {'user': " in shown


def test_keys_that_differ_are_json_as_look_ups_print_it(target: ObjectStorage, tmp_path: Path) -> None:
    """Binaries in base64 and times with a T, so that a key can be looked up; NaN, which JSON does not have, as text."""
    key = {"b": b"\xfb\xff", "x": float("nan"), "at": dt.datetime(2026, 11, 25, 1, 2, 3, tzinfo=dt.UTC)}
    types = {"b": pa.large_binary(), "x": pa.float64(), "at": pa.timestamp("us", "UTC")}
    schema = TableSchema.of("state", pa.schema(types), STATE.value)
    keys = Keys(np.array([7], np.uint64), pa.RecordBatch.from_pylist([key], schema.key))
    run = Run.build(schema, keys, pa.record_batch([pa.array([1])], schema=schema.value))
    before, _ = (a_savepoint(target, name, (schema,), run) for name in ("before", "after"))
    target.delete(["before/savepoint"])
    without = replace(before, operators=(replace(before.operators[0], pieces=()),))
    target.put("before/savepoint", without.encode())
    found = json.loads(invoke("diff", tmp_path, "before", "after", "--keys", "1", "--json", status=1).output)
    assert found["tables"][0]["keys"]["added"] == [{"b": "+/8=", "x": "nan", "at": "2026-11-25T01:02:03+00:00"}]


@pytest.mark.parametrize("given", [["totals", "sums"], ["0=totals", "0=sums"], ["first=totals"], ["0="]], ids=str)
def test_operators_of_spark_are_named_once(given: list[str]) -> None:
    """Before a Spark starts that would look for them."""
    names = [text for name in given for text in ("--operator", name)]
    found = CliRunner().invoke(savepoint, ["from-spark", "/nowhere", "--to", "/here", "--name", "one", *names])
    assert isinstance(found.exception, InvalidArgumentError)
    assert "NUMBER=NAME" in str(found.exception)


@pytest.mark.parametrize(
    ("given", "said"),
    [(["onee"], "one"), (["one", "--skip", "total"], "totals"), (["one", "--rename", "a=b"], "operator=a")],
)
def test_a_restore_of_what_is_not_there_starts_no_spark(
    target: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], said: str
) -> None:
    """A misspelt name is found in milliseconds."""
    a_savepoint(target, "one")
    monkeypatch.delattr("holdfast.commands.own_spark.started_spark")
    places = ["--state-dir", str(tmp_path / "state"), "--checkpoint-location", str(tmp_path / "new")]
    with pytest.raises(NotFoundError, match=said):
        invoke("restore", tmp_path, *given, *places)


def test_a_location_that_is_not_there_starts_no_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a query on Spark's own operators, too: a misspelt path is found in milliseconds."""
    monkeypatch.delattr("holdfast.commands.savepoint.started_spark")
    named = ["--to", str(tmp_path), "--name", "one", "--operator", "totals"]
    found = CliRunner().invoke(savepoint, ["from-spark", str(tmp_path / "nowhere"), *named])
    assert isinstance(found.exception, InvalidArgumentError)
    assert "lacks the file metadata" in str(found.exception)


@pytest.mark.parametrize(
    "given",
    [
        ["savepoint", "create", "{}/nowhere", "--to", "{}", "--name", "one", "--state-dir", "{}/durable"],
        ["rescale", "{}/nowhere", "--checkpoint-location", "{}/new", "--shards", "2", "--state-dir", "{}/durable"],
        ["export", "{}/nowhere", "--to", "{}/new", "--operator", "totals", "--state-dir", "{}/durable"],
        ["export", "{}/nowhere", "--to", "{}/new"],
        ["export", "{}/one", "--to", "{}/new", "--columns", "amount", "--operator", "totals"],
    ],
    ids=lambda given: " ".join(given[:3]),
)
def test_what_is_not_there_starts_no_spark_that_is_configured(
    target: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    """With --conf Spark does the work, and took half a minute to say that a path is misspelt."""
    a_savepoint(target, "one")
    for command in ("export", "own_spark"):
        monkeypatch.delattr(f"holdfast.commands.{command}.started_spark")
    with pytest.raises((NotFoundError, InvalidArgumentError)):
        group.main([one.format(tmp_path) for one in [*given, "--conf", "spark.a=b"]], standalone_mode=False)


def test_diff_takes_savepoints_by_their_places(target: ObjectStorage, tmp_path: Path) -> None:
    """``holdfast diff`` of two savepoints is what ``holdfast savepoint diff`` says, also of two directories."""
    a_savepoint(target, "one")
    a_savepoint(target, "same")
    assert said("diff", f"{tmp_path}/one", f"{tmp_path}/same/") == invoke("diff", tmp_path, "one", "same").output
    with open_storage(str(tmp_path / "elsewhere")) as other:
        a_savepoint(other, "one")
    assert "200" in said("diff", f"{tmp_path}/one", f"file://{tmp_path}/elsewhere/one")
    assert "two savepoints as URL/NAME" in said("diff", tmp_path, "totals", "one", "same")
    assert "two savepoints as URL/NAME" in said("diff", tmp_path, "one", "same")
    assert "two savepoints as URL/NAME" in said("diff", tmp_path, "totals", "9" * 5000, "5")
    assert "is URL/NAME" in said("diff", "s3://bucket", f"{tmp_path}/one")
    assert "all tables are compared" in said("diff", f"{tmp_path}/one", f"{tmp_path}/same", "--table", "state")
    with pytest.raises(InvalidArgumentError, match="lacks the file metadata"):
        group.main(["diff", str(tmp_path), "totals", "4", "5"], standalone_mode=False)


def said(*arguments: object) -> str:
    """Return what the whole command line prints."""
    return CliRunner().invoke(group, [str(one) for one in arguments]).output
