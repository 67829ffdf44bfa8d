"""What workers tell the state server: plain JSON, so that neither side can make the other run code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from holdfast.backends.run import TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.operator_record import decode_schemas


@dataclass(frozen=True)
class Committed:
    """A shard has a new version.

    Attributes
    ----------
    directory : str
        The shard's local directory.
    backend : str
    backend_options : mapping of str to str
        What the configuration has below ``spark.holdfast.<backend>.``.
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
    backend_options: Mapping[str, str]
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
        """Return the message that `encode` wrote.

        Raises
        ------
        InvalidArgumentError
            It did not write this.
        """
        try:
            message = cls(**json.loads(data))
        except (ValueError, TypeError) as exc:
            raise InvalidArgumentError("not an announcement of a commit") from exc
        message._require_types()
        return message

    def _require_types(self) -> None:
        texts = (self.directory, self.backend, self.committed, self.prefix)
        optional = (self.accepted, self.checkpoint_dir)
        options = (self.storage_options, self.backend_options)
        right = (
            all(isinstance(value, str) for value in texts)
            and all(value is None or isinstance(value, str) for value in optional)
            and isinstance(self.tables, dict)
            and all(isinstance(o, dict) and all(isinstance(value, str) for value in o.values()) for o in options)
            and type(self.snapshot_max_commits) is int
        )
        if not right:
            raise InvalidArgumentError("an announcement of a commit has a field of another type")

    def schemas(self) -> dict[str, TableSchema]:
        """Return the tables' schemas."""
        return decode_schemas(self.tables)
