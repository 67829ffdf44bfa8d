"""Logs of sinks as drivers would have written them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.snapshotter.sink_log import Entry, SinkLog
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage


def begin(storage: ObjectStorage, sink: str, query_id: str) -> Entry:
    log = SinkLog(storage, sink)
    newest = log.newest()
    number, decided = (newest.number + 1, newest.decided) if newest else (1, 0)
    entry = Entry(sink, number, query_id, f"{number:x}", decided)
    log.append(entry)
    return entry


def decide(
    storage: ObjectStorage, sink: str, query_id: str, batch_id: int, *handles: Mapping[str, Any], rows: int = 1
) -> Entry:
    """Append a decision, which is of a driver of its own."""
    log = SinkLog(storage, sink)
    newest = log.newest()
    decision, number = log.decision(newest), newest.number + 1 if newest else 1
    before = decision.batch_id if decision and decision.batch_id is not None else -1
    entry = Entry(sink, number, query_id, f"{number:x}", number, (), batch_id, before, rows, handles)
    log.append(entry)
    return entry


def entries(state_dir: Path, sink: str) -> list[Entry]:
    """Return what a sink's log holds, as far as it is kept."""
    with open_storage(str(state_dir)) as storage:
        numbers = sorted(int(path.name) for path in (state_dir / "_sinks" / sink).glob("[0-9]*"))
        return [SinkLog(storage, sink).read(number) for number in numbers]


def decided(state_dir: Path, sink: str) -> list[int | None]:
    """Return the micro-batches that the query which writes now has decided, as far as entries of them are kept."""
    found = entries(state_dir, sink)
    return [entry.batch_id for entry in found if entry.is_decision and entry.query_id == found[-1].query_id]


def plans(state_dir: Path, sink: str) -> list[str]:
    """Return what Spark had planned for each micro-batch that was decided."""
    return [entry.plan for entry in entries(state_dir, sink) if entry.is_decision]
