"""A state table as Parquet or CSV files, written by this process shard by shard, without Spark.

::

    a query's shards, or a savepoint's pieces ──▶ Arrow batches, as Spark would get them ──▶ part-00000.parquet, …

The directory must be new. An export that fails takes its files away.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from holdfast.backends.run import Run, TableSchema
from holdfast.errors import ConflictError, InvalidArgumentError
from holdfast.snapshotter.savepoints.pieces import read_piece
from holdfast.snapshotter.savepoints.savepoints import read_savepoint, savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.processor.state.variable_tables import find_shown
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.state_source.shown import ShownTable

Kind = Literal["parquet", "csv"]
#: A table's schema, and its rows by shard.
ShardRows = tuple[TableSchema, Iterator[tuple[int, Run]]]


def saved_rows(target: ObjectStorage, name: str, operator: str | None, table: str) -> ShardRows:
    """Return the rows of a savepoint's table.

    Raises
    ------
    NotFoundError
        There is no such savepoint, operator or table.
    CorruptionError
        The savepoint is damaged, or turns out to be as its rows are read.
    """
    found = read_savepoint(target, name).find_operator(operator)
    schema = found.tables[find_shown(found.tables, table)]
    folder = savepoint_folder(target, name)
    return schema, (
        (piece.shard, read_piece(folder, found.name, piece, schema)) for piece in found.of_table(schema.name)
    )


def write_files(
    rows: ShardRows,
    columns: Sequence[str],
    target: ObjectStorage,
    kind: Kind,
    on_rows: Callable[[int], object] = lambda _rows: None,
) -> int:
    """Write rows into a new directory; return how many there were.

    Parameters
    ----------
    columns : sequence of str
        Only these, in this order; all if there are none.
    target : ObjectStorage
        The directory.
    on_rows : callable
        Told of rows that are written.

    Raises
    ------
    ConflictError
        The directory holds something.
    NotFoundError
        There is no such column.
    InvalidArgumentError
        A CSV file cannot hold a column.
    """
    schema, runs = rows
    shown = ShownTable.of(schema, columns)
    encode = _WRITERS[kind]
    made = arrow_schema(shown.struct, "the state")
    if kind == "csv":
        _require_flat(made)
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
        if not written:  # whoever reads it finds the columns
            put(pa.RecordBatch.from_pylist([], schema=made))
    except BaseException:
        target.delete(written)
        raise
    return count


def _require_flat(columns: pa.Schema) -> None:
    nested = [field.name for field in columns if pa.types.is_nested(field.type) or pa.types.is_binary(field.type)]
    if nested:
        raise InvalidArgumentError(
            "CSV cannot hold these columns: choose others with --columns, or use --format parquet",
            columns=", ".join(nested),
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
