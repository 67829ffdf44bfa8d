"""The `Backend` of a shard that only the state server can open, through a socket.

What each call sends and receives is drawn in `holdfast.spark_integration.server.service`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.backends.base import MAX_HASH, Backend, BackendStatistics, Found, Pointer, View
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.backends.schema import find_table
from holdfast.errors import ClosedError, HoldfastError
from holdfast.spark_integration.client import streams as state_streams
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.exchange import Exchange
from holdfast.spark_integration.client.messages import ShardAddress, encode

#: For one request. It only ends the wait for a server that hangs: one that has died is noticed at once.
REQUEST_TIMEOUT_SECONDS = 600.0
#: For what only metrics want: without an answer they are null.
STATISTICS_TIMEOUT_SECONDS = 2.0


class RemoteView(View):
    """A version that the state server has open for this worker, and closes when the worker dies."""

    def __init__(self, client: StateClient, shard: ShardAddress, tables: Mapping[str, TableSchema], pointer: Pointer):
        self._client = client
        self._tables = tables
        self._pointer = pointer
        message = {"ask": "view", "shard": vars(shard), "pointer": str(pointer)}
        self._exchange: Exchange | None = Exchange(client, message, None)
        try:
            opened = self._exchange.answer()
        except BaseException:
            self.close()
            raise
        self._name: str = opened["view"]
        self._properties: Mapping[str, Any] = opened["properties"]

    @property
    def properties(self) -> Mapping[str, Any]:
        return self._properties

    def _asked(self, ask: str, table: str, **more: object) -> dict[str, object]:
        if self._exchange is None:
            raise ClosedError("the view was closed: open a new one", pointer=self._pointer)
        find_table(self._tables, table)
        return {"ask": ask, "view": self._name, "table": table, **more}

    def get(self, table: str, keys: Keys) -> Found:
        asked = self._asked("get", table)
        schema = self._tables[table]
        batch = state_streams.encode_keys(schema, keys)
        with Exchange(self._client, asked, REQUEST_TIMEOUT_SECONDS) as exchange:
            found = list(exchange.ask(state_streams.slices(batch), batch.schema))
        return state_streams.decode_found(schema, found)

    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        asked = self._asked("scan", table, first_hash=int(first_hash), last_hash=int(last_hash))
        with Exchange(self._client, asked, None) as exchange:
            exchange.end()
            for batch in exchange.receive():
                yield Run(self._tables[table], batch)

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        asked = self._asked("scan_prefix", table, columns=prefixes.columns.num_columns)
        cut = self._tables[table].prefix(prefixes.columns.num_columns)
        batch = state_streams.encode_keys(cut, prefixes)
        with Exchange(self._client, asked, None) as exchange:
            exchange.send(state_streams.slices(batch), batch.schema)
            for found in exchange.receive():
                yield Run(self._tables[table], found)

    def close(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            with suppress(HoldfastError):  # a server that is gone has closed it too
                exchange.end()
            exchange.close()


class RemoteBackend(Backend):
    """A shard of a backend with one owner, as a worker uses it.

    Parameters
    ----------
    client : StateClient
    shard : ShardAddress
        What the server opens.
    tables : mapping of str to TableSchema
        The shard's tables.
    new_id : callable
        Returns a new unique name each time.

    Raises
    ------
    UnavailableError
        No state server can be started.

    Notes
    -----
    Every method also raises `ServerLostError` when the server dies. What it was asked to make may then exist or not,
    as with any attempt that Spark drops.
    """

    contract_version = 1

    def __init__(
        self,
        client: StateClient,
        shard: ShardAddress,
        tables: Mapping[str, TableSchema],
        new_id: Callable[[], str],
    ) -> None:
        super().__init__(Path(shard.directory), tables, new_id, shard.backend_options)
        self._client = client
        self._shard = shard
        client.require_server()

    def _call(self, action: str, timeout_seconds: float = REQUEST_TIMEOUT_SECONDS, **fields: object) -> Any:
        body = encode({"shard": vars(self._shard), **fields})
        return self._client.call(action, body, timeout_seconds)

    def view(self, pointer: Pointer) -> View:
        return RemoteView(self._client, self._shard, self.tables, pointer)

    def apply(self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self._send("apply", runs, base=str(base) if base else None, new=str(new), properties=dict(properties))

    def load(self, pointer: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self._send("load", runs, pointer=str(pointer), properties=dict(properties))

    def _send(self, ask: str, runs: Mapping[str, Run], **fields: object) -> None:
        encoded = {table: state_streams.encode_run(run) for table, run in runs.items()}
        sizes = {table: sum(buffer.size for buffer in buffers) for table, buffers in encoded.items()}
        message = {"ask": ask, "shard": vars(self._shard), "sizes": sizes, **fields}
        slices = state_streams.byte_slices(buffer for buffers in encoded.values() for buffer in buffers)
        with Exchange(self._client, message, REQUEST_TIMEOUT_SECONDS) as exchange:
            exchange.send(slices, state_streams.BYTES)
            exchange.answer()

    def freeze(self, pointer: Pointer) -> list[Path]:
        return [Path(path) for path in self._call("freeze", pointer=str(pointer))]

    def thaw(self, pointer: Pointer, folder: Path) -> None:
        """See `Backend.thaw`.

        Raises
        ------
        InvalidArgumentError
            The folder is not below the executor's directory; it is left.
        """
        self._call("thaw", pointer=str(pointer), folder=str(folder))

    def versions(self) -> list[Pointer]:
        return [Pointer.parse(text) for text in self._call("versions")]

    def drop(self, pointers: Iterable[Pointer]) -> None:
        self._call("drop", pointers=[str(pointer) for pointer in pointers])

    def maintain(self, pointer: Pointer) -> int:
        return int(self._call("maintain", pointer=str(pointer)))

    def verify(self) -> list[Path]:
        return [Path(path) for path in self._call("verify")]

    def remove_leftovers(self, before_ns: int) -> int:
        return int(self._call("remove_leftovers", before_ns=before_ns))

    def statistics(self) -> BackendStatistics:
        return BackendStatistics(**self._call("shard_statistics", STATISTICS_TIMEOUT_SECONDS))

    def close(self) -> None:
        """Nothing is held open: the server keeps the shard for the next task."""
