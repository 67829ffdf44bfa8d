"""``holdfast get``, ``history`` and ``diff``: read a running or stopped query's state by key, without Spark."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from decimal import Decimal
from typing import Any

import click
import pyarrow as pa
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from holdfast.backends.arrow.values import python_rows
from holdfast.commands.target import (
    batch_option,
    both_places,
    cell_text,
    json_value,
    moment,
    new_console,
    number_option,
    on_storage,
    plain,
    printable,
    savepoint_place,
    state_dir_option,
    table,
    with_options,
)
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.lookup.keys import parse_pairs
from holdfast.spark_integration.lookup.query_pointers import KeyVersion
from holdfast.spark_integration.lookup.stored_query import StoredQuery, TableChanges, open_query

#: Spreadsheets take a cell that begins with one of these for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")  # noqa: RUF001
#: Wider than any row, to measure tables.
_MEASURING = Console(width=1 << 20)

#: A micro-batch's number: a long, as in Spark.
_NUMBER = re.compile("[0-9]{1,18}")
_TABLE = click.option("--table", metavar="NAME", help="Only this state table or variable, or `timers`.")


def _given(context: click.Context, _: click.Parameter, key: tuple[str, ...]) -> tuple[str, ...]:
    """Name all three arguments if one is missing; click would name only the last."""
    if not key:
        raise click.UsageError(
            "give LOCATION OPERATOR COLUMN=VALUE...: the query's checkpointLocation, its operator, and the key", context
        )
    return key


_on_key = with_options(
    state_dir_option(),
    _TABLE,
    on_storage,
    click.argument("location"),
    click.argument("operator"),
    click.argument("key", nargs=-1, metavar="COLUMN=VALUE...", callback=_given),
)


def _opened(given: str, operator: str, state_dir: str | None, options: Mapping[str, str]) -> StoredQuery:
    """Open the query at a checkpoint location, or an operator's query in a state directory."""
    return open_query(*both_places(given, state_dir, options, operator), options)


