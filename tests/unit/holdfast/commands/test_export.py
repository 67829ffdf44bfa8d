"""``holdfast export`` without Spark: which LOCATION is a query's, and what it says where a package is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame

from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.cli import group
from holdfast.commands.export import export, is_of_query, write, write_files
from holdfast.errors import ConflictError, CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.savepoints.pieces import read_piece
from holdfast.snapshotter.savepoints.savepoints import read_savepoint, savepoint_folder
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.lookup.query_pointers import require_no_state_directory
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.unit.holdfast.commands.state_dir import put_record
from tests.unit.holdfast.health.claimed import claim
from tests.unit.snapshotter.savepoints.sample import a_savepoint


def test_delta_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is read or written."""
    monkeypatch.delitem(sys.modules, "holdfast.spark_integration.sinks.delta.exporting", raising=False)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'holdfast-spark\[delta\]'.*missing=deltalake"):
        write(cast("DataFrame", None), "nowhere", "delta")


def test_what_lies_there_says_whether_it_is_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set for other commands; the option says that LOCATION is a query's, whatever lies there."""
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target, "one")
        target.put("query/metadata", b'{"id": "cb5e9d3c-9e6a-4f6e-9a94-0d5d1b6f7b16"}')

    def is_query(location: str, *arguments: str) -> bool:
        url = location if ":" in location else str(tmp_path / location)
        return is_of_query(export.make_context("export", [url, "--to", "elsewhere", *arguments]), {})

    assert (is_query("one"), is_query("query")) == (False, True)
    monkeypatch.setenv("HOLDFAST_STATE_DIR", "/data/app")
    assert (is_query("one"), is_query("query"), is_query("nothing")) == (False, True, False)
    assert is_query("one", "--state-dir", "/data/app")


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
    assert "query-1 (operators totals, at work until 2026-09-21 14:13 UTC on host-1)" in str(caught.value)
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
    run = nested_rows()
    with open_storage(str(tmp_path)) as to:
        with pytest.raises(InvalidArgumentError, match="columns='list, raw'"):
            write_files((NESTED, iter([(0, run)])), (), PrefixedStorage(to, "all"), "csv")
        write_files((NESTED, iter([(0, run)])), ("k", "at"), PrefixedStorage(to, "some"), "csv")
        write_files((NESTED, iter([])), (), PrefixedStorage(to, "none"), "parquet")
    assert (tmp_path / "some/part-00000.csv").read_text() == (
        '"k","at"\n"",1970-01-01 00:00:00.000000Z\n,\n"a ""b"",\nc",1970-01-01 00:00:00.000001Z\n'
    )
    assert pq.read_table(tmp_path / "none").schema.names == ["k", "list", "raw", "at", "shard"]


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        (["--format", "delta"], InvalidArgumentError, "this needs a package that is not installed.*missing=deltalake"),
        (["--format", "delta", "--to", "held"], ConflictError, "an exported table needs a new directory.*holds=a"),
        (
            ["--format", "csv", "--conf", "spark.app.name=x"],
            InvalidArgumentError,
            "CSV cannot hold.*columns='list, raw'",
        ),
    ],
    ids=["package", "directory", "columns"],
)
def test_what_needs_no_spark_is_told_before_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str], error: type[HoldfastError], words: str
) -> None:
    """It takes half a minute to start."""
    with open_storage(str(tmp_path)) as target:
        if "csv" in how:
            a_savepoint(target, "one", (NESTED,), nested_rows())
        else:
            a_savepoint(target, "one")
        target.put("held/a", b"?")
    monkeypatch.setattr("holdfast.commands.export.started_spark", lambda *_: pytest.fail("a Spark was started"))
    if "deltalake" in words:
        monkeypatch.delitem(sys.modules, "holdfast.spark_integration.sinks.delta.exporting", raising=False)
        monkeypatch.setitem(sys.modules, "deltalake", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        exported("one", "--operator", "totals", "--to", "new", *how)
