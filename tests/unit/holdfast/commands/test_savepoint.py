"""Savepoints by the command line: made, listed, compared, verified and exported."""

from __future__ import annotations

import datetime as dt
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.cli import group
from holdfast.commands.export import export, places_of_query, write_files
from holdfast.commands.savepoint import print_new_query, savepoint
from holdfast.commands.target import size
from holdfast.errors import ConflictError, CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.queries import QueryOrigin, declare_origin
from holdfast.snapshotter.savepoints.savepoints import read_piece, read_savepoint, savepoint_folder
from holdfast.snapshotter.storage.local import LocalStorage
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.lookup.places import require_no_state_directory
from holdfast.spark_integration.spark_state.pointers import metadata_of_groups, schema_of_groups
from holdfast.spark_integration.state_source.source import ShownTable
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.unit.holdfast.commands.conftest import put_record
from tests.unit.holdfast.health.in_four_states import claim
from tests.unit.snapshotter.savepoints.conftest import STATE, a_savepoint


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
def test_a_directory_without_savepoints_is_none(target: ObjectStorage, tmp_path: Path, how: list[str]) -> None:
    """Misspelt, or one of something else: an empty table would pass for a directory without savepoints yet."""
    target.put("notes/text", b"?")
    for url in (tmp_path, tmp_path / "misspelt"):
        with pytest.raises(NotFoundError, match="there are no savepoints here: check the URL"):
            invoke("list", url, *how)


