"""Progress bars on standard error, if that is a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SECONDS_BETWEEN_LOOKS = 0.5


#: Yields a function that takes the progress made since its last call.
_Shown = AbstractContextManager[Callable[[int], object]]


def bytes_shown(what: str, total_bytes: int) -> _Shown:
    """Show a bar of bytes during the context."""
    return _shown(what, total_bytes, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())


def things_shown(what: str, total: int | None) -> _Shown:
    """Show a bar of items during the context."""
    return _shown(what, total, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())


def working(what: str) -> _Shown:
    """Show a pulsing bar and the elapsed time during the context."""
    return _shown(what, None, TimeElapsedColumn())


@contextmanager
def _shown(what: str, total: int | None, *columns: ProgressColumn) -> Iterator[Callable[[int], object]]:
    with _bar(*columns) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


@contextmanager
def tasks_shown(spark: SparkSession) -> Iterator[None]:
    """Show the finished tasks of the running stage during the context."""
    with _bar(MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        if progress.disable:
            yield
            return
        ended = threading.Event()
        looking = threading.Thread(target=_follow, args=(spark, progress, ended), daemon=True)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()


def _follow(spark: SparkSession, progress: Progress, ended: threading.Event) -> None:
    tracker, task, shown = spark.sparkContext.statusTracker(), None, -1
    while not ended.wait(_SECONDS_BETWEEN_LOOKS):
        stages = tracker.getActiveStageIds()
        info = tracker.getStageInfo(stages[0]) if stages else None
        if info is None:
            continue
        if task is None or shown != info.stageId:
            if task is not None:
                progress.remove_task(task)
            task, shown = progress.add_task("tasks", total=info.numTasks), info.stageId
        progress.update(task, completed=info.numCompletedTasks)


def _bar(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    first = (TextColumn("{task.description}"), BarColumn())
    return Progress(*first, *columns, console=console, transient=True, disable=not console.is_terminal)
