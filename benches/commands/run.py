"""``holdfast bench run``: measure suites into a directory, from which a stopped run continues."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from holdfast.benches.jobs.job import FiniteRange
from holdfast.benches.running.directory import FAILED, LEFT_OUT, ResultsDirectory, facts_of
from holdfast.benches.running.execution import Execution, Step, TimeLeft
from holdfast.benches.suites import own_load
from holdfast.benches.suites.measurement import Measurement, Profile, Shape
from holdfast.benches.suites.suites import SUITES
from holdfast.errors import InvalidArgumentError

_QUICK_S = 600.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHAPE = Shape()


def _shape_options(command: Any) -> Any:
    """Add the fields of a `Shape` to a command as options, which are None by default."""
    far = "latency of your object storage: commits go to an S3 server with that latency  [default: local disk]"
    for name, kind, text in reversed(
        (
            ("--keys", click.IntRange(1), f"your keys in the state  [default: {_SHAPE.keys}]"),
            ("--rows-per-batch", click.IntRange(1), f"rows per micro-batch  [default: {_SHAPE.rows}]"),
            ("--value-bytes", click.IntRange(32), f"bytes of a key's state  [default: {_SHAPE.value_bytes}]"),
            ("--shards", click.IntRange(1), f"shuffle partitions  [default: {_SHAPE.shards}]"),
            ("--store-latency-ms", FiniteRange(min=0), far),
        )
    ):
        field = "rows" if name == "--rows-per-batch" else name[2:].replace("-", "_")
        command = click.option(name, field, type=kind, help=text)(command)
    return command


@click.command("run")
@click.option("--quick", is_flag=True, help="measure a load like yours, as described by the options, in ten minutes")
@click.option("--full", is_flag=True, help="measure everything (the default)")
@click.option(
    "--suite", "suites", multiple=True, metavar="NAME", help=f"measure only this suite; repeatable: {', '.join(SUITES)}"
)
@_shape_options
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="directory for the results")
@click.option("--fresh", is_flag=True, help="delete existing results and start over")
@click.option("--disk", type=click.Path(exists=True, file_okay=False), help="directory on the disk to measure on")
@click.option("--seed", default=1, help="seed of the random order of engines")
@click.option("--turns", type=click.IntRange(1), help="turns per measurement; use 5 for comparisons  [default: 1 to 3]")
@click.option("--list", "listing", is_flag=True, help="show what would be measured and how long it takes")
def run(
    quick: bool,
    full: bool,
    suites: tuple[str, ...],
    out: Path | None,
    fresh: bool,
    disk: str | None,
    seed: int,
    turns: int | None,
    listing: bool,
    **shape: Any,
) -> None:
    """Measure suites and store the results; run the command again to continue.

    --quick shows which backend suits your own load, which --keys, --rows-per-batch, --value-bytes, --shards and
    --store-latency-ms describe. Ctrl-C stops cleanly. The exit status is 1 if a measurement failed.
    """
    given = {name: value for name, value in shape.items() if value is not None}
    if quick and full:
        raise InvalidArgumentError("choose --quick or --full, not both")
    if given and not quick:
        raise InvalidArgumentError("only a quick run takes options of the load; add --quick", given=", ".join(given))
    if quick and turns is not None:
        raise InvalidArgumentError("a quick run makes as many turns as fit into its time; leave --turns out")
    profile = Profile(quick, replace(_SHAPE, **given))
    measurements = measurements_of(profile, suites, turns)
    console = Console(markup=False)
    if listing:
        console.print(_listing(measurements))
        return
    if out is None:
        raise InvalidArgumentError("name a directory for the results: --out DIR")
    fit, lacking = with_room(measurements, Room.here(disk))
    opened = ResultsDirectory.opened(out, facts_of(profile, seed, disk) | {"turns": turns}, fresh=fresh)
    with opened as directory, _stopping_well(console):
        for measurement in measurements:
            directory.plan(measurement)
            if measurement.note:
                console.print(measurement.note, highlight=False)
        for measurement, lack in lacking:
            if directory.is_done(measurement):
                continue
            directory.set_state(measurement, LEFT_OUT, lack)
            console.print(f"{measurement.suite}/{measurement.name} is left out: it {lack}", style="yellow")
        failed = _carry_out(console, directory, fit, disk, _QUICK_S if quick else float("inf"))
    console.print(f"Results are in {out}; `holdfast bench report {out} -o report.html` makes a page of them.")
    if failed:
        console.print(f"Failed measurements: {failed}; the same command retries them.", style="red")
        sys.exit(1)


def _carry_out(
    console: Console,
    directory: ResultsDirectory,
    measurements: Sequence[Measurement],
    disk: str | None,
    within_s: float,
) -> int:
    """Run measurements; return how many failed."""
    end_s = time.monotonic() + within_s
    seed = directory.facts["seed"]
    work = [Execution(directory, one, seed=seed, disk=disk, end_s=end_s) for one in measurements]
    directory.write_facts()
    done = [pair for one in work for pair in one.done]
    left = TimeLeft([step for one in work for step in one.to_do] + [step for step, _ in done])
    for step, seconds in done:
        left.done(step, seconds)

    def tell(step: Step, seconds: float | None, outcome: str) -> None:
        if not outcome:
            console.print(f"{step} … {_duration(left.left_s)} left", highlight=False)
            return
        left.done(step, seconds)
        if seconds is not None:
            console.print(f"{step}: {outcome.splitlines()[0]}, {_duration(seconds)}", highlight=False)

    failed = 0
    for one, measurement in zip(work, measurements, strict=True):
        if one.run(tell) == FAILED:
            failed += 1
            reason = directory.plan(measurement)["reason"]
            console.print(f"{measurement.suite}/{measurement.name} failed: {reason}", style="red")
    return failed


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class Stopped(KeyboardInterrupt):
    """A signal asked the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_status = 128 + number


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` on the first signal; exit at once on the second, which ends running engines too."""

    def stop(number: int, _frame: FrameType | None) -> None:
        for name in _SIGNALS:
            signal.signal(name, end_at_once)
        raise Stopped(number)

    def end_at_once(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + number)

    before = {name: signal.signal(name, stop) for name in _SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextmanager
def _stopping_well(console: Console) -> Iterator[None]:
    try:
        with stoppable():
            yield
    except Stopped as stopped:
        console.print("Stopped. The same command continues from here.")
        sys.exit(stopped.exit_status)


def _listing(measurements: Sequence[Measurement]) -> Table:
    table = Table(title="Measurements, and minutes on two idle cores", title_justify="left")
    for column in ("suite", "name", "question", "minutes"):
        table.add_column(column, justify="right" if column == "minutes" else "left")
    for one in measurements:
        about = f"{one.question}\n{one.note}" if one.note else one.question
        table.add_row(one.suite, one.name, about, f"{one.minutes:.1f}")
    table.add_row("", "", "total", f"{sum(one.minutes for one in measurements):.0f}", style="bold")
    return table


@dataclass(frozen=True)
class Room:
    """Free memory and disk space."""

    memory_gb: float
    disk_gb: float

    @classmethod
    def here(cls, disk: str | None) -> Room:
        free = psutil.disk_usage(disk or tempfile.gettempdir()).free
        return cls(psutil.virtual_memory().available / 2**30, free / 2**30)

    def lacks(self, measurement: Measurement) -> str:
        """Return in words what a measurement lacks, or an empty string."""
        needs = (("memory", measurement.memory_gb, self.memory_gb), ("disk", measurement.disk_gb, self.disk_gb))
        return "; ".join(
            f"needs {needed:.1f} GiB of {what}, and {free:.1f} are free"
            for what, needed, free in needs
            if needed > free
        )


def measurements_of(profile: Profile, suites: Collection[str] = (), turns: int | None = None) -> list[Measurement]:
    """Return the measurements of these suites; by default of all, or in a quick run of the user's own load."""
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise InvalidArgumentError("no such suite; choose one of these", given=unknown[0], suites=" ".join(SUITES))
    chosen = suites or ([own_load.SUITE] if profile.quick else SUITES)
    found = [one for name in SUITES if name in chosen for one in SUITES[name](profile)]
    if not found:
        remedy = "have no quick measurement; leave --quick out" if profile.quick else "need --quick"
        raise InvalidArgumentError(f"these suites {remedy}", suites=" ".join(chosen))
    if turns is None:
        return found
    # pytest-benchmark has rounds instead of turns.
    return [
        one if one.micro else replace(one, repeats=turns, minutes=one.minutes * turns / one.repeats) for one in found
    ]


def with_room(
    measurements: Sequence[Measurement], room: Room
) -> tuple[list[Measurement], list[tuple[Measurement, str]]]:
    """Return the measurements that fit the machine, and the others with what they lack."""
    lacking = [(one, room.lacks(one)) for one in measurements]
    fit = [one for one, lack in lacking if not lack]
    if not fit:
        raise InvalidArgumentError(
            f"this machine has no room for any measurement: the first {lacking[0][1]}; free some, or name another "
            "disk with --disk",
            measurement=f"{measurements[0].suite}/{measurements[0].name}",
        )
    return fit, [(one, lack) for one, lack in lacking if lack]
