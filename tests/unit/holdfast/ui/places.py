"""Locations for tests of which query belongs where: storages that fail or hang, and queries as their pointers name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.spark_state.query_location import BatchTimes
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.ui.site import Site
from tests.unit.holdfast.commands.state_dir import put_record

SiteOf = Callable[..., Site]


def _answered() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class Stored:
    """A query as its pointers name one operator's directory; `reads` counts, and waits for `answers`."""

    named: dict[str, str] = field(default_factory=lambda: {"totals": "query-1"})
    error: Exception | None = None
    reads: int = 0
    batch_id: int = 0
    query_id: str = "query-1"
    log: list[BatchTimes] | None = None
    answers: threading.Event = field(default_factory=_answered)
    is_closed: threading.Event = field(default_factory=threading.Event)

    def times(self) -> list[BatchTimes]:
        return self.log or [BatchTimes(self.batch_id, 1_000, 2_000)]

    def batches(self) -> list[int]:
        return [self.batch_id]

    def directories(self) -> dict[str, str]:
        self.reads += 1
        self.answers.wait()
        if self.error:
            raise self.error
        return self.named

    def operators(self) -> list[Any]:
        self.answers.wait()
        return []

    def close(self) -> None:
        self.is_closed.set()


def directory(root: Path, operator: str = "totals", *faults: Fault) -> FaultyStorage:
    """Return a state directory with an operator of the query that `Stored` is."""
    storage = FaultyStorage(open_storage(str(root)))
    put_record(storage, operator)
    storage.faults += faults
    return storage


def location(root: Path, query_id: str = "query-1") -> FaultyStorage:
    """Return the checkpoint location of a query."""
    root.mkdir(exist_ok=True)
    (root / "metadata").write_text(json.dumps({"id": query_id}))
    return FaultyStorage(open_storage(str(root)))
