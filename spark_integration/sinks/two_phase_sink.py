"""The seam of a sink whose results become visible once, and only after a durable decision.

::

    worker, per task          driver, per micro-batch                       target

    begin ─▶ write … ─▶ prepare ──handle──▶ confirm                         prepared: invisible, survives a crash
                                            decided-<batch> is stored       ◀── from here on it will be visible
                                            commit(handles)                 visible
    a repeated micro-batch that was decided: commit(the stored handles)     as it was
    what was prepared and never decided:     abort(handles)                 nothing

A sink's author writes a `TwoPhaseSink` and a `SinkTransaction`; decisions, repeats and leftovers are the coordinator's
(`holdfast.spark_integration.sinks.coordinator`). `holdfast.testing.SinkContract` tests an implementation. What it must
keep, by name:

invisible   no reader of the target sees what a transaction wrote before `TwoPhaseSink.commit`
prepared    when `prepare` returns, the transaction survives the death of its worker, of the driver and of the target's
            server; only `commit` or `abort` ends it
idempotent  `commit` of what is committed, and `abort` of what is gone, succeed and change nothing
final       `commit` after `abort`, or of a handle that the target has lost, raises
apart       two attempts at the same partition of the same micro-batch do not see, block or end each other for good
found       `leftovers` names everything that dead attempts of a query prepared, even if the handle never reached the
            driver
silent      no handle, error, repr or pickle holds a credential
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
#: By what `SinkTransaction.prepare` returns, any process finds the prepared transaction again: plain JSON.
Handle: TypeAlias = Mapping[str, JSON]


@dataclass(frozen=True)
class SinkQuery:
    """Which query writes to a sink.

    Attributes
    ----------
    sink : str
        The sink's name.
    query_id : str
        Spark's id of the query: the same after every restart of it.
    replaces : str or None
        The id of an ended query whose results in the target this one continues, with the user's consent.
    options : mapping of str to str
        What is set below ``spark.holdfast.sink.<name>.``: credentials are here, and nowhere else.
    was_shown : int or None
        For `TwoPhaseSink.open` alone: the newest micro-batch of this query that was visible before its last decision,
        -1 if there was none; None if it has decided nothing. Unless it is None, a target that does not know the query
        is a different one, or was emptied.
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
        From 0; each partition with rows is one transaction.
    attempt_id : str
        Unique among all attempts, of all runs: 32 hexadecimal digits.
    """

    query: SinkQuery
    batch_id: int
    partition: int
    attempt_id: str


class SinkTransaction(ABC):
    """What one attempt writes, in one thread of one worker; never pickled."""

    @abstractmethod
    def write(self, rows: pa.RecordBatch) -> None:
        """Write rows, in the schema that `TwoPhaseSink.begin` was given; called once or more.

        Raises
        ------
        HoldfastError
            The target refuses them. The attempt is aborted, and Spark may repeat the task.
        """

    @abstractmethod
    def prepare(self) -> Handle:
        """Make the writes durable but invisible, and release the transaction.

        Returns
        -------
        Handle
            Plain JSON without credentials, by which any process finds the transaction; a few KB at most, because a
            decision holds those of all partitions.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drop the writes, after an error; a lost target is not an error here."""


class TwoPhaseSink(ABC):
    """A target of results: see the module for the contract.

    An instance is configuration only: it is pickled with the query's plan, so it holds no credentials and no
    connections. The driver's calls come one after the other, from one query at a time::

        newest = sink.open(query, schema)  # the driver, at each start
        transaction = sink.begin(SinkAttempt(query, 17, 0, attempt_id), schema)  # a worker
        transaction.write(rows)
        handle = transaction.prepare()
        sink.confirm(query, 17, [handle])  # the driver; then it stores the decision
        sink.commit(query, 17, [handle])

    Attributes
    ----------
    name : str
        Identifies the sink's decisions in the state directory, and its marks in the target: letters, digits, ``_``
        and ``-``. One query writes under one name.
    credentials : sequence of str
        Names of options that hold credentials, by which Spark Connect must be asked for them.
    """

    name: str
    credentials: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        """Check the target before a run writes anything; may create what is missing.

        Parameters
        ----------
        query : SinkQuery
        schema : pyarrow.Schema
            Of the rows that will come.

        Returns
        -------
        int or None
            The newest micro-batch of this query that the target shows; -1 if it shows none, as for a query that has
            just replaced another. None if the target keeps no such mark.

        Raises
        ------
        ConflictError
            Another query, which this one does not replace, has written under this name.
        StateLostError
            The query has decided micro-batches (`SinkQuery.was_shown`), and the target knows nothing of it.
        SchemaMismatchError
            A column is missing or has another type.
        InvalidArgumentError
            The target does not exist or cannot be written; the message says what to do.
        UnavailableError
            The target did not answer.
        """

    @abstractmethod
    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        """Begin a transaction, in a worker that has a partition's first rows."""

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:  # noqa: B027  optional
        """Check, just before the decision, that everything is still prepared.

        Raises
        ------
        UnavailableError
            Something is gone: the micro-batch fails, and its repeat writes it again.
        """

    @abstractmethod
    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        """Make a decided micro-batch visible: all its partitions, one after the other or at once.

        Called again with the same handles after a crash, by any process, without `open`. There is at least one handle.

        Raises
        ------
        UnavailableError
            The target did not answer: the decision stands, and the next start commits.
        StateLostError
            The target has lost what was prepared.
        """

    @abstractmethod
    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        """Abort what was prepared but not decided; a missing handle is not an error."""

    @abstractmethod
    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        """Return the handles of all prepared work of the query that has not ended, decided work perhaps included.

        Called when a run begins, and after repeated tasks: no task that counts is at work.
        """


