"""What fails in the background, told in durable storage: there everybody can see it, whichever executor it was.

::

    <operator>/shard-0003/troubles/snapshot-<id>     no snapshot could be written: batches will have to wait
                                   clean-up-<id>     nothing can be deleted: storage grows

Each time that it fails, the object is replaced by one that says how often in a row. It is out of date as soon as there
is a newer snapshot, or is deleted by the clean-up that succeeds. Where the storage itself is down nothing can be told
there: then the state server's log says it, and the query does before it has to stop.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.errors import CorruptionError, HoldfastError
from holdfast.snapshotter.storage.object_storage import ObjectStorage

KIND = "trouble"
NAME = re.compile(r"(snapshot|clean-up)-[0-9a-z]{8,40}")
_TEXT_MAX = 1_000

What = Literal["snapshot", "clean-up"]


@dataclass(frozen=True)
class Trouble:
    """Something that fails.

    Attributes
    ----------
    what : {"snapshot", "clean-up"}
    error : str
        The message of the newest failure.
    in_a_row : int
        Failures of one executor since it last went well.
    host : str
        Whose executor it was.
    written_ms : int
        When, by that host's clock, in ms since 1970.
    """

    what: str
    error: str
    in_a_row: int
    host: str
    written_ms: int


class Troubles:
    """The troubles of one shard.

    Parameters
    ----------
    storage : ObjectStorage
    shard : str
        The shard's place in the storage: ``totals/shard-0003``.
    new_id : callable
        Returns a new unique name each time.
    """

    def __init__(self, storage: ObjectStorage, shard: str, new_id: Callable[[], str] = clock.new_id) -> None:
        self._storage = storage
        self._folder = f"{shard}/troubles/"
        self._shard = shard
        self._new_id = new_id

    def tell(self, what: What, error: HoldfastError, in_a_row: int, host: str, now_ms: int) -> None:
        """Store what fails, in the place of what was told before.

        Raises
        ------
        InvalidArgumentError, UnavailableError
            The storage refused, or did not answer.

        Notes
        -----
        Cost: a listing, a put and, but for the first time, a delete. Where nothing can be deleted nothing is stored, so
        that there are never many.
        """
        older = [info.key for info in self._storage.list(self._folder) if _is_about(info.key, what)]
        if older:
            self._storage.delete(older)
        trouble = Trouble(what, str(error)[:_TEXT_MAX], in_a_row, host, now_ms)
        data, _ = stored_file.encode(KIND, {"shard": self._shard, **asdict(trouble)})
        self._storage.put(f"{self._folder}{what}-{self._new_id()}", data)


def _is_about(key: str, what: What) -> bool:
    match = NAME.fullmatch(key.rpartition("/")[2])
    return match is not None and match[1] == what


def read_trouble(storage: ObjectStorage, key: str) -> Trouble:
    """Return what an object tells.

    Raises
    ------
    NotFoundError, CorruptionError, UnavailableError
        It is not there any more, tells nothing, or cannot be read now.
    """
    source = f"{storage.url}/{key}"
    header = stored_file.decode(storage.get(key), source=source, kind=KIND).header
    try:
        numbers = header["in_a_row"], header["written_ms"]
        if any(type(number) is not int for number in numbers):
            raise TypeError("a number is none")
        return Trouble(
            str(header["what"]), str(header["error"])[:_TEXT_MAX], numbers[0], str(header["host"]), numbers[1]
        )
    except (KeyError, TypeError) as exc:
        raise CorruptionError(f"{source} does not tell of a trouble") from exc
