"""Runs a `ShardFunction` to its end."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pyarrow as pa


def ran(running: Generator[pa.RecordBatch, None, int | None]) -> tuple[list[dict[str, Any]], int | None]:
    """Return the rows of its output, and when it wants to be called at the latest."""
    output: list[dict[str, Any]] = []
    while True:
        try:
            output += next(running).to_pylist()
        except StopIteration as end:
            return output, end.value
