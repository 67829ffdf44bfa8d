"""The demo's final output: a comparison with plain pandas, and tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pandas as pd
import pyarrow.feather as feather
from rich.console import Console
from rich.table import Table

from holdfast.examples.flights.data import TOTALS
from holdfast.examples.flights.starts import Start
from holdfast.examples.flights.totals import with_means

_WORST = 10
_WORST_MIN_FLIGHTS = 50


@dataclass(frozen=True)
class Kill:
    """A kill of the driver."""

    after_batches: int  #: Micro-batches committed before
    recovery_ms: int  #: Time to the next commit
    restored_from: str  #: Source of the state


@dataclass(frozen=True)
class Check:
    """A property that must hold at the end."""

    sign: str  #: The property, in a word
    what: str  #: What must have it
    wrong: list[str]  #: Counterexamples

    def show(self, console: Console) -> None:
        if self.wrong:
            console.print(f"[bold red]not {self.sign}:[/] {self.what}; {len(self.wrong):,} differences, the first:")
            console.print("\n".join(self.wrong[:5]), markup=False)
        else:
            console.print(f"[bold green]{self.sign}:[/] {self.what}", soft_wrap=True)


def state_totals(state: Path) -> pd.DataFrame:
    """Return the totals in a file with the operator's state."""
    return with_means(feather.read_table(str(state))).to_pandas()


def differences(found: pd.DataFrame, expected: pd.DataFrame) -> list[str]:
    """Describe the differences of two tables of totals, including missing subjects."""
    sides = [
        frame.astype({name: "Float64" for name in TOTALS if name != "last_airport"})
        .assign(name=frame["name"].astype(object).where(frame["name"].notna(), None))
        .set_index(["kind", "name"])
        for frame in (found, expected)
    ]
    if sides[0].index.has_duplicates:
        return ["a subject occurs twice"]
    mine, other = sides
    wrong = [f"{subject}: missing" for subject in other.index.difference(mine.index)]
    wrong += [f"{subject}: unexpected" for subject in mine.index.difference(other.index)]
    shared = mine.index.intersection(other.index)
    mine, other = mine.loc[shared], other.loc[shared]
    for column in TOTALS:
        left, right = mine[column].astype(object), other[column].astype(object)
        equal = (left.isna() & right.isna()) | (
            left.notna() & right.notna() & (left == right).fillna(False).astype(bool)
        )
        wrong += [f"{s}: {column} is {left[s]}, not {right[s]}" for s in shared[~equal.to_numpy()]]
    return wrong


def show_worst(console: Console, totals: pd.DataFrame) -> None:
    """Print the aircraft with the largest mean delay."""
    aircraft = totals[(totals["kind"] == "aircraft") & totals["name"].notna()]
    often = aircraft[aircraft["flights"] >= min(_WORST_MIN_FLIGHTS, aircraft["flights"].quantile(0.9))]
    table = Table(title=f"The {_WORST} worst aircraft, by mean arrival delay in minutes", title_justify="left")
    table.add_column("aircraft")
    for name in ("flights", "mean out", "worst out", "mean in", "worst in"):
        table.add_column(name, justify="right")
    table.add_column("now at")
    for row in often.nlargest(_WORST, "mean_arr_delay").itertuples():
        table.add_row(
            str(row.name),
            f"{row.flights:,}",
            f"{row.mean_dep_delay:.1f}",
            f"{row.worst_dep_delay:,.0f}",
            f"{row.mean_arr_delay:.1f}",
            f"{row.worst_arr_delay:,.0f}",
            str(row.last_airport),
        )
    console.print(table)


def show_figures(console: Console, work_dir: Path, starts: list[Start], kill: Kill | None) -> None:
    """Print durations and the size of the state."""
    batches = [json.loads(line) for line in (work_dir / "progress.jsonl").read_text().splitlines()]
    result = json.loads((work_dir / "result.json").read_text())
    durations = [batch["ms"] for batch in batches]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("micro-batch", f"median {median(durations):,.0f} ms, longest {max(durations):,.0f} ms")
    table.add_row(
        "state", f"{result['state_rows']:,} keys, {_size(result['state_bytes'])}; read in {result['read_ms']} ms"
    )
    table.add_row("written durably", f"{_size(result['durable_bytes'])} in {result['durable_objects']:,} objects")
    if result["restarts"]:
        table.add_row("query restarted", f"{result['restarts']} times, after failures logged in spark.log")
    if starts:
        table.add_row("first start", str(starts[0]))
    if kill is not None:
        started = f": {starts[1]}" if len(starts) > 1 else ""
        table.add_row("recovery", f"{kill.recovery_ms / 1000:.1f} s from kill to next commit{started}")
        table.add_row("state restored", f"from {kill.restored_from}")
    console.print(table)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:,.1f} kB"
