"""Messages between workers and the state server: plain JSON, errors included, so neither side runs the other's code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Self, TypeVar

from holdfast import clock, errors
from holdfast.backends.base import Pointer
from holdfast.backends.run import TableSchema
from holdfast.backends.schema import decode_schemas, encode_schemas
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError
from holdfast.snapshotter.fields import NOT_STORED, Coding, SignedInt, Stored
from holdfast.snapshotter.snapshots import SnapshotPolicy

Message = Mapping[str, Any]
_Kind = TypeVar("_Kind")


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return json.dumps(message).encode()


def decode(data: bytes) -> Message:
    """Return the message that `encode` wrote. Raises `InvalidArgumentError` if it is not a JSON object."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgumentError("a request to the state server is not JSON") from exc
    if not isinstance(message, dict):
        raise InvalidArgumentError("a request to the state server is not a JSON object")
    return message


def field(message: Message, name: str, kind: type[_Kind]) -> _Kind:
    """Return a field of a message, which must be of exactly this type. Raises `InvalidArgumentError`."""
    value = message.get(name)
    if type(value) is not kind:
        raise InvalidArgumentError(
            f"a request to the state server needs {name!r} as {kind.__name__}", given=type(value).__name__
        )
    return value


class _Message(Stored, notice=True):
    """A message; later releases may add fields."""

    @classmethod
    def read(cls, values: object, source: str = "a request to the state server") -> Self:
        """Return the message that decoded JSON holds. Raises `InvalidArgumentError`."""
        try:
            return super().read(values, source)
        except CorruptionError as exc:
            raise InvalidArgumentError(exc.message, **exc.facts) from exc


@dataclass(frozen=True)
class ShardAddress(_Message, notice=True):
    """What the state server must know to open a shard."""

    directory: str  #: The shard's local directory
    backend: str  #: Name under which the backend is registered
    backend_options: Mapping[str, str]  #: What the configuration has below ``spark.holdfast.<backend>.``
    #: By table: its schemas, as `holdfast.backends.schema.encode_schemas` gives them
    tables: Mapping[str, list[str]]

    @classmethod
    def of(
        cls, directory: object, backend: str, backend_options: Mapping[str, str], tables: Mapping[str, TableSchema]
    ) -> ShardAddress:
        """Return the address of a shard whose tables have these schemas."""
        return cls(str(directory), backend, dict(backend_options), encode_schemas(tables))

    def schemas(self) -> dict[str, TableSchema]:
        """Return the tables' schemas. Raises `CorruptionError` if they cannot be read."""
        return decode_schemas(self.tables)


@dataclass(frozen=True)
class MeasuredBatch(_Message, notice=True):
    """What a shard's call has measured, and for which micro-batch."""

    batch_id: int | None  #: None where Spark does not tell
    batch_ms: int  #: When the micro-batch was planned: the same in every attempt at it
    #: By the names of `holdfast.spark_integration.client.measures.CallMeasures`
    values: Mapping[str, SignedInt | None]


@dataclass(frozen=True)
class RecentBatch(_Message, notice=True):
    """One micro-batch of one operator, on one executor or over several."""

    #: The query's id, and the name of the operator's directory
    query: str
    operator: str
    batch_id: int | None  #: None where Spark does not tell
    batch_ms: int  #: When it was planned, in ms since 1970
    shards: int  #: Shards that were called
    values: Mapping[str, SignedInt]  #: Their measures together, by the names of `CallMeasures`

    def ms(self, name: str) -> float:
        """Return a measured time in ms, given its name without the unit."""
        return self.values.get(f"{name}_us", 0) / 1_000


@dataclass(frozen=True)
class SnapshotNews(_Message, notice=True):
    """The state server's answer to an announcement: the outcome of the shard's snapshots."""

    #: Since the last snapshot that this server knows, or since it first saw the shard; None without durable storage
    age_ms: int | None = None
    #: What it has uploaded since the shard's previous micro-batch, and how often it failed
    stored_bytes: int = 0
    failures: int = 0

    def __add__(self, later: SnapshotNews) -> SnapshotNews:
        return SnapshotNews(later.age_ms, self.stored_bytes + later.stored_bytes, self.failures + later.failures)


def _policy(values: Mapping[str, int | None]) -> SnapshotPolicy:
    try:
        return SnapshotPolicy(**values)  # type: ignore[arg-type]  # a worker has made them of one
    except TypeError as exc:
        raise ValueError("other fields") from exc


@dataclass(frozen=True)
class Committed(_Message, notice=True):
    """A shard has a new version."""

    shard: ShardAddress
    accepted: Pointer | None  #: The version that the query has accepted: older ones may be dropped
    committed: Pointer  #: The new version, which the query may still drop
    prefix: str  #: Of the shard in durable storage
    state_dir: str | None
    #: As configured. They cross a socket that only this user can open, and are never stored.
    storage_options: Mapping[str, str]
    policy: Annotated[SnapshotPolicy, Coding(Mapping[str, int | None], _policy, asdict)]
    retained_versions: int  #: How many versions before the accepted one the query may return to
    upload_bandwidth_bytes: int | None = None  #: Limit on the bytes per second that snapshots send
    measured: MeasuredBatch | None = None
    metrics_port: int | None = None  #: First of the ports where the server may answer Prometheus; None for none
    metrics_address: str = "127.0.0.1"
    #: In the state server: when the announcement came, in ms that never go back
    announced_ms: Annotated[int, NOT_STORED] = dataclasses.field(default_factory=clock.monotonic_ms, compare=False)

    def __repr__(self) -> str:
        accepted = str(self.accepted) if self.accepted else None
        return f"Committed({self.shard.directory!r}, accepted={accepted!r}, committed={str(self.committed)!r})"

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return encode(self.to_json())

    @classmethod
    def of_bytes(cls, data: bytes) -> Committed:
        """Return the message that `encode` wrote. Raises `InvalidArgumentError` if it did not write this."""
        # Workers of an earlier release do not name the last fields.
        defaults = {one.name: one.default for one in fields(cls) if one.default is not dataclasses.MISSING}
        return cls.read({**defaults, **decode(data)})


def encode_error(error: HoldfastError) -> bytes:
    """Return an error as bytes: the name of its class, its message and its facts."""
    return encode({"error": type(error).__name__, "message": error.message, "facts": error.facts})


def decode_error(data: bytes) -> HoldfastError | None:
    """Return the error that `encode_error` wrote, None for anything else; an unknown class is `HoldfastError`."""
    try:
        message = decode(data)
        text, facts = field(message, "message", str), field(message, "facts", dict)
        name = field(message, "error", str)
    except InvalidArgumentError:
        return None
    return errors.class_of(name, HoldfastError)(text, **facts)
