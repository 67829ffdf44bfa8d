"""Which of an executor's shards are still in use here, and which have moved away or belong to a query that has ended.

Spark does not tell an executor that it has moved a shard elsewhere. The only sign is that an operator's calls continue
without the shard::

    operator's calls here    0 1 2 3 0 1 2 3 0 1 3 0 1 3 0 1 3 …        shard 2 was called last
                                               └── a round ─┘           after so many rounds without it: it goes

A **round** is as many calls as the operator has shards here. Measured in rounds, a shard is not idle if it is called
rarely because all of them are. A shard is dropped after `IDLE_ROUNDS` without a call; when it comes back, it is
restored. So of N calls at most N / `IDLE_ROUNDS` pay for a restore that keeping everything would have saved.

An operator that is not called here at all has ended, has moved away as a whole, or waits for rows. Its shards in RAM go
after `SILENT_MS`; those on disk stay for a day, like those of a dead executor.

Only durable state is dropped. Without a checkpoint directory nothing is: there is no other copy.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import clock
from holdfast.spark_integration.executor.local_dirs import SHARD_PREFIX
from holdfast.spark_integration.executor.takeover import KEPT_MS

IDLE_ROUNDS = 32
SILENT_MS = 15 * 60_000


@dataclass
class _Operator:
    """One operator of one query, on this executor.

    Attributes
    ----------
    kept_ms : int
        How long its shards stay if it is not called.
    called_ms : int
        Time of its last call.
    calls : int
    shards : OrderedDict of str to int
        By directory, the number of calls at the shard's last call; least recent first.
    """

    kept_ms: int
    called_ms: int = 0
    calls: int = 0
    shards: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def idle(self, now_ms: int) -> list[str]:
        if now_ms - self.called_ms > self.kept_ms:
            return list(self.shards)
        since = self.calls - IDLE_ROUNDS * len(self.shards)
        found = []
        for directory, calls in self.shards.items():
            if calls >= since:
                break
            found.append(directory)
        return found


class ShardUse:
    """Counts the calls of durable shards.

    Parameters
    ----------
    now_ms : callable
        Returns a time in ms that never goes back.

    Notes
    -----
    Threads: any. Cost of a call: constant, except for an operator's first call, which lists its folder.
    """

    def __init__(self, now_ms: Callable[[], int] = clock.monotonic_ms) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._operators: dict[Path, _Operator] = {}

    def called(self, directory: str, *, in_memory: bool) -> None:
        """Count a micro-batch's call of a durable shard."""
        path = Path(directory)
        with self._lock:
            operator = self._operators.get(path.parent)
            if operator is None:
                operator = _Operator(SILENT_MS if in_memory else KEPT_MS)
                self._operators[path.parent] = operator
                # Shards that an earlier server knew: same backend, checkpoint directory and number of shards.
                kind = path.name.rpartition("-")[2]
                operator.shards.update((str(p), 0) for p in path.parent.glob(f"{SHARD_PREFIX}*-{kind}"))
            operator.calls += 1
            operator.called_ms = self._now_ms()
            operator.shards[directory] = operator.calls
            operator.shards.move_to_end(directory)

    def idle(self) -> list[str]:
        """Return the directories of the shards that are not in use."""
        now_ms = self._now_ms()
        with self._lock:
            return [directory for operator in self._operators.values() for directory in operator.idle(now_ms)]

    def idle_beside(self, directory: str) -> list[str]:
        """Return the idle shards of the operator that a shard belongs to; costs what it returns."""
        with self._lock:
            operator = self._operators.get(Path(directory).parent)
            return [] if operator is None else operator.idle(self._now_ms())

    def forget(self, directory: str) -> None:
        """Forget a shard that is gone."""
        path = Path(directory)
        with self._lock:
            operator = self._operators.get(path.parent)
            if operator is not None:
                operator.shards.pop(directory, None)
                if not operator.shards:
                    del self._operators[path.parent]
