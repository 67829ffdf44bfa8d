"""State as DataFrames: of a query, running or not, and of savepoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import errors
from holdfast.errors import HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.settings import STORAGE_PREFIX
from holdfast.snapshotter.ownership.operator_record import read_operator
from holdfast.snapshotter.ownership.stored_tables import stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.stored_reads import ReadDirectory, ReadShard, StoredRead, store_read
from holdfast.spark_integration.lookup.keys import key_option, shards_option
from holdfast.spark_integration.read_state import Pointers, find_pointers
from holdfast.spark_integration.shard.operator_directory import operator_of
from holdfast.spark_integration.state_source.kept_changes import require_kept
from holdfast.spark_integration.state_source.options import columns_option, storage_options
from holdfast.spark_integration.state_source.source import NAME, StateSource
from holdfast.spark_integration.stored_pointers import configured
from holdfast.spark_integration.worker_python import require_worker_python

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSource

# What a source says in the process where Spark plans it stands in the middle of Spark's own words.
_SAID = re.compile(rf"{re.escape(errors.__name__)}\.(\w+): (.*)")


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
    """Return the state of one operator as it was after a micro-batch, or what changed in it, as a DataFrame.

    Parameters
    ----------
    spark : SparkSession
        Its ``spark.holdfast.state.dir`` and ``spark.holdfast.storage.*`` must be those of the query.
    checkpoint_location : str or pathlib.Path
        The query's own ``checkpointLocation``.
    operator : str
        The operator's name.
    table : str, default "state"
        One of the operator's state tables, a variable of a processor, or "timers".
    columns : sequence of str, optional
        Show only these, in this order.
    key : mapping of str to object, optional
        Return only the rows of this key: a value for each column that the operator is grouped by. Reads only its shard.
        A filter on the DataFrame finds the same rows, but reads all shards.
    shards : collection of int, optional
        Read only these; no rows if it is empty.
    batchId : int, optional
        The micro-batch; by default the last committed one.
    readChangeFeed : bool, default False
        Return what changed from `changeStartBatchId` to `changeEndBatchId`, both included; by default the last
        committed micro-batch.

    Returns
    -------
    DataFrame
        One row per key: the key columns, the value columns, and ``shard``. A value column whose name is already taken
        is named ``value.<name>``. A change feed has the columns ``batch_id`` and ``change_type`` besides, "update" or
        "delete", and a row for each key and commit; a deleted row has no values.

    Raises
    ------
    InvalidArgumentError
        No state directory is configured, `checkpoint_location` holds no query with state, or arguments do not go
        together.
    NotFoundError
        There is no such operator, table or column, or the query cannot return to the micro-batch any more. Or a change
        feed begins before the oldest commit that is kept: the message says with which micro-batch it may begin.

    Notes
    -----
    The query may keep running. The DataFrame stays at its micro-batch. It can be read for as long as the query could
    return there (``minBatchesToRetain``), and for a day at most. Executors read it, a shard in each task.

    Small commits travel together, and what several micro-batches wrote in one is their net change: it has the
    ``batch_id`` of the last one, and all of it is shown if that is in the range.
    """
    first, last = _range(batchId, readChangeFeed, changeStartBatchId, changeEndBatchId)
    directory, read_id = _stored_read(spark, str(checkpoint_location), operator, first, last)
    given = {"operator": directory, "read": read_id, "table": table}
    if first is not None:
        given |= {"readChangeFeed": "true", "changeStartBatchId": str(first)}
    state_dir = configured(spark)[0].state_dir
    assert state_dir is not None
    return _frame(spark, state_dir, given, columns, key, shards)


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
    """Return a table of a savepoint.

    Parameters
    ----------
    spark : SparkSession
        Its ``spark.holdfast.storage.*`` open the storage.
    target : str or pathlib.Path
        The directory of savepoints.
    name : str
        Of the savepoint.
    operator : str, optional
        Required if it has several.
    table, columns, key, shards
        As in `holdfast.state`, which also describes what is returned.

    Raises
    ------
    NotFoundError
        There is no such savepoint, operator, table or column; the message says what there is.
    InvalidArgumentError
        An argument is wrong.
    CorruptionError
        The savepoint's manifest is damaged.
    """
    given = {"table": table} | ({} if operator is None else {"operator": operator})
    return _frame(spark, f"{target}/{name}", given, columns, key, shards)


def register_source(spark: SparkSession, source: type[DataSource]) -> None:
    """Register a source's format with a session; changes nothing if Spark finds it by itself."""
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
    reader = spark.read.format(NAME).options(**given, **storage)
    if columns is not None:
        reader = reader.option("columns", columns_option(columns))
    if key is not None:
        reader = reader.option("key", key_option(key))
    if shards is not None:
        reader = reader.option("shards", shards_option(shards))
    try:
        return reader.load(path)
    except PySparkException as exc:
        said = said_by_holdfast(exc)
        if said is None:
            raise
        raise said from exc


