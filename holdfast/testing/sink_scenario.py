"""Fixtures that a sink's author supplies, and the steps of the contract's tests, in processes that tests can kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.errors import HoldfastError, StateLostError
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
    begin,
)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

#: How long a step may take before a test fails.
PATIENCE_S = 60.0
#: holdfast's sinks, preloaded with their libraries so that not each process imports them. Missing modules are ignored.
_SINKS = tuple(
    f"holdfast.spark_integration.sinks.{name}"
    for name in ("delta.commits", "delta.sink", "kafka.sink", "files.parquet", "postgres.sink")
)
#: Part of a credential in the options of a test.
SECRET = "not-to-be-seen"  # noqa: S105  a mark, not a password
#: Limit per handle: the driver stores the handles of all partitions in one object.
HANDLE_BYTES_MAX = 8192
ROWS = 120
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["pytest", "pyarrow", "holdfast.testing", *_SINKS])


class SinkWorker:
    """One process with its own sink, pickled as in a query's plan. Leaving the context kills it."""

    def __init__(self, sink: TwoPhaseSink) -> None:
        self._here, there = _processes.Pipe()
        self._process = _processes.Process(target=_serve, args=(there, sink), daemon=True)
        self._process.start()
        there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def start(self, step: str, *arguments: object) -> None:
        """Start a step, which `kill` can interrupt; returns once the process has received it."""
        self._here.send((step, arguments))
        assert self._reply() == ("taken", None)

    def finish(self) -> Any:
        """Wait for the started step, and return its result."""
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

    def ask(self, step: str, *arguments: object) -> Any:
        """Run a step of the process's transaction, as a worker does, or ``sink.…``, as a driver does."""
        self.start(step, *arguments)
        return self.finish()

    def _reply(self) -> tuple[str, Any]:
        if not self._here.poll(PATIENCE_S):
            raise AssertionError(f"no answer from a worker for {PATIENCE_S:.0f} s: does another transaction block it?")
        reply: tuple[str, Any] = self._here.recv()
        return reply


def kill_after(worker: SinkWorker, delay_ms: int, step: str, *arguments: object) -> None:
    """Start a step, and kill the worker after a delay: before, during or after the step."""
    worker.start(step, *arguments)
    clock.sleep_ms(delay_ms)
    worker.kill()


def _serve(parent: Connection, sink: TwoPhaseSink) -> None:
    """Run steps until killed."""
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
        except Exception as exc:  # noqa: BLE001  reported to the test; may not pickle
            reply = ("raised", AssertionError(f"{step} raised {type(exc).__name__}: {exc}"))
        parent.send(reply)


def _take(step: str, arguments: Any, sink: TwoPhaseSink, transactions: list[SinkTransaction]) -> object:
    if step == "begin":
        transactions.append(begin(sink, *arguments))
        return None
    if step.startswith("sink."):
        return getattr(sink, step.removeprefix("sink."))(*arguments)
    return getattr(transactions[-1], step)(*arguments)


