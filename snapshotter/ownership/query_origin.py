"""What a query began with that was restored from a savepoint, or cloned: by its id, in one object.

::

    _queries/<query id>
    _queries/<query id>.fills       of a clone: no other query fills its directories

Whoever restores or clones writes it before anything else in the state directory, so that what a stopped attempt
leaves there can be told from what others own. A query that has no such object began by itself.

The records of a restored query name it, but those of all clones of a query name the same one. So a clone looks for
others that name its directories, once they could see that it does; only if there is none does it take them, and say so.
Of two at once, one finds the other, or both do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from holdfast.backends import stored_file
from holdfast.errors import ConflictError, NotFoundError
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.ownership.operator_record import find_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND = "origin"
#: No operator has this name.
FOLDER = "_queries"
#: Holds a savepoint below a query's id, while that is made by rescaling another one; nor has an operator this name.
RESCALING = "_rescaling"
_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_FILLS = ".fills"
_OF_QUERY = re.compile(r"[A-Za-z0-9-]{0,64}")
_DIRECTORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}(@[A-Za-z0-9-]{1,64})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class QueryOrigin:
    """What a restored or cloned query began with.

    Attributes
    ----------
    query_id : str
        Spark's id of the query.
    state_id : str
        The id in its pointers and records: its own, or for a clone that of the query which was cloned.
    of_query, batch_id : str, int
        Whose state it was, after which micro-batch; no query's if it was written for this one.
    directories : mapping of str to str
        The operators' directories that were filled, and the query that the record of each names.
    empty : tuple of str
        Operators that were meant to begin without state.
    unnamed : int
        Operators of the query that had had no rows, so that nobody could tell their names.
    """

    query_id: str
    state_id: str
    of_query: str
    batch_id: int
    directories: Mapping[str, str]
    empty: tuple[str, ...] = ()
    unnamed: int = 0

    FIELDS = ("query_id", "state_id", "of_query", "batch_id", "directories", "empty", "unnamed")

    @property
    def operators(self) -> set[str]:
        """The names of the operators that have state from the beginning."""
        return {directory.partition("@")[0] for directory in self.directories}


def declare_origin(storage: ObjectStorage, origin: QueryOrigin) -> None:
    """Store what a query begins with."""
    values = asdict(origin) | {"directories": dict(origin.directories), "empty": list(origin.empty)}
    PrefixedStorage(storage, FOLDER).put(origin.query_id, stored_file.encode(KIND, values)[0])


def find_origin(storage: ObjectStorage, query_id: str) -> QueryOrigin | None:
    """Return what a query began with; None for one that began by itself.

    Raises
    ------
    CorruptionError
        What is stored is damaged.
    """
    folder = PrefixedStorage(storage, FOLDER)
    try:
        data = folder.get(query_id)
    except NotFoundError:
        return None
    source = f"{folder.url}/{query_id}"
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=0)
    fields = Fields(stored.header, source, *QueryOrigin.FIELDS)
    origin = QueryOrigin(
        fields.text("query_id"),
        fields.text("state_id", _ID),
        fields.text("of_query", _OF_QUERY),
        fields.number("batch_id"),
        fields.mapping_of_texts("directories"),
        tuple(fields.all_texts("empty")),
        fields.number("unnamed"),
    )
    if origin.query_id != query_id:
        fields.refuse("belongs elsewhere: it was moved or copied", query_id=origin.query_id)
    wrong = [name for name in origin.directories if not _DIRECTORY.fullmatch(name)]
    wrong += [name for name in origin.empty if not _NAME.fullmatch(name)]
    if wrong:
        fields.refuse("names an operator that cannot be", name=wrong[0])
    return origin


def take_directories(storage: ObjectStorage, origin: QueryOrigin) -> None:
    """Take the directories of a clone that was declared, before anything is written there.

    Raises
    ------
    ConflictError
        Another query that was restored or cloned names one of them, or is a clone of the same query: operators that
        have had no rows yet begin in directories that nobody can name.
    """
    folder = PrefixedStorage(storage, FOLDER)
    for other in sorted(info.key for info in folder.list("")):
        found = find_origin(storage, other) if _ID.fullmatch(other) and other != origin.query_id else None
        if found is None:
            continue
        shared = origin.directories.keys() & found.directories.keys()
        if shared or (found.state_id == origin.state_id and (found.unnamed or origin.unnamed)):
            raise ConflictError(
                "another query was cloned or restored into this state directory, or that is under way or was "
                "interrupted: choose another directory, or finish that one first with the same command. If it is "
                f"gone for good, and its operators' directories with it, delete {FOLDER}/{other}",
                operators=", ".join(sorted(shared)),
                query=other,
                storage=storage.url,
            )
    folder.put(origin.query_id + _FILLS, b"")


def require_directories(storage: ObjectStorage, query_id: str) -> None:
    """Check that the directories that a query began with are still its own.

    Of two that write a record at once, the first one may have read its own, where the storage cannot refuse the second.

    Raises
    ------
    ConflictError
        Another query has taken one of them.
    """
    origin = find_origin(storage, query_id)
    for directory, owner in origin.directories.items() if origin else ():
        record = find_operator(storage, directory)
        if record is None or record.query_id != owner:
            raise ConflictError(
                "another query has taken the directory of an operator meanwhile: run one restore at a time into a "
                "state directory",
                operator=directory,
                owner=record and record.query_id,
                storage=storage.url,
            )


def may_clear(storage: ObjectStorage, origin: QueryOrigin, directory: str) -> bool:
    """Tell whether what lies in a directory was written by the attempt that declared the origin.

    It was where the directory's record names the query, which nobody else writes, or where a clone took it.
    """
    if origin.directories[directory] == origin.query_id:
        return True
    return any(info.key == f"{FOLDER}/{origin.query_id}{_FILLS}" for info in storage.list(f"{FOLDER}/"))


def forget_origin(storage: ObjectStorage, query_id: str) -> None:
    """Delete what is stored of a query that never was."""
    for key in (query_id + _FILLS, query_id):
        PrefixedStorage(storage, FOLDER).delete([key])
