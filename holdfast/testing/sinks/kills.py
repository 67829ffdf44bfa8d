"""The part of a sink's contract in which processes are killed: before, after and in the middle of each step."""

from __future__ import annotations

import pyarrow as pa
import pytest

from holdfast.errors import StateLostError
from holdfast.spark_integration.sinks.two_phase_sink import Handle, TwoPhaseSink
from holdfast.testing.sinks.scenario import ROWS, SinkScenario
from holdfast.testing.sinks.worker import SinkWorker, kill_after

#: Milliseconds from the begin of a step to the kill, so that some kills come in its middle.
DELAYS_MS = (0, 1, 3, 10, 30)
#: Where a worker may die, with the step in whose middle it does.
WORKER_DIES = ("in begin", "after begin", "in write", "after write", "in prepare", "after prepare")


class SinkKills(SinkScenario):
    """Tests that kill workers and drivers."""

    @pytest.mark.parametrize("moment", WORKER_DIES)
    def test_apart_a_killed_worker_and_its_next_attempt(self, sink: TwoPhaseSink, moment: str) -> None:
        """Spark repeats a killed task while its driver lives: only the repeat is shown, then and later."""
        sink.open(self.query, self.schema())
        committed: list[pa.Table] = []
        for batch_id, delay_ms in enumerate(self._delays(moment)):
            self._killed_worker(sink, moment, batch_id, delay_ms)
            self.expect(sink, *committed)
            rows = self.rows(ROWS, seed=batch_id, attempt=1)
            handle = self.prepared(sink, self.attempt(batch_id), rows)
            sink.confirm(self.query, batch_id, [handle])
            sink.commit(self.query, batch_id, [handle])
            committed.append(rows)
            self.expect(sink, *committed)
        self.begin_again(sink)
        self.expect(sink, *committed)

    @pytest.mark.parametrize("moment", WORKER_DIES)
    def test_found_what_a_killed_worker_left(self, sink: TwoPhaseSink, moment: str) -> None:
        """The driver dies as well, and the target's server: the next run ends it all and writes anew."""
        sink.open(self.query, self.schema())
        for delay_ms in self._delays(moment):
            handles = self._killed_worker(sink, moment, 0, delay_ms)
            self.restart_target()
            self.begin_again(sink)
            self.expect(sink)
            for handle in handles:
                with self.raises(StateLostError):
                    sink.commit(self.query, 0, [handle])
        rows = self.write_batch(sink, 0)
        self.expect(sink, rows)

    @pytest.mark.parametrize("delay_ms", DELAYS_MS)
    def test_idempotent_commit_of_a_killed_driver(self, sink: TwoPhaseSink, delay_ms: int) -> None:
        """A driver dies in a commit of several partitions; the next one commits again, and all is there once."""
        sink.open(self.query, self.schema())
        first = self.write_batch(sink, 0)
        tables = [self.rows(ROWS, seed=i) for i in range(3)]
        handles = [self.prepared(sink, self.attempt(1, i), rows) for i, rows in enumerate(tables)]
        with SinkWorker(sink) as driver:
            driver.of_sink("confirm", self.query, 1, handles)
            kill_after(driver, delay_ms, "sink.commit", self.query, 1, handles)
        assert self.seen_of(sink, [first, *tables])[:1] == [first], "what was committed before stays visible"
        self.restart_target()
        sink.open(self.query, self.schema())
        sink.commit(self.query, 1, handles)
        self.expect(sink, first, *tables)
        self.begin_again(sink)
        sink.commit(self.query, 1, handles)
        self.expect(sink, first, *tables)

    @pytest.mark.parametrize("delay_ms", DELAYS_MS)
    def test_idempotent_abort_of_a_killed_driver(self, sink: TwoPhaseSink, delay_ms: int) -> None:
        """A driver dies while it ends leftovers; the next one ends the rest."""
        sink.open(self.query, self.schema())
        first = self.write_batch(sink, 0)
        handles = [self.prepared(sink, self.attempt(1, i), self.rows(ROWS, seed=i)) for i in range(3)]
        with SinkWorker(sink) as driver:
            left = driver.of_sink("leftovers", self.query)
            kill_after(driver, delay_ms, "sink.abort", self.query, left)
        self.begin_again(sink)
        self.expect(sink, first)
        for handle in handles:
            with self.raises(StateLostError):
                sink.commit(self.query, 1, [handle])

    @pytest.mark.parametrize("delay_ms", DELAYS_MS)
    def test_a_driver_killed_while_it_opens_the_target(self, sink: TwoPhaseSink, delay_ms: int) -> None:
        """What `open` makes is whole or made by the next `open`."""
        with SinkWorker(sink) as driver:
            kill_after(driver, delay_ms, "sink.open", self.query, self.schema())
        self.begin_again(sink)
        rows = self.write_batch(sink, 0)
        self.expect(sink, rows)

    def _delays(self, moment: str) -> tuple[int, ...]:
        return DELAYS_MS if moment.startswith("in ") else (0,)

    def _killed_worker(self, sink: TwoPhaseSink, moment: str, batch_id: int, delay_ms: int) -> list[Handle]:
        """Kill a worker at a moment of its attempt, and return the handle if it got so far."""
        attempt, rows = self.attempt(batch_id), self.rows(ROWS, seed=batch_id)
        batch = rows.to_batches()[0]
        with SinkWorker(sink) as worker:
            if moment == "in begin":
                kill_after(worker, delay_ms, "begin", attempt, self.schema())
                return []
            worker.begin(attempt, self.schema())
            if moment == "in write":
                kill_after(worker, delay_ms, "write", batch)
            elif moment != "after begin":
                worker.write(batch)
            if moment == "in prepare":
                kill_after(worker, delay_ms, "prepare")
            return [self.carried(worker.prepare())] if moment == "after prepare" else []
