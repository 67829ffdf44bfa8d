"""Messages between workers and the state server, besides Arrow columns.

Plain JSON, errors included, so that neither side can make the other run code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from holdfast import clock, errors
from holdfast.backends.base import Pointer
from holdfast.backends.run import TableSchema
from holdfast.backends.schema import decode_schemas, encode_schemas
from holdfast.errors import HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.snapshotter.snapshots.snapshots import SnapshotPolicy

Message = Mapping[str, Any]
_Kind = TypeVar("_Kind")


class ServerLostError(UnavailableError):
    """The state server has ended or does not answer: start over, and its state is restored."""


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


def pointer_field(message: Message, name: str) -> Pointer | None:
    """Return the pointer that a field holds as text; None if it is null."""
    return None if message.get(name) is None else Pointer.parse(field(message, name, str))


def _number_field(message: Message, name: str) -> int | None:
    return None if message.get(name) is None else field(message, name, int)


def _policy_field(message: Message) -> SnapshotPolicy:
    policy = field(message, "policy", dict)
    names = {f.name for f in fields(SnapshotPolicy)}
    if policy.keys() != names or not all(value is None or type(value) is int for value in policy.values()):
        raise InvalidArgumentError("a request to the state server needs numbers in 'policy'", names=sorted(names))
    return SnapshotPolicy(**policy)


def _texts_field(message: Message, name: str) -> dict[str, str]:
    texts = field(message, name, dict)
    if not all(isinstance(value, str) for value in texts.values()):
        raise InvalidArgumentError(f"a request to the state server needs texts in {name!r}")
    return texts


@dataclass(frozen=True)
class ShardAddress:
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

    @classmethod
    def read(cls, message: Message) -> ShardAddress:
        """Return the address that the field ``shard`` of a message holds. Raises `InvalidArgumentError`."""
        shard = field(message, "shard", dict)
        return cls(
            field(shard, "directory", str),
            field(shard, "backend", str),
            _texts_field(shard, "backend_options"),
            field(shard, "tables", dict),
        )

    def schemas(self) -> dict[str, TableSchema]:
        """Return the tables' schemas. Raises `CorruptionError` if they cannot be read."""
        return decode_schemas(self.tables)


@dataclass(frozen=True)
class MeasuredBatch:
    """What a shard's call has measured, and for which micro-batch."""

    batch_id: int | None  #: None where Spark does not tell
    batch_ms: int  #: When the micro-batch was planned: the same in every attempt at it
    values: Mapping[str, int | None]  #: By the names of `holdfast.spark_integration.client.measures.CallMeasures`

    @classmethod
    def read(cls, message: Message) -> MeasuredBatch | None:
        """Return what the field ``measured`` of a message holds; raises `InvalidArgumentError`."""
        if message.get("measured") is None:
            return None
        measured = field(message, "measured", dict)
        values = field(measured, "values", dict)
        if not all(value is None or type(value) is int for value in values.values()):
            raise InvalidArgumentError("a request to the state server needs numbers in 'values'")
        return cls(_number_field(measured, "batch_id"), field(measured, "batch_ms", int), values)


@dataclass(frozen=True)
class SnapshotNews:
    """What the state server answers to an announcement: what became of the shard's snapshots."""

    #: Since the last snapshot that this server knows, or since it first saw the shard; None without durable storage
    age_ms: int | None = None
    #: What it has uploaded since the shard's micro-batch before, and how often it failed
    stored_bytes: int = 0
    failures: int = 0

    def __add__(self, later: SnapshotNews) -> SnapshotNews:
        return SnapshotNews(later.age_ms, self.stored_bytes + later.stored_bytes, self.failures + later.failures)

    @classmethod
    def read(cls, message: object) -> SnapshotNews:
        """Return the news that an answer holds; raises `InvalidArgumentError`."""
        if not isinstance(message, dict):
            raise InvalidArgumentError("the state server's answer is not a JSON object")
        return cls(
            _number_field(message, "age_ms"), field(message, "stored_bytes", int), field(message, "failures", int)
        )


@dataclass(frozen=True)
class Committed:
    """A shard has a new version."""

    shard: ShardAddress
    accepted: Pointer | None  #: The version that the query has accepted: older ones may be dropped
    committed: Pointer  #: The new version, which the query may still drop
    prefix: str  #: Of the shard in durable storage
    state_dir: str | None
    #: As configured. They cross a socket that only this user can open, and are never stored.
    storage_options: Mapping[str, str]
    policy: SnapshotPolicy
    retained_versions: int  #: How many versions before the accepted one the query may return to
    upload_bandwidth_bytes: int | None = None  #: Limit on the bytes per second that snapshots send
    measured: MeasuredBatch | None = None
    metrics_port: int | None = None  #: First of the ports where the server may answer Prometheus; None for none
    metrics_address: str = "127.0.0.1"
    #: In the state server: when the announcement came, in ms that never go back. It is not sent.
    announced_ms: int = dataclasses.field(default_factory=clock.monotonic_ms, compare=False)

    def __repr__(self) -> str:
        accepted = str(self.accepted) if self.accepted else None
        return f"Committed({self.shard.directory!r}, accepted={accepted!r}, committed={str(self.committed)!r})"

    def encode(self) -> bytes:
        """Return the message as bytes."""
        pointers = {"accepted": str(self.accepted) if self.accepted else None, "committed": str(self.committed)}
        message = asdict(self) | pointers
        del message["announced_ms"]
        return encode(message)

    @classmethod
    def decode(cls, data: bytes) -> Committed:
        """Return the message that `encode` wrote. Raises `InvalidArgumentError` if it did not write this."""
        message = decode(data)
        committed = pointer_field(message, "committed")
        if committed is None:
            raise InvalidArgumentError("an announcement names no version")
        return cls(
            shard=ShardAddress.read(message),
            accepted=pointer_field(message, "accepted"),
            committed=committed,
            prefix=field(message, "prefix", str),
            state_dir=None if message.get("state_dir") is None else field(message, "state_dir", str),
            storage_options=_texts_field(message, "storage_options"),
            policy=_policy_field(message),
            retained_versions=field(message, "retained_versions", int),
            upload_bandwidth_bytes=_number_field(message, "upload_bandwidth_bytes"),
            measured=MeasuredBatch.read(message),
            metrics_port=_number_field(message, "metrics_port"),
            metrics_address=_metrics_address(message),
        )


def _metrics_address(message: Message) -> str:
    # Workers of an earlier release do not name it.
    return field(message, "metrics_address", str) if "metrics_address" in message else Committed.metrics_address


def encode_error(error: HoldfastError) -> bytes:
    """Return an error as bytes: the name of its class, its message and its facts."""
    return encode({"error": type(error).__name__, "message": error.message, "facts": error.facts})


def decode_error(data: bytes) -> HoldfastError | None:
    """Return the error that `encode_error` wrote, of the same class; None if it did not write this.

    A class that this release does not know comes back as `HoldfastError`.
    """
    try:
        message = decode(data)
        text, facts = field(message, "message", str), field(message, "facts", dict)
        name = field(message, "error", str)
    except InvalidArgumentError:
        return None
    return _ERRORS.get(name, HoldfastError)(text, **facts)


_ERRORS = {
    found.__name__: found
    for found in (ServerLostError, *vars(errors).values())
    if isinstance(found, type) and issubclass(found, HoldfastError)
}
