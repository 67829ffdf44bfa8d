"""``holdfast bench table``: stored measurements as Markdown."""

from __future__ import annotations

import json
from pathlib import Path

import click

from holdfast.benches.report import micro_tables, tables


@click.command("table")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
def table(files: tuple[str, ...]) -> None:
    """Print stored measurements as Markdown: of this command, or of pytest-benchmark (--benchmark-json)."""
    for file in files:
        found = json.loads(Path(file).read_text())
        click.echo(micro_tables.markdown(found) if "benchmarks" in found else tables.markdown(found))
