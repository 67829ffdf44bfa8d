"""Progress of a run: bars by suite on a terminal, lines elsewhere; both say how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from holdfast.benches.running.carrying_out import Hooks, Step
from holdfast.benches.running.time_left import TimeLeft


class Progress:
    """See the module.

    Parameters
    ----------
    console : rich.console.Console
    steps : sequence of Step
        All of the plan that belong to this command.
    done : sequence
        Those that an earlier one has done, and the seconds that each took.
    """

    def __init__(self, console: Console, steps: Sequence[Step], done: Sequence[tuple[Step, float]] = ()) -> None:
        self._console = console
        self._left = TimeLeft(steps)
        self._suites = list(dict.fromkeys(step.measurement.suite for step in steps))
        self._in_all = {suite: self._number(steps, suite) for suite in self._suites}
        self._done = dict.fromkeys(self._suites, 0)
        self._running: tuple[Step, float] | None = None
        for step, seconds in done:
            self._left.add(step, seconds)
            self._done[step.measurement.suite] += 1

    @staticmethod
    def _number(steps: Sequence[Step], suite: str) -> int:
        return sum(step.measurement.suite == suite for step in steps)

    @contextmanager
    def shown(self) -> Iterator[Hooks]:
        """Show progress meanwhile; what is told to the hooks moves it."""
        if self._console.is_terminal:
            with Live(get_renderable=self._table, console=self._console, refresh_per_second=2, transient=True):
                yield self._hooks()
        else:
            yield self._hooks()

    def _hooks(self) -> Hooks:
        return Hooks(self._begin, self._leave_out, self._end)

    def _begin(self, step: Step) -> None:
        self._running = (step, time.monotonic())
        if not self._console.is_terminal:
            self._console.print(f"{_name(step)} … {_shown(self._left.left_s())} left", highlight=False)

    def _leave_out(self, step: Step) -> None:
        self._left.leave_out(step)
        self._in_all[step.measurement.suite] -= 1

    def _end(self, step: Step, seconds: float, outcome: str) -> None:
        self._running = None
        self._left.add(step, seconds)
        self._done[step.measurement.suite] += 1
        self._console.print(
            f"{_name(step)}: {outcome.splitlines()[0]}, {_shown(seconds)}", highlight=False, markup=False
        )

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        running_s = time.monotonic() - self._running[1] if self._running else 0.0
        for suite in self._suites:
            done, in_all = self._done[suite], self._in_all[suite]
            here = self._running is not None and self._running[0].measurement.suite == suite
            left_s = self._left.left_s(suite, running_s)
            state = _name(self._running[0]) if here and self._running else "done" if done == in_all else ""
            bar = ProgressBar(total=in_all, completed=done, width=30)
            table.add_row(suite, bar, f"{done} of {in_all}", f"{_shown(left_s)} left" if left_s else "", state)
        table.add_row(
            "all", "", "", f"{_shown(self._left.left_s(None, running_s))} left", "Ctrl-C stops, and can go on"
        )
        return table


def _name(step: Step) -> str:
    turns = f", turn {step.turn + 1} of {step.measurement.repeats}" if step.measurement.repeats > 1 else ""
    return f"{step.measurement.suite}/{step.measurement.name}: {step.label}{turns}"


def _shown(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
