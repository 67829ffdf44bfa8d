"""``holdfast export``: a state table as Parquet or CSV files, or as a Delta table.

This process writes Parquet and CSV itself, shard by shard, without Spark:

::

    a query's shards, or a savepoint's pieces ──▶ Arrow batches, as Spark would get them ──▶ part-00000.parquet, …

The directory must be new. An export that fails takes its files away.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import click
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from click.core import ParameterSource

import holdfast
from holdfast import savepoints
from holdfast.backends.run import Run, TableSchema
from holdfast.commands.own_spark import CONF, started_spark
from holdfast.commands.progress import things_shown
from holdfast.commands.target import batch_option, both_places, on_storage, savepoint_place, state_dir_option
from holdfast.distribution import needs_extra
from holdfast.errors import ConflictError, HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.settings import PREFIX
from holdfast.snapshotter.savepoints.savepoints import find_savepoint, read_piece, read_savepoint, savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.lookup.places import (
    find_places,
    find_state_dir,
    query_at,
    require_no_state_directory,
)
from holdfast.spark_integration.lookup.stored_query import open_query
from holdfast.spark_integration.processor.state.variable_tables import find_shown
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.state_source.reading import holdfast_error_in
from holdfast.spark_integration.state_source.source import ShownTable

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame, SparkSession

Kind = Literal["parquet", "csv"]
#: A table's schema, and its rows by shard.
ShardRows = tuple[TableSchema, Iterator[tuple[int, Run]]]
# Types that text cannot hold, by their names in Spark's JSON.
_NOT_IN_CSV = {"array", "map", "struct", "binary"}


def write_files(
    rows: ShardRows,
    columns: Sequence[str],
    target: ObjectStorage,
    kind: Kind,
    on_rows: Callable[[int], object] = lambda _rows: None,
) -> int:
    """Write rows, of all or some columns, into a new directory; return how many there were."""
    schema, runs = rows
    shown = ShownTable.of(schema, columns)
    encode = _WRITERS[kind]
    made = arrow_schema(shown.struct, "the state")
    if kind == "csv":
        _require_csv(made)
    if target.list(""):
        raise ConflictError("the directory is not empty: name a new one", to=target.url)
    written: list[str] = []
    count = 0

    def put(batch: pa.RecordBatch) -> None:
        key = f"part-{len(written):05d}.{kind}"
        written.append(key)
        target.put(key, encode(pa.Table.from_batches([batch], schema=made)))

    try:
        for shard, run in runs:
            for batch in shown.batches(run, shard):
                put(batch)
                count += batch.num_rows
                on_rows(batch.num_rows)
        if not written:  # an empty file still has the columns
            put(pa.RecordBatch.from_pylist([], schema=made))
    except BaseException:
        target.delete(written)
        raise
    return count


def _require_csv(schema: pa.Schema) -> None:
    _require_no(field.name for field in schema if pa.types.is_nested(field.type) or pa.types.is_binary(field.type))


def _require_no(nested: Iterable[str]) -> None:
    """Raise InvalidArgumentError if there are columns that CSV cannot hold."""
    if names := ", ".join(nested):
        raise InvalidArgumentError(
            "CSV cannot hold these columns: choose others with --columns, or use --format parquet",
            columns=names,
        )


def _as_parquet(rows: pa.Table) -> pa.Buffer:
    out = pa.BufferOutputStream()
    pa.parquet.write_table(rows, out)
    return out.getvalue()


def _as_csv(rows: pa.Table) -> bytes:
    out = io.BytesIO()
    try:
        pa.csv.write_csv(rows, out)
    except pa.ArrowException as exc:
        raise InvalidArgumentError(
            f"CSV cannot hold these values: choose other columns with --columns, or use --format parquet: {exc}"
        ) from exc
    return out.getvalue()


_WRITERS: Mapping[str, Callable[[pa.Table], pa.Buffer | bytes]] = {"parquet": _as_parquet, "csv": _as_csv}


@click.command()
@on_storage
@click.argument("location")
@click.option("--to", "target", required=True, metavar="URL", help="A new directory.")
@click.option("--format", "kind", type=click.Choice(["parquet", "csv", "delta"]), default="parquet", show_default=True)
@click.option("--operator", metavar="NAME", help="Required for a query, and if a savepoint has several.")
@click.option("--table", default="state", show_default=True, help="A state table, a variable, or timers.")
@click.option("--columns", metavar="A,B", help="Only these, in this order.")
@state_dir_option(f"Of a query: its {PREFIX}state.dir. Default: the one that its state names.")
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
    """Write a table of state as Parquet, CSV or Delta.

    LOCATION is a savepoint: its directory, a slash, and its name; or the checkpointLocation or state directory of a
    query, which may be running. This process writes Parquet and CSV, one shard after another; Spark writes Delta
    tables, and everything with --conf.
    """
    places = places_of_query(context, options)
    if places is None and batch_id is not None:
        raise InvalidArgumentError("--batch needs a query: a savepoint holds one micro-batch", location=location)
    location, state_dir = places or (location, None)
    names = None if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
    what = _Exported(location, state_dir, operator, table, names, batch_id, options)
    if kind == "delta" or conf:
        what.require(target, kind)
        with started_spark(state_dir, options, conf) as spark, errors_of_spark():
            write(what.frame(spark), target, kind)
    else:
        what.write(target, cast("Kind", kind))
    click.echo(json.dumps({"to": target, "format": kind}) if as_json else f"written to {target}")


@dataclass(frozen=True)
class _Exported:
    """The exported table: a query's if a state directory is known, else a savepoint's."""

    location: str
    state_dir: str | None
    operator: str | None
    table: str
    columns: list[str] | None
    batch_id: int | None
    options: Mapping[str, str]  #: Of the storage

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return it as a DataFrame."""
        if self.state_dir is None or self.operator is None:
            return savepoints.load(
                spark, *savepoint_place(self.location), self.operator, self.table, columns=self.columns
            )
        where = spark, self.location, self.operator
        return holdfast.state(*where, table=self.table, columns=self.columns, batchId=self.batch_id)

    def write(self, target: str, kind: Kind) -> None:
        with ExitStack() as stack:
            to = stack.enter_context(open_storage(target, parse_storage_options(self.options)))
            rows = self._rows(stack)
            on_rows = stack.enter_context(things_shown("rows", None))
            write_files(rows, self.columns or (), to, kind, on_rows)

    def require(self, target: str, kind: str) -> None:
        """Fail before Spark starts on a missing table, column or package, or an existing target."""
        with ExitStack() as stack:
            schema, _ = self._rows(stack)
        made = arrow_schema(ShownTable.of(schema, self.columns or ()).struct, "the state")
        if kind == "csv":
            _require_csv(made)
        elif kind == "delta":
            with needs_extra("delta"):
                from holdfast.spark_integration.sinks.delta.exporting import require_new_table
            require_new_table(target, self.options, made)

    def _rows(self, stack: ExitStack) -> ShardRows:
        """Return its rows, read on demand."""
        if self.state_dir is not None and self.operator is not None:
            query = stack.enter_context(open_query(self.location, self.state_dir, self.options))
            return query.rows(self.operator, self.table, batch_id=self.batch_id)
        directory, name = savepoint_place(self.location)
        target = stack.enter_context(open_storage(directory, parse_storage_options(self.options)))
        try:
            saved = read_savepoint(target, name).find_operator(self.operator)
            schema = saved.tables[find_shown(saved.tables, self.table)]
        except NotFoundError:
            require_no_state_directory(PrefixedStorage(target, name))
            raise
        folder, pieces = savepoint_folder(target, name), saved.of_table(schema.name)
        return schema, ((piece.shard, read_piece(folder, saved.name, piece, schema)) for piece in pieces)


