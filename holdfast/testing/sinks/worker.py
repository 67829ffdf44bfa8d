"""A process that writes to a sink as Spark's workers and drivers do, and that a test kills at any step.

Processes are forked from one that has imported the libraries: a new interpreter takes seconds until it has.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from holdfast import clock
from holdfast.errors import HoldfastError
from holdfast.spark_integration.sinks.two_phase_sink import begin

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import pyarrow as pa

    from holdfast.spark_integration.sinks.two_phase_sink import (
        Handle,
        SinkAttempt,
        SinkQuery,
        SinkTransaction,
        TwoPhaseSink,
    )

#: How long a step may take before a test fails.
PATIENCE_S = 60.0

#: Our sinks, with the libraries that they import: else each process imports them when it gets its pickled sink, and the
#: Delta sink's commits when it first commits. What is not installed is passed over.
_SINKS = tuple(
    f"holdfast.spark_integration.sinks.{name}"
    for name in ("delta.commits", "delta.sink", "kafka.sink", "files.parquet", "postgres.sink")
)

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["pytest", "pyarrow", "holdfast.testing", *_SINKS])


class SinkWorker:
    """One process with a sink of its own, pickled as in a query's plan. Leaving the context kills it.

    Parameters
    ----------
    sink : TwoPhaseSink
    """

    def __init__(self, sink: TwoPhaseSink) -> None:
        self._here, there = _processes.Pipe()
        self._process = _processes.Process(target=_serve, args=(there, sink), daemon=True)
        self._process.start()
        there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def begin(self, attempt: SinkAttempt, schema: pa.Schema, spare: Handle | None = None) -> None:
        """Begin a transaction, the only one of this process."""
        self._ask("begin", attempt, schema, spare)

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows in the transaction."""
        self._ask("write", batch)

    def prepare(self) -> Handle:
        """Prepare the transaction."""
        return self._ask("prepare")

    def abort(self) -> None:
        """Abort the transaction."""
        self._ask("abort")

    def of_sink(self, step: str, query: SinkQuery, *arguments: object) -> Any:
        """Call a method of the sink, as a driver does."""
        return self._ask(f"sink.{step}", query, *arguments)

    def start(self, step: str, *arguments: object) -> None:
        """Begin a step and do not wait for its end, so that `kill` comes in the middle of it.

        Returns when the process has taken it.
        """
        self._here.send((step, arguments))
        assert self._reply() == ("taken", None)

    def finish(self) -> Any:
        """Wait for the end of what `start` began."""
        kind, value = self._reply()
        if kind == "raised":
            raise value
        return value

    def kill(self) -> None:
        """Kill the process as `kill -9` does; once it is gone, no step of it can take effect."""
        if self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._here.close()

    def _ask(self, step: str, *arguments: object) -> Any:
        self.start(step, *arguments)
        return self.finish()

    def _reply(self) -> tuple[str, Any]:
        if not self._here.poll(PATIENCE_S):
            raise AssertionError(f"a worker does not answer for {PATIENCE_S:.0f} s: does another transaction block it?")
        reply: tuple[str, Any] = self._here.recv()
        return reply


def kill_after(worker: SinkWorker, delay_ms: int, step: str, *arguments: object) -> None:
    """Begin a step, and kill the worker after a delay: before, during or after the step."""
    worker.start(step, *arguments)
    clock.sleep_ms(delay_ms)
    worker.kill()


def _serve(parent: Connection, sink: TwoPhaseSink) -> None:
    """Take steps until killed."""
    transactions: list[SinkTransaction] = []
    while True:
        try:
            step, arguments = parent.recv()
        except EOFError:  # the test's process is gone
            os._exit(1)
        parent.send(("taken", None))
        try:
            reply = ("done", _take(step, arguments, sink, transactions))
        except HoldfastError as exc:
            reply = ("raised", exc)
        except Exception as exc:  # noqa: BLE001  shown where the test runs; these need not pickle
            reply = ("raised", AssertionError(f"{step} raised {type(exc).__name__}: {exc}"))
        parent.send(reply)


def _take(step: str, arguments: Any, sink: TwoPhaseSink, transactions: list[SinkTransaction]) -> object:
    if step == "begin":
        transactions.append(begin(sink, *arguments))
        return None
    if step.startswith("sink."):
        return getattr(sink, step.removeprefix("sink."))(*arguments)
    return getattr(transactions[-1], step)(*arguments)
