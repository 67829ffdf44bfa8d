"""What the page shows: checkpoint directories, each with its latest survey, and the queries whose state lies there.

Whoever starts the page names directories of both kinds, in any order: those of ``spark.holdfast.checkpoint.dir``, and
Spark's own checkpoint locations of queries. Which is which stands in them, and may not be known yet::

    empty  ──metadata──▶  a query's location  ──its first commit──▶  belongs to a directory
      └────operator────▶  a checkpoint directory

A query belongs to the directory in which its pointers name operators. So each request looks again at what is awaited,
and what is found stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.ownership.operator_record import find_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.client.recent import recent_batches
from holdfast.spark_integration.lookup.stored_query import StoredQuery, open_query
from holdfast.spark_integration.shard.operator_directory import operator_of
from holdfast.ui.survey import Survey, Surveyor, survey
from holdfast.ui.views.growth import GrowthReader
from holdfast.ui.views.live import Live
from holdfast.ui.views.row_counts import RowCounter


@dataclass(frozen=True)
class NamedQuery:
    """A query whose checkpoint location was named.

    Attributes
    ----------
    location : str
    stored : StoredQuery
    """

    location: str
    stored: StoredQuery


@dataclass(frozen=True)
class Directory:
    """A location that was named: a checkpoint directory, as far as is known.

    Attributes
    ----------
    place : int
        In the order in which they were given; part of URLs.
    location : str
        As it was given.
    storage : ObjectStorage
    executor : concurrent.futures.Executor
        For requests side by side.
    surveyor : Surveyor
    growth : GrowthReader
    rows : RowCounter
    queries : tuple of NamedQuery
        Those whose state lies here, as far as they were named.
    """

    place: int
    location: str
    storage: ObjectStorage
    executor: Executor
    surveyor: Surveyor
    growth: GrowthReader
    rows: RowCounter
    queries: tuple[NamedQuery, ...] = ()

    @classmethod
    def of(cls, place: int, storage: ObjectStorage, executor: Executor, surveys: Executor) -> Directory:
        """Return a directory; `surveys` must not be `executor`, for which a survey may wait."""
        surveyor = Surveyor(partial(survey, storage), surveys)
        return cls(place, storage.url, storage, executor, surveyor, GrowthReader(storage, executor), RowCounter())

    def query_of(self, directory: str) -> tuple[StoredQuery, str] | None:
        """Return the query whose pointers name an operator's directory, and what it calls the operator; or None."""
        for query in self.queries:
            if directory in query.stored.directories():
                return query.stored, operator_of(directory) or directory
        return None


_EMPTY = (
    "Empty, or it does not exist: check how it is written. A checkpoint directory fills when a query commits with "
    "spark.holdfast.checkpoint.dir set to it, and a checkpointLocation when its query starts."
)


@dataclass(frozen=True)
class Awaited:
    """A location that shows nothing yet.

    Attributes
    ----------
    location : str
    what : str
        What is awaited, or what is wrong, in a sentence.
    is_wrong : bool
        Whether waiting does not help.
    """

    location: str
    what: str
    is_wrong: bool = False


class Site:
    """All that the page shows; what was named is looked at again until it is known what it is.

    Parameters
    ----------
    named : iterable of Directory
        All locations.
    live : Live
    join : callable, optional
        Opens the query of a location with the state in a directory; needed where a location is a query's.

    Attributes
    ----------
    live : Live

    Notes
    -----
    Threads: any.
    """

    def __init__(
        self, named: Iterable[Directory], live: Live, join: Callable[[Directory, Directory], StoredQuery] | None = None
    ) -> None:
        self.live = live
        self._named, self._join = tuple(named), join
        self._is_query: dict[int, bool] = {}
        self._joined: dict[tuple[int, int], NamedQuery] = {}
        self._belongs: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def directories(self) -> list[Directory]:
        """Return the checkpoint directories, and what is empty or cannot be listed, each with its queries."""
        queries, homes = self._sorted()
        for query in queries:
            self._assign(query, homes)
        return [replace(home, queries=tuple(self._queries_of(home, queries))) for home in homes]

    def directory(self, place: int) -> Directory:
        """Return a directory.

        Raises
        ------
        NotFoundError
            There is none of this number.
        """
        found = self.directories()
        for one in found:
            if one.place == place:
                return one
        raise NotFoundError("the page shows no such directory", directory=place, directories=len(found))

    def awaited(self) -> list[Awaited]:
        """Return the locations that show nothing yet: empty ones, and queries that belong to no directory."""
        queries, homes = self._sorted()
        empty = [Awaited(home.location, _EMPTY) for home in homes if (found := _survey(home)) and found.is_empty]
        lost = [query for query in queries if not self._assign(query, homes)]
        return [*empty, *(_why(query.location, self._with(query, homes[0]).stored) for query in lost if homes)]

    def _sorted(self) -> tuple[list[Directory], list[Directory]]:
        """Return the locations of queries, and all others."""
        for one in self._named:
            if one.place not in self._is_query and (found := _survey(one)) and not found.is_empty:
                self._is_query[one.place] = found.is_query
        is_query = [self._is_query.get(one.place, False) for one in self._named]
        return [one for one, yes in zip(self._named, is_query, strict=True) if yes], [
            one for one, yes in zip(self._named, is_query, strict=True) if not yes
        ]

    def _assign(self, query: Directory, homes: Iterable[Directory]) -> list[int]:
        """Return the places of the directories that have the state of a query, as far as is known."""
        if query.place not in self._belongs:
            found = [home.place for home in homes if _lies_in(self._with(query, home).stored, home)]
            if not found:
                return []
            self._belongs[query.place] = found
        return self._belongs[query.place]

    def _queries_of(self, home: Directory, queries: Iterable[Directory]) -> Iterator[NamedQuery]:
        return (self._with(query, home) for query in queries if home.place in self._belongs.get(query.place, ()))

    def _with(self, query: Directory, home: Directory) -> NamedQuery:
        at = query.place, home.place
        with self._lock:
            if at not in self._joined:
                assert self._join is not None
                self._joined[at] = NamedQuery(query.location, self._join(query, home))
            return self._joined[at]


