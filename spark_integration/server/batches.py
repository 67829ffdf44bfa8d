"""What the calls of an executor's shards have measured, added up by operator and micro-batch.

::

    announcement of a shard ─▶ micro-batch, once for each shard ─▶ totals since the server began
                                       │
                                       └─▶ the last micro-batches, for who asks

A second attempt at a micro-batch measures the same again: it counts as repeated, and for nothing else. Attempts on
different executors do not know of each other, and both count.

All of it is in memory and bounded: by the shards in use here, and by `BATCHES_KEPT` for each operator.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.spark_integration.client.measures import LARGEST
from holdfast.spark_integration.client.messages import Committed, MeasuredBatch

BATCHES_KEPT = 128


class OperatorName(NamedTuple):
    """An operator of a query.

    Attributes
    ----------
    query : str
        The query's id.
    operator : str
        The name of its directory.
    """

    query: str
    operator: str

    @classmethod
    def of(cls, directory: str) -> OperatorName:
        """Return whose a shard's local directory is."""
        operator = Path(directory).parent
        return cls(operator.parent.name, operator.name)


@dataclass
class _Batch:
    batch_id: int | None
    values: dict[str, int] = field(default_factory=dict)
    shards: set[str] = field(default_factory=set)

    def add(self, directory: str, values: Mapping[str, int]) -> None:
        self.shards.add(directory)
        for name, value in values.items():
            before = self.values.get(name, 0)
            self.values[name] = max(before, value) if name in LARGEST else before + value


@dataclass
class OperatorTotals:
    """An operator's micro-batches here.

    Attributes
    ----------
    values : Counter
        Measures added up since the server began, and ``batches``, ``calls`` and ``repeated_calls``.
    newest : dict of str to mapping
        By shard's directory, the measures of its last call.
    """

    values: Counter[str] = field(default_factory=Counter)
    newest: dict[str, Mapping[str, int]] = field(default_factory=dict)
    _batches: OrderedDict[int, _Batch] = field(default_factory=OrderedDict)

    def add(self, directory: str, measured: MeasuredBatch) -> None:
        """Add what a shard's call has measured."""
        values = {name: value for name, value in measured.values.items() if value is not None and name != "shard"}
        batch = self._batches.get(measured.batch_ms)
        if batch is None:
            batch = self._batches[measured.batch_ms] = _Batch(measured.batch_id)
            self.values["batches"] += 1
            if len(self._batches) > BATCHES_KEPT:
                self._batches.popitem(last=False)
        self.newest[directory] = values
        if directory in batch.shards:
            self.values["repeated_calls"] += 1
            return
        batch.add(directory, values)
        self.values["calls"] += 1
        self.values.update(values)

    def recent(self) -> list[dict[str, Any]]:
        """Return the last micro-batches as JSON values, oldest first."""
        return [
            {
                "batch_id": batch.batch_id,
                "batch_ms": batch_ms,
                "shards": len(batch.shards),
                "values": dict(batch.values),
            }
            for batch_ms, batch in self._batches.items()
        ]


class MeasuredBatches:
    """The micro-batches of an executor's operators.

    Notes
    -----
    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operators: dict[OperatorName, OperatorTotals] = {}

    def announce(self, message: Committed) -> None:
        """Take what an announcement says of a shard's call."""
        if message.measured is None:
            return
        with self._lock:
            totals = self._operators.setdefault(OperatorName.of(message.shard.directory), OperatorTotals())
            totals.add(message.shard.directory, message.measured)

    def forget(self, directory: str) -> None:
        """Forget a shard that is gone, and an operator with its last one."""
        with self._lock:
            name = OperatorName.of(directory)
            totals = self._operators.get(name)
            if totals is not None:
                totals.newest.pop(directory, None)
                if not totals.newest:
                    del self._operators[name]

    def totals(self) -> dict[OperatorName, tuple[Counter[str], dict[str, Mapping[str, int]]]]:
        """Return by operator copies of its totals, and of the newest measures of each shard."""
        with self._lock:
            return {name: (Counter(o.values), dict(o.newest)) for name, o in self._operators.items()}

    def recent(self) -> list[dict[str, Any]]:
        """Return the last micro-batches of all operators as JSON values."""
        with self._lock:
            return [batch | name._asdict() for name, o in self._operators.items() for batch in o.recent()]
