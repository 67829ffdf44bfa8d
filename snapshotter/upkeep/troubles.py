"""Background failures, reported in durable storage, where everybody sees them, whichever executor failed.

::

    <operator>/shard-0003/troubles/snapshot-<id>     no snapshot could be written: batches will have to wait
                                   clean-up-<id>     nothing can be deleted: storage grows

Each further failure replaces the object and counts those in a row. A newer snapshot makes it out of date; a clean-up
that succeeds deletes it. If the storage itself is down, only the state server's log has the failure, until the query
reports it before it stops.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.errors import HoldfastError
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND = "trouble"
NAME = re.compile(r"(snapshot|clean-up)-[0-9a-z]{8,40}")
_WHAT = re.compile("snapshot|clean-up")
_TEXT_MAX = 1_000

What = Literal["snapshot", "clean-up"]


@dataclass(frozen=True)
class Trouble:
    """A failure that repeats.

    Attributes
    ----------
    what : {"snapshot", "clean-up"}
    error : str
        The message of the newest failure.
    in_a_row : int
        Failures of one executor since its last success.
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
    shard : PrefixedStorage
    new_id : callable
        Returns a new unique name each time.
    """

    def __init__(self, shard: PrefixedStorage, new_id: Callable[[], str] = clock.new_id) -> None:
        self._shard = shard
        self._new_id = new_id

    def tell(self, what: What, error: HoldfastError, in_a_row: int, host: str, now_ms: int) -> None:
        """Report a failure, in place of the report before.

        Raises
        ------
        InvalidArgumentError, UnavailableError
            The storage refused, or did not answer.

        Notes
        -----
        Cost: a listing, a put and, except the first time, a delete. If deleting fails, nothing is stored, so reports
        never pile up.
        """
        older = [info.key for info in self._shard.list("troubles/") if _is_about(info.key, what)]
        if older:
            self._shard.delete(older)
        text = str(error).encode(errors="backslashreplace").decode()  # a local path may be any bytes
        trouble = Trouble(what, text[:_TEXT_MAX], in_a_row, host, now_ms)
        data, _ = stored_file.encode(KIND, {"shard": self._shard.prefix, **asdict(trouble)})
        self._shard.put(f"troubles/{what}-{self._new_id()}", data)


def _is_about(key: str, what: str) -> bool:
    match = NAME.fullmatch(key.rpartition("/")[2])
    return match is not None and match[1] == what


def read_trouble(shard: PrefixedStorage, key: str) -> Trouble:
    """Return the report in an object.

    Parameters
    ----------
    key : str
        Below the shard.

    Raises
    ------
    NotFoundError, CorruptionError, UnavailableError
        It is gone, is not a report, or cannot be read now.
    """
    source = f"{shard.url}/{key}"
    header = stored_file.decode(shard.get(key), source=source, kind=KIND, plain_bytes_max=0).header
    fields = Fields.of_notice(header, source, "shard", "what", "error", "in_a_row", "host", "written_ms")
    what = fields.text("what", _WHAT)
    if (own := fields.text("shard")) != shard.prefix or not _is_about(key, what):
        fields.refuse("belongs elsewhere: it was moved or copied", shard=own, what=what)
    return Trouble(
        what,
        fields.text("error")[:_TEXT_MAX],
        fields.number("in_a_row"),
        fields.text("host"),
        fields.number("written_ms"),
    )
