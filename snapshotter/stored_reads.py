"""A read of a query's state: the version of each shard after one micro-batch, kept while readers may need it.

::

    <operator>/reads/<id>       a stored file of kind "read": pointers, and the commits that the query carried

Spark plans a data source in a process that has neither its session nor a query's pointers. So whoever has both stores
the pointers first, and hands over where. A read is written once and is out of date after a day: the next one that is
stored beside it removes it, and so does ``holdfast gc``. What it points to may go earlier, as the query cleans up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa

from holdfast import clock
from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND = "read"
FOLDER = "reads"
#: Below an operator's directory.
KEY = re.compile(rf"{FOLDER}/([0-9a-f]{{16}})")
KEPT_MS = 24 * 60 * 60_000
#: The largest one that is read: it holds what 1,000 shards carry at most.
READ_BYTES_MAX = 1 << 30
_FIELDS = ("operator", "directories", "shards")
_DIRECTORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}(@[A-Za-z0-9-]{1,64})?")
_ID = re.compile(r"[0-9a-f]{16}")
_SHARDS_LIMIT = 1 << 31


@dataclass(frozen=True)
class ReadDirectory:
    """One of the operator's directories.

    Attributes
    ----------
    shards : int
        How many shards the operator has there.
    tables : StoredTables
        What they may hold.
    """

    shards: int
    tables: StoredTables

    FIELDS = ("shards", *StoredTables.FIELDS)

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """Return the directory that the fields describe; raises `CorruptionError`."""
        return cls(fields.number("shards", 1, _SHARDS_LIMIT), StoredTables.read(fields))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"shards": self.shards, **self.tables.to_json()}


@dataclass(frozen=True)
class ReadShard:
    """Where a shard with state was.

    Attributes
    ----------
    directory : str
    shard : int
    pointer : Pointer
    carried : bytes or None
        The commit of this version, if it is no object of its own.
    """

    directory: str
    shard: int
    pointer: Pointer
    carried: bytes | None

    FIELDS = ("directory", "shard", "pointer", "carries")

    @property
    def carried_commits(self) -> dict[Pointer, bytes]:
        """The commit that the query carried, if any, by its pointer."""
        return {} if self.carried is None else {self.pointer: self.carried}


@dataclass(frozen=True)
class StoredRead:
    """One read.

    Attributes
    ----------
    operator : str
    directories : mapping of str to ReadDirectory
        At least one.
    shards : tuple of ReadShard
        Those that have state.
    """

    operator: str
    directories: Mapping[str, ReadDirectory]
    shards: tuple[ReadShard, ...]

    def encode(self) -> pa.Buffer:
        """Return it as a stored file: what is carried in sections, each named after the shard's place in the list."""
        shards = [
            {
                "directory": one.directory,
                "shard": one.shard,
                "pointer": str(one.pointer),
                "carries": one.carried is not None,
            }
            for one in self.shards
        ]
        header = {
            "operator": self.operator,
            "directories": {name: directory.to_json() for name, directory in self.directories.items()},
            "shards": shards,
        }
        carried = {str(place): one.carried for place, one in enumerate(self.shards) if one.carried is not None}
        return stored_file.encode(KIND, header, {name: _writer(data) for name, data in carried.items()})[0]

    @classmethod
    def decode(cls, data: memoryview, operator: str, source: str) -> Self:
        """Return the read that a stored file holds.

        Raises
        ------
        CorruptionError
            It is damaged, no read, of another operator, or says what cannot be.
        """
        stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=len(data))
        fields = Fields(stored.header, source, *_FIELDS)
        try:
            directories = {
                name: ReadDirectory.read(Fields(values, source, *ReadDirectory.FIELDS))
                for name, values in fields.mapping("directories").items()
            }
        except CorruptionError as exc:
            raise CorruptionError(f"{source}: {exc}") from exc
        found = cls(fields.text("operator"), directories, tuple(_shards(fields, stored.sections)))
        found._require_sound(fields, operator, stored.sections)
        return found

    def _require_sound(self, fields: Fields, operator: str, sections: Mapping[str, pa.Buffer]) -> None:
        if self.operator != operator:
            fields.refuse("belongs elsewhere: it was moved or copied", operator=self.operator)
        if not self.directories:
            fields.refuse("names no directory")
        for name in self.directories:
            if not _DIRECTORY.fullmatch(name) or name.partition("@")[0] != operator:
                fields.refuse("names a directory of another operator", directory=name)
        if len(sections) != sum(one.carried is not None for one in self.shards):
            fields.refuse("holds sections that no shard has")
        places = {(one.directory, one.shard) for one in self.shards}
        if len(places) < len(self.shards):
            fields.refuse("names a shard twice")
        for one in self.shards:
            if one.directory not in self.directories or one.shard >= self.directories[one.directory].shards:
                fields.refuse("names a shard that the operator does not have", shard=one.shard)


def _shards(fields: Fields, sections: Mapping[str, pa.Buffer]) -> list[ReadShard]:
    shards = []
    for place, shard in enumerate(fields.each("shards", *ReadShard.FIELDS)):
        section = sections.get(str(place))
        if shard.flag("carries") != (section is not None):
            shard.refuse("does not hold what a shard carries", place=place)
        shards.append(
            ReadShard(
                shard.text("directory"),
                shard.number("shard", 0, _SHARDS_LIMIT),
                shard.pointer("pointer"),
                None if section is None else section.to_pybytes(),
            )
        )
    return shards


def _writer(data: bytes) -> Callable[[pa.NativeFile], None]:
    def write(file: pa.NativeFile) -> None:
        file.write(data)

    return write


def store_read(
    storage: ObjectStorage, directory: str, read: StoredRead, new_id: Callable[[], str] = clock.new_id
) -> str:
    """Store a read beside an operator's shards, remove those that are older than a day, and return its id.

    Raises
    ------
    InvalidArgumentError, UnavailableError
        It cannot be stored.
    """
    folder, own = PrefixedStorage(storage, directory), new_id()
    data = read.encode()
    if data.size > READ_BYTES_MAX:
        raise InvalidArgumentError("the query carries too much to be read as a table", size_bytes=data.size)
    folder.put(f"{FOLDER}/{own}", data)
    with suppress(HoldfastError):  # the next one removes them
        modified = {info.key: info.modified_ms for info in folder.list(f"{FOLDER}/") if KEY.fullmatch(info.key)}
        now_ms = modified.get(f"{FOLDER}/{own}", 0)
        folder.delete([key for key, at_ms in modified.items() if now_ms - at_ms > KEPT_MS])
    return own


def fetch_read(storage: ObjectStorage, directory: str, read_id: str) -> StoredRead:
    """Return a stored read.

    Raises
    ------
    InvalidArgumentError
        Nothing has such a name.
    NotFoundError
        It is not there, or not any more.
    CorruptionError
        See `StoredRead.decode`.
    """
    if not (_DIRECTORY.fullmatch(directory) and _ID.fullmatch(read_id)):
        raise InvalidArgumentError("this is not the name of a read: holdfast.state makes them", read=read_id[:40])
    folder, key = PrefixedStorage(storage, directory), f"{FOLDER}/{read_id}"
    try:
        data = folder.get(key, READ_BYTES_MAX)
    except NotFoundError as exc:
        raise NotFoundError(
            "this read of a query's state is not there any more: call holdfast.state again",
            key=f"{directory}/{key}",
            storage=storage.url,
        ) from exc
    return StoredRead.decode(data, directory.partition("@")[0], f"{folder.url}/{key}")
