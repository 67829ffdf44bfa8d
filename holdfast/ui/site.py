"""What the page shows: checkpoint directories, each with its latest survey, and the queries whose state lies there.

Whoever starts the page names directories of both kinds, in any order: those of ``spark.holdfast.checkpoint.dir``, and
Spark's own checkpoint locations of queries. Which is which stands in them. A query belongs to the directory in which
its pointers name operators.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.client.recent import recent_batches
from holdfast.spark_integration.lookup.stored_query import StoredQuery, open_query
from holdfast.ui.survey import Surveyor, survey
from holdfast.ui.views.growth import GrowthReader
from holdfast.ui.views.live import Live
from holdfast.ui.views.row_counts import RowCounter

_METADATA_BYTES_MAX = 1 << 16


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
    """A checkpoint directory.

    Attributes
    ----------
    place : int
        In the order in which they were given; part of URLs.
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
        return cls(place, storage, executor, surveyor, GrowthReader(storage, executor), RowCounter())

    def query_of(self, directory: str) -> tuple[StoredQuery, str] | None:
        """Return the query whose pointers name an operator's directory, and what it calls the operator; or None."""
        for query in self.queries:
            for operator in query.stored.operators():
                if directory in operator.pointers:
                    return query.stored, operator.name
        return None


@dataclass(frozen=True)
class Site:
    """All that the page shows.

    Attributes
    ----------
    directories : tuple of Directory
    live : Live
    """

    directories: tuple[Directory, ...]
    live: Live

    def directory(self, place: int) -> Directory:
        """Return a directory.

        Raises
        ------
        NotFoundError
            There is none of this number.
        """
        if not 0 <= place < len(self.directories):
            raise NotFoundError("the page shows no such directory", directory=place, directories=len(self.directories))
        return self.directories[place]


def open_site(
    urls: Iterable[str],
    options: Mapping[str, str],
    requests: Executor,
    surveys: Executor,
    stack: ExitStack,
    *,
    local_dir: str | None = None,
) -> Site:
    """Open what was named, and list each checkpoint directory.

    Parameters
    ----------
    urls : iterable of str
        Checkpoint directories, and checkpoint locations of queries whose state lies there.
    options : mapping
        Of the storage of all of them, as a query sets them below ``spark.holdfast.storage``.
    requests, surveys : concurrent.futures.Executor
        For requests side by side, and for listings, which may wait for such requests.
    stack : contextlib.ExitStack
        Closes what was opened.
    local_dir : str, optional
        Where queries on this machine have their local state, if that is set.

    Raises
    ------
    HoldfastError
        What is wrong with one of them.
    """
    places, locations = [], []
    for url in dict.fromkeys(urls):
        storage = stack.enter_context(open_storage(url, parse_storage_options(options)))
        if is_query(storage):
            locations.append(url)
        else:
            places.append((url, storage))
    if not places:
        raise InvalidArgumentError(
            "these are checkpoint locations of queries, which hold pointers only: name their checkpoint directory, too "
            "(spark.holdfast.checkpoint.dir)",
            given=", ".join(locations),
        )
    directories = [Directory.of(place, one, requests, surveys) for place, (_, one) in enumerate(places)]
    for directory in directories:
        directory.surveyor.latest()
    queries: list[list[NamedQuery]] = [[] for _ in places]
    for location in locations:
        opened = [stack.enter_context(open_query(location, url, options)) for url, _ in places]
        fitting = [place for place, query in enumerate(opened) if _lies_in(query, directories[place])]
        if not fitting:
            raise NotFoundError(
                "no checkpoint directory that was named holds the state of this query: name the one that it uses "
                "(spark.holdfast.checkpoint.dir)",
                query_checkpoint=location,
                given=", ".join(url for url, _ in places),
            )
        for place in fitting:
            queries[place].append(NamedQuery(location, opened[place]))
    shown = tuple(replace(one, queries=tuple(queries[one.place])) for one in directories)
    return Site(shown, Live(partial(recent_batches, local_dir)))


def is_query(storage: ObjectStorage) -> bool:
    """Tell whether a directory is Spark's checkpoint location of a query, which says the query's id."""
    try:
        found = json.loads(bytes(storage.get("metadata", _METADATA_BYTES_MAX)))
    except (NotFoundError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("id"), str)


def _lies_in(query: StoredQuery, directory: Directory) -> bool:
    """Tell whether a directory has the operators that a query's pointers name."""
    names = directory.surveyor.latest().survey.operators
    try:
        named = {name for operator in query.operators() for name in operator.pointers}
    except NotFoundError:  # of an operator that is not there
        return False
    return bool(named) and named <= names.keys()
