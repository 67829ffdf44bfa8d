"""The interface of a sink whose results become visible exactly once, and only after a durable decision.

::

    worker, per task          driver, per micro-batch                       target

    begin ─▶ write … ─▶ prepare ──handle──▶ confirm                         prepared: invisible, survives a crash
                                            the decision is stored          ◀── bound to become visible
                                            commit(handles)                 visible
    a decided micro-batch, repeated:     commit(the stored handles)         unchanged
    prepared work that was not decided:  abort(handles)                     nothing

A sink's author implements `TwoPhaseSink` and `SinkTransaction`; the coordinator
(`holdfast.spark_integration.sinks.coordinator`) handles decisions, repeats and leftovers.
`holdfast.testing.SinkContract` tests an implementation. Its guarantees, by name:

invisible   before `TwoPhaseSink.commit`, no reader of the target sees a transaction's writes
prepared    when `prepare` returns, the transaction survives the death of its worker, of the driver and of the target's
            server; only `commit` or `abort` ends it
idempotent  committing a committed handle, or aborting a missing one, succeeds and changes nothing
final       `commit` raises for an aborted handle, and for a handle that the target has lost
apart       two attempts at one partition of a micro-batch never see, permanently block or permanently end each other
found       `leftovers` lists all work that a query's dead attempts prepared, even if a handle never reached the
            driver
silent      no handle, error, repr or pickle contains a credential
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import pyarrow as pa

from holdfast.errors import ConflictError, InvalidArgumentError

_log = logging.getLogger(__name__)

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"
#: Returned by `SinkTransaction.prepare`: plain JSON that lets any process find the prepared transaction.
Handle: TypeAlias = Mapping[str, JSON]


@dataclass(frozen=True)
class SinkQuery:
    """The query that writes to a sink.

    Attributes
    ----------
    sink : str
        The sink's name.
    query_id : str
        Spark's id of the query, stable across restarts.
    replaces : str or None
        The id of an ended query whose results in the target this query continues, with the user's consent.
    options : mapping of str to str
        The settings below ``spark.holdfast.sink.<name>.``: the only place for credentials.
    was_shown : int or None
        Only for `TwoPhaseSink.open`: the query's newest micro-batch that was visible before its last decision, -1 if
        none was, None if the query has decided nothing. If it is set, a target without a mark of the query is the
        wrong target, or was emptied.
    """

    sink: str
    query_id: str
    replaces: str | None = None
    options: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    was_shown: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SinkAttempt:
    """One attempt at one partition of one micro-batch.

    Attributes
    ----------
    query : SinkQuery
    batch_id : int
    partition : int
        Counted from 0; each partition with rows is one transaction.
    attempt_id : str
        32 hexadecimal digits, unique across the attempts of all runs.
    """

    query: SinkQuery
    batch_id: int
    partition: int
    attempt_id: str


class SinkTransaction(ABC):
    """The writes of one attempt; used by one thread of one worker, and never pickled."""

    @abstractmethod
    def write(self, rows: pa.RecordBatch) -> None:
        """Write rows in the schema passed to `TwoPhaseSink.begin`; called at least once.

        Raises
        ------
        HoldfastError
            The target rejected the rows. The attempt is aborted, and Spark may retry the task.
        """

    @abstractmethod
    def prepare(self) -> Handle:
        """Make the writes durable but invisible, and release the transaction.

        Returns
        -------
        Handle
            Plain JSON without credentials that lets any process find the transaction; a few KB at most, because a
            decision contains the handles of all partitions.
        """

    @abstractmethod
    def abort(self) -> None:
        """Discard the writes after an error; ignore an unreachable target."""


class TwoPhaseSink(ABC):
    """A target for results; see the module for its contract.

    An instance holds only configuration, no credentials or connections: it is pickled with the query's plan. The
    driver calls it for one query at a time, and never concurrently::

        newest = sink.open(query, schema)  # the driver, at each start
        transaction = sink.begin(SinkAttempt(query, 17, 0, attempt_id), schema)  # a worker
        transaction.write(rows)
        handle = transaction.prepare()
        sink.confirm(query, 17, [handle])  # the driver, which stores the decision afterwards
        sink.commit(query, 17, [handle])

    Attributes
    ----------
    name : str
        Identifies the sink's decisions in the state directory and its marks in the target: letters, digits, ``_``
        and ``-``. Only one query may write under a name.
    credentials : sequence of str
        Names of the options that hold credentials: Spark Connect returns them only when queried by name.
    """

    name: str
    credentials: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        """Check the target before a run writes to it; may create a missing target.

        Parameters
        ----------
        query : SinkQuery
        schema : pyarrow.Schema
            The schema of the rows to be written.

        Returns
        -------
        int or None
            The query's newest micro-batch that is visible in the target; -1 if none is, as for a query that has
            just replaced an ended query. None if the target does not record it.

        Raises
        ------
        ConflictError
            A query that this one does not replace has written under this name.
        StateLostError
            The query has decided micro-batches (`SinkQuery.was_shown`), but the target has no mark of the query.
        SchemaMismatchError
            A column is missing or has a different type.
        InvalidArgumentError
            The target does not exist or is not writable; the message says what to do.
        UnavailableError
            The target did not answer.
        """

    @abstractmethod
    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        """Begin a transaction; called by a worker on receiving a partition's first rows."""

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:  # noqa: B027  optional
        """Check, just before the decision, that all handles are still prepared.

        Raises
        ------
        UnavailableError
            Prepared work is gone: the micro-batch fails, and its repeat writes the rows again.
        """

    @abstractmethod
    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        """Make all partitions of a decided micro-batch visible, one by one or atomically.

        After a crash, any process may call it again with the same handles, without `open`. `handles` is never empty.

        Raises
        ------
        UnavailableError
            The target did not answer. The decision stands, and the next start commits it.
        StateLostError
            The target has lost the prepared work.
        """

    @abstractmethod
    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        """Abort prepared but undecided work; ignore missing handles."""

    @abstractmethod
    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        """Return the handles of the query's prepared work that has not ended; may include decided work.

        Called when a run begins and after tasks were repeated, while only abandoned tasks may still run.
        """


