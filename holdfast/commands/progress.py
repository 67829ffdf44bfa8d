"""Progress bars on standard error, if that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

#: Yields a function to call with the progress since its last call.
_Shown = AbstractContextManager[Callable[[int], object]]


def bytes_shown(what: str, total_bytes: int) -> _Shown:
    """Show a progress bar in bytes during the context."""
    return _shown(what, total_bytes, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())


def items_shown(what: str, total: int | None) -> _Shown:
    """Show a progress bar in items during the context."""
    return _shown(what, total, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())


def working(what: str) -> _Shown:
    """Show a pulsing bar and the elapsed time during the context."""
    return _shown(what, None, TimeElapsedColumn())


@contextmanager
def _shown(what: str, total: int | None, *columns: ProgressColumn) -> Iterator[Callable[[int], object]]:
    console = Console(stderr=True)
    first = (TextColumn("{task.description}"), BarColumn())
    with Progress(*first, *columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
