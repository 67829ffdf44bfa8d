"""What the page shows: checkpoint directories, each with its latest survey, and the queries whose state lies there.

Whoever starts the page names directories of both kinds, in any order: those of ``spark.holdfast.checkpoint.dir``, and
Spark's own checkpoint locations of queries. Which is which stands in them, and may not be known yet::

    empty  ──metadata──▶  a query's location  ──its first commit──▶  belongs to a directory
      └────operator────▶  a checkpoint directory

A query belongs to the directory in which its pointers name operators. So each request looks again at what is awaited,
and which query a location is of; where a query belongs stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from holdfast import clock
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.ownership.operator_record import find_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.client.recent import recent_batches
from holdfast.spark_integration.lookup.stored_query import StoredQuery, open_query
from holdfast.spark_integration.shard.operator_directory import operator_of
from holdfast.ui.survey import PATIENCE_S, Survey, Surveyor, survey
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

    @property
    def awaited(self) -> Awaited | None:
        """What is awaited where it is empty; None where it is not, or that cannot be told."""
        known = self.surveyor.known
        return Awaited(self.location, _EMPTY) if known and known.is_empty else None

    def query_of(self, directory: str) -> tuple[StoredQuery, str] | None:
        """Return the query whose pointers name an operator's directory, and what it calls the operator; or None.

        Raises
        ------
        HoldfastError
            One of the queries cannot be read, and it is none of the others.
        """
        failed = None
        for query in self.queries:
            try:
                named = query.stored.directories()
            except HoldfastError as exc:  # which need not be the one
                failed = exc
            else:
                if directory in named:
                    return query.stored, operator_of(directory) or directory
        if failed:
            raise failed
        return None


_EMPTY = (
    "Empty, or it does not exist: check how it is written. A checkpoint directory fills when a query commits with "
    "spark.holdfast.checkpoint.dir set to it, and a checkpointLocation when its query starts."
)
_POINTERS_ONLY = (
    "This is the checkpoint location of a query, which holds pointers only: start the page with the checkpoint "
    "directory, too (spark.holdfast.checkpoint.dir)."
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
    """All that the page shows; what a location is may change while the page is open.

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
        # By the query's id, too: a location that was deleted may become another query's.
        self._joined: dict[tuple[int, str, int], NamedQuery] = {}
        self._belongs: dict[tuple[int, str], list[int]] = {}
        self._lock = threading.Lock()

    def look(self) -> tuple[list[Directory], list[Awaited]]:
        """Return what can be shown, and what cannot yet.

        Returns
        -------
        list of Directory
            The checkpoint directories, and what is empty or cannot be listed, each with its queries.
        list of Awaited
            The queries that belong to no directory.
        """
        found = {one.place: known for one in self._named if (known := one.surveyor.known)}
        # Of a query this is one small request. Directories are listed when they are looked at themselves.
        found |= _surveys([one for one in self._named if not _is_directory(found.get(one.place))])
        ids = {place: known.query_id for place, known in found.items() if known.query_id}
        homes = [one for one in self._named if one.place not in ids]
        shown: dict[int, list[NamedQuery]] = {home.place: [] for home in homes}
        awaited = []
        for query in (one for one in self._named if one.place in ids):
            belongs = self._find(query, ids[query.place], homes)
            if isinstance(belongs, Awaited):
                awaited.append(belongs)
                continue
            for home in (home for home in homes if home.place in belongs):
                shown[home.place].append(self._with(query, ids[query.place], home))
        return [replace(home, queries=tuple(shown[home.place])) for home in homes], awaited

    def directory(self, place: int) -> Directory:
        """Return a directory.

        Raises
        ------
        NotFoundError
            There is none of this number.
        """
        found, _ = self.look()
        for one in found:
            if one.place == place:
                return one
        raise NotFoundError("the page shows no such directory", directory=place, directories=len(found))

    def awaited(self) -> list[Awaited]:
        """Return the locations that show nothing yet: empty ones, and queries that belong to no directory."""
        homes, awaited = self.look()
        return [one for home in homes if (one := home.awaited)] + awaited

    def _find(self, query: Directory, query_id: str, homes: Sequence[Directory]) -> list[int] | Awaited:
        """Return the places of the directories that have the state of a query; or why that is none."""
        known = self._belongs.get((query.place, query_id))
        if known is not None:
            return known
        if not homes:
            return Awaited(query.location, _POINTERS_ONLY, is_wrong=True)
        named = _named_by(query.location, self._with(query, query_id, homes[0]).stored)
        if isinstance(named, Awaited):
            return named
        found, failed = [], None
        for home in homes:
            try:
                if _lies_in(named, home):
                    found.append(home.place)
            except HoldfastError as exc:  # another directory may have it
                failed = exc
        if found:
            self._belongs[query.place, query_id] = found
            return found
        return Awaited(query.location, str(failed) if failed else _elsewhere(named), is_wrong=True)

    def _with(self, query: Directory, query_id: str, home: Directory) -> NamedQuery:
        at = query.place, query_id, home.place
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
        Of the queries, where none of the locations is such a directory yet.
    local_dir : str, optional
        Where queries on this machine have their local state, if that is set.

    Raises
    ------
    HoldfastError
        What is wrong with one of them, where waiting does not help.
    """
    named: list[Directory] = []

    def add(url: str) -> None:
        storage = stack.enter_context(open_storage(url, parse_storage_options(options)))
        if all(one.storage.url != storage.url for one in named):
            named.append(replace(Directory.of(len(named), storage, requests, surveys), location=url))

    for url in urls:
        add(url)
    surveys_of = [one.surveyor.latest().survey for one in named]
    if checkpoint_dir and all(one.query_id or one.is_empty for one in surveys_of):
        add(checkpoint_dir)
        named[-1].surveyor.latest()
    elif all(one.query_id for one in surveys_of):
        raise InvalidArgumentError(
            "these are checkpoint locations of queries, which hold pointers only: name their checkpoint directory, too "
            "(spark.holdfast.checkpoint.dir)",
            given=", ".join(one.location for one in named),
        )

    def join(query: Directory, home: Directory) -> StoredQuery:
        return stack.enter_context(open_query(query.location, home.location, options))

    site = Site(named, Live(partial(recent_batches, local_dir)), join)
    for one in site.awaited():
        if one.is_wrong:
            raise NotFoundError(one.what, query_checkpoint=one.location)
    return site


def _is_directory(found: Survey | None) -> bool:
    return found is not None and not found.is_empty and not found.query_id


def _surveys(named: Sequence[Directory]) -> dict[int, Survey]:
    """Return by place what locations hold, as far as that can be told within the patience for one of them."""
    until_ms = clock.monotonic_ms() + int(PATIENCE_S * 1000)
    for one in named:  # all begin before one is waited for
        _survey(one, 0)
    found = {one.place: _survey(one, max(until_ms - clock.monotonic_ms(), 0) / 1000) for one in named}
    return {place: one for place, one in found.items() if one is not None}


def _survey(one: Directory, patience_s: float) -> Survey | None:
    """Return what a location holds; None where that cannot be told, as its own page says."""
    try:
        return one.surveyor.latest(patience_s).survey
    except HoldfastError:
        return None


def _lies_in(named: Mapping[str, str], home: Directory) -> bool:
    """Tell whether a directory has an operator that a query's pointers name, whole or in part."""
    # Not what was listed: that may be older than the first commit.
    return any(_is_there(home.storage, directory, query_id) for directory, query_id in named.items()) or any(
        directory in found.without_record for directory in named if (found := home.surveyor.known)
    )


def _is_there(storage: ObjectStorage, directory: str, query_id: str) -> bool:
    try:
        record = find_operator(storage, directory)
    except CorruptionError:  # of a later release, too
        return True
    return record is not None and record.query_id == query_id


def _named_by(location: str, query: StoredQuery) -> Mapping[str, str] | Awaited:
    """Return the directories that a query's pointers name, and the query of each; or why there are none."""
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
    return named


def _elsewhere(named: Iterable[str]) -> str:
    return (
        "no checkpoint directory that was named holds the state of this query: name the one that it uses "
        f"(spark.holdfast.checkpoint.dir), which has the operator {', '.join(sorted(named))}"
    )
