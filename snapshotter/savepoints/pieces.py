"""Pieces: the rows of a savepoint, in runs that any Arrow reader opens.

A piece is a stored file whose only section, at its beginning, is an Arrow IPC stream with one record batch and LZ4
buffers: ``pyarrow.ipc.open_stream``, Polars and DuckDB read it as it is. It has the columns of a run (FORMAT.md section
2): all of the table's, whichever of them a row was written with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import pyarrow.ipc as ipc
import xxhash

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.run import Run, TableSchema
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.fields import Stored, refuse, refuse_stray
from holdfast.snapshotter.savepoints.manifest import PIECE_BYTES_MAX, Piece
from holdfast.snapshotter.storage.object_storage import ObjectStorage

KIND = "piece"
#: Average unpacked size of a piece's rows; a task holds it twice.
PIECE_BYTES = 64 << 20
#: How many digits of a piece's id identify the maker of its savepoint.
MAKER_DIGITS = 8
_ROWS_MAX = (1 << 31) - 1
_NAME_BYTES_MAX = 100


@dataclass(frozen=True)
class _Header(Stored):
    """Whose rows a piece's object holds."""

    operator: str
    table: str
    shard: int


def folder_of(operator: str, table: str) -> str:
    """Return the folder of a table's pieces below the savepoint, escaped: not every variable's name is a valid key."""
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
    maker: str = "",
    each: Callable[[Callable[[Any], Piece], Iterable[Any]], Iterable[Piece]] = map,
) -> Iterator[Piece]:
    """Store the live rows of a table and shard in pieces of about `piece_bytes`; yield each when it is stored.

    `maker`: with which their ids begin; see `MAKER_DIGITS`.
    """

    def written(numbered: tuple[int, Run]) -> Piece:
        number, chunk = numbered
        key = f"{folder_of(operator, run.schema.name)}/{shard:04d}-{number}-{maker}{clock.new_id()[len(maker) :]}.arrow"
        return _write_piece(savepoint, operator, shard, chunk, key)

    yield from each(written, enumerate(run.chunks(_ROWS_MAX, piece_bytes)))


def _write_piece(savepoint: ObjectStorage, operator: str, shard: int, rows: Run, key: str) -> Piece:
    table, plain_bytes = rows.schema.name, ipc.get_record_batch_size(rows.batch)
    header = _Header(operator, table, shard).to_json()
    sections = {"rows": partial(rows.write, compression="lz4")}
    data, digest = stored_file.encode(KIND, header, sections, plain_bytes=plain_bytes)
    if data.size > PIECE_BYTES_MAX:
        raise InvalidArgumentError("rows of one key are too large for a savepoint", key=key, size_bytes=data.size)
    savepoint.put(key, data)
    first_hash, last_hash = int(rows.hashes[0]), int(rows.hashes[-1])
    return Piece(key, table, shard, len(rows), data.size, plain_bytes, digest, first_hash, last_hash)


def fetch_piece(savepoint: ObjectStorage, piece: Piece) -> tuple[memoryview, stored_file.StoredFile]:
    """Return the object of a piece; raises `CorruptionError` if it is missing, damaged, or not the manifest's."""
    source = f"{savepoint.url}/{piece.key}"
    try:
        data = savepoint.get(piece.key, piece.size_bytes)
    except NotFoundError as exc:
        raise CorruptionError(f"{source} is missing: the savepoint is incomplete") from exc
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=len(data))
    if (stored.digest, stored.size_bytes) != (piece.digest, piece.size_bytes):
        raise CorruptionError(f"{source} is not the object that the savepoint names", digest=stored.digest)
    return data, stored


def read_piece(savepoint: ObjectStorage, operator: str, piece: Piece, schema: TableSchema) -> Run:
    """Return the rows of a piece. Raises `CorruptionError`. `schema`: of its table, as the manifest has it."""
    stored, source = fetch_piece(savepoint, piece)[1], f"{savepoint.url}/{piece.key}"
    header = _Header.read(stored.header, source)
    if (header.operator, header.table, header.shard) != (operator, piece.table, piece.shard):
        refuse_stray(source, operator=header.operator, table=header.table, shard=header.shard)
    run = Run.read(stored.section("rows", source), schema, source=source, plain_bytes=piece.plain_bytes)
    if len(run) != piece.rows or (int(run.hashes[0]), int(run.hashes[-1])) != (piece.first_hash, piece.last_hash):
        refuse(source, "holds other rows than the savepoint says", rows=len(run), wanted=piece.rows)
    if run.deleted.any():
        refuse(source, "holds deleted rows")
    return run