class ReusingSink(TwoPhaseSink):
    """A sink whose target keeps names for long, as Kafka keeps transactional ids, so that attempts reuse them."""

    @abstractmethod
    def begin_reusing(self, attempt: SinkAttempt, schema: pa.Schema, spare: Handle) -> SinkTransaction:
        """Begin a transaction as `begin` does, if possible under the name of a committed one.

        Parameters
        ----------
        attempt : SinkAttempt
        schema : pyarrow.Schema
        spare : Handle
            Of a transaction that will not be committed again; no other attempt is given it.
        """


def begin(sink: TwoPhaseSink, attempt: SinkAttempt, schema: pa.Schema, spare: Handle | None = None) -> SinkTransaction:
    """Begin a transaction; a sink that reuses names takes the spare one."""
    if spare is not None and isinstance(sink, ReusingSink):
        return sink.begin_reusing(attempt, schema, spare)
    return sink.begin(attempt, schema)


def another_query(query: SinkQuery, other: str | None, **facts: object) -> ConflictError:
    """Return the error for a sink's name that belongs to another query."""
    return ConflictError(
        "another query writes to this sink, or did: give the sink another name or, if this query continues the other "
        "one's results and the other one has ended for good, name it: replaces=<its id>",
        sink=query.sink,
        query=query.query_id,
        other_query=other,
        **facts,
    )


def column_names(what: str, given: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that a user has named. Raises `InvalidArgumentError` for a string."""
    if isinstance(given, str):
        raise InvalidArgumentError(f"{what} must be a list of column names", given=given)
    return tuple(given)


def warn_of_another_driver(query: SinkQuery, batch_id: int) -> None:
    """Warn that another driver, with its own log, has shown a micro-batch: the state directory was copied."""
    _log.warning(
        "sink %s shows micro-batch %d already: another driver of query %s, with another state directory, was faster, "
        "and what this one prepared is dropped. Stop one of them: a copy of a query needs its own sink",
        query.sink,
        batch_id,
        query.query_id,
    )
