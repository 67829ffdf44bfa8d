"""A task's durable storage, opened once per process, and the threads for its requests."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Executor, ThreadPoolExecutor

from pyspark import TaskContext

from holdfast.settings import PREFIX, STORAGE_PREFIX, Settings
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import CREDENTIALS, parse_storage_options
from holdfast.spark_integration.executor.processes import STORAGES, kept_per_process

_IO_THREADS = 8


def storage_options(settings: Settings) -> dict[str, str]:
    """Return the values of ``spark.holdfast.storage.*`` from this task's properties.

    They may be credentials, so they are not pickled with the operator. Spark Connect hides credentials from the client
    program, so the usual names of credentials are always tried.
    """
    return session_values({*settings.storage_names, *CREDENTIALS})


def session_values(names: Collection[str]) -> dict[str, str]:
    """Return the ``spark.holdfast.storage.*`` settings of this task's session; none outside a task."""
    context = TaskContext.get()
    values = {}
    for name in names:
        value = context.getLocalProperty(STORAGE_PREFIX + name) if context else None
        if value is not None:
            values[name] = value
    return values


def local_dir_of_session() -> str | None:
    """Return this task's ``spark.holdfast.local.dir``, or None."""
    context = TaskContext.get()
    value = context.getLocalProperty(f"{PREFIX}local.dir") if context else None
    return value or None


def state_storage(settings: Settings) -> ObjectStorage | None:
    """Return the durable storage of this task, shared by the tasks of this process."""
    return None if settings.state_dir is None else storage_at(settings.state_dir, settings)


def storage_at(url: str, settings: Settings) -> ObjectStorage:
    """Return the storage of this task at a URL, shared by the tasks of this process."""
    return _open(url, tuple(sorted(storage_options(settings).items())))


@kept_per_process(STORAGES)
def _open(url: str, options: tuple[tuple[str, str], ...]) -> ObjectStorage:
    return open_storage(url, parse_storage_options(dict(options)))


@kept_per_process(1)
def io_executor() -> Executor:
    """Return this process's threads for storage requests."""
    return ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="holdfast-io")
