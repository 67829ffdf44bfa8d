"""``holdfast export``: a state table as Parquet or CSV files, written by Spark, or as a Delta table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

import holdfast
from holdfast import savepoints
from holdfast.commands.own_spark import CONF, started_spark
from holdfast.commands.target import batch_option, on_storage, state_dir_option
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.settings import PREFIX, STORAGE_PREFIX
from holdfast.spark_integration.sinks.extras import needs_extra
from holdfast.spark_integration.state_source.reading import said_by_holdfast

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame, SparkSession

# Types that a line of text cannot hold, as Spark's JSON names them.
_NOT_IN_CSV = {"array", "map", "struct", "binary"}


@click.command()
@on_storage
@click.argument("location")
@click.option("--to", "target", required=True, metavar="URL", help="A new directory.")
@click.option("--format", "kind", type=click.Choice(["parquet", "csv", "delta"]), default="parquet", show_default=True)
@click.option("--operator", metavar="NAME", help="Required for a query, and if a savepoint has several.")
@click.option("--table", default="state", show_default=True, help="A state table, a variable, or timers.")
@click.option("--columns", metavar="A,B", help="Only these, in this order.")
@state_dir_option(f"Of a query: its {PREFIX}state.dir.", required=False)
@batch_option("A query's micro-batch. Default: the last committed one.")
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
    """Write a table of a savepoint, or of a query's state, as Parquet or CSV files, or as a Delta table.

    LOCATION is a savepoint: its directory, a slash, and its name. With --state-dir, or if the variable is set and
    no savepoint is there, it is a query's checkpointLocation; the query may be running. Starts Spark, on this machine
    unless --conf says otherwise.
    """
    names = None if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
    with started_spark(state_dir, options, conf) as spark, errors_of_spark():
        if not is_of_query(context, dict(spark.conf.getAll)):
            frame = _saved(spark, location, operator, table, names, batch_id)
        elif operator is None:
            raise InvalidArgumentError(
                "this is a query's location, not a savepoint, because a state directory is given: name the "
                "operator with --operator",
                location=location,
            )
        else:
            frame = holdfast.state(spark, location, operator, table=table, columns=names, batchId=batch_id)
        write(frame, target, kind)
    click.echo(json.dumps({"to": target, "format": kind}) if as_json else f"written to {target}")


def _saved(
    spark: SparkSession,
    location: str,
    operator: str | None,
    table: str,
    columns: list[str] | None,
    batch_id: int | None,
) -> DataFrame:
    if batch_id is not None:
        raise InvalidArgumentError(
            "--batch selects a query's micro-batch, which needs --state-dir: a savepoint is one micro-batch"
        )
    return savepoints.load(spark, *_place(location), operator, table, columns=columns)


def is_of_query(context: click.Context, settings: Mapping[str, str]) -> bool:
    """Tell whether LOCATION is that of a query, not a savepoint: the variable may be set for other commands."""
    if context.params["state_dir"] is None:
        return False
    if context.get_parameter_source("state_dir") is not ParameterSource.ENVIRONMENT:
        return True
    storage = {name.removeprefix(STORAGE_PREFIX): v for name, v in settings.items() if name.startswith(STORAGE_PREFIX)}
    try:
        savepoints.read(*_place(context.params["location"]), storage)
    except CorruptionError:  # a damaged savepoint
        return False
    except (InvalidArgumentError, NotFoundError):  # a location that only Spark can read, for one
        return True
    return False


def _place(location: str) -> tuple[str, str]:
    directory, _, name = location.rstrip("/").rpartition("/")
    return directory, name


def write(frame: DataFrame, target: str, kind: str) -> None:
    """Write a DataFrame into a new directory.

    Raises
    ------
    InvalidArgumentError
        It has a column that a CSV file cannot hold, or the package for Delta is missing.
    SchemaMismatchError
        It has a column that Delta does not know.
    ConflictError
        The directory of a Delta table holds something.
    """
    if kind == "delta":
        with needs_extra("delta"):
            from holdfast.spark_integration.sinks.delta.exporting import export_table
        export_table(frame, target)
        return
    if kind == "csv":
        nested = [field.name for field in frame.schema if field.dataType.typeName() in _NOT_IN_CSV]
        if nested:
            raise InvalidArgumentError(
                "CSV cannot hold these columns: choose others with --columns, or use --format parquet",
                columns=", ".join(nested),
            )
    writer = frame.write.mode("errorifexists")
    writer.option("header", "true").csv(target) if kind == "csv" else writer.parquet(target)


@contextmanager
def errors_of_spark() -> Iterator[None]:
    """Raise what Spark says as an error of holdfast; what holdfast said to Spark, without Spark's words around it."""
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except PySparkException as exc:
        kind = InvalidArgumentError if isinstance(exc, AnalysisException) else UnavailableError
        raise (said_by_holdfast(exc) or kind(_summary(exc))) from exc


def _summary(error: PySparkException) -> str:
    """Return a line that says what went wrong: of a traceback in a worker the last one, else the first one."""
    _, is_traceback, traced = str(error).partition("Traceback (most recent call last):\n")
    lines = [line for line in (traced or str(error)).splitlines() if line.strip()]
    raised = [line for line in lines if not line[0].isspace()] if is_traceback else lines
    return (raised or lines or [type(error).__name__])[0]
