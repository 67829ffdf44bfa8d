"""A table of a savepoint: the driver reads the manifest, executors the pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from holdfast.backends.run import TableSchema
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.savepoints.pieces import read_piece
from holdfast.snapshotter.savepoints.saved_operator import Piece
from holdfast.snapshotter.savepoints.savepoints import read_savepoint, savepoint_folder
from holdfast.spark_integration.processor.state.variable_tables import find_shown, grouping_columns
from holdfast.spark_integration.savepoints.restoring_shards import HashRange
from holdfast.spark_integration.state_source.options import Place, ReadOptions
from holdfast.spark_integration.state_source.table import (
    Part,
    ReadableTable,
    Rows,
)


@dataclass(frozen=True)
class PiecePart(Part):
    """A piece of a savepoint."""

    piece: Piece


@dataclass(frozen=True)
class SavedTable(ReadableTable):
    """A table of a savepoint's operator.

    Attributes
    ----------
    place : Place
        Of the directory of savepoints.
    name : str
        Of the savepoint.
    operator : str
    pieces : tuple of Piece
    """

    place: Place
    name: str
    operator: str
    schema: TableSchema
    grouping: tuple[str, ...]
    pieces: tuple[Piece, ...] = field(repr=False)

    @classmethod
    def find(cls, options: ReadOptions) -> SavedTable:
        """Return the table that options name.

        Raises
        ------
        InvalidArgumentError, NotFoundError
            There is no such savepoint, operator or table.
        CorruptionError
            The manifest is damaged.
        """
        target, _, name = options.path.rstrip("/").rpartition("/")
        if not target or not name:
            raise InvalidArgumentError("load the path of a savepoint: its directory, a slash, and its name")
        place = Place(target, options.storage)
        with place.open() as storage:
            try:
                savepoint = read_savepoint(storage, name)
            except NotFoundError as exc:
                raise NotFoundError(
                    f"{exc.message}; to read a query's state, use holdfast.state(spark, checkpoint_location, operator)",
                    **exc.facts,
                ) from exc
            operator = savepoint.find_operator(options.operator)
        if options.shards is not None:
            options.shards.require_below(operator.shards)
        table = find_shown(operator.tables, options.table)
        grouping = grouping_columns(operator.tables, table)
        return cls(place, name, operator.name, operator.tables[table], grouping, tuple(operator.of_table(table)))

    def parts(self) -> list[Part]:
        """Return a part for each piece."""
        return [
            PiecePart(piece.shard, HashRange(piece.first_hash, piece.last_hash), None, piece) for piece in self.pieces
        ]

    def rows(self, part: Part) -> Iterator[Rows]:
        """Yield the rows of a piece."""
        assert isinstance(part, PiecePart)
        with self.place.in_task().open() as storage:
            folder = savepoint_folder(storage, self.name)
            yield Rows(read_piece(folder, self.operator, part.piece, self.schema))

    def travelling(self) -> SavedTable:
        """Return the table without pieces and credentials."""
        return replace(self, place=self.place.without_credentials(), pieces=())
