"""What the state server answers, by Arrow Flight.

::

    action     ping, committed, statistics, recent, drain, snapshot        of the server as a whole
    action     versions, drop, freeze, thaw, maintain, verify, …   of one shard, for backends that have one owner
    exchange   view                                                opens a view, which lives as long as the exchange
    exchange   get, scan, scan_prefix        of an open view       see `holdfast.spark_integration.client.streams`
    exchange   apply, load                                         a new version, once all its runs have arrived

Every exchange is a separate call, so a worker's threads do not wait for each other. When a worker dies, its connection
breaks, which ends its exchanges and closes their views.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import pyarrow as pa
import pyarrow.flight as flight

from holdfast import clock
from holdfast.backends.base import Backend, Pointer, View
from holdfast.backends.run import Run, TableSchema
from holdfast.backends.schema import find_table
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.spark_integration.client import streams as state_streams
from holdfast.spark_integration.client.messages import (
    Committed,
    Message,
    ServerLostError,
    ShardAddress,
    decode,
    encode,
    encode_error,
    field,
    pointer_field,
)
from holdfast.spark_integration.server.batches import MeasuredBatches
from holdfast.spark_integration.server.durable_logs import DurableLogs
from holdfast.spark_integration.server.exposition import Exposition
from holdfast.spark_integration.server.housekeeping import Housekeeping
from holdfast.spark_integration.server.open_shards import OpenShards, require_below
from holdfast.spark_integration.server.snapshotting import Snapshotting

_log = logging.getLogger(__name__)

Reader: TypeAlias = flight.MetadataRecordBatchReader
Writer: TypeAlias = flight.MetadataRecordBatchWriter


@contextmanager
def _answering(what: str) -> Iterator[None]:
    """Send our own errors to the worker as they are; log any other as a defect, and end the call."""
    try:
        yield
    except HoldfastError as exc:
        raise flight.FlightServerError(type(exc).__name__, extra_info=encode_error(exc)) from exc
    except flight.FlightError:
        raise  # the connection broke: there is nobody to tell
    except Exception:
        _log.exception("%r failed", what)
        raise


class _OpenView(NamedTuple):
    """A version that a worker reads, the shard's tables, and what its look-ups have learned about their rows."""

    view: View
    tables: Mapping[str, TableSchema]
    piece_keys: dict[str, int]