class ReusingSink(TwoPhaseSink):
    """A sink that reuses its attempts' names, because its target retains each for days, as Kafka does its ids."""

    @abstractmethod
    def begin_reusing(self, attempt: SinkAttempt, schema: pa.Schema, spare: Handle) -> SinkTransaction:
        """Begin a transaction as `begin` does, if possible under the name of a committed transaction.

        Parameters
        ----------
        attempt : SinkAttempt
        schema : pyarrow.Schema
        spare : Handle
            The handle of a transaction that will not be committed again; no other attempt receives it.
        """


def begin(sink: TwoPhaseSink, attempt: SinkAttempt, schema: pa.Schema, spare: Handle | None = None) -> SinkTransaction:
    """Begin a transaction; a `ReusingSink` reuses the spare handle."""
    if spare is not None and isinstance(sink, ReusingSink):
        return sink.begin_reusing(attempt, schema, spare)
    return sink.begin(attempt, schema)


def another_query(query: SinkQuery, other: str | None, **facts: object) -> ConflictError:
    """Return the error for a sink's name that belongs to another query."""
    return ConflictError(
        "another query writes to this sink, or wrote to it before: give the sink another name or, if the other query "
        "has ended for good and this one continues its results, pass replaces=<its id>",
        sink=query.sink,
        query=query.query_id,
        other_query=other,
        **facts,
    )


def column_names(what: str, given: Sequence[str]) -> tuple[str, ...]:
    """Return the column names as a tuple. Raises `InvalidArgumentError` for a string."""
    if isinstance(given, str):
        raise InvalidArgumentError(f"{what} must be a list of column names", given=given)
    return tuple(given)


def warn_of_another_driver(query: SinkQuery, batch_id: int) -> None:
    """Warn that a driver with a different state directory has already committed a micro-batch."""
    _log.warning(
        "sink %s already shows micro-batch %d: another driver of query %s, with a different state directory, committed "
        "it first, and this driver's rows are dropped. Stop one of them: a copy of a query needs its own sink",
        query.sink,
        batch_id,
        query.query_id,
    )
