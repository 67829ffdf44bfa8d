"""The rows of staging tables, put into the target: over one connection of the driver, or over several at once.

::

    one      BEGIN; apply, remember and drop each; show the mark; COMMIT        the micro-batch is visible as a whole
    several  each: BEGIN; apply, remember and drop its share
             when all have done so: COMMIT, one after the other, the one with the mark last: visible in parts

Several only where the user asks for it, and where no row depends on another: a row that refers to one of another share,
or takes the value of a second unique index from it, would be refused each time. So nothing is checked at a COMMIT.
Each transaction holds what it locked until all have applied. So where two shares have a key in common, one waits for
another that waits for it to be done; it gives up after a second, all are rolled back, and one applies everything. Of a
key that is in a table twice, the row that was written last counts; of one in two tables, that of the higher partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from psycopg import errors, sql

from holdfast.errors import UnavailableError
from holdfast.spark_integration.sinks.postgres import names
from holdfast.spark_integration.sinks.postgres.connecting import Link
from holdfast.spark_integration.sinks.postgres.marks import Marks
from holdfast.spark_integration.sinks.postgres.target import Target
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery

_log = logging.getLogger(__name__)

#: What is no larger is applied as a whole in less time than a second connection saves.
_SMALL_BYTES = 4 << 20
# Who has done its share waits for the others, idle.
_TOGETHER = "SET LOCAL lock_timeout = '1s'; SET LOCAL idle_in_transaction_session_timeout = 0"
_ONE = "one connection applies"


class Staged(NamedTuple):
    """A staging table, with names and types of its columns, names of its checks, and its size."""

    schema: str
    table: str
    columns: list[tuple[str, str]]
    checks: set[str]
    size_bytes: int

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [name for name, _ in self.columns]

    @property
    def identifier(self) -> sql.Identifier:
        """The table's name in SQL."""
        return sql.Identifier(self.schema, self.table)


@dataclass(frozen=True)
class Helpers:
    """What applies beside the driver's own connection.

    Attributes
    ----------
    connections : int
        How many work at once, the driver's own among them.
    lend : callable
        Lends a further connection.
    threads : Executor
    """

    connections: int
    lend: Callable[[], AbstractContextManager[Link]]
    threads: Executor


class _HeldUpError(Exception):
    """Several connections cannot do it; the message says why."""


