"""Messages between workers and the state server, errors included, as plain JSON: neither side unpickles anything."""

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
    """Return a message's field of exactly this type. Raises `InvalidArgumentError`."""
    value = message.get(name)
    if type(value) is not kind:
        raise InvalidArgumentError(
            f"a request to the state server must have {name!r} of type {kind.__name__}", given=type(value).__name__
        )
    return value


class _Message(Stored, notice=True):
    """A message; later releases may add fields."""

    @classmethod
    def read(cls, values: object, source: str = "a request to the state server") -> Self:
        """Return the message from decoded JSON. Raises `InvalidArgumentError`."""
        try:
            return super().read(values, source)
        except CorruptionError as exc:
            raise InvalidArgumentError(exc.message, **exc.facts) from exc


@dataclass(frozen=True)
class ShardAddress(_Message, notice=True):
    """The facts that the state server needs to open a shard."""

    directory: str  #: The shard's local directory
    backend: str  #: The backend's registered name
    backend_options: Mapping[str, str]  #: Settings below ``spark.holdfast.<backend>.``
    #: Each table's schemas, in the form of `holdfast.backends.schema.encode_schemas`
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
    """The measures of a shard's call in a micro-batch."""

    batch_id: int | None  #: None if unknown
    batch_ms: int  #: When the micro-batch was planned: equal in all attempts
    #: By field of `holdfast.spark_integration.client.measures.CallMeasures`
    values: Mapping[str, SignedInt | None]


@dataclass(frozen=True)
class RecentBatch(_Message, notice=True):
    """A micro-batch of an operator, on one executor or on several."""

    #: The query's id, and the name of the operator's directory
    query: str
    operator: str
    batch_id: int | None  #: None if unknown
    batch_ms: int  #: When it was planned, in ms since 1970
    shards: int  #: Number of shards called
    values: Mapping[str, SignedInt]  #: The shards' merged measures, by field of `CallMeasures`

    def ms(self, name: str) -> float:
        """Return a measured time in ms, given its name without the unit."""
        return self.values.get(f"{name}_us", 0) / 1_000


@dataclass(frozen=True)
class SnapshotNews(_Message, notice=True):
    """The state server's answer to an announcement: the outcome of the shard's snapshots."""

    #: Time since the shard's last known snapshot, or since its first announcement; None without durable storage
    age_ms: int | None = None
    #: Bytes uploaded, and failures, since the shard's previous micro-batch
    stored_bytes: int = 0
    failures: int = 0

    def __add__(self, later: SnapshotNews) -> SnapshotNews:
        return SnapshotNews(later.age_ms, self.stored_bytes + later.stored_bytes, self.failures + later.failures)


def _policy(values: Mapping[str, int | None]) -> SnapshotPolicy:
    try:
        return SnapshotPolicy(**values)  # type: ignore[arg-type]  # a worker has made them of one
    except TypeError as exc:
        raise ValueError("unknown or missing fields") from exc


@dataclass(frozen=True)
class Committed(_Message, notice=True):
    """The announcement of a shard's new version."""

    shard: ShardAddress
    accepted: Pointer | None  #: The version that the query has accepted: older versions may be dropped
    committed: Pointer  #: The new version, which the query may still discard
    prefix: str  #: The shard's prefix in durable storage
    state_dir: str | None
    #: As configured. They are sent only through a socket that no other user can open, and are never stored.
    storage_options: Mapping[str, str]
    policy: Annotated[SnapshotPolicy, Coding(Mapping[str, int | None], _policy, asdict)]
    retained_versions: int  #: How many versions before the accepted version must stay restorable
    upload_bandwidth_bytes: int | None = None  #: Limit on the bytes per second that snapshots upload
    measured: MeasuredBatch | None = None
    metrics_port: int | None = None  #: The first port to try for the Prometheus endpoint; None for no endpoint
    metrics_address: str = "127.0.0.1"
    #: When the state server received the announcement, by its monotonic clock
    announced_ms: Annotated[int, NOT_STORED] = dataclasses.field(default_factory=clock.monotonic_ms, compare=False)

    def __repr__(self) -> str:
        accepted = str(self.accepted) if self.accepted else None
        return f"Committed({self.shard.directory!r}, accepted={accepted!r}, committed={str(self.committed)!r})"

    def encode(self) -> bytes:
        return encode(self.to_json())

    @classmethod
    def of_bytes(cls, data: bytes) -> Committed:
        """Return the message that `encode` wrote. Raises `InvalidArgumentError` for other data."""
        # Workers of earlier releases omit the last fields.
        defaults = {one.name: one.default for one in fields(cls) if one.default is not dataclasses.MISSING}
        return cls.read({**defaults, **decode(data)})


def encode_error(error: HoldfastError) -> bytes:
    """Encode an error's class, message and facts."""
    return encode({"error": type(error).__name__, "message": error.message, "facts": error.facts})


def decode_error(data: bytes) -> HoldfastError | None:
    """Return the error that `encode_error` wrote, as `HoldfastError` if its class is unknown; None for other data."""
    try:
        message = decode(data)
        text, facts = field(message, "message", str), field(message, "facts", dict)
        name = field(message, "error", str)
    except InvalidArgumentError:
        return None
    return errors.class_of(name, HoldfastError)(text, **facts)
