"""``holdfast bench``: whole runs of suites and what becomes of them, and single benches."""

from __future__ import annotations

import click

from holdfast.benches.commands import durability, keyed, nexmark, peers, totals
from holdfast.benches.commands.compare import compare
from holdfast.benches.commands.report import report
from holdfast.benches.commands.run import run
from holdfast.benches.commands.table import table

# In the order of the listing; whoever chooses a backend needs these alone.
_RUNS = (run, report, compare, table)
_SINGLE = (*totals.COMMANDS, *keyed.COMMANDS, *durability.COMMANDS, *nexmark.COMMANDS, *peers.COMMANDS)


class _Group(click.Group):
    """Lists whole runs before single benches."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in (("Whole runs", _RUNS), ("Single benches", _SINGLE)):
            rows = [(str(command.name), command.get_short_help_str(formatter.width)) for command in commands]
            with formatter.section(title):
                formatter.write_dl(rows)


@click.group(cls=_Group, context_settings={"show_default": True})
def bench() -> None:
    """Measure holdfast against Spark's own state, in paired runs on this machine."""


for command in (*_RUNS, *_SINGLE):
    bench.add_command(command)
