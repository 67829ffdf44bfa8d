"""Reads a query's pointers from the files of Spark's state stores, and writes such files for a new query.

::

    Spark's checkpoint location              spark.holdfast.state.dir
        state/0/3/…  ──pointers──▶               <operator>/operator           schemas, number of shards
                                                 <operator>/shard-0003/…       each shard, restored at its pointer

A query may have several stateful operators. Only the pointers show which operators are ours and which directories they
use; the session's names and settings do not. These files are read:

::

    offsets/7       the provider and codec that Spark pinned
    commits/7       ids of state stores, if any, by operator and partition
    state/0/…       version 8: a row per shard, whose value is the pointer
    state/0/_metadata/metadata          v1
                                        {"operatorInfo": {"operatorId": 0, "operatorName": "applyInPandasWithState"},
                                         "stateStoreInfo": [{"storeName": "default", "numPartitions": 4, …}]}
    state/0/_metadata/v2/0              v2: the same, and "operatorPropertiesJson", since micro-batch 0
    state/0/0/_metadata/schema          "v2" ‖ key columns ‖ value columns; each a count and texts of JSON

Texts in a schema are Java's: a 2-byte size, then UTF-8. Numbers have 4 bytes. All are big endian.

Keys and values are Spark's rows (`holdfast.spark_integration.spark_state.row_streams`). On RocksDB, a byte with the
encoding's version, 0, precedes each row, and rows may be Avro. A value is the struct ``groupState``, perhaps with a
timeout, or the pointer itself.

These files are written for a query that starts with pointers::

    state/0/_metadata/metadata      the operator, and its number of partitions
    state/0/0/_metadata/schema      the columns of keys and values
    state/0/<partition>/1.delta     version 1, after micro-batch 0: the pointers of the partition's shards

These are the files of ``applyInPandasWithState`` on Spark's default state store; only Spark writes RocksDB's files.
`tests/spark/savepoints/test_new_state.py` compares their decompressed bytes with the files of each Spark version.

Source: Spark 4.3's ``OperatorStateMetadata``, ``SchemaHelper``, ``FlatMapGroupsWithStateExecHelper``,
``OffsetSeqMetadata`` and ``HDFSBackedStateStoreProvider``, and locations written by 4.0 to 4.3.
"""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.shard.pointer_row import (
    GROUP_STATE,
    POINTER_COLUMN,
    POINTER_VARIABLE,
    STATE_VARIABLES,
    PointerRow,
    operator_of,
)
from holdfast.spark_integration.shard.timeout import TIME_MODES, TimeMode, TimeoutConf
from holdfast.spark_integration.spark_state import row_streams
from holdfast.spark_integration.spark_state.query_location import LoggedBatch
from holdfast.spark_integration.spark_state.row_streams import (
    CODECS,
    LZ4,
    WRITTEN_CODECS,
    Named,
    Rows,
    avro_binary,
    checked_unique_id,
    compressed,
    first_binary,
    stream_of_rows,
    too_much,
    unsafe_row,
)
from holdfast.spark_integration.transport.routes import ROUTE, route_of_hash

#: The only store of an operator that holds pointers.
_STORE = "default"
_POINTERS_OF_GROUPS = ("groupState",)
_TIMEOUT = "timeoutTimestamp"
_FILE_BYTES_MAX = 64 << 20
_PARTITIONS_MAX = 1 << 20
_METADATA, _SCHEMA_BEGIN = re.compile(r"metadata|v2/(0|[1-9][0-9]{0,17})"), b"\0\2v2"
_PREFIX = "spark.sql.streaming.stateStore."
#: The setting that names the class of state stores.
PROVIDER = f"{_PREFIX}providerClass"
FILES, _ROCKSDB = "HDFSBackedStateStoreProvider", "RocksDBStateStoreProvider"
_PACKAGE = "org.apache.spark.sql.execution.streaming.state."
_CODEC = re.compile(r"(?:org\.apache\.spark\.io\.)?(\w+?)(?:compressioncodec)?", re.IGNORECASE)
#: Settings of rows' checksums and, on RocksDB, of their encoding.
ROW_CHECKSUM, ENCODING = f"{_PREFIX}rowChecksum.enabled", f"{_PREFIX}encodingFormat"
_UNSAFE_ROW, _AVRO = "unsaferow", "avro"
_ENCODING_VERSION = b"\0"
#: Limit in bytes of a file, of its decompressed content and of all rows, for a partition that is read alone.
FILE_BYTES_MAX = 1 << 30
#: The same for each of several partitions that are read in parallel; together they have about the same limit.
PART_BYTES_MAX = 64 << 20
_AT_ONCE = 16
#: Limit in bytes of an operator's pointers with the commits that they carry.
KEPT_BYTES_MAX = 4 << 30
#: Held while a large partition is read.
_ALONE = threading.Lock()
_THREADS = 16
_FORMAT, _KNOWN_FORMAT = "spark.sql.streaming.flatMapGroupsWithState.stateFormatVersion", "2"
#: The form of rows in written files.
PLAIN_ROWS: Mapping[str, str] = {ROW_CHECKSUM: "false", ENCODING: "unsaferow"}
_NO_TIMEOUT = -1