def open_site(
    urls: Iterable[str],
    options: Mapping[str, str],
    requests: Executor,
    surveys: Executor,
    stack: ExitStack,
    *,
    checkpoint_dir: str | None = None,
    local_dir: str | None = None,
) -> Site:
    """Open what was named, and look at each location once.

    Parameters
    ----------
    urls : iterable of str
        Checkpoint directories, and checkpoint locations of queries whose state lies there. Either may be empty yet.
    options : mapping
        Of the storage of all of them, as a query sets them below ``spark.holdfast.storage``.
    requests, surveys : concurrent.futures.Executor
        For requests side by side, and for listings, which may wait for such requests.
    stack : contextlib.ExitStack
        Closes what was opened.
    checkpoint_dir : str, optional
        Of the queries, where only queries are named.
    local_dir : str, optional
        Where queries on this machine have their local state, if that is set.

    Raises
    ------
    HoldfastError
        What is wrong with one of them, where waiting does not help.
    """

    def opened(place: int, url: str) -> Directory:
        storage = stack.enter_context(open_storage(url, parse_storage_options(options)))
        return replace(Directory.of(place, storage, requests, surveys), location=url)

    named = [opened(place, url) for place, url in enumerate(dict.fromkeys(urls))]
    are_queries = [one.surveyor.latest().survey.is_query for one in named]
    if all(are_queries):
        if not checkpoint_dir:
            raise InvalidArgumentError(
                "these are checkpoint locations of queries, which hold pointers only: name their checkpoint directory, "
                "too (spark.holdfast.checkpoint.dir)",
                given=", ".join(one.location for one in named),
            )
        named.append(opened(len(named), checkpoint_dir))
        named[-1].surveyor.latest()

    def join(query: Directory, home: Directory) -> StoredQuery:
        return stack.enter_context(open_query(query.location, home.location, options))

    site = Site(named, Live(partial(recent_batches, local_dir)), join)
    for one in site.awaited():
        if one.is_wrong:
            raise NotFoundError(one.what, query_checkpoint=one.location)
    return site


def _survey(one: Directory) -> Survey | None:
    """Return what a location holds; None where that cannot be told, as its own page says."""
    try:
        return one.surveyor.latest().survey
    except HoldfastError:
        return None


def _lies_in(query: StoredQuery, home: Directory) -> bool:
    """Tell whether a directory has an operator that a query's pointers name, whole or in part."""
    try:
        named = query.directories()
    except HoldfastError:  # as `_why` says
        return False
    # Not what was listed: that may be older than the first commit.
    return any(_is_there(home.storage, directory, query_id) for directory, query_id in named.items()) or any(
        directory in found.without_record for directory in named if (found := _survey(home))
    )


def _is_there(storage: ObjectStorage, directory: str, query_id: str) -> bool:
    try:
        record = find_operator(storage, directory)
    except CorruptionError:  # of a later release, too
        return True
    return record is not None and record.query_id == query_id


def _why(location: str, query: StoredQuery) -> Awaited:
    """Say why a query belongs to no directory."""
    try:
        planned, batches = query.newest_planned(), query.batches()
        named = query.directories() if batches else {}
    except HoldfastError as exc:
        return Awaited(location, str(exc), is_wrong=True)
    if planned is None:
        return Awaited(location, "The query has not planned a micro-batch yet; its first commit is awaited.")
    if not batches:
        return Awaited(location, f"Micro-batch {planned} runs, or has failed: its commit is awaited.")
    if not named:
        return Awaited(location, f"Micro-batch {batches[-1]} is committed. No operator of holdfast's has had rows yet.")
    return Awaited(
        location,
        "no checkpoint directory that was named holds the state of this query: name the one that it uses "
        f"(spark.holdfast.checkpoint.dir), which has the operator {', '.join(sorted(named))}",
        is_wrong=True,
    )
