"""Pieces: the rows of a savepoint, in runs that any Arrow reader opens.

A piece is a stored file whose only section, at its begin, is an Arrow IPC stream with one record batch and LZ4 buffers:
``pyarrow.ipc.open_stream``, Polars and DuckDB read it as it is. Its columns are those of a run (FORMAT.md section 2),
all of the table's, whichever of them a row was written with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import quote

import pyarrow.ipc as ipc
import xxhash

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.run import Run, TableSchema
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.savepoints.saved_operator import PIECE_BYTES_MAX, Piece
from holdfast.snapshotter.storage.object_storage import ObjectStorage

KIND = "piece"
_FIELDS = ("operator", "table", "shard")
#: Of a piece's rows, unpacked and on the average: what a task holds twice.
PIECE_BYTES = 64 << 20
_ROWS_MAX = (1 << 31) - 1
_NAME_BYTES_MAX = 100


def folder_of(operator: str, table: str) -> str:
    """Return where the pieces of a table are, below the savepoint; a variable may have a name that no key may have."""
    name = quote(table, safe="")
    if len(name) > _NAME_BYTES_MAX:
        name = f"{name[:_NAME_BYTES_MAX]}-{xxhash.xxh3_64_hexdigest(table.encode())}"
    return f"operators/{operator}/{name}"


def write_pieces(
    savepoint: ObjectStorage,
    operator: str,
    shard: int,
    run: Run,
    piece_bytes: int = PIECE_BYTES,
    new_id: Callable[[], str] = clock.new_id,
) -> Iterator[Piece]:
    """Store the live rows of a table and shard, and yield each piece when it is stored.

    Parameters
    ----------
    savepoint : ObjectStorage
        Its folder.
    run : Run
        Without deletes.
    piece_bytes : int
        Of the rows of one piece, unpacked and on the average.

    Raises
    ------
    InvalidArgumentError
        A few rows are so large that no reader would take them.
    """
    for number, chunk in enumerate(run.chunks(_ROWS_MAX, piece_bytes)):
        header = {"operator": operator, "table": run.schema.name, "shard": shard}
        data, digest = stored_file.encode(KIND, header, {"rows": partial(chunk.write, compression="lz4")})
        key = f"{folder_of(operator, run.schema.name)}/{shard:04d}-{number}-{new_id()}.arrow"
        if data.size > PIECE_BYTES_MAX:
            raise InvalidArgumentError("rows of one key are too large for a savepoint", key=key, size_bytes=data.size)
        savepoint.put(key, data)
        yield Piece(
            key,
            run.schema.name,
            shard,
            len(chunk),
            data.size,
            ipc.get_record_batch_size(chunk.batch),
            digest,
            int(chunk.hashes[0]),
            int(chunk.hashes[-1]),
        )


def read_piece(savepoint: ObjectStorage, operator: str, piece: Piece, schema: TableSchema) -> Run:
    """Return the rows of a piece.

    Parameters
    ----------
    savepoint : ObjectStorage
        Its folder.
    schema : TableSchema
        Of its table, as the manifest has it.

    Raises
    ------
    CorruptionError
        It is missing, damaged, or not the one that the manifest names.
    """
    source = f"{savepoint.url}/{piece.key}"
    try:
        data = savepoint.get(piece.key, piece.size_bytes)
    except NotFoundError as exc:
        raise CorruptionError(f"{source} is missing: the savepoint is not whole") from exc
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=len(data))
    if (stored.digest, stored.size_bytes) != (piece.digest, piece.size_bytes):
        raise CorruptionError(f"{source} is not the object that the savepoint names", digest=stored.digest)
    fields = Fields(stored.header, source, *_FIELDS)
    whose = fields.text("operator"), fields.text("table"), fields.number("shard")
    if whose != (operator, piece.table, piece.shard):
        fields.refuse("belongs elsewhere: it was moved or copied", operator=whose[0], table=whose[1], shard=whose[2])
    run = Run.read(stored.section("rows", source), schema, source=source, plain_bytes=piece.plain_bytes)
    if len(run) != piece.rows or (int(run.hashes[0]), int(run.hashes[-1])) != (piece.first_hash, piece.last_hash):
        fields.refuse("holds other rows than the savepoint says", rows=len(run), wanted=piece.rows)
    if run.deleted.any():
        fields.refuse("holds deleted rows")
    return run
