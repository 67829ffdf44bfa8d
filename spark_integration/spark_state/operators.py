"""Spark's operators with state, as their metadata describes them, and which of them hold pointers.

::

    state/0/_metadata/metadata          v1
                                        {"operatorInfo": {"operatorId": 0, "operatorName": "applyInPandasWithState"},
                                         "stateStoreInfo": [{"storeName": "default", "numPartitions": 4, …}]}
    state/0/_metadata/v2/0              v2: the same, and "operatorPropertiesJson", from micro-batch 0 on
    state/0/0/_metadata/schema          "v2" ‖ columns of keys ‖ columns of values; each a number of texts, as JSON

Texts in a schema are Java's: 2 bytes for their size, then UTF-8; numbers have 4 bytes; all big endian.

Source: Spark 4.3's ``OperatorStateMetadata`` and ``SchemaHelper``, and locations that it wrote.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE, POINTER_COLUMN
from holdfast.spark_integration.transport.routes import ROUTE

#: The only store of a host's.
_STORE = "default"
_POINTERS_OF_GROUPS = ("groupState",)
_TIMEOUT = "timeoutTimestamp"
_FILE_BYTES_MAX = 64 << 20
_PARTITIONS_MAX = 1 << 20
_METADATA = re.compile(r"metadata|v2/(0|[1-9][0-9]{0,17})")


class NotKnownError(Exception):
    """Spark's state has a form that is not known here; the text says which."""


@contextmanager
def reading_state(location: str) -> Iterator[None]:
    """Map an unknown form of state to an error that users see."""
    try:
        yield
    except NotKnownError as exc:
        raise InvalidArgumentError(
            f"only Spark reads the pointers in its state of such a form, {exc}: save the query "
            "(holdfast savepoint create, which starts Spark for them), and read the savepoint",
            location=location,
        ) from exc


@dataclass(frozen=True)
class StateOperator:
    """One of Spark's operators with state."""

    number: int  #: From 0, in the query's plan
    host: str  #: Spark's name of it
    partitions: int  #: Of its state; 0 where it has several stores, or others than a host's
    variables: tuple[str, ...]  #: Names of its state variables; none where it has no such things
    #: What Spark keeps of ``transformWithState``: modes, and variables
    properties: Mapping[str, Any] = field(default_factory=dict)


class StateOperators:
    """The operators with state of a query, by micro-batch; what was read is kept."""

    def __init__(self, location: ObjectStorage) -> None:
        self._location = location
        self._read: dict[str, StateOperator] = {}
        self._pointer_columns: dict[int, tuple[str, ...]] = {}
        # Up to which micro-batch it is known which metadata there is, and by operator since when each holds.
        self._listed = -1
        self._versions: list[dict[int, str]] = []

    def at(self, batch_id: int) -> list[StateOperator]:
        """Return the operators as they were in a micro-batch, which is committed.

        Raises `CorruptionError` if metadata cannot be read; `NotKnownError` if it has another format.
        """
        if batch_id > self._listed:
            versions: list[dict[int, str]] = []
            while found := self._list(len(versions)):
                versions.append(found)
            self._versions, self._listed = versions, batch_id
        operators = []
        for number, since in enumerate(self._versions):
            if held := [first for first in since if first <= batch_id]:
                key = since[max(held)]
                if key not in self._read:
                    self._read[key] = _read(self._location, key, number)
                operators.append(self._read[key])
        return operators

    def hold_pointers(self, operator: StateOperator) -> bool:
        """Tell whether groups have pointers as their state; see `pointer_columns`."""
        return bool(self._columns(operator))

    def has_timeout(self, operator: StateOperator) -> bool:
        """Tell whether each pointer of a group has a timeout beside it."""
        return _TIMEOUT in self._columns(operator)

    def _columns(self, operator: StateOperator) -> tuple[str, ...]:
        if operator.number not in self._pointer_columns:
            self._pointer_columns[operator.number] = pointer_columns(self._location, operator)
        return self._pointer_columns[operator.number]

    def _list(self, number: int) -> dict[int, str]:
        """Return the keys of an operator's metadata by the micro-batch since which it holds."""
        folder = f"state/{number}/_metadata/"
        found = [(info.key, _METADATA.fullmatch(info.key.removeprefix(folder))) for info in self._location.list(folder)]
        return {int(match[1] or -1): key for key, match in found if match}


