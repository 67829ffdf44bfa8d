"""Adds the operator and the key to an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa


class GatheredOutput(Protocol):
    """Output of many keys that is converted together."""

    failed_key: tuple[Any, ...] | None  #: After a failed conversion, the key whose output caused it

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining output."""


def note_key(exc: BaseException, operator: str, key: tuple[Any, ...]) -> None:
    """Add to an exception the key that it was raised for."""
    exc.add_note(f"raised in operator {operator!r} for key {tuple(key)!r}")


def finished(output: GatheredOutput, operator: str) -> Iterator[pa.RecordBatch]:
    """Yield the remaining output; a conversion error names its key."""
    try:
        yield from output.finish()
    except Exception as exc:
        if output.failed_key is not None:
            note_key(exc, operator, output.failed_key)
        raise