class NeedsSparkError(Exception):
    """Only Spark can write state in the form that the message names."""


def _not_known(form: str, **where: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"holdfast cannot read this form of Spark's state, only what Spark's own state stores write: {form}", **where
    )


@dataclass(frozen=True)
class StateOperator:
    """A stateful operator of Spark."""

    number: int  #: From 0, in the query's plan
    host: str  #: Spark's name of the operator
    partitions: int  #: Partitions of its state; 0 if its stores differ from a pointer operator's
    variables: tuple[str, ...]  #: Names of its state variables, if any
    #: What Spark keeps of ``transformWithState``: modes, and variables
    properties: Mapping[str, Any] = field(default_factory=dict)


class StateOperators:
    """Reads a query's stateful operators by micro-batch; results are cached."""

    def __init__(self, location: ObjectStorage) -> None:
        self._location = location
        self._read = cache(partial(_read, location))
        self._columns = cache(partial(_pointer_columns, location))
        # The micro-batch up to which metadata is listed, and by operator each file's first micro-batch.
        self._listed = -1
        self._versions: list[dict[int, str]] = []

    def at(self, batch_id: int) -> list[StateOperator]:
        """Return the operators at a committed micro-batch. Raises `CorruptionError`, `InvalidArgumentError`."""
        if batch_id > self._listed:
            versions: list[dict[int, str]] = []
            while found := self._list(len(versions)):
                versions.append(found)
            self._versions, self._listed = versions, batch_id
        operators = []
        for number, since in enumerate(self._versions):
            if held := [first for first in since if first <= batch_id]:
                operators.append(self._read(since[max(held)], number))
        return operators

    def every(self, batch_id: int) -> list[StateOperator]:
        """Like `at`, but raises if there are no operators or an operator is missing."""
        found = self.at(batch_id)
        if self._location.list(f"state/{len(found)}/"):  # numbers have no gaps, and each operator has metadata
            raise CorruptionError(
                "Spark's metadata of an operator with state is missing: the checkpoint location was copied in part, "
                "or files of it were deleted; restore them",
                number=len(found),
                location=self._location.url,
            )
        if not found:
            raise InvalidArgumentError(
                "this is not the checkpoint location of a query with state that has committed a micro-batch",
                checkpoint_location=self._location.url,
            )
        return found

    def hold_pointers(self, operator: StateOperator) -> bool:
        """Return whether an operator holds holdfast's pointers. Raises `InvalidArgumentError`, `CorruptionError`."""
        if operator.host == GROUP_STATE:
            return bool(operator.partitions and self._columns(operator.number))
        return operator.host == STATE_VARIABLES and POINTER_VARIABLE in operator.variables

    def has_timeout(self, operator: StateOperator) -> bool:
        """Return whether each pointer of a group has a timeout."""
        return _TIMEOUT in self._columns(operator.number)

    def _list(self, number: int) -> dict[int, str]:
        """Return the keys of an operator's metadata by the first micro-batch to which each applies."""
        folder = f"state/{number}/_metadata/"
        found = [(info.key, _METADATA.fullmatch(info.key.removeprefix(folder))) for info in self._location.list(folder)]
        return {int(match[1] or -1): key for key, match in found if match}


def _read(location: ObjectStorage, key: str, number: int) -> StateOperator:
    source = f"{location.url}/{key}"
    text = bytes(location.get(key, _FILE_BYTES_MAX))
    version, _, document = text.partition(b"\n")
    if version not in (b"v1", b"v2"):
        raise _not_known(f"{source} has a format other than v1 and v2")
    try:
        found = json.loads(document)
        operator, stores = found["operatorInfo"], found["stateStoreInfo"]
        if operator["operatorId"] != number or not isinstance(operator["operatorName"], str):
            raise ValueError("it belongs to a different operator")
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


