"""Takes objects of one savepoint over into another one: byte for byte, by tasks, since a savepoint names no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.settings import Settings
from holdfast.snapshotter.savepoints import pieces as saved_pieces
from holdfast.snapshotter.savepoints.saved_operator import Piece
from holdfast.snapshotter.savepoints.savepoints import savepoint_folder
from holdfast.spark_integration.savepoints.tasks import each_row, run_tasks
from holdfast.spark_integration.shard.task_storage import storage_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PIECE = "operator string, shard int, key string, size_bytes long, digest string"
_COPIED = "operator string, shard int, error string"
_COPIED_ARROW = pa.schema([("operator", pa.string()), ("shard", pa.int32()), ("error", pa.string())])


def copy_pieces(
    spark: SparkSession, settings: Settings, target: str, base: str, name: str, pieces: Sequence[tuple[str, Piece]]
) -> None:
    """Copy pieces of a savepoint, each under its key.

    Parameters
    ----------
    settings : Settings
        Of the session, without credentials.
    target : str
        URL of the directory of both savepoints.
    base, name : str
        From which, to which.
    pieces : sequence of (str, Piece)
        With the operators that they are of.

    Raises
    ------
    CorruptionError
        One of them is missing or damaged.
    """
    rows = [(operator, piece.shard, piece.key, piece.size_bytes, piece.digest) for operator, piece in pieces]
    run_tasks(spark, rows, _PIECE, PieceCopier(settings, target, base, name), _COPIED)


@dataclass(frozen=True)
class PieceCopier:
    """Copies the pieces of a task; a function for ``mapInArrow``; see `copy_pieces`."""

    settings: Settings
    target: str
    base: str
    name: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield an empty error for each piece, or what is wrong with it."""
        return each_row(batches, self._copied, _COPIED_ARROW)

    def _copied(self, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        self._copy(row["key"], row["size_bytes"], row["digest"])
        yield {"operator": row["operator"], "shard": row["shard"]}

    def _copy(self, key: str, size_bytes: int, digest: str) -> None:
        storage = storage_at(self.target, self.settings)
        before, after = savepoint_folder(storage, self.base), savepoint_folder(storage, self.name)
        source = f"{before.url}/{key}"
        try:
            data = before.get(key, size_bytes)
        except NotFoundError as exc:
            raise CorruptionError(f"{source} is missing: the savepoint is not whole") from exc
        found = stored_file.decode(data, source=source, kind=saved_pieces.KIND, plain_bytes_max=len(data))
        if (found.digest, found.size_bytes) != (digest, size_bytes):
            raise CorruptionError(f"{source} is not the object that the savepoint names", digest=found.digest)
        after.put(key, data)