def said_by_holdfast(error: PySparkException) -> HoldfastError | None:
    """Return the holdfast error that Spark has wrapped; None if the error is Spark's own."""
    found = _SAID.findall(str(error))
    if not found:
        return None
    name, message = found[-1]
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, HoldfastError):
        return kind(message)
    return InvalidArgumentError(message)


def _stored_read(
    spark: SparkSession, checkpoint_location: str, operator: str, first: int | None, last: int | None
) -> tuple[str, str]:
    """Store an operator's pointers; return the directory and the id."""
    settings, options = configured(spark)
    assert settings.state_dir is not None
    with open_storage(settings.state_dir, options) as storage:
        try:
            pointers = find_pointers(spark, checkpoint_location, operator, last)
        except (InvalidArgumentError, NotFoundError):
            read_operator(storage, operator)  # a clearer error if no query has an operator of this name
            raise
        read = _read_of(storage, operator, pointers)
        if first is not None:
            require_kept(storage, read, first)
        directory = min(read.directories)
        return directory, store_read(storage, directory, read)


def _range(batch_id: int | None, is_feed: bool, first: int | None, last: int | None) -> tuple[int | None, int | None]:
    """Return the first micro-batch of a change feed, None for state, and the micro-batch to read."""
    if not is_feed:
        if first is not None or last is not None:
            raise InvalidArgumentError("changeStartBatchId and changeEndBatchId need readChangeFeed=True")
        return None, batch_id
    if batch_id is not None:
        raise InvalidArgumentError("a change feed has changeStartBatchId and changeEndBatchId instead of batchId")
    if type(first) is not int or first < 0:
        raise InvalidArgumentError("readChangeFeed needs changeStartBatchId, a number, 0 or more", given=first)
    if last is not None and type(last) is not int:
        raise InvalidArgumentError("changeEndBatchId is a number, 0 or more", given=last)
    if last is not None and last < first:
        raise InvalidArgumentError("the change feed ends before it begins", first=first, last=last)
    return first, last


def _read_of(storage: ObjectStorage, operator: str, pointers: Pointers) -> StoredRead:
    """Return what executors need to read an operator's shards."""
    # An operator that never had rows has no pointers, but may have a record of its own.
    if "" in pointers:
        raise InvalidArgumentError(
            "the query has state that is not durable, because it runs without spark.holdfast.state.dir",
            operator=operator,
        )
    directories, shards = {}, []
    for name in sorted(pointers) or [operator]:
        record = read_operator(storage, name)
        directories[name] = ReadDirectory(record.shards, stored_tables(storage, record))
        for row in pointers.get(name, []):
            row.require(operator_of(name) or operator, row.shard, record.shards)
            if row.pointer is not None:
                shards.append(ReadShard(name, row.shard, row.pointer, row.carried))
    return StoredRead(operator, directories, tuple(sorted(shards, key=lambda one: (one.directory, one.shard))))