@dataclass(frozen=True)
class Applying:
    """See the module; each call is part of the transaction that is open on its link."""

    target: Target
    marks: Marks
    keys: tuple[str, ...]

    def commit(
        self, link: Link, query: SinkQuery, batch_id: int, staged: Sequence[Staged], helpers: Helpers | None
    ) -> None:
        """Apply, remember and drop staging tables; what helpers have done is committed before the link's own part."""
        may_share = helpers and _ONE not in link.known and not self.target.looks_across_rows(self.keys)
        shares = _shares(staged, helpers.connections if helpers and may_share else 1)
        if helpers and len(shares) > 1:
            try:
                self._commit_shares(link, query, batch_id, shares, helpers)
                return
            except _HeldUpError as exc:
                link.known[_ONE] = True
                _log.info("sink %s: %s: from now on micro-batches are applied over one connection", query.sink, exc)
        self._commit_share(link, query, batch_id, staged)

    def apply(self, link: Link, staged: Sequence[Staged]) -> None:
        """Put rows into the target."""
        for one in sorted(staged, key=lambda each: names.partition_of(each.table)):
            try:
                with link.connection.transaction():
                    link.run(self._insert(one.identifier, one.names, sql.SQL("")))
            except errors.CardinalityViolation:
                # Rare, and sorting costs as much as the rest: so only where a key is there twice.
                link.run(self._insert(one.identifier, one.names, sql.SQL("DISTINCT ON ({keys}) ")))

    def _commit_shares(
        self, link: Link, query: SinkQuery, batch_id: int, shares: Sequence[Sequence[Staged]], helpers: Helpers
    ) -> None:
        with ExitStack() as stack:
            links = [stack.enter_context(_lent(helpers)) for _ in shares[1:]]
            # A savepoint of the link's transaction: it is left last, and undone with the others.
            for each in (link, *links):
                stack.enter_context(each.connection.transaction())
            others = [
                helpers.threads.submit(self._commit_share_in_time, each, query, batch_id, share)
                for each, share in zip(links, shares[1:], strict=True)
            ]
            problems: list[BaseException] = []
            try:
                self._commit_share_in_time(link, query, batch_id, shares[0])
            except BaseException as exc:  # noqa: BLE001  raised below, when nobody uses the connections any more
                problems.append(exc)
            problems += [exc for exc in [other.exception() for other in others] if exc is not None]
            if problems:
                raise next((exc for exc in problems if not isinstance(exc, _HeldUpError)), problems[0])

    def _commit_share_in_time(self, link: Link, query: SinkQuery, batch_id: int, share: Sequence[Staged]) -> None:
        try:
            link.run(_TOGETHER)
            self._commit_share(link, query, batch_id, share)
        except (errors.LockNotAvailable, errors.DeadlockDetected):
            problem = _HeldUpError("two partitions have a key in common, or somebody else has locked one")
        else:
            return
        raise problem

    def _commit_share(self, link: Link, query: SinkQuery, batch_id: int, share: Sequence[Staged]) -> None:
        self.apply(link, share)
        # From here on nobody can drop the table.
        self.marks.require_same(link, query, self.target)
        for one in share:
            link.run(self.marks.remember(query, batch_id, names.attempt_of_table(one.table)))
        drop(link, share)

    def _insert(self, source: sql.Identifier, columns: Sequence[str], distinct: sql.SQL) -> sql.Composed:
        named = sql.SQL(", ").join(map(sql.Identifier, columns))
        keys = sql.SQL(", ").join(map(sql.Identifier, self.keys))
        once = distinct.format(keys=keys)
        # The last row that was written is the last in the file: nothing was ever deleted from it.
        order = sql.SQL(" ORDER BY {}, ctid DESC").format(keys) if once.as_string() else sql.SQL("")
        parts = [self.target.identifier, named, once, named, source, order]
        insert = sql.SQL("INSERT INTO {} ({}) SELECT {}{} FROM {}{}").format(*parts)
        return sql.Composed([insert, self._on_conflict(columns, keys)]) if self.keys else insert

    def _on_conflict(self, columns: Sequence[str], keys: sql.Composed) -> sql.Composed:
        values = [name for name in columns if name not in self.keys]
        if not values:
            return sql.SQL(" ON CONFLICT ({}) DO NOTHING").format(keys)
        sets = sql.SQL(", ").join(
            sql.SQL("{} = EXCLUDED.{}").format(sql.Identifier(name), sql.Identifier(name)) for name in values
        )
        return sql.SQL(" ON CONFLICT ({}) DO UPDATE SET {}").format(keys, sets)


@contextmanager
def _lent(helpers: Helpers) -> Iterator[Link]:
    with ExitStack() as stack:
        try:
            link = stack.enter_context(helpers.lend())
        except UnavailableError as exc:
            # The server, or the user's role, may have no room for more. If it is away, the link will say so.
            raise _HeldUpError(f"no further connection is available ({exc})") from exc
        yield link


def drop(link: Link, tables: Sequence[Staged]) -> None:
    """Drop staging tables."""
    if tables:
        listed = sql.SQL(", ").join(one.identifier for one in tables)
        link.run(sql.SQL("DROP TABLE IF EXISTS {}").format(listed))


def _shares(staged: Sequence[Staged], connections: int) -> list[list[Staged]]:
    """Divide staging tables into as many parts of about the same size; one if all are small."""
    if sum(one.size_bytes for one in staged) <= _SMALL_BYTES:
        return [list(staged)]
    shares: list[list[Staged]] = [[] for _ in range(min(connections, len(staged)))]
    for one in sorted(staged, key=lambda each: each.size_bytes, reverse=True):
        min(shares, key=lambda share: sum(each.size_bytes for each in share)).append(one)
    return shares