class SinkScenario:
    """A sink, its target, and what a query does with it.

    Attributes
    ----------
    query : SinkQuery
        The query of this test.
    secrets : tuple of str
        Parts of `options`' credentials, which no handle, error, repr or pickle may hold.
    """

    query: SinkQuery
    secrets: tuple[str, ...] = (SECRET,)

    @pytest.fixture
    def sink(self) -> TwoPhaseSink:
        """Return a sink whose target is empty; to be supplied by the subclass."""
        raise NotImplementedError

    @pytest.fixture
    def options(self) -> Mapping[str, str]:
        """Return the query's options; every credential among them must contain one of `secrets`."""
        return {}

    def schema(self) -> pa.Schema:
        """Return the schema of `rows`."""
        return pa.schema([("key", pa.int64()), ("word", pa.string()), ("amount", pa.float64())])

    def rows(self, n: int, seed: int, attempt: int = 0) -> pa.Table:
        """Return `n` rows; the seed determines the keys, the attempt the values."""
        keys = [seed * 1_000_000 + i for i in range(n)]
        words = [f"row {i} of attempt {attempt}" for i in range(n)]
        return pa.table([keys, words, [attempt + i / 4 for i in range(n)]], schema=self.schema())

    def unfit_schemas(self) -> list[pa.Schema]:
        """Return schemas that do not fit a target with rows of `schema`; by default a changed and a missing column."""
        schema = self.schema()
        other = pa.binary() if schema[-1].type != pa.binary() else pa.float64()
        return [schema.set(len(schema) - 1, pa.field(schema[-1].name, other)), schema.remove(len(schema) - 1)]

    def shown(self, sink: TwoPhaseSink) -> pa.Table:
        """Return what an ordinary reader sees; supplied by the subclass."""
        raise NotImplementedError

    def restart_target(self) -> None:
        """Kill the target's server as `kill -9` does and start it again; nothing if it has no server."""

    @pytest.fixture(autouse=True)
    def _query(self, sink: TwoPhaseSink, options: Mapping[str, str]) -> None:
        self.query = SinkQuery(sink.name, clock.new_uuid(), options=dict(options))

    def successor(self, *, replaces: bool) -> SinkQuery:
        """Return a second query that writes to the same sink."""
        return replace(self.query, query_id=clock.new_uuid(), replaces=self.query.query_id if replaces else None)

    def attempt(self, batch_id: int = 0, partition: int = 0, query: SinkQuery | None = None) -> SinkAttempt:
        """Return a new attempt."""
        return SinkAttempt(query or self.query, batch_id, partition, clock.new_id() + clock.new_id())

    @contextmanager
    def written(
        self, sink: TwoPhaseSink, attempt: SinkAttempt, rows: pa.Table, spare: Handle | None = None
    ) -> Iterator[SinkWorker]:
        """Yield a worker that has written rows and not prepared them."""
        with SinkWorker(sink) as worker:
            worker.ask("begin", attempt, self.schema(), spare)
            for batch in rows.to_batches(max_chunksize=max(1, rows.num_rows // 3)):
                worker.ask("write", batch)
            yield worker

    def prepared(self, sink: TwoPhaseSink, attempt: SinkAttempt, rows: pa.Table, spare: Handle | None = None) -> Handle:
        """Write and prepare rows in a worker, which is dead when this returns."""
        with self.written(sink, attempt, rows, spare) as worker:
            return self.carried(worker.ask("prepare"))

    def carried(self, handle: Handle) -> Handle:
        """Return a handle as read from the stored decision."""
        text = json.dumps(handle)
        assert len(text) <= HANDLE_BYTES_MAX, f"a handle is too long: {len(text)} bytes"
        self.check_silent(text)
        stored: Handle = json.loads(text)
        assert stored == handle, "a handle must be plain JSON"
        return stored

    def write_batch(self, sink: TwoPhaseSink, batch_id: int, query: SinkQuery | None = None) -> pa.Table:
        """Write, prepare and commit a micro-batch of one partition, and return its rows."""
        query = query or self.query
        rows = self.rows(ROWS, seed=1000 + batch_id)
        handle = self.prepared(sink, self.attempt(batch_id, query=query), rows)
        self.show(sink, batch_id, [handle], query)
        return rows

    def show(self, sink: TwoPhaseSink, batch_id: int, handles: list[Handle], query: SinkQuery | None = None) -> None:
        """Commit what was prepared, as a driver does."""
        sink.confirm(query or self.query, batch_id, handles)
        sink.commit(query or self.query, batch_id, handles)

    def expect_lost(self, sink: TwoPhaseSink, batch_id: int, *handles: Handle) -> None:
        """Check that lost results never count as committed."""
        for handle in handles:
            with self.raises(StateLostError):
                sink.commit(self.query, batch_id, [handle])

    def begin_again(self, sink: TwoPhaseSink, query: SinkQuery | None = None) -> int | None:
        """Start as a run does: open the target, and abort what dead attempts left."""
        query = query or self.query
        newest = sink.open(query, self.schema())
        self.end_leftovers(sink, query)
        return newest

    def end_leftovers(self, sink: TwoPhaseSink, query: SinkQuery) -> None:
        """Abort what a query's dead attempts have prepared."""
        sink.abort(query, [self.carried(handle) for handle in sink.leftovers(query)])
        assert list(sink.leftovers(query)) == [], "aborted handles must not be leftovers"

    def take_over(self, sink: TwoPhaseSink, heir: SinkQuery) -> int | None:
        """Start as a run that replaces this test's query."""
        self.end_leftovers(sink, self.query)
        return self.begin_again(sink, heir)

    def expect(self, sink: TwoPhaseSink, *tables: pa.Table) -> None:
        """Check that a reader sees these rows and no others, each once."""
        assert _sorted(self.shown(sink)) == _sorted(*tables)

    def seen_of(self, sink: TwoPhaseSink, tables: Sequence[pa.Table]) -> list[pa.Table]:
        """Return the tables that a reader sees; each must be visible whole or not at all."""
        found = _sorted(self.shown(sink))
        seen = [table for table in tables if _sorted(table)[0] in found]
        assert found == _sorted(*seen), "a part of a partition is visible"
        return seen

    @contextmanager
    def raises(self, kind: type[HoldfastError]) -> Iterator[None]:
        """Expect an error that pickles and, with its causes, holds no credential."""
        with pytest.raises(kind) as raised:
            yield
        self.check_error(raised.value)

    def check_error(self, exc: BaseException) -> None:
        """Check that neither an error nor its causes hold a credential, and that it pickles."""
        links: list[BaseException | None] = [exc]
        while links[-1] is not None:
            links.append(links[-1].__cause__ or links[-1].__context__)
        for link in links[:-1]:
            self.check_silent(f"{link!r} {link} {link.__dict__}")
        self.check_silent("".join(traceback.format_exception(exc)))
        self.check_silent(repr(bytes(ForkingPickler.dumps(exc))))

    def check_silent(self, text: str) -> None:
        """Check that a text holds no credential."""
        assert not [secret for secret in self.secrets if secret in text], text


def _sorted(*tables: pa.Table) -> list[str]:
    return sorted(repr(sorted(row.items())) for table in tables for row in table.to_pylist())
