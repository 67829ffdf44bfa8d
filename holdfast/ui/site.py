"""What the page shows: state directories, each with its latest survey, and the queries whose state lies there.

Whoever starts the page names directories of both kinds, in any order: those of ``spark.holdfast.state.dir``, and
Spark's own checkpoint locations of queries. Which is which stands in them, and may not be known yet::

    empty  ──metadata──▶  a query's location  ──its first commit──▶  belongs to a directory
      └────operator────▶  a state directory

So each view looks again at what is awaited, and which query a location is of. It waits a moment for what is awaited,
never for queries that are known: of these it shows what was said last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from holdfast.errors import HoldfastError, NotFoundError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.client.recent import recent_batches
from holdfast.spark_integration.lookup.state_directory import find_state_dir
from holdfast.spark_integration.lookup.stored_query import StoredQuery, open_query
from holdfast.ui.assignment import Assignment, Join, assign
from holdfast.ui.directory import Awaited, Directory
from holdfast.ui.inquiry import Patience, answers
from holdfast.ui.named_query import NamedQuery
from holdfast.ui.survey import Survey
from holdfast.ui.views.live import Live

_UNLIMITED = Patience(None)
_AT_ONCE = Patience(0)


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

    def __init__(self, named: Iterable[Directory], live: Live, join: Join | None = None) -> None:
        self.live = live
        self._named, self._join = tuple(named), join
        # By the query's id, too: a location that was deleted may become another query's.
        self._queries: dict[tuple[int, str], Assignment] = {}
        self._lock = threading.Lock()

    def look(self, patience: Patience | None = None) -> tuple[list[Directory], list[Awaited]]:
        """Return what can be shown, and what cannot yet.

        Parameters
        ----------
        patience : Patience, optional
            How long to wait for what is awaited; by default that of a view.

        Returns
        -------
        list of Directory
            The state directories, and what is empty or cannot be listed, each with its queries.
        list of Awaited
            The queries that belong to no directory.
        """
        patience = patience or Patience.of_a_view()
        found = self._told_apart(patience)
        homes = [one for one in self._named if not (one.place in found and found[one.place].query_id)]
        queries = self._of_ids({place: one.query_id for place, one in found.items() if one.query_id})
        shown: dict[int, list[NamedQuery]] = {home.place: [] for home in homes}
        awaited = []
        for place, belongs in assign(queries, homes, patience).items():
            if isinstance(belongs, Awaited):
                awaited.append(belongs)
                continue
            for home in (home for home in homes if home.place in belongs):
                shown[home.place].append(queries[place].in_directory(home))
        return [replace(home, queries=tuple(shown[home.place])) for home in homes], awaited

    def directory(self, place: int, patience: Patience | None = None) -> Directory:
        """Return a directory.

        Raises
        ------
        NotFoundError
            There is none of this number.
        """
        found, _ = self.look(patience)
        for one in found:
            if one.place == place:
                return one
        raise NotFoundError("the page shows no such directory", directory=place, directories=len(found))

    def awaited(self, patience: Patience | None = None) -> list[Awaited]:
        """Return the locations that show nothing yet: empty ones, and queries that belong to no directory."""
        homes, awaited = self.look(patience)
        return [one for home in homes if (one := home.awaited)] + awaited

    def close(self) -> None:
        """Close the queries."""
        self._of_ids({})

    def _told_apart(self, patience: Patience) -> dict[int, Survey]:
        """Return by place what locations hold, if known."""
        found = {one.place: known for one in self._named if (known := one.surveyor.known)}
        queries = {one.place: one.surveyor for one in self._named if one.place in found and found[one.place].query_id}
        # Of what is empty this is one small request. Directories are listed when they are looked at themselves.
        awaited = {
            one.place: one.surveyor for one in self._named if one.place not in found or found[one.place].is_empty
        }
        told = answers(queries, _AT_ONCE) | answers(awaited, patience)
        return found | {place: one.found for place, one in told.items() if not isinstance(one, HoldfastError)}

    def _of_ids(self, ids: Mapping[int, str]) -> dict[int, Assignment]:
        """Return by place the queries of some ids, and close what else was opened."""
        with self._lock:
            left = [self._queries.pop(at) for at in set(self._queries) - set(ids.items())]
            for at in ids.items():
                if at not in self._queries:
                    assert self._join is not None
                    self._queries[at] = Assignment(self._named[at[0]], self._join)
            found = {place: self._queries[place, query_id] for place, query_id in ids.items()}
        for one in left:
            one.leave()
        return found


def looks_at_once(locations: int) -> int:
    """Return the number of threads that ask locations: enough even if no location answers."""
    # Of each location what it holds; of each query its pointers, its progress, and where it lies in each directory.
    return (locations + 1) ** 2


def open_site(
    urls: Iterable[str],
    options: Mapping[str, str],
    requests: Executor,
    surveys: Executor,
    stack: ExitStack,
    *,
    state_dir: str | None = None,
    local_dir: str | None = None,
) -> Site:
    """Open what was named, and look at each location once.

    Parameters
    ----------
    urls : iterable of str
        State directories, and checkpoint locations of queries whose state lies there. Either may be empty yet.
    options : mapping
        Of the storage of all of them, as a query sets them below ``spark.holdfast.storage``.
    requests, surveys : concurrent.futures.Executor
        For requests side by side, and for what is asked now and then, which may wait for such requests. One that hangs
        keeps a thread of `surveys`, so it needs `looks_at_once`.
    stack : contextlib.ExitStack
        Closes what was opened.
    state_dir : str, optional
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
    surveys_of = [one.surveyor.latest(_UNLIMITED).found for one in named]
    if state_dir and all(one.query_id or one.is_empty for one in surveys_of):
        add(state_dir)
        named[-1].surveyor.latest(_UNLIMITED)
    elif all(one.query_id for one in surveys_of):
        for found in [find_state_dir(one.location, parse_storage_options(options)) for one in named]:
            add(found)
            named[-1].surveyor.latest(_UNLIMITED)

    def join(query: Directory, home: Directory) -> StoredQuery:
        return open_query(query.location, home.location, options)

    site = Site(named, Live(partial(recent_batches, local_dir)), join)
    stack.callback(site.close)
    for one in site.awaited(_UNLIMITED):
        if one.is_wrong:
            raise NotFoundError(one.what, checkpoint_location=one.location)
    return site
