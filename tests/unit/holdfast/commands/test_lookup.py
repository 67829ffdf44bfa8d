"""Values of state as the command line prints them for other programs."""

from __future__ import annotations

import contextlib
import csv
import datetime as dt
import io
import logging
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.cli import group, main
from holdfast.commands import lookup, target
from holdfast.commands.lookup import print_csv
from holdfast.commands.target import json_value
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.lookup.keys import parse_key
from holdfast.spark_integration.lookup.query_pointers import KeyVersion
from holdfast.spark_integration.lookup.stored_query import TableChanges
from tests.unit.holdfast.commands.conftest import put_record, run


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


def test_an_error_does_nothing_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may name what somebody else has written, as the columns of a key."""
    monkeypatch.setattr(lookup, "_opened", lambda *_: contextlib.nullcontext(NamesColumns()))
    monkeypatch.setattr(sys, "argv", ["holdfast", "get", "at", "op", "user=x", "--state-dir", "there"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == "holdfast: name\\x1b[31m\\u202e\nas this says, columns=\\x1b]0;\\x07\n"


def test_a_warning_does_nothing_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody sets logging up, so Python prints what modules warn of, as of a damaged snapshot that they go around."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.lastResort, "formatter", None)
    monkeypatch.setattr(lookup, "_opened", lambda *_: contextlib.nullcontext(WarnsOfDamage()))
    monkeypatch.setattr(sys, "argv", ["holdfast", "get", "at", "op", "user=x", "--state-dir", "there"])
    with pytest.raises(SystemExit, match="2"):
        main()
    warned, _ = capsys.readouterr().err.split("holdfast: ")
    assert warned == "\\x1b]0;\\x07 is not used:\nit is damaged\n"


class NamesColumns:
    """A query whose key has other columns, of names that a terminal obeys."""

    def get(self, *_: object, **__: object) -> Any:
        raise InvalidArgumentError("name\x1b[31m\u202e\nas this says", columns="\x1b]0;\x07")


class WarnsOfDamage(NamesColumns):
    """The same, with a damaged snapshot, whose name a terminal obeys, too."""

    def get(self, *_: object, **__: object) -> Any:
        logging.getLogger("holdfast.snapshotter").warning("%s is not used:\n%s", "\x1b]0;\x07", "it is damaged")
        return super().get()


def test_csv_is_of_one_table() -> None:
    """Two tables have different columns."""
    with pytest.raises(InvalidArgumentError, match="--table"):
        print_csv({"a": pa.table({}), "b": pa.table({})})


class ShownQuery(contextlib.nullcontext[None]):
    """A query with a key that holds bytes which are no text, and a time beyond year 9999: Spark stores both."""

    far = pa.array([2**62], pa.int64()).cast(pa.timestamp("us"))
    text = pa.array([b"\xffa"], pa.large_binary()).view(pa.large_string())
    held = MappingProxyType({"state": pa.table({"user": text, "t": far, "n": [7]})})

    def __enter__(self) -> Any:
        return self

    def get(self, *_: object, **__: object) -> Any:
        return self.held

    def history(self, *_: object, **__: object) -> Any:
        return iter([KeyVersion(3, 0, True, self.held)])

    def diff(self, *_: object, **__: object) -> Any:
        schema = TableSchema.of("state", pa.schema([("user", pa.string())]), pa.schema([("t", self.far.type)]))
        key = Keys(np.zeros(1, np.uint64), pa.record_batch([self.text], schema=schema.key))
        found, after = TableChanges("state"), Run.build(schema, key, pa.record_batch({"t": self.far}))
        found.take(after.slice(1, 1), after, 9)
        return [found]


@pytest.mark.parametrize(
    "command",
    [
        *(["get", "at", "op", "user=x", *how] for how in ([], ["--json"], ["--csv"])),
        *(["history", "at", "op", "user=x", *how] for how in ([], ["--json"])),
        *(["diff", "at", "op", "1", "2", *how] for how in ([], ["--json"])),
    ],
    ids=" ".join,
)
def test_values_that_python_does_not_have_are_shown(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    """They hide nothing else that the key holds."""
    monkeypatch.setattr(lookup, "_opened", lambda *_: ShownQuery())
    result = CliRunner().invoke(group, [*command, "--state-dir", "there"], catch_exceptions=False)
    assert "xffa" in result.output
    assert f"{2**62} timestamp[us]" in " ".join(result.output.split())


def test_the_last_line_of_a_history_says_that_older_values_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_opened", lambda *_: ShownQuery())
    shown = CliRunner().invoke(group, ["history", "at", "op", "user=x"], catch_exceptions=False).output
    assert shown.startswith("at micro-batch 3, 1970-01-01 00:00:00; nothing older is retained\n"), shown


@pytest.mark.parametrize(
    "command",
    [["get", "at", "op", "user=x"], ["history", "at", "op", "user=x"], ["diff", "at", "op", "1", "2"]],
    ids=" ".join,
)
@pytest.mark.parametrize("text", ["user:id:42 [red]:100:", "C:\\new\\", "\\\\[red]\\\\", "\\\\\\", "\\[a-z"])
def test_text_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch, command: list[str], text: str) -> None:
    """In a cell, and in a line: what rich takes for an emoji, for a tag, or for what escapes one."""
    monkeypatch.setattr(ShownQuery, "text", pa.array([text], pa.large_string()))
    monkeypatch.setattr(ShownQuery, "held", {"a:id:b": pa.table({"n:m:o": ShownQuery.text})})
    monkeypatch.setattr(lookup, "_opened", lambda *_: ShownQuery())
    shown = CliRunner().invoke(group, [*command, "--state-dir", "there"], catch_exceptions=False).output
    assert re.search(rf"(^|=){re.escape(text)}( *$|:)", shown, re.MULTILINE), shown
    assert command[0] == "diff" or {"a:id:b:", "n:m:o"} <= set(shown.split())


WIDE = pa.table({f"a_column_with_a_long_name_{i}": ["a value of some length"] for i in range(8)})


class HoldsAWideRow(ShownQuery):
    """A query whose rows are wider than a terminal."""

    held = MappingProxyType({"state": WIDE})


class HoldsNothing(ShownQuery):
    """A query that knows the operator and its tables, but not the key."""

    held = MappingProxyType({"state": WIDE.slice(0, 0), "timers": WIDE.slice(0, 0)})


def getting(monkeypatch: pytest.MonkeyPatch, query: Any, *how: str) -> Any:
    monkeypatch.setattr(lookup, "_opened", lambda *_: query)
    monkeypatch.setattr(target, "_WIDTH_ELSEWHERE", 80)
    return CliRunner().invoke(group, ["get", "at", "op", "user=x", "--state-dir", "there", *how])


def test_a_row_that_is_wider_than_the_terminal_stands_upright(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each column: side by side they would be cut into pieces that nobody can read."""
    shown = getting(monkeypatch, HoldsAWideRow()).output.splitlines()
    assert [line.split(None, 1) for line in shown[2:]] == [
        [name, "a value of some length"] for name in WIDE.schema.names
    ]
    monkeypatch.setattr(HoldsAWideRow, "held", {"state": WIDE.select([0])})
    shown = getting(monkeypatch, HoldsAWideRow()).output.splitlines()
    assert [line.strip() for line in shown[1:]] == [WIDE.schema.names[0], "a value of some length"]