@click.command()
@_on_key
@batch_option("Show state as of this micro-batch. Default: the last committed one.")
@click.option("--csv", "as_csv", is_flag=True, help="Print one table as CSV.")
def get(
    location: str,
    operator: str,
    key: tuple[str, ...],
    state_dir: str | None,
    table: str | None,
    batch_id: int | None,
    as_csv: bool,
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Show what a key holds.

    Shows its rows in all state tables, their expiry times, and its timers. LOCATION is the query's checkpointLocation
    or state directory; the query may be running. Give a key as user=ann for each grouping column of OPERATOR, or as
    JSON: '{"user": null}'. The exit status is 1 if the key has no state.
    """
    with _opened(location, operator, state_dir, options) as query:
        found = query.get(operator, parse_pairs(key), table=table, batch_id=batch_id)
    is_held = any(rows.num_rows for rows in found.values())
    if as_csv:
        print_csv(found)
    elif as_json:
        click.echo(json.dumps({"operator": operator, "tables": _documents(found)}, indent=2))
    elif not is_held:
        new_console().print(f"{plain(operator)} has no state for this key")
    else:
        _show(found)
    if not is_held:
        sys.exit(1)


@click.command()
@_on_key
@number_option("--limit", default=20, text="How many values to show.")
def history(
    location: str,
    operator: str,
    key: tuple[str, ...],
    state_dir: str | None,
    table: str | None,
    limit: int,
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Show what a key held, newest first. The history covers the micro-batches that the query retains."""
    found: list[KeyVersion] = []
    with _opened(location, operator, state_dir, options) as query:
        for one in query.history(operator, parse_pairs(key), table=table):
            found.append(one)
            if len(found) == limit:
                break
    if as_json:
        facts = ("batch_id", "batch_ms", "is_oldest")
        versions = [{n: getattr(one, n) for n in facts} | {"tables": _documents(one.tables)} for one in found]
        click.echo(json.dumps({"operator": operator, "versions": versions}, indent=2))
        return
    console = new_console()
    for one in found:
        at = f"at micro-batch {one.batch_id:,}" if one.is_oldest else f"since micro-batch {one.batch_id:,}"
        oldest = "; nothing older is retained" if one.is_oldest else ""
        console.print(f"[bold]{at}[/], {moment(one.batch_ms)}{oldest}")
        _show(one.tables)


@click.command()
@on_storage
@_TABLE
@state_dir_option()
@click.argument("compared", nargs=-1, required=True, metavar="{LOCATION OPERATOR BEFORE AFTER | A B}")
@number_option("--rows", least=0, default=20, text="Rows to show per table.")
def diff(
    compared: tuple[str, ...],
    state_dir: str | None,
    table: str | None,
    rows: int,
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Compare two micro-batches, or two savepoints.

    LOCATION OPERATOR BEFORE AFTER: a query's checkpointLocation or state directory, its operator, and the numbers of
    two micro-batches.

    A B: two savepoints, each as URL/NAME, as in `holdfast savepoint diff`; the exit status is 1 if they differ.
    """
    if len(compared) == 2:
        if table is not None:
            raise click.UsageError("--table applies to a query's operator: for savepoints, all tables are compared")
        from holdfast.commands.savepoint import compare_savepoints  # not needed for look-ups

        (url, name), (other_url, other) = map(_savepoint, compared)
        compare_savepoints(url, name, other, rows, options, as_json, other_url=other_url)
        return
    if len(compared) != 4 or not all(_NUMBER.fullmatch(one) for one in compared[2:]):
        raise click.UsageError(
            "give LOCATION OPERATOR BEFORE AFTER, the last two as micro-batch numbers; or two savepoints as URL/NAME"
        )
    location, operator, before, after = compared
    with _opened(location, operator, state_dir, options) as query:
        found = query.diff(operator, int(before), int(after), table=table, rows_each=rows)
    if as_json:
        click.echo(json.dumps({"operator": operator, "tables": [json_value(asdict(one)) for one in found]}, indent=2))
    else:
        _show_changes(found)


def _savepoint(given: str) -> tuple[str, str]:
    url, name = savepoint_place(given)
    if not name or url.endswith(":/"):
        raise click.UsageError(f"a savepoint is URL/NAME, not {given!r}")
    return url, name


def _show_changes(found: Iterable[TableChanges]) -> None:
    console = new_console()
    for one in found:
        console.print(
            f"[bold]{plain(one.table)}[/]: {one.added:,} keys added, {one.changed:,} changed, {one.removed:,} removed"
        )
        for row in one.rows:
            console.print(f"  {row.kind} {_pairs(row.key)}: {_pairs(row.before)} → {_pairs(row.after)}", soft_wrap=True)
        left = one.added + one.changed + one.removed - len(one.rows)
        if left:
            console.print(f"  and {left:,} more; --rows shows them")


def _show(tables: Mapping[str, pa.Table]) -> None:
    console = new_console()
    for name, rows in tables.items():
        if not rows.num_rows:
            console.print(f"{plain(name)}: nothing")
            continue
        console.print(f"{plain(name)}:")
        console.print(_shown(rows, console.width))


def _shown(rows: pa.Table, width: int) -> Table:
    """Return rows as a table; a single row wider than the terminal as one line per column."""
    cells = [[plain(cell_text(value)) for value in row.values()] for row in python_rows(rows)]
    shown = table(*map(plain, rows.column_names))
    for row in cells:
        shown.add_row(*row)
    if len(cells) > 1 or Measurement.get(_MEASURING, _MEASURING.options, shown).maximum <= width:
        return shown
    vertical = table("column", "value", whole=("column",))
    for name, text in zip(rows.column_names, cells[0], strict=True):
        vertical.add_row(plain(name), text)
    return vertical


def _pairs(values: Mapping[str, Any] | None) -> str:
    if values is None:
        return "nothing"
    return ", ".join(f"{plain(name)}={plain(cell_text(value))}" for name, value in values.items())


def print_csv(tables: Mapping[str, pa.Table]) -> None:
    """Print one table; raises InvalidArgumentError if there are several."""
    if len(tables) != 1:
        raise InvalidArgumentError("CSV holds one table: choose it with --table", tables=", ".join(tables))
    out = io.StringIO()
    writer = csv.writer(out)
    for rows in tables.values():
        writer.writerow(map(_csv_cell, rows.column_names))
        writer.writerows([_csv_cell(value) for value in row.values()] for row in python_rows(rows))
    click.echo(out.getvalue(), nl=False)


def _csv_cell(value: object) -> object:
    """Return a value as a cell that neither spreadsheets nor terminals interpret."""
    if value is None or (isinstance(value, int | float | Decimal) and not isinstance(value, bool)):
        return value
    found = json_value(value)
    text = printable(found if isinstance(found, str) else json.dumps(found))
    return f"'{text}" if text.startswith(_FORMULA) else text


def _documents(tables: Mapping[str, pa.Table]) -> dict[str, list[dict[str, Any]]]:
    return {name: [json_value(row) for row in python_rows(rows)] for name, rows in tables.items()}
