"""The pointers of a query's shards after a micro-batch: all, or the requested ones.

A shard's pointer is in one partition of Spark's state (`holdfast.spark_integration.transport.routes`), so the pointer
of one shard of many costs one partition.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.spark_state.operators import NotKnownError, StateOperator, StateOperators
from holdfast.spark_integration.spark_state.pointers import StateStores, read_pointers
from holdfast.spark_integration.spark_state.query_location import LoggedBatch, QueryLocation

_KEPT_BATCHES = 128


@dataclass(frozen=True)
class Held:
    """One of Spark's operators, and the pointers that were read of it.

    Attributes
    ----------
    operator : StateOperator
    rows : tuple of PointerRow
    """

    operator: StateOperator
    rows: tuple[PointerRow, ...]


class QueryPointers:
    """See the module. Safe for many threads.

    Parameters
    ----------
    location : ObjectStorage
        Its root is the query's checkpoint location.
    executor : concurrent.futures.Executor
        Must not run the caller.
    """

    def __init__(self, location: ObjectStorage, executor: Executor) -> None:
        self._storage, self._executor = location, executor
        self.log = QueryLocation(location)
        self._operators = StateOperators(location)
        self._lock = threading.Lock()
        self._batches: OrderedDict[int, tuple[LoggedBatch, StateStores, list[StateOperator]]] = OrderedDict()

    @cached_property
    def query_id(self) -> str:
        """The query's id; raises InvalidArgumentError if the location is not a query's."""
        return self.log.query_id()

    @property
    def url(self) -> str:
        """Of the checkpoint location."""
        return self._storage.url

    def batch(self, batch_id: int | None) -> LoggedBatch:
        """Return Spark's log of a micro-batch, by default the last committed one.

        Raises
        ------
        NotFoundError
            It is not committed, or was purged.
        """
        number = batch_id
        if number is None:
            committed = self.log.committed()
            if not committed:
                raise NotFoundError("the query has not committed a micro-batch yet", location=self._storage.url)
            number = committed[-1]
        return self._of(number)[0]

    def held(self, batch_id: int, partitions: Collection[int] | None = None) -> list[Held]:
        """Return the operators that hold pointers of holdfast's, after a micro-batch.

        Parameters
        ----------
        partitions : collection of int, optional
            Read the pointers in these partitions only, as far as an operator has such.

        Raises
        ------
        NotFoundError
            The micro-batch is not committed, or was purged.
        InvalidArgumentError
            Spark's state has a form that cannot be read without Spark.
        CorruptionError
            It is damaged.
        """
        _, stores, operators = self._of(batch_id)
        found = []
        for operator in operators:
            wanted = None if partitions is None else [n for n in partitions if n < operator.partitions]
            with _reading(self._storage.url):
                rows = read_pointers(self._storage, stores, operator, self._operators, self._executor, wanted)
            if rows is not None:
                found.append(Held(operator, tuple(rows)))
        return found

    def of_shards(self, batch_id: int, shards: Iterable[int]) -> list[Held]:
        """Return the same with the pointers of these shards at least; raises as `held`."""
        wanted = set(shards)
        _, _, operators = self._of(batch_id)
        numbers = {operator.partitions for operator in operators if operator.partitions}
        return self.held(batch_id, sorted({shard % number for shard in wanted for number in numbers}))

    def _of(self, batch_id: int) -> tuple[LoggedBatch, StateStores, list[StateOperator]]:
        with self._lock:
            if batch_id in self._batches:
                return self._batches[batch_id]
        try:
            batch = self.log.logged(batch_id)
        except NotFoundError:
            batch = self.log.batch(batch_id)  # whose error says which there are
        with _reading(self._storage.url):
            found = batch, StateStores.of(batch), self._operators.at(batch_id)
        with self._lock:
            self._batches[batch_id] = found
            while len(self._batches) > _KEPT_BATCHES:
                self._batches.popitem(last=False)
        return found


@contextmanager
def _reading(location: str) -> Iterator[None]:
    """Map an unknown form of state to an error that says that Spark can read it."""
    try:
        yield
    except NotKnownError as exc:
        raise InvalidArgumentError(
            f"only Spark can read this state; use holdfast.read_state: {exc}",
            location=location,
        ) from exc
