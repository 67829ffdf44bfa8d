"""A table that can be read: in parts, each a stretch of the hashes of one shard.

::

    savepoint     a part for each piece                     `holdfast.spark_integration.state_source.saved_table`
    query         a part for each shard with state          `holdfast.spark_integration.state_source.query_table`
    changes       a part for each shard that has any        `holdfast.spark_integration.state_source.query_table`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from holdfast.backends.run import Run, TableSchema
from holdfast.spark_integration.savepoints.restoring_shards import HashRange


@dataclass(frozen=True)
class Part(InputPartition):
    """What a task reads.

    Attributes
    ----------
    shard : int
    hashes : HashRange
        All its rows' keys have one of these.
    wanted : frozenset of int or None
        Only rows with one of these hashes are wanted; None for all.
    """

    shard: int
    hashes: HashRange
    wanted: frozenset[int] | None


class Rows(NamedTuple):
    """Rows of a part.

    Attributes
    ----------
    run : Run
    batch_id : int or None
        The micro-batch that wrote them, in a change feed.
    """

    run: Run
    batch_id: int | None = None


class ReadableTable(ABC):
    """One table of an operator; without its parts it travels to the executors.

    Attributes
    ----------
    schema : TableSchema
        As it is shown.
    grouping : tuple of str
        The key columns that the rows' hashes are of; none where that is not known.
    """

    schema: TableSchema
    grouping: tuple[str, ...]

    @abstractmethod
    def parts(self) -> list[Part]:
        """Return all parts."""

    @abstractmethod
    def rows(self, part: Part) -> Iterator[Rows]:
        """Read a part, in a task.

        Raises
        ------
        HoldfastError
            Something of it is missing or damaged, or the storage does not answer.
        """

    @abstractmethod
    def travelling(self) -> ReadableTable:
        """Return the table without parts and credentials."""