def _read(location: ObjectStorage, key: str, number: int) -> StateOperator:
    source = f"{location.url}/{key}"
    text = bytes(location.get(key, _FILE_BYTES_MAX))
    version, _, document = text.partition(b"\n")
    if version not in (b"v1", b"v2"):
        raise NotKnownError(f"{source} has a format other than v1 and v2")
    try:
        found = json.loads(document)
        operator, stores = found["operatorInfo"], found["stateStoreInfo"]
        if operator["operatorId"] != number or not isinstance(operator["operatorName"], str):
            raise ValueError("it belongs to another operator")
        partitions = [_partitions(store["numPartitions"]) for store in stores]
        is_hosts = [store["storeName"] for store in stores] == [_STORE]
        properties = json.loads(found.get("operatorPropertiesJson") or "{}")
        names = tuple(str(variable["stateName"]) for variable in properties.get("stateVariables", []))
        return StateOperator(number, operator["operatorName"], partitions[0] if is_hosts else 0, names, properties)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise CorruptionError(f"{source} does not describe an operator with state: {exc!r}") from exc


def _partitions(number: object) -> int:
    if type(number) is not int or not 0 < number <= _PARTITIONS_MAX:
        raise ValueError("not a number of partitions")
    return number


def pointer_columns(location: ObjectStorage, operator: StateOperator) -> tuple[str, ...]:
    """Return the pointer columns of an ``applyInPandasWithState`` group; empty if the names are not a pointer's.

    Raises `NotKnownError` or `CorruptionError` if the schema of the state cannot be read.
    """
    key = f"state/{operator.number}/0/_metadata/schema"
    source = f"{location.url}/{key}"
    try:
        data = bytes(location.get(key, _FILE_BYTES_MAX))
    except NotFoundError as exc:
        raise NotKnownError(f"{source} is not there") from exc
    try:
        version, at = _text(data, 0)
        if version != "v2":
            raise NotKnownError(f"{source} has a format other than v2")
        _, at = _texts(data, at)
        values, _ = _texts(data, at)
        columns = json.loads(values)["fields"]
        names = tuple(column["name"] for column in columns)
        if names[:1] != _POINTERS_OF_GROUPS or names[1:] not in ((), (_TIMEOUT,)):
            return ()
        state = columns[0]["type"]
        is_pointer = isinstance(state, dict) and [one["name"] for one in state["fields"]] == [POINTER_COLUMN]
        return names if is_pointer else ()
    except (struct.error, ValueError, TypeError, KeyError, RecursionError) as exc:
        raise CorruptionError(f"{source} holds no schema: {exc!r}") from exc


def metadata_of_groups(number: int, partitions: int) -> bytes:
    """Return the metadata of an ``applyInPandasWithState``, as Spark writes it."""
    store = {"storeName": _STORE, "numColsPrefixKey": 0, "numPartitions": partitions}
    operator = {"operatorId": number, "operatorName": GROUP_STATE}
    return f"v1\n{_json({'operatorInfo': operator, 'stateStoreInfo': [store]})}".encode()


def schema_of_groups(*, has_timeout: bool) -> bytes:
    """Return the schema of its state, as Spark writes it where groups have pointers.

    All columns may be null, so that they fit whatever schema a version of Spark expects.
    """
    pointer = _struct(**{POINTER_COLUMN: "binary"})
    value = _struct(groupState=pointer, **({_TIMEOUT: "long"} if has_timeout else {}))
    parts = [struct.pack(">i", 1) + _java_text(_json(one)) for one in (_struct(**{ROUTE: "integer"}), value)]
    return _java_text("v2") + b"".join(parts)


def _struct(**columns: Any) -> dict[str, Any]:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns.items()]
    return {"type": "struct", "fields": fields}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _java_text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


def _text(data: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from(">H", data, at)
    return data[at + 2 : at + 2 + size].decode(), at + 2 + size


def _texts(data: bytes, at: int) -> tuple[str, int]:
    (count,) = struct.unpack_from(">i", data, at)
    parts, at = [], at + 4
    for _ in range(count):
        part, at = _text(data, at)
        parts.append(part)
    return "".join(parts), at
