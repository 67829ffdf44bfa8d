"""``holdfast export``: a state table as Parquet or CSV files, or as a Delta table.

This process writes Parquet and CSV itself, shard by shard, without Spark:

::

    a query's shards, or a savepoint's pieces ──▶ Arrow batches, as for Spark ──▶ part-00000.parquet, …

The directory must be new. A failed export deletes its files.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal, cast

import click
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from click.core import ParameterSource

import holdfast
from holdfast import savepoints
from holdfast.commands.own_spark import CONF, started_spark
from holdfast.commands.progress import items_shown
from holdfast.commands.target import batch_option, both_places, on_storage, savepoint_place, state_dir_option
from holdfast.distribution import needs_extra
from holdfast.errors import ConflictError, HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.settings import PREFIX
from holdfast.snapshotter.savepoints.savepoints import find_savepoint
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.lookup.places import (
    find_places,
    find_state_dir,
    query_at,
    require_no_state_directory,
)
from holdfast.spark_integration.state_source.reading import holdfast_error_in
from holdfast.spark_integration.state_source.source import ReadableTable, ReadOptions, ShownTable, find_table

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame, SparkSession

Kind = Literal["parquet", "csv"]


def write_files(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    target: ObjectStorage,
    kind: Kind,
    on_rows: Callable[[int], object] = lambda _rows: None,
) -> None:
    """Write rows into an empty directory; on failure, delete the files."""
    if target.list(""):
        raise ConflictError("the directory is not empty: name a new one", to=target.url)
    written: list[str] = []

    def put(batch: pa.RecordBatch) -> None:
        key = f"part-{len(written):05d}.{kind}"
        written.append(key)
        target.put(key, _encoded(pa.Table.from_batches([batch], schema=schema), kind))
        on_rows(batch.num_rows)

    try:
        for batch in batches:
            put(batch)
        if not written:  # an empty file still has the columns
            put(pa.RecordBatch.from_pylist([], schema=schema))
    except BaseException:
        target.delete(written)
        raise


def _encoded(rows: pa.Table, kind: Kind) -> bytes:
    out = io.BytesIO()
    if kind == "parquet":
        pa.parquet.write_table(rows, out)
        return out.getvalue()
    try:
        pa.csv.write_csv(rows, out)
    except pa.ArrowException as exc:
        raise InvalidArgumentError(
            f"CSV cannot hold these values: choose other columns with --columns, or use --format parquet: {exc}"
        ) from exc
    return out.getvalue()


@click.command()
@on_storage
@click.argument("location")
@click.option("--to", "target", required=True, metavar="URL", help="The directory to write; must be empty or absent.")
@click.option("--format", "kind", type=click.Choice(["parquet", "csv", "delta"]), default="parquet", show_default=True)
@click.option("--operator", metavar="NAME", help="Operator to export; required unless a savepoint has only one.")
@click.option("--table", default="state", show_default=True, help="Name of a state table or variable, or `timers`.")
@click.option("--columns", metavar="A,B", help="Export only these columns, in this order.")
@state_dir_option(f"The {PREFIX}state.dir, if LOCATION is a query. Default: the one recorded in the checkpoint.")
@batch_option("The micro-batch, if LOCATION is a query. Default: the last committed one.")
@CONF
@click.pass_context
def export(
    context: click.Context,
    location: str,
    target: str,
    kind: str,
    operator: str | None,
    table: str,
    columns: str | None,
    state_dir: str | None,
    batch_id: int | None,
    conf: tuple[str, ...],
    options: dict[str, str],
    as_json: bool,
) -> None:
    """Write a table of state as Parquet, CSV or Delta.

    LOCATION is a savepoint: its directory, a slash, and its name; or the checkpointLocation or state directory of a
    query, which may be running. This process writes Parquet and CSV, one shard after another; Spark writes Delta
    tables and, with --conf, any format.
    """
    places = places_of_query(context, options)
    if places is None and batch_id is not None:
        raise InvalidArgumentError("--batch needs a query: a savepoint holds one micro-batch", location=location)
    path, state_dir = places or ("/".join(savepoint_place(location)), None)
    names = tuple(name.strip() for name in (columns or "").split(",") if name.strip())
    what = ReadOptions(path, operator, table, names, state_dir=state_dir, batch_id=batch_id, storage=options)
    found, shown = _found(what, kind)
    if kind == "delta" or conf:
        if kind == "delta":
            with needs_extra("delta"):
                from holdfast.spark_integration.sinks.delta.exporting import require_new_table
            require_new_table(target, options, shown.arrow)
        with started_spark(state_dir, options, conf) as spark, errors_of_spark():
            write(_frame(spark, what), target, kind)
    else:
        with (
            found.place.open() as storage,
            open_storage(target, options) as to,
            items_shown("rows", None) as on_rows,
        ):
            runs = ((part.shard, run) for part in found.parts() for run, _ in found.rows(storage, part))
            batches = (batch for shard, run in runs for batch in shown.batches(run, shard))
            write_files(batches, shown.arrow, to, cast("Kind", kind), on_rows)
    click.echo(json.dumps({"to": target, "format": kind}) if as_json else f"written to {target}")


def _found(what: ReadOptions, kind: str) -> tuple[ReadableTable, ShownTable]:
    """Return a table with the columns to write. Raises `InvalidArgumentError`, `NotFoundError`."""
    try:
        table = find_table(what)
    except NotFoundError:
        if what.state_dir is None:
            with open_storage(what.path, what.storage) as location:
                require_no_state_directory(location)
        raise
    shown = ShownTable.of(table.schema, what.columns)
    nested = (f.name for f in shown.arrow if pa.types.is_nested(f.type) or pa.types.is_binary(f.type))
    if kind == "csv" and (names := ", ".join(nested)):
        raise InvalidArgumentError(
            "CSV cannot hold these columns: choose others with --columns, or use --format parquet", columns=names
        )
    return table, shown


def _frame(spark: SparkSession, what: ReadOptions) -> DataFrame:
    columns = list(what.columns) or None
    if what.state_dir is None or what.operator is None:
        return savepoints.load(spark, *savepoint_place(what.path), what.operator, what.table, columns=columns)
    return holdfast.state(spark, what.path, what.operator, table=what.table, columns=columns, batchId=what.batch_id)


def places_of_query(context: click.Context, options: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the checkpoint location and state directory of a query; None for a savepoint, whatever the environment."""
    location, state_dir, operator = (context.params[name] for name in ("location", "state_dir", "operator"))
    is_given = context.get_parameter_source("state_dir") is ParameterSource.COMMANDLINE
    query_id = None if is_given else query_at(location, options)
    if operator is None and (is_given or query_id is not None):
        raise InvalidArgumentError(
            "this is a query's location, not a savepoint: name the operator with --operator", location=location
        )
    if state_dir is not None and (is_given or query_id is not None):
        return both_places(location, state_dir, options, operator)
    if query_id is not None:
        return location, find_state_dir(location, options, query_id)
    is_named = operator is not None and not _is_savepoint(location, options)
    return find_places(location, options, operator) if is_named else None


