"""``holdfast bench report``: a directory of results as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.errors import InvalidArgumentError


@click.command("report")
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o",
    "--out",
    "page",
    default="report.html",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="the page to write",
)
def report(directory: Path, page: Path) -> None:
    """Make one HTML page of the results in DIR, which holdfast bench run wrote: it loads nothing from anywhere."""
    # matplotlib takes a second to load.
    from holdfast.benches.report.directory import read
    from holdfast.benches.report.page.html import render
    from holdfast.benches.running.directory import replace_text

    if not page.parent.is_dir():
        raise InvalidArgumentError("the folder of the page does not exist; make it, or choose another", page=page)
    results = read(directory)
    replace_text(page, render(results))
    click.echo(f"{page}: {len(results.measured)} questions measured, {len(results.missing)} not")
