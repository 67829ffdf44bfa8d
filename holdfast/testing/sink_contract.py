"""What every two-phase sink must do, as tests that a subclass runs on its own sink.

::

    class TestMySink(SinkContract):
        @pytest.fixture
        def sink(self, tmp_path):
            self.place = str(tmp_path / "place")
            return MySink(self.place)  # its target is empty at the start of each test

        @pytest.fixture
        def options(self):
            return {"password": f"{SECRET}-1"}  # must never leak; or set your own `secrets`

        def shown(self, sink):
            return read_my(self.place)  # a table, as any reader sees it

        def restart_target(self):  # optional: if the target is a server
            self.server.kill()
            self.server.start()

pytest collects the subclass; write one for each way in which the sink writes. Override `schema`, `rows` and
`unfit_schemas` if the target does not take such rows. Tests are named after the invariants of
`holdfast.spark_integration.sinks.two_phase_sink`. Workers and drivers are processes that the tests kill. No test
is skipped for a sink that fails it.

`SinkKills` has the tests that kill processes before, during and after each step.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import pyarrow as pa
import pytest

from holdfast.errors import ConflictError, HoldfastError, SchemaMismatchError, StateLostError, UnavailableError
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, TwoPhaseSink
from holdfast.testing.sink_scenario import ROWS, SECRET, SinkScenario, SinkWorker, kill_after

__all__ = ["SECRET", "SinkContract"]

#: Milliseconds from the start of a step to the kill, so that some kills interrupt the step.
DELAYS_MS = (0, 1, 3, 10, 30)
#: When a worker is killed: during or after a step.
WORKER_DIES = ("in begin", "after begin", "in write", "after write", "in prepare", "after prepare")


class SinkKills(SinkScenario):
    """Tests that kill workers and drivers."""

    @pytest.mark.parametrize("moment", WORKER_DIES)
    def test_apart_a_killed_worker_and_its_next_attempt(self, sink: TwoPhaseSink, moment: str) -> None:
        """Spark retries a killed task while the driver lives: only the retry's rows ever appear."""
        sink.open(self.query, self.schema())
        committed: list[pa.Table] = []
        for batch_id, delay_ms in enumerate(self._delays(moment)):
            self._killed_worker(sink, moment, batch_id, delay_ms)
            self.expect(sink, *committed)
            rows = self.rows(ROWS, seed=batch_id, attempt=1)
            handle = self.prepared(sink, self.attempt(batch_id), rows)
            self.show(sink, batch_id, [handle])
            committed.append(rows)
            self.expect(sink, *committed)
        self.begin_again(sink)
        self.expect(sink, *committed)

    @pytest.mark.parametrize("moment", WORKER_DIES)
    def test_found_what_a_killed_worker_left(self, sink: TwoPhaseSink, moment: str) -> None:
        """The driver and the target's server die, too: the next run aborts everything and writes again."""
        sink.open(self.query, self.schema())
        for delay_ms in self._delays(moment):
            handles = self._killed_worker(sink, moment, 0, delay_ms)
            self.restart_target()
            self.begin_again(sink)
            self.expect(sink)
            self.expect_lost(sink, 0, *handles)
        rows = self.write_batch(sink, 0)
        self.expect(sink, rows)

    @pytest.mark.parametrize("delay_ms", DELAYS_MS)
    def test_idempotent_commit_of_a_killed_driver(self, sink: TwoPhaseSink, delay_ms: int) -> None:
        """A driver dies while committing several partitions; the next commits again, and all rows appear once."""
        sink.open(self.query, self.schema())
        first = self.write_batch(sink, 0)
        tables = [self.rows(ROWS, seed=i) for i in range(3)]
        handles = [self.prepared(sink, self.attempt(1, i), rows) for i, rows in enumerate(tables)]
        with SinkWorker(sink) as driver:
            driver.ask("sink.confirm", self.query, 1, handles)
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
        """A driver dies while aborting leftovers; the next one aborts the rest."""
        sink.open(self.query, self.schema())
        first = self.write_batch(sink, 0)
        handles = [self.prepared(sink, self.attempt(1, i), self.rows(ROWS, seed=i)) for i in range(3)]
        with SinkWorker(sink) as driver:
            left = driver.ask("sink.leftovers", self.query)
            kill_after(driver, delay_ms, "sink.abort", self.query, left)
        self.begin_again(sink)
        self.expect(sink, first)
        self.expect_lost(sink, 1, *handles)

    @pytest.mark.parametrize("delay_ms", DELAYS_MS)
    def test_a_driver_killed_while_it_opens_the_target(self, sink: TwoPhaseSink, delay_ms: int) -> None:
        """The next `open` completes what a killed `open` began."""
        with SinkWorker(sink) as driver:
            kill_after(driver, delay_ms, "sink.open", self.query, self.schema())
        self.begin_again(sink)
        rows = self.write_batch(sink, 0)
        self.expect(sink, rows)

    def _delays(self, moment: str) -> tuple[int, ...]:
        return DELAYS_MS if moment.startswith("in ") else (0,)

    def _killed_worker(self, sink: TwoPhaseSink, moment: str, batch_id: int, delay_ms: int) -> list[Handle]:
        """Kill a worker during its attempt, and return the handle, if any."""
        attempt, rows = self.attempt(batch_id), self.rows(ROWS, seed=batch_id)
        batch = rows.to_batches()[0]
        with SinkWorker(sink) as worker:
            if moment == "in begin":
                kill_after(worker, delay_ms, "begin", attempt, self.schema())
                return []
            worker.ask("begin", attempt, self.schema())
            if moment == "in write":
                kill_after(worker, delay_ms, "write", batch)
            elif moment != "after begin":
                worker.ask("write", batch)
            if moment == "in prepare":
                kill_after(worker, delay_ms, "prepare")
            return [self.carried(worker.ask("prepare"))] if moment == "after prepare" else []