@pytest.mark.parametrize("how", [[], ["--json"], ["--csv", "--table", "state"]], ids=" ".join)
def test_a_key_that_holds_nothing_is_no_success(monkeypatch: pytest.MonkeyPatch, how: list[str]) -> None:
    """A script sees it by the exit status, whatever it reads, and people in words."""
    monkeypatch.setattr(HoldsNothing, "held", {"state": WIDE.slice(0, 0)})
    found = getting(monkeypatch, HoldsNothing(), *how)
    assert found.exit_code == 1, found.output
    assert how or found.output == "op has no state for this key\n"


def test_a_key_is_printed_as_it_is_given() -> None:
    """So that one copied from an answer is found."""
    assert parse_key('{"k": "AP8="}') == json_value({"k": b"\0\xff"})


@pytest.mark.slow(1)
def test_look_ups_import_no_spark() -> None:
    """A third of the time of a process's first look-up; its Python is one of its own, where nothing is imported yet."""
    program = (
        "import sys, holdfast.commands.lookup, holdfast; holdfast.open_query; "
        "print([name for name in ('pyspark', 'pandas', 'py4j') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_state_directory_in_place_of_the_location_is_named(tmp_path: Path) -> None:
    """As where the variable names another directory: then LOCATION is taken for a checkpointLocation."""
    with open_storage(str(tmp_path / "state")) as storage:
        put_record(storage)
    result = run("get", tmp_path / "state", "totals", "user=x", HOLDFAST_STATE_DIR=str(tmp_path / "other"))
    assert "this is a state directory: name the checkpointLocation" in str(result.exception)


def test_a_damaged_note_says_how_to_do_without_it(tmp_path: Path) -> None:
    """And a damaged record of another operator hides nothing."""
    with open_storage(str(tmp_path)) as storage:
        put_record(storage)
        storage.put("alerts/operator", b"rubbish")
        storage.put("_queries/query-1.locations/" + "1".zfill(20), b"rubbish")
    result = run("get", tmp_path, "totals", "user=x")
    assert "is not a whole holdfast file" in str(result.exception)
    assert "name the query's checkpointLocation in place of the state directory" in str(result.exception)


def test_of_many_queries_some_are_described(tmp_path: Path) -> None:
    with open_storage(str(tmp_path)) as storage:
        for number in range(30):
            put_record(storage, f"op-{number}", query=f"query-{number}")
    told = str(run("get", tmp_path, "totals", "user=x").exception)
    assert told.count("(operators op-") == 20
    assert "and 10 more" in told
