"""Reads the state of queries, running or not, and of savepoints, as DataFrames or into this process."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast import errors
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.settings import STORAGE_PREFIX
from holdfast.snapshotter.storage.options import parse_url
from holdfast.spark_integration.lookup.keys import as_table, key_option, shards_option
from holdfast.spark_integration.lookup.query_pointers import Key
from holdfast.spark_integration.lookup.stored_query import open_query
from holdfast.spark_integration.savepoints.tasks import configured
from holdfast.spark_integration.state_source.source import NAME, StateSource, columns_option, storage_options
from holdfast.spark_integration.worker_python import require_worker_python

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSource

_SHARDS_AT_ONCE = 4
# During planning, Spark wraps a source's errors in its own message.
_WRAPPED = re.compile(rf"{re.escape(errors.__name__)}\.(\w+): (.*)")


def read_state(
    spark: SparkSession,
    checkpoint_location: str | Path,
    operator: str,
    *,
    table: str = "state",
    batchId: int | None = None,
    keys: Key | Sequence[Key] | None = None,
) -> pa.Table:
    """Return an operator's live state after a micro-batch.

    Parameters
    ----------
    spark : SparkSession
        ``spark.holdfast.state.dir`` and ``spark.holdfast.storage.*`` must be set as for the query.
    checkpoint_location : str or pathlib.Path
        The query's ``checkpointLocation``.
    operator : str
        The operator's name.
    table : str, default "state"
        A state table of the operator, or a processor's variable by its declared name. Timers are in the table
        "timers".
    batchId : int, optional
        The micro-batch, to which the query must be able to return; by default the last committed.
    keys : mapping, or sequence of mappings, optional
        Return only the rows of these keys, each with a value for every grouping column of the operator, such as
        ``{"user": "ann"}``. Reads only objects with these keys; see `holdfast.open_query`, which needs no session.

    Returns
    -------
    pyarrow.Table
        One row per key with state, in no particular order: the key columns, then the value columns. If a value column's
        name is taken, ignoring case, the column is named ``value.<name>``.

    Raises
    ------
    InvalidArgumentError
        If no state directory is configured, or `checkpoint_location` holds no query with state.
    NotFoundError
        If the query has no such operator, the operator has no such table, or the micro-batch is not committed or was
        purged.
    StateLostError, CorruptionError
        If an object of the state is missing or damaged.

    Notes
    -----
    The query may keep running. This process reads the whole state; `holdfast.state` returns a DataFrame instead, which
    executors read.
    """
    settings, options = configured(spark)
    with open_query(checkpoint_location, settings.state_dir, options) as query:
        if keys is not None:
            return query.get(operator, keys, table=table, batch_id=batchId).popitem()[1]
        schema, shards = query.rows(operator, table, batch_id=batchId, at_once=_SHARDS_AT_ONCE)
        return as_table(schema, [run for _, run in shards])


def state(
    spark: SparkSession,
    checkpoint_location: str | Path,
    operator: str,
    *,
    table: str = "state",
    columns: Sequence[str] | None = None,
    key: Mapping[str, object] | None = None,
    shards: Collection[int] | None = None,
    batchId: int | None = None,
    readChangeFeed: bool = False,
    changeStartBatchId: int | None = None,
    changeEndBatchId: int | None = None,
) -> DataFrame:
    """Return an operator's state after a micro-batch, or its changes, as a DataFrame.

    Parameters
    ----------
    spark, checkpoint_location, operator, table
        As in `read_state`.
    columns : sequence of str, optional
        Return only these columns, in this order.
    key : mapping of str to object, optional
        Return only the rows of this key, given by a value for each grouping column. Reads only the key's shard; a
        filter on the DataFrame finds the same rows but reads all shards.
    shards : collection of int, optional
        Read only these shards; no rows if empty.
    batchId : int, optional
        The micro-batch; by default the last committed.
    readChangeFeed : bool, default False
        Return the changes from `changeStartBatchId` to `changeEndBatchId`, inclusive; the end is by default the last
        committed micro-batch.

    Returns
    -------
    DataFrame
        One row per key: the key columns, the value columns, and ``shard``. If a value column's name is taken, it
        is named ``value.<name>``. A change feed has a row per key and commit, and also the columns ``batch_id`` and
        ``change_type``, "update" or "delete"; the values of a deleted row are null.

    Raises
    ------
    InvalidArgumentError
        If no state directory is configured, `checkpoint_location` holds no query with state, or arguments
        conflict.
    NotFoundError
        If there is no such operator, table or column, or the query can no longer return to the micro-batch. Also if a
        change feed starts before the oldest retained commit; the message names the earliest possible start.

    Notes
    -----
    The query may keep running. The DataFrame stays at its micro-batch, and can be read as long as the query could
    return to it (``minBatchesToRetain``). Executors read the DataFrame, one shard per task.

    A small commit may be merged with those of later micro-batches. Its rows are then their net change, have the
    ``batch_id`` of the last of them, and are all returned if that micro-batch is in the range.
    """
    first, last = _range(batchId, readChangeFeed, changeStartBatchId, changeEndBatchId)
    settings, options = configured(spark)
    assert settings.state_dir is not None
    with open_query(checkpoint_location, settings.state_dir, options) as query:
        found = query.operator(operator, last)
    given = {"operator": operator, "stateDir": settings.state_dir, "batchId": str(found.batch_id), "table": table}
    if first is not None:
        given |= {"readChangeFeed": "true", "changeStartBatchId": str(first)}
    return _frame(spark, str(parse_url(checkpoint_location)), given, columns, key, shards)


def load(
    spark: SparkSession,
    target: str | Path,
    name: str,
    operator: str | None = None,
    table: str = "state",
    *,
    columns: Sequence[str] | None = None,
    key: Mapping[str, object] | None = None,
    shards: Collection[int] | None = None,
) -> DataFrame:
    """Return a table of a savepoint as a DataFrame.

    Parameters
    ----------
    spark : SparkSession
        ``spark.holdfast.storage.*`` are used to open the storage.
    target : str or pathlib.Path
        The savepoints' directory.
    name : str
        The savepoint's name.
    operator : str, optional
        The operator; required if the savepoint has several.
    table, columns, key, shards
        As in `holdfast.state`, which also describes the result.

    Raises
    ------
    NotFoundError
        If there is no such savepoint, operator, table or column; the message lists those that exist.
    InvalidArgumentError
        If an argument is invalid.
    CorruptionError
        If the savepoint's manifest is damaged.
    """
    given = {"table": table} | ({} if operator is None else {"operator": operator})
    return _frame(spark, f"{target}/{name}", given, columns, key, shards)


def register_source(spark: SparkSession, source: type[DataSource]) -> None:
    """Register a data source with a session; no effect if Spark already finds it."""
    from pyspark.errors import AnalysisException

    require_worker_python(spark)
    try:
        spark.dataSource.register(source)
    except AnalysisException as exc:
        if exc.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def _frame(
    spark: SparkSession,
    path: str,
    given: dict[str, str],
    columns: Sequence[str] | None,
    key: Mapping[str, object] | None,
    shards: Collection[int] | None,
) -> DataFrame:
    from pyspark.errors import PySparkException

    register_source(spark, StateSource)
    set_names = {k: v for k, v in dict(spark.conf.getAll).items() if k.startswith(STORAGE_PREFIX)}
    storage = storage_options({k.removeprefix(STORAGE_PREFIX): v for k, v in set_names.items()})
    selected = {
        "columns": None if columns is None else columns_option(columns),
        "key": None if key is None else key_option(key),
        "shards": None if shards is None else shards_option(shards),
    }
    given |= {name: text for name, text in selected.items() if text is not None}
    try:
        return spark.read.format(NAME).options(**given, **storage).load(path)
    except PySparkException as exc:
        if (error := holdfast_error_in(exc)) is None:
            raise
        raise error from exc


def holdfast_error_in(error: PySparkException) -> HoldfastError | None:
    """Return the holdfast error wrapped by Spark, or None for Spark's own errors."""
    found = _WRAPPED.findall(str(error))
    if not found:
        return None
    name, message = found[-1]
    return errors.class_of(name, InvalidArgumentError)(message)


def _range(batch_id: int | None, is_feed: bool, first: int | None, last: int | None) -> tuple[int | None, int | None]:
    """Return a change feed's first micro-batch, or None for state, and the micro-batch to read."""
    if not is_feed:
        if first is not None or last is not None:
            raise InvalidArgumentError("changeStartBatchId and changeEndBatchId need readChangeFeed=True")
        return None, batch_id
    if batch_id is not None:
        raise InvalidArgumentError("a change feed takes changeStartBatchId and changeEndBatchId instead of batchId")
    if type(first) is not int or first < 0:
        raise InvalidArgumentError("readChangeFeed needs changeStartBatchId, a whole number, 0 or more", given=first)
    if last is not None and type(last) is not int:
        raise InvalidArgumentError("changeEndBatchId must be a whole number, 0 or more", given=last)
    if last is not None and last < first:
        raise InvalidArgumentError("the change feed ends before it begins", first=first, last=last)
    return first, last
