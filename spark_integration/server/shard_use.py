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

Only durable state is dropped. Without a state directory nothing is: there is no other copy. A file in the shard's
directory says that it is durable, to a later server that nobody announces it to: its query may have ended since.
"""

from __future__ import annotations

import glob
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import clock
from holdfast.backends.local_files import DURABLE
from holdfast.spark_integration.executor.local_dirs import IN_MEMORY, ON_DISK, SHARD_PREFIX
from holdfast.spark_integration.executor.takeover import KEPT_MS

IDLE_ROUNDS = 32
SILENT_MS = 15 * 60_000


@dataclass
class _Operator:
    """One operator of one query, on this executor."""

    kept_ms: int  #: How long its shards stay if it is not called
    called_ms: int = 0  #: Time of its last call
    calls: int = 0
    #: By directory, the number of calls at the shard's last call; least recent first
    shards: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def add(self, shards: Iterable[Path]) -> None:
        """Count shards whose last call is unknown as called now."""
        for path in shards:
            self.shards.setdefault(str(path), self.calls)

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

    Threads: any. Cost of a call: a look at a file, except for an operator's first call, which lists its folder.
    """

    def __init__(self, now_ms: Callable[[], int] = clock.monotonic_ms) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._operators: dict[Path, _Operator] = {}

    def called(self, directory: str, *, in_memory: bool) -> None:
        """Count a micro-batch's call of a durable shard."""
        path = Path(directory)
        with suppress(OSError):  # without it, the shard may stay too long
            if not (path / DURABLE).exists():
                (path / DURABLE).touch(mode=0o600)
        with self._lock:
            operator = self._operators.get(path.parent)
            if operator is None:
                operator = self._operators[path.parent] = _Operator(SILENT_MS if in_memory else KEPT_MS)
                operator.add(_of_kind(path.parent, _kind(path)))
            operator.calls += 1
            operator.called_ms = self._now_ms()
            operator.shards[directory] = operator.calls
            operator.shards.move_to_end(directory)

    def take_up(self, executor_directory: Path) -> None:
        """Count the executor's durable shards that are not known as called now.

        They are those of an earlier server, and those of calls that failed.
        """
        for place, kept_ms in ((IN_MEMORY, SILENT_MS), (ON_DISK, KEPT_MS)):
            marks = _found(executor_directory / place, f"*/*/{SHARD_PREFIX}*/{DURABLE}")
            for folder, kind in {(mark.parents[1], _kind(mark.parent)) for mark in marks}:
                shards = _of_kind(folder, kind)
                with self._lock:
                    self._operators.setdefault(folder, _Operator(kept_ms, self._now_ms())).add(shards)

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


def _kind(shard: Path) -> str:
    """Return the digest in a shard's name, of its state directory among others: it tells what is durable."""
    return shard.name.rpartition("-")[2]


def _of_kind(operator_directory: Path, kind: str) -> list[Path]:
    return _found(operator_directory, f"{SHARD_PREFIX}*-{kind}")


def _found(folder: Path, pattern: str) -> list[Path]:
    """Return what matches below a folder; `Path.glob` fails at what cannot be read, or goes meanwhile."""
    return [folder / name for name in glob.glob(pattern, root_dir=folder)]
