"""A query looked into from outside: which operators it has, where their shards were after a micro-batch, and their rows.

::

    checkpointLocation                          spark.holdfast.checkpoint.dir
        offsets/7, commits/7                        <operator>/operator, schemas/…
        state/0/3/…  ──pointer──▶                   <operator>/shard-0003/commits/…, snapshots/…, files/…
        └─ read without Spark ─┘                    └─ only what holds the wanted keys ─┘

Nothing is written anywhere, and nothing starts a JVM: the query may run meanwhile, on any machine. A micro-batch can be
read for as long as the query could return to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from holdfast.backends.run import TableSchema
from holdfast.spark_integration.shard.pointer_row import PointerRow

Key = Mapping[str, Any]
"""A value for each column that the operator is grouped by: ``{"user": "ann"}``."""


@dataclass(frozen=True)
class StoredOperator:
    """An operator of holdfast's as it was after a micro-batch.

    Attributes
    ----------
    name : str
    batch_id : int
        The micro-batch.
    number : int
        Spark's number of the operator that holds the pointers.
    host : str
        Spark's name of it.
    shards : int
        How many the operator has.
    tables : mapping of str to TableSchema
        Those that users see, with the columns that are declared by now.
    grouping : tuple of str
        The key columns that the operator is grouped by; none where that is not certain.
    pointers : mapping of str to tuple of PointerRow
        By directory below the checkpoint directory, ascending by shard. A shard that never had rows has none; the
        attribute ``pointer`` of one without state is None.
    """

    name: str
    batch_id: int
    number: int
    host: str
    shards: int
    tables: Mapping[str, TableSchema]
    grouping: tuple[str, ...]
    pointers: Mapping[str, tuple[PointerRow, ...]]


@dataclass(frozen=True)
class KeyVersion:
    """What a key held from one micro-batch on.

    Attributes
    ----------
    batch_id : int
        The first retained micro-batch after which it held this.
    batch_ms : int
        When that micro-batch was planned, in ms since 1970.
    is_oldest : bool
        Whether nothing older is retained: it may have held this before.
    tables : mapping of str to pyarrow.Table
        Its rows by table, as `StoredQuery.get` returns them.
    """

    batch_id: int
    batch_ms: int
    is_oldest: bool
    tables: Mapping[str, pa.Table]


@dataclass(frozen=True)
class Page:
    """Some rows of a shard, in the order of their hashes.

    Attributes
    ----------
    rows : pyarrow.Table
        The key columns, then the value columns.
    after : str or None
        What gives the next page; None on the last one.
    """

    rows: pa.Table
    after: str | None


class StoredQuery:
    """See the module; made by `open_query`, and to be closed, best by a ``with`` statement.

    Notes
    -----
    Threads: many. What was read of immutable objects is kept, within a budget, so that a history costs little more than
    one look-up.
    """

    @property
    def query_id(self) -> str:
        """The query's id."""
        raise NotImplementedError

    def batches(self) -> list[int]:
        """Return the micro-batches that can be read, ascending: those that are committed and not purged."""
        raise NotImplementedError

    def operators(self, batch_id: int | None = None) -> list[StoredOperator]:
        """Return the operators of holdfast's after a micro-batch, by default the last one that is committed.

        Raises
        ------
        InvalidArgumentError
            This is not the checkpoint location of a query with state.
        NotFoundError
            The micro-batch is not committed, or was purged; says which is the oldest one that can be read.
        """
        raise NotImplementedError

    def operator(self, name: str, batch_id: int | None = None) -> StoredOperator:
        """Return one operator; raises as `operators`, and NotFoundError if there is none of this name."""
        raise NotImplementedError

    def get(
        self, operator: str, keys: Key | Sequence[Key], *, table: str | None = None, batch_id: int | None = None
    ) -> dict[str, pa.Table]:
        """Return the rows of some keys after a micro-batch.

        Parameters
        ----------
        keys : mapping, or sequence of mappings
            At most `KEYS_MAX`.
        table : str, optional
            One of the operator's tables, a variable of a processor, or "timers"; by default all that users see.
        batch_id : int, optional
            By default the last micro-batch that is committed.

        Returns
        -------
        dict of str to pyarrow.Table
            By table the key columns and the value columns, as of `holdfast.read_state`; no rows where a key holds none.

        Raises
        ------
        InvalidArgumentError
            A key lacks a column, has one too many, or a value of another type.
        NotFoundError
            There is no such operator, table or micro-batch.
        StateLostError, CorruptionError, UnavailableError
            An object is missing or damaged, or the storage does not answer.
        """
        raise NotImplementedError

    def history(
        self, operator: str, key: Key, *, table: str | None = None, batch_id: int | None = None
    ) -> Iterator[KeyVersion]:
        """Yield what a key held, newest first, as far as micro-batches are retained; raises as `get`.

        Parameters
        ----------
        batch_id : int, optional
            Begin with what it held after this micro-batch.
        """
        raise NotImplementedError

    def page(
        self,
        operator: str,
        table: str,
        shard: int,
        *,
        batch_id: int | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Return some rows of a shard, beginning where an earlier page ended; raises as `get`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release connections and temporary files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_query(
    location: str | Path, checkpoint_dir: str | Path, options: Mapping[str, object] | None = None
) -> StoredQuery:
    """Open the state of a query for reading, without Spark.

    Parameters
    ----------
    location : str or pathlib.Path
        The query's ``checkpointLocation``: a path, or a URL of any storage that holdfast knows.
    checkpoint_dir : str or pathlib.Path
        Its ``spark.holdfast.checkpoint.dir``.
    options : mapping, optional
        What the query sets as ``spark.holdfast.storage.<name>``; used for both.

    Raises
    ------
    InvalidArgumentError
        A URL or an option is wrong, or `location` is not the checkpoint location of a query.
    """
    raise NotImplementedError
