"""Sinks that do something at each named step of the protocol, and are otherwise the sink that they wrap.

`KilledAt` dies once at each of them.

==========  ================================================================  ========
step        where the process is                                              which
==========  ================================================================  ========
begin       a transaction has been begun                                      worker
write       some rows are written                                             worker
prepared    everything is prepared, and nobody has the handle                 worker
confirmed   all is confirmed, and no decision is stored                       driver
decided     the decision is stored, and nothing of it is committed            driver
commit      in the middle of the commit                                       driver
committed   all is visible, and Spark has not ended the micro-batch           driver
found       a start knows what was left, and has ended none of it             driver
aborted     a start has ended what was left, and has written nothing          driver
==========  ================================================================  ========
"""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.sinks import Handle, SinkAttempt, SinkQuery, SinkTransaction, TwoPhaseSink

STEPS = ("begin", "write", "prepared", "confirmed", "found", "decided", "commit", "committed", "aborted")
_MID_COMMIT_S = 0.002


@dataclass(frozen=True)
class Stepping(TwoPhaseSink, ABC):
    inner: TwoPhaseSink

    @abstractmethod
    def reach(self, step: str) -> None:
        """Do what this sink is there for."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    @property
    def credentials(self) -> Sequence[str]:  # type: ignore[override]
        return self.inner.credentials

    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        return self.inner.open(query, schema)

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        transaction = self.inner.begin(attempt, schema)
        self.reach("begin")
        return _Transaction(transaction, self)

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        self.inner.confirm(query, batch_id, handles)
        self.reach("confirmed")

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        self.reach("decided")
        self.inner.commit(query, batch_id, handles)
        self.reach("committed")

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        if handles:
            self.reach("found")
        self.inner.abort(query, handles)
        if handles:
            self.reach("aborted")

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        return self.inner.leftovers(query)


@dataclass(frozen=True)
class KilledAt(Stepping):
    """See the module; `marks` is a folder with a file for each step at which a process has died."""

    marks: str

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        self.reach("decided")
        if self._has_turn("commit"):
            threading.Thread(target=self._die_soon, daemon=True).start()
        self.inner.commit(query, batch_id, handles)
        self.reach("commit")  # at the latest
        self.reach("committed")

    def reach(self, step: str) -> None:
        """Kill this process, or the driver with all that is of its process group, if it is the step's turn."""
        if not self._has_turn(step):
            return
        try:
            Path(self.marks, step).touch(exist_ok=False)
        except FileExistsError:  # another worker dies of it
            return
        if step in ("begin", "write", "prepared"):
            os.kill(os.getpid(), signal.SIGKILL)
        os.killpg(os.getpgrp(), signal.SIGKILL)
        time.sleep(60)

    def _has_turn(self, step: str) -> bool:
        if not Path(self.marks).is_dir():  # its time has not come
            return False
        done = {path.name for path in Path(self.marks).iterdir()}
        # Leftovers are there after a driver's death before a decision: these two wait for it, and hold up no others.
        if step in ("found", "aborted"):
            return step not in done and (step == "found" or "found" in done)
        others = [each for each in STEPS if each not in ("found", "aborted")]
        return next((each for each in others if each not in done), None) == step

    def _die_soon(self) -> None:
        time.sleep(_MID_COMMIT_S)
        self.reach("commit")


@dataclass
class _Transaction(SinkTransaction):
    inner: SinkTransaction
    sink: Stepping

    def write(self, rows: pa.RecordBatch) -> None:
        self.inner.write(rows)
        self.sink.reach("write")

    def prepare(self) -> Handle:
        handle: Mapping[str, Any] = self.inner.prepare()
        self.sink.reach("prepared")
        return handle

    def abort(self) -> None:
        self.inner.abort()
