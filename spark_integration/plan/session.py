"""What a data frame's session is set to: holdfast's own settings, checked, and Spark's that bear on a definition."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

from pyspark.sql import DataFrame

from holdfast.backends.registry import backend_names, find_backend
from holdfast.settings import Settings
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options


def checked_settings(df: DataFrame, stacklevel: int) -> Settings:
    """Return the settings of the data frame's session; warn where the state will not be durable.

    Parameters
    ----------
    df : DataFrame
    stacklevel : int
        For the warning: how many calls above this one the user's stands.

    Raises
    ------
    InvalidArgumentError
        A setting, or an option of the backend or of the storage, is wrong.
    """
    configuration = dict(df.sparkSession.conf.getAll)
    settings = Settings.parse(configuration, backend_names())
    find_backend(settings.backend).parse_options(settings.backend, settings.backend_options)
    _check_storage(settings, configuration, is_remote=not hasattr(df.sparkSession, "sparkContext"))
    if settings.checkpoint_dir is None and df.isStreaming:
        warnings.warn(
            "the state of this query is not durable: it is lost with the executors, and the query then fails; set "
            "spark.holdfast.checkpoint.dir to a directory that all executors reach",
            stacklevel=stacklevel + 1,
        )
    return settings


def _check_storage(settings: Settings, configuration: Mapping[str, str], *, is_remote: bool) -> None:
    """Open the durable storage, which asks it for nothing, so that unknown schemes and options are found at once.

    A Spark Connect client may lack what the executors have, packages and credentials, so there nothing is opened.
    """
    if settings.checkpoint_dir is not None and not is_remote:
        options = parse_storage_options(settings.storage_values(configuration))
        open_storage(settings.checkpoint_dir, options).close()


def rows_each(df: DataFrame) -> int:
    """Return how many rows an Arrow batch between Spark and Python has at most."""
    configured = int(str(df.sparkSession.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")))
    return configured if configured > 0 else 2**31 - 1


def name_folding(df: DataFrame) -> Callable[[str], str]:
    """Return a function that makes names equal which the data frame's session takes for one."""
    return str if df.sparkSession.conf.get("spark.sql.caseSensitive") == "true" else str.lower