def test_the_lines_to_paste_set_shards_where_the_name_leads_to_others(
    target: ObjectStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a query that was rescaled within its state directory; elsewhere its own record says how many it has."""
    table = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))
    for directory, query_id, shards in (("totals", "original", 2), ("totals@1-2", "1-2", 4), ("alerts", "3-4", 4)):
        record = OperatorRecord(directory, query_id, "def-1", "run-1", shards, {"state": table}, 100)
        declare_operator(target, record)
    declare_origin(target, QueryOrigin("1-2", "1-2", "original", 7, {"totals@1-2": "1-2"}))
    declare_origin(target, QueryOrigin("3-4", "3-4", "original", 7, {"alerts": "3-4"}))
    places = "/data/app-spark-2", str(tmp_path), {}
    print_new_query("app is rescaled", "app", "1-2", *places, as_json=False)
    assert capsys.readouterr().out.splitlines()[2:] == [
        f'    spark.conf.set("spark.holdfast.state.dir", "{tmp_path}")  # before the query is defined',
        '    spark.conf.set("spark.holdfast.shards", "4")',
        '    df.writeStream.option("checkpointLocation", "/data/app-spark-2")',
    ]
    print_new_query("app is restored", "app", "3-4", "s3://bucket/app-spark", *places[1:], as_json=False)
    shown = capsys.readouterr().out
    assert "shards" not in shown
    assert '"checkpointLocation", "s3a://bucket/app-spark"' in shown  # Spark has no file system of the other name


def test_a_notebook_shows_what_was_saved(target: ObjectStorage) -> None:
    """In a line: the names of thousands of pieces are of no use to people."""
    shown = repr(a_savepoint(target))
    assert shown.startswith("<Savepoint 'one' after micro-batch 7, ")
    assert shown.endswith("rows={'totals': {'state': 200, 'v.a/b:c': 200}}>")


def test_a_misspelt_operator_is_recognised(target: ObjectStorage) -> None:
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
    assert f"leftover of a retried task or a failed attempt: {key}" in shown
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
    with pytest.raises(NotFoundError, match="no savepoint of this name exists; did you mean 'one'"):
        invoke("delete", tmp_path, "onee", *how, said="")
    with pytest.raises(InvalidArgumentError, match="this file is not a savepoint"):
        invoke("delete", tmp_path, "notes", *how, said="")


@pytest.mark.parametrize("how", [["create"], ["delete", "--yes"]], ids=" ".join)
def test_a_savepoint_is_looked_for_once(
    target: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    """By the function that makes or deletes it."""
    a_savepoint(target, "one")
    looked: list[str] = []

    def look(_: ObjectStorage, name: str) -> list[str]:
        looked.append(name)
        return []

    for found in ("find_objects", "require_free"):
        monkeypatch.setattr(f"holdfast.commands.savepoint.{found}", look)
    if how == ["create"]:
        places = str(tmp_path / "query"), str(tmp_path / "state")
        monkeypatch.setattr("holdfast.commands.savepoint.both_places", lambda *_: places)
        with pytest.raises(InvalidArgumentError, match="lacks the file metadata"):
            invoke("create", tmp_path / "query", "--to", tmp_path, "--name", "two")
    else:
        assert "objects deleted" in invoke("delete", tmp_path, "one", "--yes").output
    assert looked == []


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


@pytest.mark.parametrize(
    ("given", "aggregates", "window"),
    [
        ("", None, None),
        ("--aggregate n=count --aggregate a.b=max", {"n": "count", "a.b": "max"}, None),
        ("--aggregate 0.n=count --aggregate 1.m=sum(double)", {0: {"n": "count"}, 1: {"m": "sum(double)"}}, None),
        ("--window '1 hour, 5 minutes'", None, ["1 hour", "5 minutes"]),
        ("--window '0=1 hour' --window '2=1 day'", None, {0: ["1 hour"], 2: ["1 day"]}),
    ],
)
def test_what_spark_does_not_keep_of_aggregations_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, aggregates: Any, window: Any
) -> None:
    """By column, or by number where there are several."""
    handed: dict[str, Any] = {}

    def stop(*_: Any, **arguments: Any) -> None:
        handed.update(arguments)
        raise NotFoundError("enough is known")

    with open_storage(str(tmp_path)) as location:
        location.put("metadata", b'{"id": "cb5e9d3c-9e6a-4f6e-9a94-0d5d1b6f7b16"}')
        location.put("offsets/0", b'v1\n{"conf":{}}\n-')
        location.put("commits/0", b'v1\n{"nextBatchWatermarkMs":0}')
    for name in ("require_sparks_own", "started_spark"):
        monkeypatch.setattr(f"holdfast.commands.savepoint.{name}", lambda *_: nullcontext())
    monkeypatch.setattr("holdfast.savepoints.from_spark", stop)
    named = ["--to", str(tmp_path), "--name", "one", "--operator", "hours"]
    found = CliRunner().invoke(savepoint, ["from-spark", str(tmp_path), *named, *shlex.split(given)])
    assert isinstance(found.exception, NotFoundError)
    assert (handed["aggregates"], handed["window"]) == (aggregates, window)


def test_diff_takes_savepoints_by_their_places(target: ObjectStorage, tmp_path: Path) -> None:
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


def test_what_lies_there_says_whether_it_is_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set for other commands; the option says that LOCATION is a query's, whatever lies there."""
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target, "one")
        target.put("query/metadata", b'{"id": "cb5e9d3c-9e6a-4f6e-9a94-0d5d1b6f7b16"}')

        put_record(PrefixedStorage(target, "state"))
    listed: list[str] = []
    read: list[str] = []

    def gets(storage: LocalStorage, key: str, *limit: int) -> Any:
        read.append(f"{storage.url}/{key}")
        return get_of(storage, key, *limit)

    def lists(storage: LocalStorage, prefix: str) -> Any:
        listed.append(f"{storage.url}/{prefix}")
        return list_of(storage, prefix)

    get_of, list_of = LocalStorage.get, LocalStorage.list
    monkeypatch.setattr(LocalStorage, "get", gets)
    monkeypatch.setattr(LocalStorage, "list", lists)

    def is_query(location: str, *arguments: str) -> bool:
        given = [str(tmp_path / location), "--to", "elsewhere", *arguments]
        try:
            return places_of_query(export.make_context("export", given), {}) is not None
        except HoldfastError:
            return True

    assert (is_query("one"), is_query("query")) == (False, True)
    read.clear()
    assert is_query("query", "--operator", "totals")
    assert read.count(f"file://{tmp_path}/query/metadata") == 1
    monkeypatch.setenv("HOLDFAST_STATE_DIR", "/data/app")
    assert (is_query("one"), is_query("query"), is_query("nothing")) == (False, True, False)
    assert is_query("one", "--state-dir", "/data/app")
    # All that is there may be much: of a savepoint it is not listed, of a state directory once.
    listed.clear()
    assert not is_query("one", "--operator", "totals")
    assert listed == []
    assert is_query("state", "--operator", "totals")
    assert listed.count(f"file://{tmp_path}/state/") == 1


