"""``holdfast bench compare``: find what became slower since an earlier run."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.benches.comparing.verdicts import FASTER, RATIO, SLOWER, Measured, Verdict, differ, read, smallest_visible
from holdfast.benches.comparing.verdicts import compare as compare_all
from holdfast.benches.jobs.job import FiniteRange

_STYLES = {SLOWER: "red", FASTER: "green"}
_PATH = click.Path(exists=True, path_type=Path)


@click.command("compare")
@click.argument("base", type=_PATH)
@click.argument("new", type=_PATH)
@click.option(
    "--threshold", default=5.0, type=FiniteRange(0, 100, min_open=True), help="slowdown in % that is a regression"
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def compare(base: Path, new: Path, threshold: float, as_json: bool) -> None:
    """Show what became faster or slower from BASE to NEW, beyond noise.

    Both are directories that `holdfast bench run` wrote, or single documents. The exit status is 1 if something became
    slower by more than --threshold, beyond noise; 2 if the two cannot be compared.
    """
    before, after = read(base), read(new)
    verdicts = compare_all(before, after, threshold / 100)
    regressions = [one for one in verdicts if one.regression]
    differences = differ(before, after)
    if as_json:
        found = {
            "base": str(base),
            "new": str(new),
            "threshold": threshold / 100,
            "differences": differences,
            "only_in_base": _only(before, after),
            "only_in_new": _only(after, before),
            "verdicts": [asdict(one) for one in verdicts],
            "regressions": len(regressions),
            "smallest_visible": smallest_visible(verdicts),
        }
        click.echo(json.dumps(found, indent=1))
    else:
        _show(before, after, differences, verdicts, regressions, threshold)
    if regressions:
        sys.exit(1)


def _only(one: Measured, other: Measured) -> list[str]:
    return [name for name in one.documents if name not in other.documents]


def _show(
    before: Measured,
    after: Measured,
    differences: Sequence[str],
    verdicts: Sequence[Verdict],
    regressions: Sequence[Verdict],
    threshold: float,
) -> None:
    console = Console()
    for line in differences:
        console.print(f"differs: {line}", style="yellow", markup=False, highlight=False)
    for side, names in ((before.path, _only(before, after)), (after.path, _only(after, before))):
        if names:
            console.print(f"only in {side}: {', '.join(names)}", markup=False, highlight=False)
    console.print(_table(verdicts))
    counts = Counter(one.verdict for one in verdicts)
    console.print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()), highlight=False)
    for one in regressions:
        what = "relative to the baseline" if one.kind == RATIO else "in throughput"
        console.print(f"{one.measurement}: {one.name} is {-one.change:.0%} slower {what}", style="red", markup=False)
    if not regressions:
        console.print(f"These runs show no slowdown of more than {threshold:g} %.", highlight=False)
    visible = smallest_visible(verdicts)
    if visible > threshold / 100:
        text = f"They cannot tell changes below about {visible:.0%} from noise; more turns (--turns 5) can."
        console.print(text, highlight=False)


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="From base to new; the interval is 95 %", title_justify="left")
    for column in ("figure", "base", "new", "turns", "change", "interval", "verdict"):
        table.add_column(column, justify="left" if column in {"figure", "verdict"} else "right")
    for measurement in dict.fromkeys(one.measurement for one in verdicts):
        table.add_section()
        table.add_row(f"[bold]{escape(measurement)}[/bold]")
        for one in (one for one in verdicts if one.measurement == measurement):
            table.add_row(
                escape(f"{one.name} / baseline" if one.kind == RATIO else one.name),
                _figure(one.base),
                _figure(one.new),
                f"{one.turns[0]}, {one.turns[1]}",
                f"{one.change:+.1%}",
                f"{one.low:+.0%} to {one.high:+.0%}",
                one.verdict,
                style=_STYLES.get(one.verdict, ""),
            )
    return table


def _figure(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