def _pointer_columns(location: ObjectStorage, number: int) -> tuple[str, ...]:
    """Return the pointer columns of an operator of groups; empty if the operator is not ours."""
    key = f"state/{number}/0/_metadata/schema"
    source = f"{location.url}/{key}"
    try:
        data = bytes(location.get(key, _FILE_BYTES_MAX))
    except NotFoundError as exc:
        raise _not_known(f"{source} does not exist") from exc
    if data[: len(_SCHEMA_BEGIN)] != _SCHEMA_BEGIN[: len(data)]:
        raise _not_known(f"{source} has a format other than v2")
    try:
        _, at = _texts(data, len(_SCHEMA_BEGIN))
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
    """Return the metadata of an ``applyInPandasWithState`` in Spark's format."""
    store = {"storeName": _STORE, "numColsPrefixKey": 0, "numPartitions": partitions}
    operator = {"operatorId": number, "operatorName": GROUP_STATE}
    return f"v1\n{_json({'operatorInfo': operator, 'stateStoreInfo': [store]})}".encode()


def schema_of_groups(*, has_timeout: bool) -> bytes:
    """Return the schema of groups with pointers, all nullable, which every version of Spark accepts."""
    pointer = _struct(**{POINTER_COLUMN: "binary"})
    value = _struct(groupState=pointer, **({_TIMEOUT: "long"} if has_timeout else {}))
    parts = [struct.pack(">i", 1) + _java_text(_json(one)) for one in (_struct(**{ROUTE: "integer"}), value)]
    return _SCHEMA_BEGIN + b"".join(parts)


def _struct(**columns: Any) -> dict[str, Any]:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns.items()]
    return {"type": "struct", "fields": fields}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _java_text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


def _texts(data: bytes, at: int) -> tuple[str, int]:
    (count,) = struct.unpack_from(">i", data, at)
    parts, at = [], at + 4
    for _ in range(count):
        (size,) = struct.unpack_from(">H", data, at)
        parts.append(data[at + 2 : at + 2 + size].decode())
        at += 2 + size
    return "".join(parts), at


@dataclass(frozen=True)
class StateStores:
    """Spark's state stores of a query after a micro-batch."""

    version: int  #: The version that the micro-batch committed
    provider: str  #: The class of the state stores, without the package
    codec: str
    has_checksums: bool  #: Whether rows have checksums
    is_avro: bool  #: Whether rows are Avro, not Spark's
    unique_ids: Mapping[int, tuple[str, ...]]  #: Ids of partitions by operator; empty if stores have no ids

    @classmethod
    def of(cls, batch: LoggedBatch, location: str) -> StateStores:
        """Return the stores by Spark's pinned settings. Raises `InvalidArgumentError`, `CorruptionError`."""
        pinned = batch.conf
        provider, codec = str(pinned.get(PROVIDER, _PACKAGE + FILES)), _codec_of(pinned)
        if provider not in (_PACKAGE + FILES, _PACKAGE + _ROCKSDB):
            raise _not_known(f"the state store {provider[:200]}", location=location)
        if codec not in CODECS:
            raise _not_known(f"compressed by {codec[:80]}", location=location)
        provider = provider.removeprefix(_PACKAGE)
        has_checksums = str(pinned.get(ROW_CHECKSUM)).lower() == "true"
        encoding = str(pinned.get(ENCODING, _UNSAFE_ROW)).lower() if provider == _ROCKSDB else _UNSAFE_ROW
        if encoding not in (_UNSAFE_ROW, _AVRO):
            raise _not_known(f"written with {ENCODING}={encoding[:80]}", location=location)
        return cls(batch.batch_id + 1, provider, codec, has_checksums, encoding == _AVRO, _unique_ids(batch))

    def read(
        self, location: ObjectStorage, operator: int, partition: int, family: str | None, limit_bytes: int
    ) -> Rows:
        """Return a partition's rows without checksums and encoding versions; `limit_bytes` limits files and rows."""
        folder = PrefixedStorage(location, f"state/{operator}/{partition}")
        ids = self.unique_ids.get(operator)
        if ids is not None and partition >= len(ids):
            raise CorruptionError(f"{location.url}/commits lacks the state of a partition", partition=partition)
        at = Named(self.version, ids[partition] if ids is not None else None)
        if self.provider == FILES:
            return row_streams.read_rows(folder, at, self.codec, limit_bytes, has_checksums=self.has_checksums)
        # Each new process imports this module with the data source; few processes need RocksDB.
        from holdfast.spark_integration.spark_state import rocksdb_files

        rows = rocksdb_files.read_rows(folder, at, self.codec, family, limit_bytes, has_checksums=self.has_checksums)
        if any(row[:1] != _ENCODING_VERSION for pair in rows.items() for row in pair):
            raise _not_known(f"rows with a different encoding in {folder.url}")
        return {key[1:]: value[1:] for key, value in rows.items()}

    def pointer(self, value: bytes, source: str, *, is_of_group: bool) -> tuple[object, ...]:
        """Return a pointer's row from a value of Spark's state: a group's or a state variable's."""
        if self.is_avro:  # which Spark refuses for groups
            return (avro_binary(value, source),)
        # The group's state comes before the timeout.
        row = first_binary(value, source) if is_of_group else value
        if row is None:
            raise CorruptionError(f"{source} holds a group without a state")
        return (first_binary(row, source),)