@pytest.mark.slow(2)
def test_a_savepoint_is_exported_without_spark(tmp_path: Path) -> None:
    """All rows of a table, with the shard of each; nothing is left of an export that fails."""
    with open_storage(str(tmp_path / "savepoints")) as target:
        a_savepoint(target, "one")
        (operator,) = (one for one in read_savepoint(target, "one").operators if one.name == "totals")
        folder = savepoint_folder(target, "one")
        expected = sum(
            len(read_piece(folder, "totals", p, operator.tables["state"])) for p in operator.of_table("state")
        )
    where = [str(tmp_path / "savepoints/one"), "--operator", "totals"]
    program = "import sys; from holdfast.cli import main; main(); assert 'py4j' not in sys.modules"
    for kind, read in (("parquet", pq.read_table), ("csv", csv.read_csv)):
        to = tmp_path / kind
        done = subprocess.run(
            [sys.executable, "-c", program, "export", *where, "--to", str(to), "--format", kind],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, f"written to {to}\n", "")
        parts = sorted(to.iterdir())
        rows = pa.concat_tables([read(part) for part in parts])
        assert {part.suffix for part in parts} == {f".{kind}"}
        assert rows.num_rows == expected > 0
        assert rows.schema.names[-1] == "shard"
    with pytest.raises(ConflictError, match="the directory is not empty"):
        exported(*where, "--to", str(tmp_path / "csv"))
    with pytest.raises(NotFoundError, match="did you mean 'shard'"):
        exported(*where, "--to", str(tmp_path / "new"), "--columns", "shrd")
    with pytest.raises(InvalidArgumentError, match="a savepoint holds one micro-batch"):
        exported(*where, "--to", str(tmp_path / "new"), "--batch", "7")
    piece = next((tmp_path / "savepoints/one/operators/totals/state").iterdir())
    piece.write_bytes(piece.read_bytes()[:-1])
    with pytest.raises(CorruptionError):
        exported(*where, "--to", str(tmp_path / "new"))
    assert not list((tmp_path / "new").glob("*"))