def places_of_query(context: click.Context, options: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the places of LOCATION's query; None for a savepoint, even if HOLDFAST_STATE_DIR is set."""
    location, state_dir, operator = (context.params[name] for name in ("location", "state_dir", "operator"))
    parsed = parse_storage_options(options)
    is_given = context.get_parameter_source("state_dir") is ParameterSource.COMMANDLINE
    query_id = None if is_given else query_at(location, parsed)
    if operator is None and (is_given or query_id is not None):
        raise InvalidArgumentError(
            "this is a query's location, not a savepoint: name the operator with --operator", location=location
        )
    if state_dir is not None and (is_given or query_id is not None):
        return both_places(location, state_dir, options, operator)
    if query_id is not None:
        return location, find_state_dir(location, parsed, query_id)
    is_named = operator is not None and not _is_savepoint(location, parsed)
    return find_places(location, parsed, operator) if is_named else None


def _is_savepoint(location: str, options: Mapping[str, object]) -> bool:
    directory, name = savepoint_place(location)
    with suppress(HoldfastError), open_storage(directory, options) as target:  # whoever reads it says what is wrong
        return find_savepoint(target, name) is not None
    return False


def write(frame: DataFrame, target: str, kind: str) -> None:
    """Write a DataFrame into a new directory. Raises `InvalidArgumentError`, `SchemaMismatchError`, `ConflictError`."""
    if kind == "delta":
        with needs_extra("delta"):
            from holdfast.spark_integration.sinks.delta.exporting import export_table
        export_table(frame, target)
        return
    if kind == "csv":
        _require_no(field.name for field in frame.schema if field.dataType.typeName() in _NOT_IN_CSV)
    writer = frame.write.mode("errorifexists")
    writer.option("header", "true").csv(target) if kind == "csv" else writer.parquet(target)


@contextmanager
def errors_of_spark() -> Iterator[None]:
    """Raise Spark's errors as holdfast's; holdfast's own errors, raised inside Spark, stay unchanged."""
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except PySparkException as exc:
        kind = InvalidArgumentError if isinstance(exc, AnalysisException) else UnavailableError
        raise (holdfast_error_in(exc) or kind(_summary(exc))) from exc


def _summary(error: PySparkException) -> str:
    """Return the line that says what failed: a worker traceback's last, else the first."""
    _, is_traceback, traced = str(error).partition("Traceback (most recent call last):\n")
    lines = [line for line in (traced or str(error)).splitlines() if line.strip()]
    raised = [line for line in lines if not line[0].isspace()] if is_traceback else lines
    return (raised or lines or [type(error).__name__])[0]
