"""Values of state as the command line prints them for other programs."""

from __future__ import annotations

import csv
import datetime as dt
import io
import subprocess
import sys
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from holdfast.commands.lookup import json_value, print_csv
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.lookup.keys import parse_key


def printed(capsys: pytest.CaptureFixture[str], value: Any) -> str:
    print_csv({"state": pa.table({"v": pa.array([value])})})
    (_, row) = csv.reader(io.StringIO(capsys.readouterr().out))
    return row[0] if row else ""


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (-1, "-1"),
        (Decimal("-1.50"), "-1.50"),
        (dt.date(2024, 1, 2), "2024-01-02"),
        (b"\xfb\xff", "'+/8="),
        (True, "true"),
        (["=a", None], '["=a", null]'),
        ("=1+1", "'=1+1"),
        ("＝1+1", "'＝1+1"),  # noqa: RUF001
        ("\r\n=1", "\\r\\n=1"),
        ("a\u202eb", "a\\u202eb"),
    ],
)
def test_a_cell_is_the_value_and_no_formula(capsys: pytest.CaptureFixture[str], value: Any, cell: str) -> None:
    """Numbers and times without quotes around them; text as text, whatever it begins with."""
    assert printed(capsys, value) == cell


def test_csv_is_of_one_table() -> None:
    """Two tables have different columns."""
    with pytest.raises(InvalidArgumentError, match="--table"):
        print_csv({"a": pa.table({}), "b": pa.table({})})


def test_a_key_is_printed_as_it_is_given() -> None:
    """So that one copied from an answer is found."""
    assert parse_key('{"k": "AP8="}') == json_value({"k": b"\0\xff"})


def test_look_ups_import_no_spark() -> None:
    """A third of the time of a process's first look-up; its Python is one of its own, where nothing is imported yet."""
    program = (
        "import sys, holdfast.commands.lookup, holdfast; holdfast.open_query; "
        "print([name for name in ('pyspark', 'pandas', 'py4j') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