def _is_savepoint(location: str, options: Mapping[str, object]) -> bool:
    directory, name = savepoint_place(location)
    with suppress(HoldfastError), open_storage(directory, options) as target:  # reading it reports the error
        return find_savepoint(target, name) is not None
    return False


def write(frame: DataFrame, target: str, kind: str) -> None:
    """Write a DataFrame into a new directory. Raises `SchemaMismatchError`, `ConflictError`."""
    if kind == "delta":
        with needs_extra("delta"):
            from holdfast.spark_integration.sinks.delta.exporting import export_table
        export_table(frame, target)
        return
    writer = frame.write.mode("errorifexists")
    writer.option("header", "true").csv(target) if kind == "csv" else writer.parquet(target)


@contextmanager
def errors_of_spark() -> Iterator[None]:
    """Convert Spark's errors to holdfast's, and unwrap holdfast's own errors that Spark wrapped."""
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except PySparkException as exc:
        kind = InvalidArgumentError if isinstance(exc, AnalysisException) else UnavailableError
        raise (holdfast_error_in(exc) or kind(_summary(exc))) from exc


def _summary(error: PySparkException) -> str:
    """Return the line that says what failed: the last of a worker's traceback, else the first."""
    _, is_traceback, traced = str(error).partition("Traceback (most recent call last):\n")
    lines = [line for line in (traced or str(error)).splitlines() if line.strip()]
    raised = [line for line in lines if not line[0].isspace()] if is_traceback else lines
    return (raised or lines or [type(error).__name__])[0]
