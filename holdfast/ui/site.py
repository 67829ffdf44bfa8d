"""What the page shows: state directories, each with its latest survey, and the queries that keep their state there.

The locations on the command line are state directories (``spark.holdfast.state.dir``) and checkpoint locations of
queries, in any order. Their content shows which is which, perhaps only later::

    empty  ──metadata──▶  a query's location  ──its first commit──▶  belongs to a directory
      └────operator────▶  a state directory

Each view checks empty locations again and waits a moment for them; for known queries it shows the last answer. A query
belongs to the directories that hold the operators its pointers name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice

from holdfast.errors import CorruptionError, HoldfastError, NotFoundError, UnavailableError
from holdfast.health import origin_of
from holdfast.snapshotter.ownership.operator_record import find_operator
from holdfast.snapshotter.ownership.queries import QueryOrigin, find_noted
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.upkeep.catalogue import StateSizes
from holdfast.spark_integration.client.connection import over_executors, recent_batches
from holdfast.spark_integration.client.messages import RecentBatch
from holdfast.spark_integration.lookup.places import find_state_dir, location_of
from holdfast.spark_integration.lookup.stored_query import StoredQuery, open_query
from holdfast.spark_integration.shard.pointer_row import operator_of
from holdfast.spark_integration.spark_state.query_location import LoggedTimes
from holdfast.ui.inquiry import Dated, Inquiry, Patience, answers
from holdfast.ui.shards import RowCounter
from holdfast.ui.survey import Survey, survey

_ORIGINS = 256
#: Upper limit of recorded locations that are opened in addition to the named locations.
_NOTED_MAX = 8
_EMPTY = (
    "Empty, or it does not exist: check the spelling. A state directory fills when a query commits with "
    "spark.holdfast.state.dir set to it, and a checkpointLocation when its query starts."
)
BATCHES_MAX = 12
_POINTERS_ONLY = (
    "This is the checkpoint location of a query, which holds only pointers: restart `holdfast ui` with "
    "the state directory, too (spark.holdfast.state.dir)."
)
_UNLIMITED = Patience(None)
_AT_ONCE = Patience(0)


@dataclass(frozen=True)
class Pointers:
    """A checkpoint location's content."""

    log: tuple[LoggedTimes, ...]  #: The logged micro-batches, ascending
    named: Mapping[str, str]  #: The query by operator directory, as the pointers name them
    query_id: str

    @property
    def planned(self) -> int | None:
        """The last planned micro-batch."""
        return self.log[-1].batch_id if self.log else None

    @property
    def committed(self) -> list[LoggedTimes]:
        """The committed micro-batches, ascending."""
        return [one for one in self.log if one.committed_ms is not None]

    @property
    def operators(self) -> str:
        return ", ".join(sorted(operator_of(one) or one for one in self.named))


