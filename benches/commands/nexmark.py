"""Nexmark: one of its queries, vectorised and by key on holdfast, and on Spark's own operators."""

from __future__ import annotations

from typing import Any

import click

from holdfast.benches.commands.single import Plan, console, engines_option, known_engines, options_of
from holdfast.benches.nexmark.equality import checked
from holdfast.benches.nexmark.job import Nexmark
from holdfast.benches.runs.paired import BenchError, Entry
from holdfast.benches.suites.nexmark import ENGINES


@click.command("nexmark")
@engines_option(Nexmark, ",".join(ENGINES))
@options_of(Nexmark(), repeats=1)
def nexmark(engines: str, **options: Any) -> None:
    """A query of Nexmark, such as --query 5; only engines that find the same are measured."""
    plan, labels = Plan.of(Nexmark(), options), known_engines(Nexmark, engines)
    assert isinstance(plan.job, Nexmark)
    console.print(f"[dim]do they find the same: {', '.join(labels)} …[/dim]")
    equality = checked(plan.job, labels)
    if not equality["equal"]:
        raise BenchError("engines do not find the same, so no time counts", **equality)
    console.print(f"they find the same {equality['rows']} results")
    entries = {label: Entry(label, plan.job) for label in labels}
    plan.carry_out("nexmark", f"--engines {engines}", entries, {"equality": equality})


COMMANDS = (nexmark,)
