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
from dataclasses import dataclass

from holdfast.errors import CorruptionError, NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.shard.pointer_row import POINTER_COLUMNS

#: Spark's names of the hosts.
GROUP_STATE, STATE_VARIABLES = "applyInPandasWithState", "transformWithStateInPandasExec"
#: The only store of a host's.
_STORE = "default"
_POINTERS_OF_GROUPS = ("groupState",)
_TIMEOUT = "timeoutTimestamp"
_FILE_BYTES_MAX = 64 << 20
_PARTITIONS_MAX = 1 << 20
_METADATA = re.compile(r"metadata|v2/(0|[1-9][0-9]{0,17})")


class NotKnownError(Exception):
    """Spark's state has a form that is not read here; the text says which. Spark's own reader may read it."""


@dataclass(frozen=True)
class StateOperator:
    """One of Spark's operators with state.

    Attributes
    ----------
    number : int
        From 0, in the query's plan.
    host : str
        Spark's name of it.
    partitions : int
        Of its state; 0 where it has several stores, or others than a host's.
    variables : tuple of str
        Names of its state variables; none where it has no such things.
    """

    number: int
    host: str
    partitions: int
    variables: tuple[str, ...]


def read_operators(location: ObjectStorage, batch_id: int) -> list[StateOperator]:
    """Return the operators with state of a query as they were in a micro-batch.

    Parameters
    ----------
    location : ObjectStorage
        Its root is the checkpoint location.

    Raises
    ------
    CorruptionError
        Metadata cannot be read.
    NotKnownError
        It has another format.
    """
    found: list[StateOperator] = []
    while key := _newest(location, len(found), batch_id):
        found.append(_read(location, key, len(found)))
    return found


def _newest(location: ObjectStorage, number: int, batch_id: int) -> str | None:
    """Return the key of an operator's metadata that holds for a micro-batch; None if it has none."""
    folder = f"state/{number}/_metadata/"
    versions: dict[int, str] = {}
    for info in location.list(folder):
        match = _METADATA.fullmatch(info.key.removeprefix(folder))
        if match and (since := int(match[1] or -1)) <= batch_id:
            versions[since] = info.key
    return versions[max(versions)] if versions else None


def _read(location: ObjectStorage, key: str, number: int) -> StateOperator:
    source = f"{location.url}/{key}"
    text = bytes(location.get(key, _FILE_BYTES_MAX))
    version, _, document = text.partition(b"\n")
    if version not in (b"v1", b"v2"):
        raise NotKnownError(f"{source} has another format than v1 and v2")
    try:
        found = json.loads(document)
        operator, stores = found["operatorInfo"], found["stateStoreInfo"]
        if operator["operatorId"] != number or not isinstance(operator["operatorName"], str):
            raise ValueError("it is of another operator")
        partitions = [_partitions(store["numPartitions"]) for store in stores]
        is_hosts = [store["storeName"] for store in stores] == [_STORE]
        variables = json.loads(found.get("operatorPropertiesJson") or "{}").get("stateVariables", [])
        names = tuple(str(variable["stateName"]) for variable in variables)
        return StateOperator(number, operator["operatorName"], partitions[0] if is_hosts else 0, names)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise CorruptionError(f"{source} does not describe an operator with state: {exc!r}") from exc


def _partitions(number: object) -> int:
    if type(number) is not int or not 0 < number <= _PARTITIONS_MAX:
        raise ValueError("not a number of partitions")
    return number


def holds_pointers(location: ObjectStorage, operator: StateOperator) -> bool:
    """Tell whether the groups of ``applyInPandasWithState`` have pointers as their state, by its columns' names.

    Raises
    ------
    NotKnownError, CorruptionError
        The schema of the state cannot be read.
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
            raise NotKnownError(f"{source} has another format than v2")
        _, at = _texts(data, at)
        values, _ = _texts(data, at)
        columns = json.loads(values)["fields"]
        names = tuple(column["name"] for column in columns)
        if names[:1] != _POINTERS_OF_GROUPS or names[1:] not in ((), (_TIMEOUT,)):
            return False
        state = columns[0]["type"]
        return isinstance(state, dict) and [field["name"] for field in state["fields"]] == list(POINTER_COLUMNS)
    except (struct.error, ValueError, TypeError, KeyError, RecursionError) as exc:
        raise CorruptionError(f"{source} holds no schema: {exc!r}") from exc


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