def _codec_of(pinned: Mapping[str, object]) -> str:
    named = str(pinned.get(f"{_PREFIX}compression.codec", LZ4))
    match = _CODEC.fullmatch(named)
    return match[1].lower() if match else named


def _unique_ids(batch: LoggedBatch) -> dict[int, tuple[str, ...]]:
    found = {}
    try:
        for operator, partitions in batch.unique_ids.items():
            # Each partition lists its stores' ids; pointer operators have one store.
            found[int(operator)] = tuple(checked_unique_id(stores[0]) for stores in partitions)
    except (ValueError, TypeError, IndexError, AttributeError, KeyError) as exc:
        raise CorruptionError("the log of a committed micro-batch names no state", batch_id=batch.batch_id) from exc
    return found


def read_pointers(
    location: ObjectStorage,
    stores: StateStores,
    operator: StateOperator,
    operators: StateOperators,
    executor: Executor,
    partitions: Collection[int] | None = None,
) -> list[PointerRow] | None:
    """Return the pointers in all or the given partitions of a Spark operator, or None if it holds no pointers."""
    if not operators.hold_pointers(operator):
        return None
    family = None if operator.host == GROUP_STATE else POINTER_VARIABLE
    wanted = range(operator.partitions) if partitions is None else partitions
    read = partial(stores.read, location, operator.number, family=family)
    source = f"the state of operator {operator.number} in {location.url}"
    left_bytes = KEPT_BYTES_MAX
    pointers = []
    for rows in _each(read, wanted, executor):
        found = (stores.pointer(value, source, is_of_group=family is None) for value in rows.values())
        pointers += [PointerRow.read(one) for one in found]
        left_bytes -= sum(map(len, rows.values()))
        if left_bytes < 0:
            raise too_much(source, limit_bytes=KEPT_BYTES_MAX)
    return pointers


def _each(read: Callable[..., Rows], partitions: Collection[int], executor: Executor) -> Iterator[Rows]:
    """Yield the rows of partitions, read in parallel; large partitions are read alone."""

    def read_small(partition: int) -> Rows | None:
        try:
            return read(partition, limit_bytes=PART_BYTES_MAX)
        except CorruptionError:
            return None  # too large, or damaged: the next read reports damage

    # While a large partition is read, at most `_AT_ONCE` small partitions are in memory.
    with closing(ahead(executor, read_small, partitions, _AT_ONCE)) as found:
        for partition, small in zip(partitions, found, strict=True):
            if small is not None:
                yield small
            else:
                with _ALONE:
                    large = read(partition, limit_bytes=FILE_BYTES_MAX)
                yield large


@dataclass(frozen=True, kw_only=True)
class StatefulStep(StateOperator):
    """A stateful operator of Spark, with its pointers after a micro-batch."""

    is_ours: bool  #: Whether its state consists of holdfast's pointers
    has_timeout: bool  #: Whether each pointer has a timeout
    #: By holdfast operator and directory; shards that never had rows have no pointers
    pointers: Mapping[str, Mapping[str, list[PointerRow]]]


def modes_of(properties: Mapping[str, Any], number: int) -> dict[str, str]:
    """Return ``timeMode`` and ``outputMode`` of a ``transformWithState`` in the form of an operator's record."""
    modes = {name: str(properties.get(name, "")).lower() for name in ("timeMode", "outputMode")}
    if modes["timeMode"] not in TIME_MODES:
        raise InvalidArgumentError("Spark's metadata has an unknown time mode", number=number, **modes)
    return modes | {"timeMode": TIME_MODES[modes["timeMode"]]}


