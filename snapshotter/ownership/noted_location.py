"""The checkpoint location of a query, noted under the id in its state's records.

::

    _queries/<state id>.locations/<number>      a fence, of which the newest counts

Anyone with write access to the state directory may have written the text: readers check the location before use
(`holdfast.spark_integration.lookup.places`).
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from holdfast.backends import stored_file
from holdfast.errors import ConflictError, CorruptionError, InvalidArgumentError
from holdfast.snapshotter.fence import Fence, looks
from holdfast.snapshotter.fields import QUERY_ID, Fields, Stored, refuse_stray
from holdfast.snapshotter.ownership.query_origin import FOLDER
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.options import parse_url

KIND = "location"
# No terminal control codes, and no lone surrogates.
_PLAIN = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]"
_LOCATION = re.compile(_PLAIN + "{1,2048}")
_HOST = re.compile(_PLAIN + "{0,255}")


@dataclass(frozen=True)
class NotedLocation(Stored):
    """A query's checkpoint location, as the last run that knew it noted."""

    state_id: Annotated[str, QUERY_ID]  #: The id in the query's pointers and records
    query_id: Annotated[str, QUERY_ID]  #: Spark's id of the query: a clone's is another one
    location: str  #: As Spark writes it
    host: Annotated[str, _HOST]  #: Of the driver; a local path is on this machine

    def require(self, header: Fields) -> None:
        """Refuse a location without showing it: it may hold credentials, or what a terminal obeys."""
        try:
            _require_notable(self.location)
        except InvalidArgumentError as exc:
            header.refuse(f"notes no location of a query: {exc.message}")


def _require_notable(location: str) -> None:
    """Raise `InvalidArgumentError` if this is not a query's location, or holds credentials."""
    if not _LOCATION.fullmatch(location):
        raise InvalidArgumentError("a location has 1 to 2,048 characters, without control characters")
    parse_url(location)


def note_location(storage: ObjectStorage, noted: NotedLocation) -> None:
    """Store a note, unless the newest one says the same. Raises `InvalidArgumentError` if readers would refuse it."""
    _require_notable(noted.location)
    fence = _fence(storage, noted.state_id)
    for _ in looks(fence.url):
        number, data = fence.newest()
        with suppress(CorruptionError):  # the next note replaces it
            if data is not None and _read(fence, number, data, noted.state_id) == noted:
                return
        with suppress(ConflictError):  # another driver was faster: read its note
            fence.delete(fence.old(fence.take(number + 1, stored_file.encode(KIND, noted.to_json())[0])))
            return


def find_noted(storage: ObjectStorage, state_id: str) -> NotedLocation | None:
    """Return the note, or None. Raises `CorruptionError`."""
    fence = _fence(storage, state_id)
    number, data = fence.newest()
    return None if data is None else _read(fence, number, data, state_id)


def _fence(storage: ObjectStorage, state_id: str) -> Fence:
    return Fence(storage, f"{FOLDER}/{state_id}.locations")


def _read(fence: Fence, number: int, data: memoryview, state_id: str) -> NotedLocation:
    source = f"{fence.url}/{number}"
    noted = NotedLocation.decode(data, KIND, source)
    if noted.state_id != state_id:
        refuse_stray(source, query_id=noted.state_id)
    return noted