class SinkContract(SinkKills):
    """The suite; see the module."""

    def test_invisible_until_committed_and_then_whole(self, sink: TwoPhaseSink) -> None:
        """Written, prepared and confirmed rows are invisible; committed rows appear once."""
        sink.open(self.query, self.schema())
        rows = self.rows(ROWS, seed=1)
        with self.written(sink, self.attempt(), rows) as worker:
            self.expect(sink)
            handle = self.carried(worker.ask("prepare"))
            self.expect(sink)
        sink.confirm(self.query, 0, [handle])
        self.expect(sink)
        sink.commit(self.query, 0, [handle])
        self.expect(sink, rows)
        assert list(sink.leftovers(self.query)) == []

    def test_invisible_until_committed_also_beside_earlier_micro_batches(self, sink: TwoPhaseSink) -> None:
        """Each micro-batch stays invisible until its own commit."""
        sink.open(self.query, self.schema())
        first = self.write_batch(sink, 0)
        rows = self.rows(ROWS, seed=2)
        handle = self.prepared(sink, self.attempt(1), rows)
        self.expect(sink, first)
        sink.commit(self.query, 1, [handle])
        self.expect(sink, first, rows)

    def test_invisible_when_the_worker_gives_up(self, sink: TwoPhaseSink) -> None:
        """An aborted attempt leaves nothing: only the partition's next attempt appears."""
        sink.open(self.query, self.schema())
        with self.written(sink, self.attempt(), self.rows(ROWS, seed=1)) as worker:
            worker.ask("abort")
        self.expect(sink)
        rows = self.rows(ROWS, seed=1, attempt=1)
        sink.commit(self.query, 0, [self.prepared(sink, self.attempt(), rows)])
        self.expect(sink, rows)
        self.begin_again(sink)
        self.expect(sink, rows)

    def test_prepared_survives_worker_driver_and_server(self, sink: TwoPhaseSink) -> None:
        """Another process can commit prepared rows after the target's server was killed."""
        sink.open(self.query, self.schema())
        rows = self.rows(ROWS, seed=1)
        handle = self.prepared(sink, self.attempt(), rows)
        self.restart_target()
        self.expect(sink)
        sink.open(self.query, self.schema())
        self.show(sink, 0, [handle])
        self.restart_target()
        self.expect(sink, rows)

    def test_prepared_is_confirmed_and_a_missing_one_noticed(self, sink: TwoPhaseSink) -> None:
        """The last check before the decision fails if either of two partitions is gone."""
        sink.open(self.query, self.schema())
        handles = [self.prepared(sink, self.attempt(0, i), self.rows(ROWS, seed=i)) for i in range(2)]
        sink.confirm(self.query, 0, handles)
        sink.confirm(self.query, 0, [])
        sink.abort(self.query, handles[:1])
        for order in (handles, handles[::-1]):
            with self.raises(UnavailableError):
                sink.confirm(self.query, 0, order)
        sink.confirm(self.query, 0, handles[1:])
        self.expect(sink)

    def test_idempotent_commit(self, sink: TwoPhaseSink) -> None:
        """A micro-batch that is committed again, even after a new start, appears once."""
        sink.open(self.query, self.schema())
        first = self.write_batch(sink, 0)
        tables = [self.rows(ROWS, seed=i) for i in range(2)]
        handles = [self.prepared(sink, self.attempt(1, i), rows) for i, rows in enumerate(tables)]
        for _ in range(3):
            sink.commit(self.query, 1, handles)
            self.expect(sink, first, *tables)
        self.restart_target()
        self.begin_again(sink)
        sink.commit(self.query, 1, handles)
        self.expect(sink, first, *tables)

    def test_idempotent_abort(self, sink: TwoPhaseSink) -> None:
        """Aborting a handle again, alone or with others, is fine."""
        sink.open(self.query, self.schema())
        handles = [self.prepared(sink, self.attempt(0, i), self.rows(ROWS, seed=i)) for i in range(2)]
        sink.abort(self.query, [])
        sink.abort(self.query, handles[:1])
        sink.abort(self.query, handles)
        sink.abort(self.query, handles)
        self.expect(sink)
        assert list(sink.leftovers(self.query)) == []

    def test_idempotent_commit_with_gaps(self, sink: TwoPhaseSink) -> None:
        """Micro-batches without rows are not committed, so numbers may have gaps."""
        sink.open(self.query, self.schema())
        self.expect(sink)
        first = self.write_batch(sink, 1)
        self.begin_again(sink)
        second = self.write_batch(sink, 5)
        self.expect(sink, first, second)

    def test_final_open_of_another_target_raises(self, sink: TwoPhaseSink) -> None:
        """With micro-batches decided, a target that does not know the query is refused, if targets keep marks."""
        decided = replace(self.query, was_shown=-1)
        try:
            assert sink.open(decided, self.schema()) is None, "an unknown target must be refused"
        except StateLostError as exc:
            self.check_error(exc)
        sink.open(self.query, self.schema())
        assert sink.open(decided, self.schema()) in (-1, None), "the query's first start has made it known"
        rows = self.write_batch(sink, 0)
        self.expect(sink, rows)

    def test_final_commit_after_abort_raises(self, sink: TwoPhaseSink) -> None:
        """Lost results never count as committed, however often they are committed."""
        sink.open(self.query, self.schema())
        first = self.write_batch(sink, 0)
        handle = self.prepared(sink, self.attempt(1), self.rows(ROWS, seed=1))
        sink.abort(self.query, [handle])
        for _ in range(2):
            self.expect_lost(sink, 1, handle)
        self.expect(sink, first)
        rows = self.rows(ROWS, seed=1, attempt=1)
        sink.commit(self.query, 1, [self.prepared(sink, self.attempt(1), rows)])
        self.expect(sink, first, rows)

    @pytest.mark.parametrize("chosen", [0, 1])
    def test_apart_two_attempts_at_once(self, sink: TwoPhaseSink, chosen: int) -> None:
        """Two workers write one partition at once: only the chosen attempt's rows appear."""
        sink.open(self.query, self.schema())
        tables = [self.rows(ROWS, seed=1, attempt=i) for i in range(2)]
        with (
            self.written(sink, self.attempt(), tables[0]) as one,
            self.written(sink, self.attempt(), tables[1]) as other,
        ):
            handles = [self.carried(worker.ask("prepare")) for worker in (one, other)]
        sink.confirm(self.query, 0, [handles[chosen]])
        sink.commit(self.query, 0, [handles[chosen]])
        self.expect(sink, tables[chosen])
        self.begin_again(sink)
        self.expect(sink, tables[chosen])
        self.expect_lost(sink, 0, handles[1 - chosen])
        self.expect(sink, tables[chosen])

    def test_apart_a_slow_attempt_does_not_block_the_commit(self, sink: TwoPhaseSink) -> None:
        """A worker that still writes does not block its micro-batch's commit, and its own rows never appear."""
        sink.open(self.query, self.schema())
        rows = self.rows(ROWS, seed=1, attempt=1)
        with self.written(sink, self.attempt(), self.rows(ROWS, seed=1)) as slow:
            handle = self.prepared(sink, self.attempt(), rows)
            self.show(sink, 0, [handle])
            self.expect(sink, rows)
            late = self._late_handle(slow)
        self.expect(sink, rows)
        self.begin_again(sink)
        self.expect_lost(sink, 0, *late)
        sink.commit(self.query, 0, [handle])
        self.expect(sink, rows)

    def test_apart_partitions_at_once(self, sink: TwoPhaseSink) -> None:
        """Partitions of a micro-batch can be written, prepared and committed concurrently."""
        sink.open(self.query, self.schema())
        tables = [self.rows(ROWS + i, seed=i) for i in range(4)]
        with ExitStack() as stack:
            workers = [
                stack.enter_context(self.written(sink, self.attempt(0, i), rows)) for i, rows in enumerate(tables)
            ]
            for worker in workers:
                worker.start("prepare")
            handles = [self.carried(worker.finish()) for worker in workers]
        self.expect(sink)
        self.show(sink, 0, handles)
        self.expect(sink, *tables)

    def test_apart_a_spare_handle_changes_nothing_that_is_shown(self, sink: TwoPhaseSink) -> None:
        """The same rules apply to attempts that reuse an old committed handle."""
        sink.open(self.query, self.schema())
        tables = [self.rows(ROWS, seed=i) for i in range(4)]
        handles = [self._committed(sink, self.attempt(0), tables[0]), self._committed(sink, self.attempt(1), tables[1])]
        lost = self.prepared(sink, self.attempt(2), self.rows(ROWS, seed=2, attempt=1), handles[0])
        self.expect(sink, *tables[:2])
        assert lost in list(sink.leftovers(self.query))
        sink.commit(self.query, 1, handles[1:])
        self.begin_again(sink)
        self.expect_lost(sink, 2, lost)
        handles.append(self._committed(sink, self.attempt(2), tables[2]))
        handles.append(self._committed(sink, self.attempt(3), tables[3], handles[1]))
        self.expect(sink, *tables)
        sink.commit(self.query, 3, handles[3:])
        self.begin_again(sink)
        self.expect(sink, *tables)

    def _committed(
        self, sink: TwoPhaseSink, attempt: SinkAttempt, rows: pa.Table, spare: Handle | None = None
    ) -> Handle:
        handle = self.prepared(sink, attempt, rows, spare)
        self.show(sink, attempt.batch_id, [handle])
        return handle

    def test_found_though_the_handle_never_arrived(self, sink: TwoPhaseSink) -> None:
        """A new run aborts attempts whose handle was lost, in any micro-batch and partition, and nothing else."""
        sink.open(self.query, self.schema())
        first = self.write_batch(sink, 0)
        lost = [self.prepared(sink, self.attempt(1, i), self.rows(ROWS, seed=i)) for i in range(3)]
        left = [self.carried(handle) for handle in sink.leftovers(self.query)]
        assert [handle for handle in lost if handle not in left] == [], "leftovers must return equal handles"
        self.restart_target()
        self.begin_again(sink)
        self.expect(sink, first)
        self.expect_lost(sink, 1, *lost)

    def test_found_by_the_query_that_replaces_the_dead_one(self, sink: TwoPhaseSink) -> None:
        """A query that replaces another first aborts what the other prepared."""
        sink.open(self.query, self.schema())
        first = self.write_batch(sink, 0)
        lost = self.prepared(sink, self.attempt(1), self.rows(ROWS, seed=1))
        self.take_over(sink, self.successor(replaces=True))
        self.expect_lost(sink, 1, lost)
        self.expect(sink, first)

    def test_found_or_failed_a_zombie_prepares_late(self, sink: TwoPhaseSink) -> None:
        """A worker outlives its run and prepares after the next began: never shown, eventually removed."""
        sink.open(self.query, self.schema())
        with self.written(sink, self.attempt(), self.rows(ROWS, seed=1)) as zombie:
            self.begin_again(sink)
            rows = self.rows(ROWS, seed=1, attempt=1)
            handle = self.prepared(sink, self.attempt(), rows)
            late = self._late_handle(zombie)
        self.show(sink, 0, [handle])
        self.expect(sink, rows)
        self.begin_again(sink)
        self.expect_lost(sink, 0, *late)
        self.expect(sink, rows)

    def test_the_newest_micro_batch_is_remembered_or_never(self, sink: TwoPhaseSink) -> None:
        """A target that keeps marks returns the newest committed micro-batch, and -1 before the first."""
        newest = sink.open(self.query, self.schema())
        marks = newest is not None
        assert newest in (None, -1)
        self.write_batch(sink, 0)
        self.prepared(sink, self.attempt(1), self.rows(ROWS, seed=1))
        assert self.begin_again(sink) == (0 if marks else None)
        self.write_batch(sink, 7)
        self.restart_target()
        assert self.begin_again(sink) == (7 if marks else None)
        heir = self.successor(replaces=True)
        assert self.take_over(sink, heir) == (-1 if marks else None), "the mark is the other query's"
        self.write_batch(sink, 3, heir)
        assert self.begin_again(sink, heir) == (3 if marks else None)

    def test_another_query_needs_consent(self, sink: TwoPhaseSink) -> None:
        """A second query is refused unless it replaces the first, which is refused from then on."""
        sink.open(self.query, self.schema())
        first = self.write_batch(sink, 0)
        with self.raises(ConflictError):
            sink.open(self.successor(replaces=False), self.schema())
        self.expect(sink, first)
        self.begin_again(sink)
        heir = self.successor(replaces=True)
        self.take_over(sink, heir)
        second = self.write_batch(sink, 1, heir)
        self.expect(sink, first, second)
        self.begin_again(sink, heir)
        with self.raises(ConflictError):
            sink.open(self.query, self.schema())
        self.expect(sink, first, second)

    def test_other_columns_are_refused_before_anything_is_written(self, sink: TwoPhaseSink) -> None:
        """A schema that does not fit the target makes `open` fail, and leaves the target unchanged."""
        sink.open(self.query, self.schema())
        first = self.write_batch(sink, 0)
        for schema in self.unfit_schemas():
            with self.raises(SchemaMismatchError):
                sink.open(self.query, schema)
        self.expect(sink, first)
        second = self.write_batch(sink, 1)
        self.expect(sink, first, second)

    def test_silent_about_credentials(self, sink: TwoPhaseSink) -> None:
        """Neither the sink nor its handles hold a credential, before and after use; the sink still pickles then."""
        self._check_text(sink)
        sink.open(self.query, self.schema())
        handle = self.prepared(sink, self.attempt(), self.rows(ROWS, seed=1))
        sink.commit(self.query, 0, [handle])
        self.prepared(sink, self.attempt(1), self.rows(ROWS, seed=2))
        for left in sink.leftovers(self.query):
            self.carried(left)
        self._check_text(sink)

    def _check_text(self, sink: TwoPhaseSink) -> None:
        self.check_silent(f"{sink!r} {sink} {vars(sink)}")
        self.check_silent(repr(bytes(ForkingPickler.dumps(sink))))

    def _late_handle(self, worker: SinkWorker) -> list[Handle]:
        try:
            return [self.carried(worker.ask("prepare"))]
        except HoldfastError as exc:
            self.check_error(exc)
            return []