class NamedQuery:
    """An open query, which closes `stored` once it is retired and not in use."""

    def __init__(self, location: str, stored: StoredQuery, surveys: Executor) -> None:
        self.location = location
        self.pointers: Inquiry[Pointers] = Inquiry(self._pointers, surveys, location)
        self._stored, self._surveys = stored, surveys
        self._lock = threading.Lock()
        self._is_retired = False
        self._users = 1  #: Its readers, plus one until it is retired

    @contextmanager
    def reading(self) -> Iterator[StoredQuery]:
        """Keep the query open during the context. Raises `NotFoundError` if it was retired."""
        with self._lock:
            if self._is_retired:
                raise NotFoundError(
                    "this checkpoint location was deleted, or now has a different query", location=self.location
                )
            self._users += 1
        try:
            yield self._stored
        finally:
            self._release()

    def retire(self) -> None:
        """Close the query once its last reader is done."""
        with self._lock:
            was_retired, self._is_retired = self._is_retired, True
        if not was_retired:
            self._release()

    def _release(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self._surveys.submit(self._stored.close)  # waits for requests that readers abandoned

    def _pointers(self) -> Pointers:
        """Read only new pointers: they are in many small files, and never change."""
        with self.reading() as stored:
            found, known = Pointers(tuple(stored.times()), {}, stored.query_id), self.pointers.known
            if not found.committed:
                return found
            if known is not None and known.named and known.committed[-1:] == found.committed[-1:]:
                return replace(found, named=known.named)
            return replace(found, named=stored.directories())


@dataclass(frozen=True)
class Awaited:
    """A location with nothing to show yet."""

    location: str
    what: str  #: A sentence on what is awaited or wrong
    is_wrong: bool = False  #: Whether waiting cannot help


@dataclass(frozen=True)
class Directory:
    """A named location, presumably a state directory."""

    place: int  #: The index of the location; part of URLs
    location: str  #: As given by the user
    storage: ObjectStorage
    origin_of: Callable[[str], QueryOrigin | None]  #: Returns a query's origin, which never changes: cached
    executor: Executor  #: For parallel requests
    surveys: Executor  #: For inquiries
    surveyor: Inquiry[Survey]
    sizes: StateSizes
    rows: RowCounter
    queries: tuple[NamedQuery, ...] = ()  #: The named queries with their state here

    @classmethod
    def of(cls, place: int, storage: ObjectStorage, executor: Executor, surveys: Executor) -> Directory:
        """Return a directory; a survey may wait for `executor`, so `surveys` must not be the same."""
        sizes = StateSizes(storage, executor)
        surveyor = Inquiry(partial(survey, storage, sizes, executor), surveys, storage.url)
        origins = lru_cache(maxsize=_ORIGINS)(partial(origin_of, storage))
        return cls(place, storage.url, storage, origins, executor, surveys, surveyor, sizes, RowCounter())

    @property
    def awaited(self) -> Awaited | None:
        """What an empty directory waits for; None if it is not empty or unknown."""
        known = self.surveyor.known
        return Awaited(self.location, _EMPTY) if known and known.is_empty else None

    def query_of(self, directory: str, patience: Patience) -> tuple[NamedQuery, str] | None:
        """Return the query whose pointers name an operator's directory, and the operator's name; or None."""
        failed = None
        pointers = answers({place: one.pointers for place, one in enumerate(self.queries)}, patience)
        for place, answer in pointers.items():
            if isinstance(answer, HoldfastError):  # perhaps of a different query
                failed = answer
            elif directory in answer.found.named:
                return self.queries[place], operator_of(directory) or directory
            else:
                failed = answer.error or failed
        if failed:
            raise failed
        return None


Join = Callable[[Directory, Directory], StoredQuery]


class Assignment:
    """The directories that hold a query's state, final once known. `join` opens a query with a directory."""

    def __init__(self, query: Directory, join: Join) -> None:
        self._query, self._join = query, join
        self._lock = threading.Lock()
        self._opened: dict[int, NamedQuery] = {}
        self._held_by: dict[int, Inquiry[bool]] = {}
        self._belongs: frozenset[int] | None = None
        self._is_retired = False

    def in_directory(self, home: Directory) -> NamedQuery:
        """Return the query with the state in a directory."""
        with self._lock:
            if home.place not in self._opened:
                stored = self._join(self._query, home)
                self._opened[home.place] = NamedQuery(self._query.location, stored, self._query.surveys)
                if self._is_retired:
                    self._opened[home.place].retire()
            return self._opened[home.place]

    def retire(self) -> None:
        """Close the query, since its location now has a different query."""
        with self._lock:
            self._is_retired = True
            opened = list(self._opened.values())
        for one in opened:
            one.retire()

    def pointers(self, homes: Sequence[Directory]) -> Inquiry[Pointers] | None:
        """Return the inquiry for the pointers; None if it is not needed or cannot help."""
        return None if self._belongs is not None or not homes else self.in_directory(homes[0]).pointers

    def places(
        self, homes: Sequence[Directory], answer: Dated[Pointers] | HoldfastError | None
    ) -> dict[int, Inquiry[bool]]:
        """Return the inquiries to the directories; none if they are not needed or cannot help."""
        if self._belongs is not None or answer is None or isinstance(named_by(self._query.location, answer), Awaited):
            return {}
        pointers = self.in_directory(homes[0]).pointers
        with self._lock:
            for home in homes:
                if home.place not in self._held_by:
                    ask = partial(_is_held_by, home, pointers)
                    self._held_by[home.place] = Inquiry(ask, home.surveys, home.location)
            return {home.place: self._held_by[home.place] for home in homes}

    def belongs(
        self, answer: Dated[Pointers] | HoldfastError | None, held_by: Mapping[int, Dated[bool] | HoldfastError]
    ) -> frozenset[int] | Awaited:
        """Return the directories that hold the state, or why none does."""
        if self._belongs is not None:
            return self._belongs
        if answer is None:
            return Awaited(self._query.location, _POINTERS_ONLY, is_wrong=True)
        named = named_by(self._query.location, answer)
        if isinstance(named, Awaited):
            return named
        found = frozenset(place for place, one in held_by.items() if not isinstance(one, HoldfastError) and one.found)
        if found:
            self._belongs = found
            return found
        failed = [
            str(error) for one in held_by.values() if (error := one if isinstance(one, HoldfastError) else one.error)
        ]
        elsewhere = (
            "none of the given state directories has this query's state: also pass its spark.holdfast.state.dir, "
            f"which has the operator {', '.join(sorted(named))}"
        )
        return Awaited(self._query.location, failed[-1] if failed else elsewhere, is_wrong=True)


def assign(
    queries: Mapping[int, Assignment], homes: Sequence[Directory], patience: Patience
) -> dict[int, frozenset[int] | Awaited]:
    """Return for each query the directories that hold its state, or why none does."""
    pointers = answers({at: asked for at, one in queries.items() if (asked := one.pointers(homes))}, patience)
    held_by = answers(
        {
            (at, place): asked
            for at, one in queries.items()
            for place, asked in one.places(homes, pointers.get(at)).items()
        },
        patience,
    )
    return {
        at: one.belongs(pointers.get(at), {place: found for (of, place), found in held_by.items() if of == at})
        for at, one in queries.items()
    }


def named_by(location: str, answer: Dated[Pointers] | HoldfastError) -> Mapping[str, str] | Awaited:
    """Return the operator directories that a query's pointers name, each with its query, or why there are none."""
    error = answer if isinstance(answer, HoldfastError) else answer.error
    if error is not None:
        return Awaited(location, str(error), is_wrong=True)
    assert isinstance(answer, Dated)
    found = answer.found
    if found.planned is None:
        return Awaited(location, "The query has not planned a micro-batch yet; waiting for its first commit.")
    if not found.committed:
        return Awaited(location, f"Micro-batch {found.planned} is running or has failed; waiting for its commit.")
    if not found.named:
        committed = found.committed[-1].batch_id
        return Awaited(location, f"Micro-batch {committed} is committed. No holdfast operator has received rows yet.")
    return found.named


def _is_held_by(home: Directory, pointers: Inquiry[Pointers]) -> bool:
    """Return whether a directory has an operator that a query's pointers name, even an incomplete one."""
    known = pointers.known
    named = known.named if known else {}
    # The records, since the listing may be older than the first commit.
    return any(_has_state(home.storage, directory, query_id) for directory, query_id in named.items()) or any(
        directory in found.without_record for directory in named if (found := home.surveyor.known)
    )


def _has_state(storage: ObjectStorage, directory: str, query_id: str) -> bool:
    try:
        record = find_operator(storage, directory)
    except CorruptionError:  # perhaps of a later release
        return True
    return record is not None and record.query_id == query_id


class Site:
    """Everything that the page shows; it may change while the page is open. Thread-safe."""

    def __init__(self, named: Iterable[Directory], live: Inquiry[list[RecentBatch]], join: Join | None = None) -> None:
        self._named, self._live, self._join = tuple(named), live, join
        # The key includes the query's id: a deleted location may be reused for a different query.
        self._queries: dict[tuple[int, str], Assignment] = {}
        self._lock = threading.Lock()

    def look(self, patience: Patience | None = None) -> tuple[list[Directory], list[Awaited]]:
        """Return the state directories with their queries, and queries without a directory; wait up to `patience`."""
        patience = patience or Patience.of_a_view()
        found = self._known_surveys(patience)
        homes = [one for one in self._named if not (one.place in found and found[one.place].query_id)]
        queries = self._assignments({place: one.query_id for place, one in found.items() if one.query_id})
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
        """Return a directory. Raises `NotFoundError` if it does not exist."""
        found, _ = self.look(patience)
        for one in found:
            if one.place == place:
                return one
        raise NotFoundError("the page shows no such directory", directory=place, directories=len(found))

    def awaited(self, patience: Patience | None = None) -> list[Awaited]:
        """Return the locations with nothing to show yet: empty locations, and queries without a directory."""
        homes, awaited = self.look(patience)
        return [one for home in homes if (one := home.awaited)] + awaited

    def batches(self, patience: Patience) -> list[RecentBatch]:
        """Return the last micro-batches that state servers on this machine know; none until they answer."""
        try:
            return self._live.latest(patience).found
        except UnavailableError:
            return []

    def batches_of(self, query_id: str, directory: str, patience: Patience) -> list[RecentBatch]:
        """Return the last micro-batches of an operator of a query, newest first."""
        wanted = (one for one in self.batches(patience) if (one.query, one.operator) == (query_id, directory))
        return over_executors(wanted)[:BATCHES_MAX]

    def close(self) -> None:
        self._assignments({})

    def _known_surveys(self, patience: Patience) -> dict[int, Survey]:
        """Return the known content of locations, by place."""
        found = {one.place: known for one in self._named if (known := one.surveyor.known)}
        queries = {one.place: one.surveyor for one in self._named if one.place in found and found[one.place].query_id}
        # For an empty location this is one small request. Directories are listed when they are viewed.
        awaited = {
            one.place: one.surveyor for one in self._named if one.place not in found or found[one.place].is_empty
        }
        surveys = answers(queries, _AT_ONCE) | answers(awaited, patience)
        return found | {place: one.found for place, one in surveys.items() if not isinstance(one, HoldfastError)}

    def _assignments(self, ids: Mapping[int, str]) -> dict[int, Assignment]:
        """Return the queries with these ids, by place, and retire all others."""
        with self._lock:
            retired = [self._queries.pop(at) for at in set(self._queries) - set(ids.items())]
            for at in ids.items():
                if at not in self._queries:
                    assert self._join is not None
                    self._queries[at] = Assignment(self._named[at[0]], self._join)
            found = {place: self._queries[place, query_id] for place, query_id in ids.items()}
        for one in retired:
            one.retire()
        return found


def _noted_locations(
    named: Iterable[Directory], surveys_of: Sequence[Survey], options: Mapping[str, object], requests: Executor
) -> Iterator[str]:
    """Yield the checkpoint locations that state directories record for their queries, except named locations."""
    known = {one.query_id for one in surveys_of}

    def look(query: tuple[ObjectStorage, str]) -> str | None:
        states, state_id = query
        with suppress(HoldfastError):  # the page shows the directory without it
            noted = find_noted(states, state_id)
            if noted is not None and noted.query_id not in known:
                return location_of(noted, states, options)
        return None

    queries = [
        (home.storage, state_id)
        for home, found in zip(named, surveys_of, strict=True)
        for state_id in sorted({one.signs.query_id for one in found.operators.values()} - {""})
    ]
    with closing(ahead(requests, look, queries, _NOTED_MAX)) as found:
        yield from islice(filter(None, found), _NOTED_MAX)


def _surveyed(directories: Sequence[Directory]) -> list[Survey]:
    for one in directories:
        one.surveyor.begin()
    return [one.surveyor.latest(_UNLIMITED).found for one in directories]


def survey_threads(locations: int) -> int:
    """Return how many threads surveys need: enough even if no location answers."""
    # For each location its survey; for each query its pointers, and whether each directory holds its state.
    return (locations + _NOTED_MAX + 1) ** 2


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
    """Open and survey the named locations; `surveys` needs `survey_threads` threads, since requests may hang."""
    named: list[Directory] = []

    def add(url: str) -> None:
        storage = stack.enter_context(open_storage(url, options))
        if all(one.storage.url != storage.url for one in named):
            named.append(replace(Directory.of(len(named), storage, requests, surveys), location=url))

    for url in urls:
        add(url)
    surveys_of = _surveyed(named)
    for found in [*_noted_locations(named, surveys_of, options, requests)]:
        add(found)
    surveys_of += _surveyed(named[len(surveys_of) :])
    if state_dir and all(one.query_id or one.is_empty for one in surveys_of):
        add(state_dir)
        named[-1].surveyor.latest(_UNLIMITED)
    elif all(one.query_id for one in surveys_of):
        for found in [find_state_dir(one.location, options) for one in named]:
            add(found)
            named[-1].surveyor.latest(_UNLIMITED)

    def join(query: Directory, home: Directory) -> StoredQuery:
        return open_query(query.location, home.location, options)

    site = Site(named, Inquiry(partial(recent_batches, local_dir), surveys, "this machine"), join)
    stack.callback(site.close)
    for one in site.awaited(_UNLIMITED):
        if one.is_wrong:
            raise NotFoundError(one.what, checkpoint_location=one.location)
    return site
