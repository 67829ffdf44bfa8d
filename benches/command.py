"""``holdfast bench``: runs of suites with their reports and comparisons, and single benches."""

from __future__ import annotations

import json
from pathlib import Path

import click

from holdfast.benches.commands.compare import compare
from holdfast.benches.commands.run import run
from holdfast.benches.commands.single import SINGLE, command_of
from holdfast.benches.report import tables
from holdfast.errors import InvalidArgumentError

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_PAGE = click.Path(dir_okay=False, path_type=Path)


@click.command("report")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("-o", "--out", "page", default="report.html", show_default=True, type=_PAGE, help="the page to write")
def report(directory: Path, page: Path) -> None:
    """Write an HTML page of the results in DIR; it works offline."""
    from holdfast.benches.report.directory import read, replace_text
    from holdfast.benches.report.html import render

    if not page.parent.is_dir():
        raise InvalidArgumentError("the folder of the page does not exist; create it", page=page)
    results = read(directory)
    replace_text(page, render(results))
    click.echo(f"{page}: {len(results.measured)} questions measured, {len(results.missing)} missing")


@click.command("table")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
def table(files: tuple[str, ...]) -> None:
    """Print stored measurements, of this command or of pytest-benchmark, as Markdown."""
    for file in files:
        click.echo(tables.markdown(json.loads(Path(file).read_text())))


# In the order of the help page.
_RUNS, _SINGLE = (run, report, compare, table), tuple(map(command_of, SINGLE))


class _Group(click.Group):
    """Lists whole runs before single benches."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in (("Whole runs", _RUNS), ("Single benches", _SINGLE)):
            rows = [(str(command.name), command.get_short_help_str(formatter.width)) for command in commands]
            with formatter.section(title):
                formatter.write_dl(rows)


@click.group(cls=_Group, context_settings={"show_default": True})
def bench() -> None:
    """Measure holdfast against Spark's own state on this machine."""


for command in (*_RUNS, *_SINGLE):
    bench.add_command(command)
