"""Progress of long work, on standard error if that is a terminal: how much, how fast, how long still."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def bytes_shown(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a bar during the context; yields a function to report finished bytes."""
    with _bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)


@contextmanager
def things_shown(what: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """Show a bar during the context; yields a function to report finished items."""
    with _bar(MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner and the elapsed time during the context."""
    with _bar(TimeElapsedColumn()) as progress:
        progress.add_task(what, total=None)
        yield


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
