"""Whether a session has far more shuffle partitions than task slots, as with Spark's default of 200.

Each shuffle partition is a task of every micro-batch, however few rows there are, and a streaming query never merges
them: Spark plans it without adaptive execution. A query keeps the number that it first started with.

The number of task slots follows from the configuration, which a Spark Connect session has too::

    local, local[4], local-cluster[2,4,1024]    1, 4, 2 * 4
    local[*]                                    the driver's cores: its default parallelism, unless that is configured
    dynamic allocation                          maxExecutors * executor.cores
    otherwise                                   executor.instances * executor.cores; standalone: cores.max at most

divided by ``spark.task.cpus``. If a figure is missing, as on a standalone cluster that gives all its cores, the number
is unknown and there is no warning.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

from pyspark.sql import SparkSession

from holdfast.spark_integration.spark_versions import is_classic

_KEY = "spark.sql.shuffle.partitions"
# Beyond this, a micro-batch of few rows takes more than a second: a task takes 0.1 to 0.15 s with its state store.
_FAR_MORE = 8
_LOCAL = re.compile(r"local(?:\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]")


def shuffle_partitions(session: SparkSession) -> int:
    """Return the number that a query gets if it first starts now."""
    return int(str(session.conf.get(_KEY)))


def warn_of_partitions(session: SparkSession, stacklevel: int) -> None:
    """Warn if the session has far more shuffle partitions than task slots.

    `stacklevel` says how many calls up the user's is.
    """
    configuration = dict(session.conf.getAll)
    partitions = shuffle_partitions(session)
    slots = task_slots(configuration, _default_parallelism(session, configuration))
    if slots is not None and partitions > _FAR_MORE * slots:
        warnings.warn(
            f"this session has {partitions} shuffle partitions for {slots} task slots: a query that first starts in it "
            f"runs {partitions} tasks in every micro-batch, each of 0.1 s or more, however few its rows. Set "
            f"{_KEY}={slots}, or a small multiple if the cluster will grow; a query keeps the number that it first "
            "started with",
            stacklevel=stacklevel + 1,
        )


def _default_parallelism(session: SparkSession, configuration: Mapping[str, str]) -> int | None:
    if "spark.default.parallelism" in configuration or not is_classic(session):
        return None
    return int(session.sparkContext.defaultParallelism)


def task_slots(configuration: Mapping[str, str], local_cores: int | None) -> int | None:
    """Return how many tasks can run at once; None if the configuration does not say.

    `local_cores` is what ``local[*]`` uses, if known.
    """
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
