"""State in files: what they hold is what `read_state` shows."""

from __future__ import annotations

from pathlib import Path

import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

import holdfast
from holdfast.commands.export import errors_of_spark, write
from holdfast.errors import InvalidArgumentError
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


def test_csv_cannot_hold_what_is_nested(lab: Lab) -> None:
    frame = lab.spark.sql(
        "SELECT 1 AS n, array(1) AS list, named_struct('a', 1) AS inner, map(1, 2) AS by, X'00' AS raw"
    )
    with pytest.raises(InvalidArgumentError, match="columns='list, inner, by, raw'"):
        write(frame, str(lab.folder / "csv"), "csv")
    assert not (lab.folder / "csv").exists()


def test_errors_say_what_holdfast_said(lab: Lab) -> None:
    with pytest.raises(InvalidArgumentError, match="no savepoint of this name is here"), errors_of_spark():
        lab.spark.read.format("holdfast").load(str(lab.folder / "nothing"))
