"""The origin of a restored or cloned query: one object under the query's id.

::

    _queries/<query id>
    _queries/<original's id>.fills      the id of its clone, which alone fills the directories here that name it

A restore or clone writes it before anything else in the state directory, so that a stopped attempt's leftovers
can be distinguished from other objects. A query without such an object was neither restored nor cloned.

A restored query's records name it, but those of all clones name the original. So a state directory takes one clone of a
query: the first to put the second object, if absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from holdfast.backends import stored_file
from holdfast.errors import ConflictError, NotFoundError
from holdfast.snapshotter.fields import QUERY_ID, Fields, Stored, refuse_stray
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND = "origin"
#: No operator has this name.
FOLDER = "_queries"
#: Holds, below a new query's id, its savepoint during a rescale. No operator has this name.
RESCALING = "_rescaling"
_FILLS = ".fills"
_DIRECTORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}(@[A-Za-z0-9-]{1,64})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class QueryOrigin(Stored):
    """What a restored or cloned query began with."""

    query_id: str  #: Spark's id of the query
    #: The id in its pointers and records: its own, or a clone's original's
    state_id: Annotated[str, QUERY_ID]
    #: Whose state it was, after which micro-batch; no query's if it was written for this one
    of_query: Annotated[str, re.compile("[A-Za-z0-9-]{0,64}")]
    batch_id: int
    #: The operators' directories that were filled, and the query that the record of each names
    directories: Mapping[str, str]
    empty: tuple[str, ...] = ()  #: Operators that were meant to begin without state
    unnamed: int = 0  #: How many operators had no rows, and so no known names

    def require(self, header: Fields) -> None:
        wrong = [name for name in self.directories if not _DIRECTORY.fullmatch(name)]
        wrong += [name for name in self.empty if not _NAME.fullmatch(name)]
        if wrong:
            header.refuse("names an invalid operator", name=wrong[0])

    @property
    def is_clone(self) -> bool:
        """Whether the clone keeps the id of the query that was cloned."""
        return self.state_id != self.query_id

    @property
    def first_batch(self) -> int:
        """The first micro-batch that it ran itself: those before are a restore's, or a clone's original's."""
        return self.batch_id + 1 if self.is_clone else 1

    @property
    def operators(self) -> set[str]:
        """The names of the operators that have state from the beginning."""
        return {directory.partition("@")[0] for directory in self.directories}


def declare_origin(storage: ObjectStorage, origin: QueryOrigin) -> None:
    """Store what a query begins with, before anything is written to its directories. Raises `ConflictError`."""
    folder = PrefixedStorage(storage, FOLDER)
    folder.put(origin.query_id, stored_file.encode(KIND, origin.to_json())[0])
    if not origin.is_clone:
        return
    try:
        folder.put_if_absent(origin.state_id + _FILLS, origin.query_id.encode())
    except ConflictError as exc:
        raise ConflictError(
            "this query was cloned into this state directory before, or a clone is under way or was interrupted: "
            "choose another directory, or finish that clone with the same command. If it is gone for good, with its "
            f"operators' directories, delete {FOLDER}/{origin.state_id}{_FILLS}",
            storage=storage.url,
        ) from exc


def find_origin(storage: ObjectStorage, query_id: str) -> QueryOrigin | None:
    """Return what a query began with; None if it began empty. Raises `CorruptionError`."""
    folder = PrefixedStorage(storage, FOLDER)
    try:
        data = folder.get(query_id)
    except NotFoundError:
        return None
    source = f"{folder.url}/{query_id}"
    origin = QueryOrigin.decode(data, KIND, source)
    if origin.query_id != query_id:
        refuse_stray(source, query_id=origin.query_id)
    return origin


def is_filling(storage: ObjectStorage, origin: QueryOrigin) -> bool:
    """Tell whether an unfinished query's directories hold its own objects: only its records name it."""
    try:
        filling = PrefixedStorage(storage, FOLDER).get(origin.state_id + _FILLS) if origin.is_clone else None
    except NotFoundError:
        return False
    return filling is None or bytes(filling) == origin.query_id.encode()


def forget_origin(storage: ObjectStorage, origin: QueryOrigin) -> None:
    """Delete the origin of a query that was never finished."""
    own = [origin.state_id + _FILLS] if origin.is_clone and is_filling(storage, origin) else []
    for key in (*own, origin.query_id):
        PrefixedStorage(storage, FOLDER).delete([key])
