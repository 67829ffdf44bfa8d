"""Which directories have the state of a query: those in which its pointers name operators.

The location of the query is asked, and then each directory, all side by side: one that does not answer holds up, and
hides, no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from holdfast.errors import CorruptionError, HoldfastError
from holdfast.snapshotter.ownership.operator_record import find_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.lookup.stored_query import StoredQuery
from holdfast.ui.directory import Awaited, Directory
from holdfast.ui.inquiry import Dated, Inquiry, Patience, answers
from holdfast.ui.named_query import NamedQuery, Pointers

_POINTERS_ONLY = (
    "This is the checkpoint location of a query, which holds only pointers: start the page with the state "
    "directory, too (spark.holdfast.state.dir)."
)
Join = Callable[[Directory, Directory], StoredQuery]


class Assignment:
    """Where the state of a query lies; once that is known, it stays.

    Parameters
    ----------
    query : Directory
        The query's location.
    join : callable
        Opens the query of a location with the state in a directory.

    Notes
    -----
    Threads: any.
    """

    def __init__(self, query: Directory, join: Join) -> None:
        self._query, self._join = query, join
        self._lock = threading.Lock()
        self._opened: dict[int, NamedQuery] = {}
        self._lies_in: dict[int, Inquiry[bool]] = {}
        self._belongs: frozenset[int] | None = None
        self._is_left = False

    def in_directory(self, home: Directory) -> NamedQuery:
        """Return the query with the state in a directory."""
        with self._lock:
            if home.place not in self._opened:
                stored = self._join(self._query, home)
                self._opened[home.place] = NamedQuery(self._query.location, stored, self._query.surveys)
                if self._is_left:
                    self._opened[home.place].leave()
            return self._opened[home.place]

    def leave(self) -> None:
        """Close the query: its location holds another one now."""
        with self._lock:
            self._is_left = True
            opened = list(self._opened.values())
        for one in opened:
            one.leave()

    def pointers(self, homes: Sequence[Directory]) -> Inquiry[Pointers] | None:
        """Return the inquiry for the pointers; None if needless or useless."""
        return None if self._belongs is not None or not homes else self.in_directory(homes[0]).pointers

    def places(
        self, homes: Sequence[Directory], told: Dated[Pointers] | HoldfastError | None
    ) -> dict[int, Inquiry[bool]]:
        """Return what is asked of the directories; nothing where that is not needed, or useless."""
        if self._belongs is not None or told is None or isinstance(_named(self._query.location, told), Awaited):
            return {}
        pointers = self.in_directory(homes[0]).pointers
        with self._lock:
            for home in homes:
                if home.place not in self._lies_in:
                    ask = partial(_lies_in, pointers, home)
                    self._lies_in[home.place] = Inquiry(ask, home.surveys, home.location)
            return {home.place: self._lies_in[home.place] for home in homes}

    def belongs(
        self, told: Dated[Pointers] | HoldfastError | None, lies: Mapping[int, Dated[bool] | HoldfastError]
    ) -> frozenset[int] | Awaited:
        """Return the directories that have the state, or why none has."""
        if self._belongs is not None:
            return self._belongs
        if told is None:
            return Awaited(self._query.location, _POINTERS_ONLY, is_wrong=True)
        named = _named(self._query.location, told)
        if isinstance(named, Awaited):
            return named
        found = frozenset(place for place, one in lies.items() if not isinstance(one, HoldfastError) and one.found)
        if found:
            self._belongs = found
            return found
        failed = [
            str(error) for one in lies.values() if (error := one if isinstance(one, HoldfastError) else one.error)
        ]
        return Awaited(self._query.location, failed[-1] if failed else _elsewhere(named), is_wrong=True)


def assign(
    queries: Mapping[int, Assignment], homes: Sequence[Directory], patience: Patience
) -> dict[int, frozenset[int] | Awaited]:
    """Return for each query the directories that have its state, or why none has."""
    told = answers({at: asked for at, one in queries.items() if (asked := one.pointers(homes))}, patience)
    lies = answers(
        {(at, place): asked for at, one in queries.items() for place, asked in one.places(homes, told.get(at)).items()},
        patience,
    )
    return {
        at: one.belongs(told.get(at), {place: said for (of, place), said in lies.items() if of == at})
        for at, one in queries.items()
    }


def _named(location: str, told: Dated[Pointers] | HoldfastError) -> Mapping[str, str] | Awaited:
    """Return the directories that a query's pointers name, with the query of each, or the reason for none."""
    error = told if isinstance(told, HoldfastError) else told.error
    if error is not None:
        return Awaited(location, str(error), is_wrong=True)
    assert isinstance(told, Dated)
    found = told.found
    if found.planned is None:
        return Awaited(location, "The query has not planned a micro-batch yet; waiting for its first commit.")
    if not found.batches:
        return Awaited(location, f"Micro-batch {found.planned} is running or has failed; waiting for its commit.")
    if not found.named:
        committed = found.batches[-1]
        return Awaited(location, f"Micro-batch {committed} is committed. No operator of holdfast's has had rows yet.")
    return found.named


def _lies_in(pointers: Inquiry[Pointers], home: Directory) -> bool:
    """Tell whether a directory has an operator that a query's pointers name, whole or in part."""
    known = pointers.known
    named = known.named if known else {}
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


def _elsewhere(named: Iterable[str]) -> str:
    return (
        "no state directory that was named holds the state of this query: name the one that it uses "
        f"(spark.holdfast.state.dir), which has the operator {', '.join(sorted(named))}"
    )
