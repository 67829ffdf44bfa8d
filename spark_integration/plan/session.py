"""The settings of a DataFrame's session: holdfast's own, checked, and those of Spark's that affect a definition."""

from __future__ import annotations

import os
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
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.executor.processes import ProcessId, place_of
from holdfast.spark_integration.worker_python import require_worker_python


def checked_settings(df: DataFrame, stacklevel: int) -> Settings:
    """Return the settings of the DataFrame's session; warn if the state will not be durable.

    `stacklevel` says how many calls up the user's is. Raises `InvalidArgumentError` if a setting or an option is wrong,
    Spark and pyarrow do not go together, or tasks on this machine would run in another Python.
    """
    require_worker_python(df.sparkSession)
    configuration = dict(df.sparkSession.conf.getAll)
    settings = Settings.parse(configuration, backend_names())
    find_backend(settings.backend).parse_options(settings.backend, settings.backend_options)
    is_remote = not spark_versions.is_classic(df.sparkSession)
    if df.isStreaming and not is_remote:  # a client's versions are not those of the server's workers
        spark_versions.require_fitting_arrow(pa.__version__)
    _check_storage(settings, configuration, is_remote=is_remote)
    if settings.state_dir is None and df.isStreaming:
        warnings.warn(
            "this query's state is not durable: losing an executor loses its state, and the query fails; set "
            "spark.holdfast.state.dir to a directory that all executors reach",
            stacklevel=stacklevel + 1,
        )
    return settings if is_remote else replace(settings, driver=place_of(ProcessId.of(os.getpid())))


def _check_storage(settings: Settings, configuration: Mapping[str, str], *, is_remote: bool) -> None:
    """Open the durable storage, without a request, so that unknown schemes and options fail at definition.

    A Spark Connect client may lack the executors' packages and credentials, so it opens nothing.
    """
    if settings.state_dir is not None and not is_remote:
        options = parse_storage_options(settings.storage_values(configuration))
        open_storage(settings.state_dir, options).close()


def rows_each(df: DataFrame) -> int:
    """Return the maximum rows of an Arrow batch between Spark and Python."""
    configured = int(str(df.sparkSession.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")))
    return configured if configured > 0 else 2**31 - 1


def name_folding(df: DataFrame) -> Callable[[str], str]:
    """Return a function that folds the case of names, if the DataFrame's session ignores it."""
    return str if spark_versions.is_on(df.sparkSession, "spark.sql.caseSensitive") else str.lower


def require_session(session: SparkSession) -> None:
    """Raise `InvalidArgumentError` if a session of classic Spark was stopped: Spark's own error then has no words."""
    try:
        _ = session.sparkContext.startTime
    except PySparkAttributeError:  # Spark Connect, where there is no such context
        return
    except AttributeError as exc:  # the context has let go of its JVM
        raise InvalidArgumentError(
            "the Spark session of this DataFrame was stopped: start another one, and read the input anew"
        ) from exc
