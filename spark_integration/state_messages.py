"""What workers tell the state server: plain JSON, so that neither side can make the other run code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from holdfast.backends.run import TableSchema
from holdfast.snapshotter.operator_record import decode_schemas


@dataclass(frozen=True)
class Committed:
    """A shard has a new version.

    Attributes
    ----------
    directory : str
        The shard's local directory.
    backend : str
    tables : mapping of str to list of str
        By table: its schemas, as `holdfast.snapshotter.operator_record.encode_schemas` gives them.
    accepted : str or None
        Pointer that the query accepted: older versions may go.
    committed : str
        Pointer of the new version, which the query may still drop.
    prefix : str
        Of the shard in durable storage.
    checkpoint_dir : str or None
    storage_options : mapping of str to str
        As configured. They cross a socket that only this user can open, and are never stored.
    snapshot_max_commits : int
    """

    directory: str
    backend: str
    tables: Mapping[str, list[str]]
    accepted: str | None
    committed: str
    prefix: str
    checkpoint_dir: str | None
    storage_options: Mapping[str, str]
    snapshot_max_commits: int

    def __repr__(self) -> str:
        return f"Committed({self.directory!r}, accepted={self.accepted!r}, committed={self.committed!r})"

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Committed:
        """Return the message that `encode` wrote."""
        return cls(**json.loads(data))

    def schemas(self) -> dict[str, TableSchema]:
        """Return the tables' schemas."""
        return decode_schemas(self.tables)
