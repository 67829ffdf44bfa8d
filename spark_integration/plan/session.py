"""Reads and checks the settings of a session, holdfast's and Spark's, that affect a definition.

A session with far more shuffle partitions than task slots, such as Spark's default of 200, causes a warning. Each
shuffle partition is a task in every micro-batch, however few the rows. Partitions are never coalesced, because Spark
plans streaming queries without adaptive execution. A query keeps its initial number of partitions.

The number of task slots follows from the configuration, which a Spark Connect session has too::

    local, local[4], local-cluster[2,4,1024]    1, 4, 2 * 4
    local[*]                                    the driver's cores: its default parallelism, unless that is configured
    dynamic allocation                          maxExecutors * executor.cores
    otherwise                                   executor.instances * executor.cores; standalone: cores.max at most

divided by ``spark.task.cpus``. If a value is missing, as on a standalone cluster without a limit on cores, the number
is unknown, and there is no warning.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import pyarrow as pa
from pyspark.errors import PySparkAttributeError
from pyspark.sql import DataFrame, SparkSession

from holdfast.backends.registry import backend_names, find_backend
from holdfast.errors import InvalidArgumentError
from holdfast.settings import Settings
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.executor.processes import ProcessId, place_of
from holdfast.spark_integration.plan.noting import news_of
from holdfast.spark_integration.spark_versions import is_classic, is_on, require_fitting_arrow
from holdfast.spark_integration.worker_python import require_worker_python

_KEY = "spark.sql.shuffle.partitions"
# Above this, a small micro-batch takes over a second: a task with its state store takes 0.1 to 0.15 s.
_FAR_MORE = 8
_LOCAL = re.compile(r"local(?:\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]")


def checked_settings(df: DataFrame, stacklevel: int) -> Settings:
    """Return the session's settings; warn, at the user's `stacklevel`, if state will not be durable.

    Raises `InvalidArgumentError` for invalid settings or options, and an unsuitable pyarrow or Python version.
    """
    require_worker_python(df.sparkSession)
    configuration = dict(df.sparkSession.conf.getAll)
    settings = Settings.parse(configuration, backend_names())
    find_backend(settings.backend).parse_options(settings.backend, settings.backend_options)
    is_remote = not is_classic(df.sparkSession)
    if df.isStreaming and not is_remote:  # a client's versions may differ from those of the server's workers
        require_fitting_arrow(pa.__version__)
    if settings.state_dir is not None and not is_remote:
        # Fail at definition for unknown schemes and options; a Connect client may lack the packages and credentials.
        open_storage(settings.state_dir, settings.storage_values(configuration)).close()
    if settings.state_dir is None and df.isStreaming:
        warnings.warn(
            "this query's state is not durable: losing an executor loses its state, and the query fails; set "
            "spark.holdfast.state.dir to a directory that all executors can access",
            stacklevel=stacklevel + 1,
        )
    if is_remote:
        return settings
    settings = replace(settings, driver=place_of(ProcessId.of(os.getpid())))
    if settings.state_dir is None or not df.isStreaming:
        return settings
    values = settings.storage_values(configuration)
    return replace(settings, news=news_of(df.sparkSession, settings.state_dir, values))


def rows_each(df: DataFrame) -> int:
    """Return the maximum number of rows in an Arrow batch between Spark and Python."""
    configured = int(str(df.sparkSession.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")))
    return configured if configured > 0 else 2**31 - 1


def name_folding(df: DataFrame) -> Callable[[str], str]:
    """Return a function that folds the case of names if the session ignores case."""
    return str if is_on(df.sparkSession, "spark.sql.caseSensitive") else str.lower


def shuffle_partitions(session: SparkSession) -> int:
    """Return the number of shuffle partitions that a new query would pin."""
    return int(str(session.conf.get(_KEY)))


def warn_of_partitions(session: SparkSession, stacklevel: int) -> None:
    """Warn if the session has far more shuffle partitions than task slots, at the user's `stacklevel`."""
    configuration = dict(session.conf.getAll)
    partitions, cores = shuffle_partitions(session), None
    if "spark.default.parallelism" not in configuration and is_classic(session):
        cores = int(session.sparkContext.defaultParallelism)
    slots = task_slots(configuration, cores)
    if slots is not None and partitions > _FAR_MORE * slots:
        warnings.warn(
            f"this session has {partitions} shuffle partitions for {slots} task slots: a new query runs {partitions} "
            "tasks in every micro-batch, each of 0.1 s or more, however few the rows. Set "
            f"{_KEY}={slots}, or a small multiple if the cluster will grow; a query keeps its initial number",
            stacklevel=stacklevel + 1,
        )


def task_slots(configuration: Mapping[str, str], local_cores: int | None) -> int | None:
    """Return how many tasks can run at once; None if unknown. `local_cores` is the value for ``local[*]``."""
    cores = _cores(configuration, local_cores)
    return None if cores is None else max(cores // (_number(configuration, "spark.task.cpus") or 1), 1)


def _cores(configuration: Mapping[str, str], local_cores: int | None) -> int | None:
    master = configuration.get("spark.master", "")
    if local := _LOCAL.fullmatch(master):
        threads = local[1] or "1"
        return local_cores if threads == "*" else int(threads)
    if cluster := _LOCAL_CLUSTER.fullmatch(master):
        return int(cluster[1]) * int(cluster[2])
    is_dynamic = configuration.get("spark.dynamicAllocation.enabled", "").lower() == "true"
    limit = "spark.dynamicAllocation.maxExecutors" if is_dynamic else "spark.executor.instances"
    is_standalone = master.startswith("spark://")
    executors = _number(configuration, limit)
    cores = _number(configuration, "spark.executor.cores") or (None if is_standalone else 1)
    by_executor = executors * cores if executors and cores else None
    in_all = _number(configuration, "spark.cores.max") if is_standalone else None
    return min((found for found in (by_executor, in_all) if found), default=None)


def _number(configuration: Mapping[str, str], key: str) -> int | None:
    value = configuration.get(key, "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def require_session(session: SparkSession) -> None:
    """Raise `InvalidArgumentError` if a session of classic Spark was stopped, as Spark's own error is empty."""
    try:
        _ = session.sparkContext.startTime
    except PySparkAttributeError:  # Spark Connect has no SparkContext
        return
    except AttributeError as exc:  # the context has released its JVM
        raise InvalidArgumentError(
            "the Spark session of this DataFrame was stopped: start a new session and read the input again"
        ) from exc