def test_what_is_no_savepoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state directory, the name alone where the shell is, and a folder that may not be listed."""
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target, "one")
        put_record(PrefixedStorage(target, "state"))
    monkeypatch.chdir(tmp_path)
    exported("one", "--operator", "totals", "--to", "new")
    claim(tmp_path / "state", 1_790_000_000_000)
    with pytest.raises(InvalidArgumentError, match="this is a state directory: name the checkpointLocation") as caught:
        exported(str(tmp_path / "state"), "--to", "elsewhere")
    assert "query-1 (operators totals, active until 2026-09-21 14:13 UTC on host-1)" in str(caught.value)
    with pytest.raises(NotFoundError, match="no savepoint of this name"):
        exported("two", "--to", "elsewhere")
    with open_storage(str(tmp_path / "state")) as inner:
        denied = FaultyStorage(inner, [Fault("fail", "list", error=lambda: InvalidArgumentError("access denied"))])
        require_no_state_directory(denied)
        denied.assert_all_hit()


def exported(*arguments: str) -> None:
    group.main(["export", *arguments], standalone_mode=False)


NESTED = TableSchema.of(
    "state",
    pa.schema([("k", pa.large_string())]),
    pa.schema([("list", pa.large_list(pa.int64())), ("raw", pa.large_binary()), ("at", pa.timestamp("us", "UTC"))]),
)


def nested_rows() -> Run:
    keys = pa.record_batch({"k": pa.array(["", None, 'a "b",\nc'], pa.large_string())})
    at = pa.array([0, None, 1], pa.timestamp("us", "UTC"))
    values = pa.record_batch(
        [pa.array([[1]] * 3, NESTED.value.field("list").type), pa.array([b""] * 3, pa.large_binary()), at],
        schema=NESTED.value,
    )
    return Run.build(NESTED, Keys(np.arange(3, dtype=np.uint64), keys), values)


def test_csv_holds_text_and_times_and_says_what_it_cannot(tmp_path: Path) -> None:
    """Null is told from empty text; a table without rows has its columns."""
    some, every = ShownTable.of(NESTED, ("k", "at")), ShownTable.of(NESTED)
    with open_storage(str(tmp_path)) as to:
        write_files(some.batches(nested_rows(), 0), some.arrow, PrefixedStorage(to, "some"), "csv")
        write_files([], every.arrow, PrefixedStorage(to, "none"), "parquet")
    assert (tmp_path / "some/part-00000.csv").read_text() == (
        '"k","at"\n"",1970-01-01 00:00:00.000000Z\n,\n"a ""b"",\nc",1970-01-01 00:00:00.000001Z\n'
    )
    assert pq.read_table(tmp_path / "none").schema.names == ["k", "list", "raw", "at", "shard"]


MISTAKES: list[tuple[str, type[HoldfastError] | tuple[type[HoldfastError], ...], str]] = [
    # A name that is taken.
    ("savepoint create {}/query {name} --state-dir {}/state {conf}", ConflictError, "a savepoint of this name"),
    ("savepoint from-spark {}/query {name} --operator totals {conf}", ConflictError, "a savepoint of this name"),
    # A query on holdfast: Spark's metadata tells that its groups hold pointers, and which micro-batches there are.
    ("savepoint from-spark {}/query {new} --operator totals", InvalidArgumentError, "is holdfast's already"),
    ("savepoint from-spark {}/query {new} --operator totals --batch 7", NotFoundError, "is not committed"),
    ("savepoint from-spark {}/state {new} --operator totals", InvalidArgumentError, "this is a state directory: name"),
    # Spark's operators, which are named once, and its aggregations.
    *(
        (f"savepoint from-spark /nowhere --to /here --name one {names}", InvalidArgumentError, "NUMBER=NAME")
        for names in (
            *("--operator totals --operator sums", "--operator 0=totals --operator 0=sums"),
            *("--operator first=totals", "--operator 0="),
        )
    ),
    *(
        (f"savepoint from-spark {{}}/empty {{new}} --operator hours {given}", InvalidArgumentError, given.split()[0])
        for given in (
            *("--aggregate count", "--aggregate n=count --aggregate n=max", "--aggregate n=count --aggregate 1.n=max"),
            *("--window 'first=1 hour'", "--window first=hour --window hour"),
        )
    ),
    # What a restore shall change.
    ("savepoint restore {} onee {places}", NotFoundError, "one"),
    ("savepoint restore {} one --skip total {places}", NotFoundError, "totals"),
    ("savepoint restore {} one --rename a=b {places}", NotFoundError, "operator=a"),
    # A new query's location that holds something.
    *(
        (f"{command} --checkpoint-location {{}}/held --state-dir {{}}/state {{conf}}", ConflictError, "must be empty")
        for command in (
            *("savepoint restore {} one --skip dedupe", "rescale {}/query --shards 2"),
            "clone {}/query --to-state-dir {}/fresh",
        )
    ),
    # What is not there: with --conf Spark does the work, and took half a minute to say that a path is misspelt.
    *(
        (f"{command} --conf spark.a=b", (NotFoundError, InvalidArgumentError), "nowhere|amount")
        for command in (
            "savepoint create {}/nowhere {name} --state-dir {}/durable",
            "savepoint from-spark {}/nowhere {name} --operator totals",
            "savepoint from-spark {}/nowhere {name} --operator 2024",
            "rescale {}/nowhere --checkpoint-location {}/new --shards 2 --state-dir {}/durable",
            "export {}/nowhere --to {}/new --operator totals --state-dir {}/durable",
            "export {}/nowhere --to {}/new",
            "export {}/one --to {}/new --columns amount --operator totals",
        )
    ),
    # What cannot be exported so.
    ("export {}/one --to {}/new --format delta --operator totals", InvalidArgumentError, "missing=deltalake"),
    ("export {}/one --to {}/held --format delta --operator totals", ConflictError, "needs a new directory.*holds=a"),
    *(
        (
            f"export {{}}/nested --operator totals --to {{}}/new --format csv {conf}",
            InvalidArgumentError,
            "CSV cannot.*'list, raw'",
        )
        for conf in ("", "--conf spark.app.name=x")
    ),
]


@pytest.mark.parametrize(("command", "error", "words"), MISTAKES)
def test_a_mistake_is_told_before_a_spark_starts(
    target: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, error: Any, words: str
) -> None:
    """It takes half a minute to start."""
    a_savepoint(target, "one")
    a_savepoint(target, "nested", (NESTED,), nested_rows())
    put_record(PrefixedStorage(target, "state"))
    target.put("held/a", b"?")
    location = PrefixedStorage(target, "query")
    location.put("metadata", b'{"id": "cb5e9d3c-9e6a-4f6e-9a94-0d5d1b6f7b16"}')
    location.put("offsets/0", b'v1\n{"conf":{}}\n-')
    location.put("commits/0", b'v1\n{"nextBatchWatermarkMs":0}')
    location.put("state/0/_metadata/metadata", metadata_of_groups(0, 2))
    location.put("state/0/0/_metadata/schema", schema_of_groups(has_timeout=False))
    for module in ("export", "own_spark", "savepoint"):
        started = f"holdfast.commands.{module}.started_spark"
        monkeypatch.setattr(started, lambda *_: pytest.fail("a Spark was started"))
    if "deltalake" in words:
        monkeypatch.delitem(sys.modules, "holdfast.spark_integration.sinks.delta.exporting", raising=False)
        monkeypatch.setitem(sys.modules, "deltalake", None)
    places = "--state-dir {}/fresh --checkpoint-location {}/new"
    for name, stands_for in {"name": "--to {} --name one", "new": "--to {} --name new", "places": places}.items():
        command = command.replace(f"{{{name}}}", stands_for)
    command = command.replace("{conf}", "--conf spark.app.name=x").replace("{}", str(tmp_path))
    with pytest.raises(error, match=words):
        group.main(shlex.split(command), standalone_mode=False)
