"""A state directory's records about queries: the origin of a restored or cloned query, and the checkpoint location.

::

    _queries/<query id>                         `QueryOrigin`; a query without it was neither restored nor cloned
    _queries/<original's id>.fills              the id of its clone; only that clone may fill the original's directories
    _queries/<state id>.locations/<number>      `NotedLocation`, in a fence; the newest counts

A restore or a clone writes the origin before anything else in the state directory, so that leftovers of an interrupted
attempt can be told from other queries' objects. A restored query's records name that query, but a clone's records name
the original. So a state directory accepts one clone of a query: the first to put the ``.fills`` object.

Anyone with write access to the state directory may have written a location's text: readers check the location before
use (`holdfast.spark_integration.lookup.places`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from holdfast.errors import ConflictError, CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.fence import TypedFence, looks
from holdfast.snapshotter.fields import QUERY_ID, Fields, Stored
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.options import parse_url
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

#: No operator has this name.
FOLDER = "_queries"
#: Holds a new query's savepoint, below its id, during a rescale. No operator has this name.
RESCALING = "_rescaling"
_FILLS = ".fills"
_DIRECTORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}(@[A-Za-z0-9-]{1,64})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class QueryOrigin(Stored, kind="origin"):
    """The state that a restored or cloned query began with."""

    query_id: str  #: Spark's id of the query
    #: The id in the query's pointers and records: its own or, for a clone, the original's
    state_id: Annotated[str, QUERY_ID]
    #: The query that the state came from, and its micro-batch; empty if the state was written for this query
    of_query: Annotated[str, re.compile("[A-Za-z0-9-]{0,64}")]
    batch_id: int
    #: The operators' directories that were filled, with the query that each record names
    directories: Mapping[str, str]
    empty: tuple[str, ...] = ()  #: Operators that deliberately begin without state
    unnamed: int = 0  #: Number of operators that had no rows, and so no known names

    def require(self, header: Fields) -> None:
        wrong = [name for name in self.directories if not _DIRECTORY.fullmatch(name)]
        wrong += [name for name in self.empty if not _NAME.fullmatch(name)]
        if wrong:
            header.refuse("names an invalid operator", name=wrong[0])

    @property
    def is_clone(self) -> bool:
        """Whether the query is a clone, whose state names the original."""
        return self.state_id != self.query_id

    @property
    def first_batch(self) -> int:
        """The first micro-batch that the query ran itself; earlier ones belong to the restore or the original."""
        return self.batch_id + 1 if self.is_clone else 1

    @property
    def operators(self) -> set[str]:
        """The names of the operators that begin with state."""
        return {directory.partition("@")[0] for directory in self.directories}


def declare_origin(storage: ObjectStorage, origin: QueryOrigin) -> None:
    """Store a query's origin, before anything is written to its directories. Raises `ConflictError`."""
    folder = PrefixedStorage(storage, FOLDER)
    folder.put(origin.query_id, origin.encode())
    if not origin.is_clone:
        return
    try:
        folder.put_if_absent(origin.state_id + _FILLS, origin.query_id.encode())
    except ConflictError as exc:
        raise ConflictError(
            "this query was already cloned into this state directory, or a clone is in progress or was interrupted: "
            "choose a different directory, or finish that clone with the same command. If the clone and its operators' "
            f"directories are gone for good, delete {FOLDER}/{origin.state_id}{_FILLS}",
            storage=storage.url,
        ) from exc


def find_origin(storage: ObjectStorage, query_id: str) -> QueryOrigin | None:
    """Return a query's origin; None if the query began empty. Raises `CorruptionError`."""
    folder = PrefixedStorage(storage, FOLDER)
    try:
        data = folder.get(query_id)
    except NotFoundError:
        return None
    return QueryOrigin.decode(data, f"{folder.url}/{query_id}", query_id=query_id)


def is_filling(storage: ObjectStorage, origin: QueryOrigin) -> bool:
    """Return whether an unfinished query owns its directories; a different clone may have taken them."""
    try:
        filling = PrefixedStorage(storage, FOLDER).get(origin.state_id + _FILLS) if origin.is_clone else None
    except NotFoundError:
        return False
    return filling is None or bytes(filling) == origin.query_id.encode()


def forget_origin(storage: ObjectStorage, origin: QueryOrigin) -> None:
    """Delete the origin of an unfinished query."""
    own = [origin.state_id + _FILLS] if origin.is_clone and is_filling(storage, origin) else []
    for key in (*own, origin.query_id):
        PrefixedStorage(storage, FOLDER).delete([key])


# No terminal control codes, and no lone surrogates.
_PLAIN = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]"
_LOCATION = re.compile(_PLAIN + "{1,2048}")
_HOST = re.compile(_PLAIN + "{0,255}")


@dataclass(frozen=True)
class NotedLocation(Stored, kind="location"):
    """A query's checkpoint location, noted by the last run that knew it."""

    state_id: Annotated[str, QUERY_ID]  #: The id in the query's pointers and records
    query_id: Annotated[str, QUERY_ID]  #: Spark's id of the query; for a clone, it differs from `state_id`
    location: str  #: As Spark writes it
    host: Annotated[str, _HOST]  #: Host of the driver, to which a local path refers

    def require(self, header: Fields) -> None:
        """Refuse an invalid location without showing it: it may hold credentials or terminal control codes."""
        try:
            _require_notable(self.location)
        except InvalidArgumentError as exc:
            header.refuse(f"holds an invalid checkpoint location: {exc.message}")


def _require_notable(location: str) -> None:
    """Raise `InvalidArgumentError` if a location is invalid or holds credentials."""
    if not _LOCATION.fullmatch(location):
        raise InvalidArgumentError("a location must have 1 to 2,048 characters, and no control characters")
    parse_url(location)


def note_location(storage: ObjectStorage, noted: NotedLocation) -> None:
    """Store a note unless it equals the newest one. Raises `InvalidArgumentError` if readers would refuse it."""
    _require_notable(noted.location)
    fence = _fence(storage, noted.state_id)
    for _ in looks(fence.url):
        number, data = fence.newest()
        with suppress(CorruptionError):  # the next note replaces it
            if data is not None and fence.decode(number, data) == noted:
                return
        with suppress(ConflictError):  # another driver was faster: read its note
            fence.replace(number + 1, noted)
            return


def find_noted(storage: ObjectStorage, state_id: str) -> NotedLocation | None:
    """Return the newest note, or None. Raises `CorruptionError`."""
    return _fence(storage, state_id).newest_value()[1]


def _fence(storage: ObjectStorage, state_id: str) -> TypedFence[NotedLocation]:
    return TypedFence(storage, f"{FOLDER}/{state_id}.locations", NotedLocation, state_id=state_id)
