"""A table of a query's state after one micro-batch, or its changes since another one.

The driver reads the pointers that `holdfast.state` has stored, executors restore each shard at its pointer, as a
micro-batch would: from durable storage, without what the query keeps locally.

A change feed is read from the commits, newest first, along their lineage::

    pointer 25 ─▶ carried: 24, 25 ─▶ commits/23 ─▶ commits/21 ─▶ …      each says what its micro-batches wrote

A commit that several micro-batches share is the net of their writes, and counts as the last one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from holdfast.backends.column_names import Names
from holdfast.backends.evolution import evolved
from holdfast.backends.run import TableSchema, under_names
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.commit_objects import Commit, CommitObjects
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.stored_reads import ReadShard, StoredRead, fetch_read
from holdfast.snapshotter.version_rows import read_tables
from holdfast.spark_integration.executor.takeover import own_directory
from holdfast.spark_integration.processor.state.variable_tables import find_shown, grouping_columns
from holdfast.spark_integration.savepoints.restoring_shards import HashRange
from holdfast.spark_integration.shard.task_storage import io_executor, local_dir_of_session
from holdfast.spark_integration.state_source.options import Place, ReadOptions
from holdfast.spark_integration.state_source.table import (
    Part,
    ReadableTable,
    Rows,
)


@dataclass(frozen=True)
class ShardPart(Part):
    """A shard at its pointer."""

    at: ReadShard = field(repr=False)


@dataclass(frozen=True)
class QueryTable(ReadableTable):
    """A table of a query's operator.

    Attributes
    ----------
    place : Place
        Of the state directory.
    held : mapping of str to mapping
        By directory all tables that the state may hold, with all their columns.
    names : mapping of str to mapping of str to str
        By directory under which names the table's columns are stored.
    changes_from : int or None
        Read what has changed since this micro-batch began; None: read the state.
    shards : tuple of ShardPart
    """

    place: Place
    held: Mapping[str, Mapping[str, TableSchema]] = field(repr=False)
    names: Mapping[str, Names] = field(repr=False)
    schema: TableSchema
    grouping: tuple[str, ...]
    changes_from: int | None
    shards: tuple[ShardPart, ...] = field(repr=False)

    @classmethod
    def find(cls, options: ReadOptions) -> QueryTable:
        """Return the table that options name.

        Raises
        ------
        InvalidArgumentError, NotFoundError
            There is no such read, or no such table.
        CorruptionError
            The stored read is damaged.
        """
        if options.operator is None or options.read is None:
            raise InvalidArgumentError("the option read needs the option operator: holdfast.state gives both")
        place = Place(options.path, options.storage)
        with place.open() as storage:
            read = fetch_read(storage, options.operator, options.read)
        if options.shards is not None:
            options.shards.require_below(max(one.shards for one in read.directories.values()))
        stored = {name: one.tables for name, one in read.directories.items()}
        every = {name: schema for tables in stored.values() for name, schema in tables.held.items()}
        table = find_shown(every, options.table)
        latest = [tables.latest[table] for tables in stored.values() if table in tables.latest]
        return cls(
            place,
            {name: tables.held for name, tables in stored.items()},
            {name: tables.names[table] for name, tables in stored.items() if table in tables.names},
            reduce(evolved, latest),
            grouping_columns(every, table),
            options.changes_from,
            tuple(_part(read, one) for one in read.shards if table in stored[one.directory].held),
        )

    def parts(self) -> list[Part]:
        """Return a part for each shard that may have rows."""
        if self.changes_from is None:
            return list(self.shards)
        return [part for part in self.shards if part.at.pointer.version > self.changes_from]

    def rows(self, part: Part) -> Iterator[Rows]:
        """Yield the rows of a shard: live ones, or those of each commit."""
        assert isinstance(part, ShardPart)
        with self.place.in_task().open() as storage:
            yield from (
                self._changes(storage, part.at) if self.changes_from is not None else self._live(storage, part.at)
            )

    def _live(self, storage: ObjectStorage, at: ReadShard) -> Iterator[Rows]:
        with own_directory(local_dir_of_session()) as home:
            prefix, held = shard_prefix(at.directory, at.shard), self.held[at.directory]
            log = ObjectCommitLog(storage, prefix, held, io_executor(), home, carried=at.carried_commits)
            rows = read_tables(log, at.pointer, [self.schema.name])
        for run in rows.values():
            yield Rows(under_names(run, self.schema, self.names[at.directory]))

    def _changes(self, storage: ObjectStorage, at: ReadShard) -> Iterator[Rows]:
        assert self.changes_from is not None
        held = self.held[at.directory][self.schema.name]
        for commit in commits_after(storage, at, held, self.changes_from):
            run = commit.run_of(held)
            if run is not None:
                # Micro-batch b commits version b + 1.
                yield Rows(under_names(run, self.schema, self.names[at.directory]), commit.pointer.version - 1)

    def travelling(self) -> QueryTable:
        """Return the table without shards and credentials."""
        return replace(self, place=self.place.without_credentials(), shards=())


def _part(read: StoredRead, at: ReadShard) -> ShardPart:
    hashes = HashRange.of_shard(at.shard, read.directories[at.directory].shards)
    return ShardPart(at.shard, hashes, None, at)


def commits_after(storage: ObjectStorage, at: ReadShard, table: TableSchema, version: int) -> Iterator[Commit]:
    """Yield the commits of a shard that hold writes of later versions than one, newest first.

    Parameters
    ----------
    at : ReadShard
        Where to begin.
    table : TableSchema
        Whose rows are wanted.

    Raises
    ------
    NotFoundError
        The query has cleaned up commits that are needed; says with which micro-batch a feed may begin.
    StateLostError, CorruptionError, UnavailableError
        A commit is missing or damaged, or the storage does not answer.
    """
    objects = CommitObjects(PrefixedStorage(storage, shard_prefix(at.directory, at.shard)), {table.name: table})
    carried = at.carried
    commit = objects.fetch_newest(at.pointer) if carried is None else objects.decode_carried(carried, at.pointer)
    while commit.pointer.version > version:
        yield commit
        last = commit.lineage.last
        if last is None or last.version <= version:
            return
        try:
            commit = objects.fetch(last)
        except CorruptionError as exc:
            if isinstance(exc.__cause__, NotFoundError):
                raise cleaned_up(at, last.version) from exc
            raise


def cleaned_up(at: ReadShard, first: int) -> NotFoundError:
    """Return the error for a feed that begins before a shard's oldest retained commit.

    Parameters
    ----------
    first : int
        The first micro-batch with which it may begin.
    """
    return NotFoundError(
        "the change feed begins before the oldest commit that is kept, because the query deletes what it no longer "
        f"needs: begin with micro-batch {first} or a later one",
        operator=at.directory,
        shard=at.shard,
        first=first,
    )