def stored_steps(location: ObjectStorage, batch: LoggedBatch) -> list[StatefulStep]:
    """Return a query's stateful operators with their pointers after a micro-batch."""
    with ThreadPoolExecutor(_THREADS) as executor:
        operators, stores = StateOperators(location), StateStores.of(batch, location.url)
        steps = []
        for operator in operators.every(batch.batch_id):
            rows = read_pointers(location, stores, operator, operators, executor)
            is_ours = rows is not None
            has_timeout = is_ours and operator.host == GROUP_STATE and operators.has_timeout(operator)
            pointers = by_operator(rows or (), location.url)
            steps.append(StatefulStep(**vars(operator), is_ours=is_ours, has_timeout=has_timeout, pointers=pointers))
        return steps


def by_operator(rows: Iterable[PointerRow], checkpoint_location: str) -> dict[str, dict[str, list[PointerRow]]]:
    """Group pointers by operator and directory. Raises `InvalidArgumentError` if the state is not durable."""
    found: dict[str, dict[str, list[PointerRow]]] = {}
    for row in rows:
        if row.directory is None:
            raise InvalidArgumentError(
                "the query has state that is not durable, because it runs without spark.holdfast.state.dir",
                location=checkpoint_location,
            )
        name = operator_of(row.directory) or row.directory
        found.setdefault(name, {}).setdefault(row.directory, []).append(row)
    return found


@dataclass(frozen=True)
class PointerOperator:
    """A stateful operator of Spark, with the pointers with which a new query starts."""

    host: str  #: Spark's name of the operator, as in `StatefulStep`
    timeout_conf: TimeoutConf  #: For ``applyInPandasWithState``
    time_mode: TimeMode  #: For ``transformWithStateInPandas``
    output_mode: str  #: For ``transformWithStateInPandas``
    pointers: tuple[PointerRow, ...]


@dataclass(frozen=True)
class NewState:
    """The form in which a new query's state is written."""

    partitions: int
    codec: str

    @classmethod
    def of(cls, pinned: Mapping[str, str], partitions: int, hosts: Iterable[str]) -> NewState:
        """Return the form for a query's pinned settings. Raises `NeedsSparkError`."""
        if PROVIDER not in pinned:
            raise NeedsSparkError("a state store that its session chooses")
        if (provider := str(pinned[PROVIDER])) != _PACKAGE + FILES:
            raise NeedsSparkError(f"the state store {provider.removeprefix(_PACKAGE)[:200]}")
        if (codec := _codec_of(pinned)) not in WRITTEN_CODECS:
            raise NeedsSparkError(f"state compressed by {codec[:80]}")
        for name, known in PLAIN_ROWS.items():
            if (given := str(pinned.get(name, known))).lower() != known:
                raise NeedsSparkError(f"state written with {name}={given[:80]}")
        if (version := pinned.get(_FORMAT)) != _KNOWN_FORMAT:
            raise NeedsSparkError(f"state written with {_FORMAT}={version}")
        for host in hosts:
            if host != GROUP_STATE:
                raise NeedsSparkError(f"the operator {host}")
        return cls(partitions, codec)

    def files(self, operators: Sequence[PointerOperator]) -> Iterator[tuple[str, bytes]]:
        """Yield the key, below the checkpoint location, and content of each file of the operators."""
        for number, operator in enumerate(operators):
            has_timeout = operator.timeout_conf != "NoTimeout"
            yield f"state/{number}/_metadata/metadata", metadata_of_groups(number, self.partitions)
            yield f"state/{number}/0/_metadata/schema", schema_of_groups(has_timeout=has_timeout)
            rows: list[Rows] = [{} for _ in range(self.partitions)]
            for route, pointer in sorted((route_of_hash(row.shard), row) for row in operator.pointers):
                rows[pointer.shard % self.partitions][unsafe_row(route & 0xFFFFFFFF)] = _value(pointer, has_timeout)
            for partition, mine in enumerate(rows):
                yield f"state/{number}/{partition}/1.delta", compressed(stream_of_rows(mine), self.codec)


def _value(pointer: PointerRow, has_timeout: bool) -> bytes:
    """Return a group's row: its state, and its timeout if it has one."""
    state = unsafe_row(*pointer.columns())
    if not has_timeout:
        return unsafe_row(state)
    due_ms = pointer.earliest_timer_ms
    if due_ms is None:
        return unsafe_row(state, _NO_TIMEOUT)
    return unsafe_row(state, due_ms - 1 if due_ms == _NO_TIMEOUT else due_ms)  # overdue, and not `_NO_TIMEOUT`
