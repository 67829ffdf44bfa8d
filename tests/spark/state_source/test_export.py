"""State in files: what they hold is what `read_state` shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import holdfast
from holdfast.commands.export import errors_of_spark, write
from holdfast.errors import ConflictError, InvalidArgumentError, NotFoundError, SchemaMismatchError, UnavailableError
from holdfast.spark_integration.sinks.delta import exporting
from tests.spark.conftest import Lab

pytestmark = pytest.mark.spark


def files(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.glob(f"*.{ending}"))


def test_parquet_and_csv_hold_the_state(lab: Lab) -> None:
    """Text with line ends, quotes and commas too; a directory that is there is not written to."""
    lab.feed([("a,b", 1), ('"quoted"', 2), ("two\nlines", -3)])
    lab.run(lab.totals())
    expected = sorted(map(repr, holdfast.read_state(lab.spark, lab.folder / "query", "totals").to_pylist()))
    state = holdfast.state(lab.spark, lab.folder / "query", "totals", columns=["key", "n", "total"])
    write(state, str(lab.folder / "parquet"), "parquet")
    assert sorted(map(repr, pq.read_table(lab.folder / "parquet").to_pylist())) == expected
    write(state.coalesce(1), str(lab.folder / "csv"), "csv")
    (file,) = files(lab.folder / "csv", "csv")
    parsed = csv.read_csv(file, parse_options=csv.ParseOptions(newlines_in_values=True, escape_char="\\"))
    assert sorted(map(repr, parsed.to_pylist())) == expected
    with pytest.raises(InvalidArgumentError, match="already exists"), errors_of_spark():
        write(state, str(lab.folder / "csv"), "csv")


@pytest.mark.all
def test_a_delta_table_holds_the_state(lab: Lab) -> None:
    """In one transaction, with what lets readers pass over files; a directory that is not empty is left alone."""
    lab.feed([("a,b", 1), ("two\nlines", -3), (None, 4)])
    lab.run(lab.totals())
    state = holdfast.state(lab.spark, lab.folder / "query", "totals")
    where = lab.folder / "delta"
    write(state, str(where), "delta")
    expected = holdfast.read_state(lab.spark, lab.folder / "query", "totals").to_pylist()
    table = DeltaTable(str(where))
    shown = pa.table(table.to_pyarrow_table()).drop_columns(["shard"])
    assert sorted(map(repr, shown.to_pylist())) == sorted(map(repr, expected))
    assert table.version() == 0
    described = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    assert sum(file["num_records"] for file in described) == 3
    assert min(file["min.n"] for file in described) == 1
    before = sorted(where.rglob("*"))
    with pytest.raises(ConflictError, match="is not empty"):
        write(state, str(where), "delta")
    assert sorted(where.rglob("*")) == before


@pytest.mark.all
def test_a_delta_table_of_no_rows_and_of_every_type(lab: Lab) -> None:
    """A reader finds the columns even where there is no file."""
    frame = lab.spark.sql(
        "SELECT 1 AS n, array(1) AS list, named_struct('a', 1) AS inner, map('k', 2) AS by, X'00' AS raw, "
        "timestamp'2026-01-01 00:00:00' AS at, timestamp_ntz'2026-01-01 00:00:00' AS clock, 1.5BD AS amount, "
        "5 AS `value.n`"
    )
    write(frame, str(lab.folder / "typed"), "delta")
    write(frame.where("n > 1"), str(lab.folder / "empty"), "delta")
    typed, empty = (DeltaTable(str(lab.folder / name)) for name in ("typed", "empty"))
    assert typed.schema() == empty.schema()
    assert (empty.file_uris(), len(typed.file_uris())) == ([], 1)
    (row,) = pa.table(typed.to_pyarrow_table()).to_pylist()
    (sparks,) = frame.toArrow().to_pylist()
    assert repr(row) == repr(sparks)


def test_an_export_that_fails_takes_its_files_away(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its table is there, because only the reply to the commit was lost."""
    frame, make = lab.spark.range(3), exporting.create_table_with_add_actions

    def lose(*given: object, **options: object) -> None:
        if where.name == "made":
            make(*given, **options)  # type: ignore[arg-type]
        if where.name == "taken":
            DeltaTable.create(where, pa.schema([("id", pa.int64())]))
            make(*given, **options)  # type: ignore[arg-type]
        raise KeyboardInterrupt if where.name == "interrupted" else OSError("the connection was closed")

    monkeypatch.setattr(exporting, "create_table_with_add_actions", lose)
    where = lab.folder / "failed"
    with pytest.raises(UnavailableError, match="the connection was closed"):
        write(frame, str(where), "delta")
    assert not list(where.rglob("*.parquet"))
    where = lab.folder / "taken"
    with pytest.raises(ConflictError, match="another writer"):
        write(frame, str(where), "delta")
    assert (DeltaTable(str(where)).version(), list(where.rglob("*.parquet"))) == (0, [])
    where = lab.folder / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        write(frame, str(where), "delta")
    assert not list(where.rglob("*.parquet"))
    where = lab.folder / "made"
    write(frame, str(where), "delta")
    assert DeltaTable(str(where)).to_pyarrow_table().num_rows == 3
    with pytest.raises(SchemaMismatchError, match="column=d type=duration"):
        write(lab.spark.sql("SELECT interval '1' day AS d"), str(lab.folder / "typed"), "delta")
    assert not (lab.folder / "typed").exists()


def test_what_a_repeated_task_has_left_is_taken_away(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no part of the table, and nobody else would delete it. The URL is one as Spark writes them."""
    make = exporting.create_table_with_add_actions

    def make_later(*given: object, **options: object) -> None:
        (written,) = where.glob("*.parquet")
        shutil.copy(written, written.with_stem(f"{written.stem}-again"))
        make(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(exporting, "create_table_with_add_actions", make_later)
    where = lab.folder / "repeated"
    write(lab.spark.range(3).coalesce(1), f"file:{where}", "delta")
    assert [Path(file) for file in DeltaTable(str(where)).file_uris()] == list(where.glob("*.parquet"))


@pytest.mark.all
def test_csv_cannot_hold_what_is_nested(lab: Lab) -> None:
    frame = lab.spark.sql(
        "SELECT 1 AS n, array(1) AS list, named_struct('a', 1) AS inner, map(1, 2) AS by, X'00' AS raw"
    )
    with pytest.raises(InvalidArgumentError, match="columns='list, inner, by, raw'"):
        write(frame, str(lab.folder / "csv"), "csv")
    assert not (lab.folder / "csv").exists()


@pytest.mark.all
def test_errors_of_spark_say_what_went_wrong_in_a_worker(lab: Lab) -> None:
    """Of a traceback the last line; Spark's own first line only says that there was one."""

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        raise ModuleNotFoundError("No module named 'deltalake'")

    with (
        pytest.raises(UnavailableError, match=r"^ModuleNotFoundError: No module named 'deltalake'$"),
        errors_of_spark(),
    ):
        lab.spark.range(1).mapInArrow(fail, "id long").collect()


def test_errors_say_what_holdfast_said(lab: Lab) -> None:
    with pytest.raises(NotFoundError, match=r"^no savepoint of this name is here"), errors_of_spark():
        lab.spark.read.format("holdfast").load(str(lab.folder / "nothing"))