class StateService(flight.FlightServerBase):
    """See the module.

    Parameters
    ----------
    location : str
    shards : OpenShards
    housekeeping : Housekeeping
    snapshotting : Snapshotting
    logs : DurableLogs
    batches : MeasuredBatches
    exposition : Exposition
    directory : pathlib.Path
        Where runs lie that are received and too large for memory.
    """

    def __init__(
        self,
        location: str,
        shards: OpenShards,
        housekeeping: Housekeeping,
        snapshotting: Snapshotting,
        logs: DurableLogs,
        batches: MeasuredBatches,
        exposition: Exposition,
        directory: Path,
    ) -> None:
        self._shards = shards
        self._housekeeping = housekeeping
        self._snapshotting = snapshotting
        self._logs = logs
        self._batches = batches
        self._exposition = exposition
        self._directory = directory
        self._views: dict[str, _OpenView] = {}
        self._piece_keys: WeakKeyDictionary[Backend, dict[str, int]] = WeakKeyDictionary()
        self._exchanges: dict[str, Callable[[Message, Reader, Writer], None]] = {
            "view": self._view,
            "get": self._get,
            "scan": self._scan,
            "scan_prefix": self._scan_prefix,
            "apply": self._apply,
            "load": self._load,
        }
        super().__init__(location)  # last: from here on it answers

    def do_action(self, context: object, action: flight.Action) -> Iterator[bytes]:
        """Answer one action with one JSON value."""
        with _answering(action.type):
            answer = self._act(action.type, action.body.to_pybytes())
            return iter([json.dumps(answer).encode()])

    def _act(self, kind: str, body: bytes) -> Any:
        if kind == "ping":
            return None
        if kind == "committed":
            committed = Committed.decode(body)
            self._housekeeping.announce(committed)
            news = self._snapshotting.announce(committed)
            self._batches.announce(committed)
            self._exposition.announce(committed)  # last: it may wait for a name to be resolved
            return asdict(news)
        if kind == "recent":
            return self._batches.recent()
        if kind == "snapshot":
            return self._snapshotting.write_now(Committed.decode(body))
        if kind == "statistics":
            return self._statistics()
        message = decode(body)
        if kind == "drain":
            return self._drain(field(message, "timeout_seconds", float))
        if kind not in _SHARD_ACTIONS:
            raise InvalidArgumentError("no such action", action=kind)
        with self._shards.use(ShardAddress.read(message)) as backend:
            return _SHARD_ACTIONS[kind](backend, message)

    def _statistics(self) -> dict[str, Any]:
        found = self._housekeeping.statistics()
        found["counters"] |= self._snapshotting.counters | self._shards.counters
        found["counters"]["metrics_errors"] = self._exposition.failures
        return found | {
            "metrics_port": self._exposition.port,
            "views": len(self._views),
            "snapshot_errors": self._snapshotting.errors(),
            "requests": self._logs.requests(),
        }

    def _drain(self, timeout_seconds: float) -> bool:
        end_ms = clock.monotonic_ms() + int(timeout_seconds * 1000)
        queues = (self._housekeeping.queue, self._snapshotting.queue)
        drained = [queue.drain(max(0, end_ms - clock.monotonic_ms()) / 1000) for queue in queues]
        return all(drained)

    def do_exchange(self, context: object, descriptor: flight.FlightDescriptor, reader: Reader, writer: Writer) -> None:
        """Carry out one exchange."""
        with _answering("exchange"):
            message = decode(descriptor.command)
            kind = field(message, "ask", str)
            if kind not in self._exchanges:
                raise InvalidArgumentError("no such exchange", ask=kind)
            self._exchanges[kind](message, reader, writer)

    def _view(self, message: Message, reader: Reader, writer: Writer) -> None:
        address, pointer = ShardAddress.read(message), _required_pointer(message, "pointer")
        with self._shards.use(address) as backend, backend.view(pointer) as view:
            name = clock.new_id()
            self._views[name] = _OpenView(view, backend.tables, self._piece_keys.setdefault(backend, {}))
            try:
                writer.write_metadata(encode({"view": name, "properties": view.properties}))
                for _ in _received(reader):  # nothing comes: it ends when the worker closes the view, or dies
                    raise InvalidArgumentError("a view takes no columns")
            finally:
                del self._views[name]

    def _viewed(self, message: Message) -> tuple[_OpenView, TableSchema]:
        """Return the open view and the table that a message names."""
        at = self._views.get(field(message, "view", str))
        if at is None:
            raise ServerLostError("the state server that had this version open has ended, and another runs now")
        return at, find_table(at.tables, field(message, "table", str))

    def _get(self, message: Message, reader: Reader, writer: Writer) -> None:
        at, schema = self._viewed(message)
        writer.begin(state_streams.found_columns(schema))
        _send(state_streams.look_up(at.view, schema, _received(reader), at.piece_keys), writer)

    def _scan(self, message: Message, reader: Reader, writer: Writer) -> None:
        at, schema = self._viewed(message)
        first, last = (field(message, name, int) for name in ("first_hash", "last_hash"))
        _send_runs(at.view.scan(schema.name, first, last), schema, writer)

    def _scan_prefix(self, message: Message, reader: Reader, writer: Writer) -> None:
        at, schema = self._viewed(message)
        prefix = schema.prefix(field(message, "columns", int))
        asked = state_streams.joined(list(_received(reader)), state_streams.key_columns(prefix))
        _send_runs(at.view.scan_prefix(schema.name, state_streams.decode_keys(prefix, asked)), schema, writer)

    def _apply(self, message: Message, reader: Reader, writer: Writer) -> None:
        base, new = pointer_field(message, "base"), _required_pointer(message, "new")
        with self._shards.use(ShardAddress.read(message)) as backend:
            runs = self._receive_runs(message, reader, backend)
            backend.apply(base, new, runs, field(message, "properties", dict))
        writer.write_metadata(encode({}))

    def _load(self, message: Message, reader: Reader, writer: Writer) -> None:
        pointer = _required_pointer(message, "pointer")
        with self._shards.use(ShardAddress.read(message)) as backend:
            runs = self._receive_runs(message, reader, backend)
            backend.load(pointer, runs, field(message, "properties", dict))
        writer.write_metadata(encode({}))

    def _receive_runs(self, message: Message, reader: Reader, backend: Backend) -> dict[str, Run]:
        sizes = field(message, "sizes", dict)
        for table, size in sizes.items():
            find_table(backend.tables, table)
            if type(size) is not int or size < 0:
                raise InvalidArgumentError("a request to the state server has a wrong size", table=table)
        return state_streams.receive_runs(sizes, _received(reader), backend.tables, self._directory)


def _required_pointer(message: Message, name: str) -> Pointer:
    return Pointer.parse(field(message, name, str))


def _received(reader: Reader) -> Iterator[pa.RecordBatch]:
    """Yield the batches that a worker sends until it has finished, or is gone."""
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        if chunk.data is not None:
            yield chunk.data


def _send(batches: Iterable[pa.RecordBatch], writer: Writer) -> None:
    for batch in batches:
        for part in state_streams.slices(batch):
            writer.write_batch(part)


def _send_runs(runs: Iterator[Run], schema: TableSchema, writer: Writer) -> None:
    writer.begin(schema.columns)
    _send((run.batch for run in runs if len(run)), writer)


def _drop(backend: Backend, message: Message) -> None:
    backend.drop([Pointer.parse(str(text)) for text in field(message, "pointers", list)])


def _thaw(backend: Backend, message: Message) -> None:
    folder = require_below(backend.executor_directory, field(message, "folder", str))
    backend.thaw(_required_pointer(message, "pointer"), folder)


_SHARD_ACTIONS: dict[str, Callable[[Backend, Message], Any]] = {
    "versions": lambda backend, _: [str(pointer) for pointer in backend.versions()],
    "drop": _drop,
    "freeze": lambda backend, m: [str(path) for path in backend.freeze(_required_pointer(m, "pointer"))],
    "thaw": _thaw,
    "maintain": lambda backend, m: backend.maintain(_required_pointer(m, "pointer")),
    "verify": lambda backend, _: [str(path) for path in backend.verify()],
    "remove_leftovers": lambda backend, m: backend.remove_leftovers(field(m, "before_ns", int)),
    "shard_statistics": lambda backend, _: asdict(backend.statistics()),
}
