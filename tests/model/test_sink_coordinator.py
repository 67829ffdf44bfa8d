"""The coordinator of a two-phase commit against a model: drivers die at any request, workers at any step.

The target is a plain dict that keeps the seam's contract; Spark is a number, the micro-batch after the last one that it
ended. Each attempt at a micro-batch writes rows of its own, so that two that are mixed, or shown twice, are seen.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.errors import UnavailableError
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery
from tests.model.sink_target import SCHEMA, Crash, CrashingStorage, Killed, ModelSink, Target
from tests.storage_in_ram import storage_in_ram
from tests.tiers import examples

_numbers = itertools.count()


class CoordinatorModel(RuleBasedStateMachine):
    """One query that is killed and begun again; see the module."""

    @initialize(has_mark=st.booleans())
    def begin(self, has_mark: bool) -> None:
        self.target = Target(has_mark)
        self.crash = Crash()
        self.cleanup = ExitStack()
        self.storage = CrashingStorage(self.cleanup.enter_context(storage_in_ram()), self.crash)
        self.run: Coordinator | None = None
        self.batch_id = 0
        #: By micro-batch what each attempt prepared to be shown, and what the last one to end left visible.
        self.attempts: dict[int, list[set[str]]] = {}
        self.ended: dict[int, set[str]] = {}

    @rule(
        parts=st.integers(0, 3),
        at=st.none() | st.integers(1, 16),
        after=st.booleans(),
        kills=st.booleans(),
        repeated=st.booleans(),
        fails=st.booleans(),
    )
    def micro_batch(self, parts: int, at: int | None, after: bool, kills: bool, repeated: bool, fails: bool) -> None:
        """Spark runs a micro-batch; the driver may die, or a request fail, at any of its calls."""
        self.crash.at, self.crash.after, self.crash.kills, self.crash.calls = at, after, kills, 0
        try:
            self._run(parts, repeated=repeated, fails=fails)
        except (Killed, UnavailableError):
            self.run = None
        else:
            self.batch_id += 1

    def _run(self, parts: int, *, repeated: bool, fails: bool) -> None:
        batch_id = self.batch_id
        if self.run is None:
            run = Coordinator(
                ModelSink(self.target, self.crash), SinkQuery("model", "query-1"), self.storage, retained=3
            )
            run.start(batch_id, SCHEMA)
            assert not self.target.prepared, "a start leaves nothing half-done"
            self.run = run
        if self.run.is_decided(batch_id):
            self.ended[batch_id] = next(a for a in self.attempts[batch_id] if a and a == self.target.shown(batch_id))
            return
        assert not self.ended.get(batch_id), "what was shown is not written again"
        try:
            prepared = self._prepare(batch_id, parts, repeated=repeated)
            if fails:
                raise UnavailableError("a task failed")
            self.run.finish(batch_id, prepared)
        except UnavailableError:
            self.run.give_up()
            raise
        self.ended[batch_id] = self.attempts[batch_id][-1]
        if repeated and parts and self.crash.at is None:
            assert not self.target.prepared, "attempts that do not count are given up at once"

    def _prepare(self, batch_id: int, parts: int, *, repeated: bool) -> Prepared:
        """Write one attempt; where tasks were repeated, one that does not count is prepared as well."""
        handles = [f"attempt-{next(_numbers)}" for _ in range(parts)]
        self.attempts.setdefault(batch_id, []).append(set(handles))
        twins = [f"twin-{next(_numbers)}"] if repeated and parts else []
        self.target.prepared |= dict.fromkeys([*handles, *twins], batch_id)
        return Prepared(tuple({"id": handle} for handle in handles), parts, repeated)

    @rule()
    def restart(self) -> None:
        """The driver ends between two micro-batches."""
        self.run = None

    @rule()
    @precondition(
        lambda self: self.run is None and self.batch_id - 1 in self.ended and self.batch_id not in self.attempts
    )
    def repeat(self) -> None:
        """Spark had not noted the end of the last micro-batch when the driver died: it repeats that one."""
        if not self.target.forgotten & self.ended[self.batch_id - 1]:
            self.batch_id -= 1

    @rule()
    @precondition(lambda self: self.run is None)
    def days_go_by(self) -> None:
        """The query is stopped for so long that the target forgets what Spark has ended."""
        self.target.forgotten |= {h for batch, handles in self.ended.items() if batch < self.batch_id for h in handles}

    @rule()
    def a_zombie_prepares(self) -> None:
        """A worker of an attempt that is over prepares late."""
        self.target.prepared[f"zombie-{next(_numbers)}"] = self.batch_id

    @invariant()
    def what_is_shown_is_of_one_attempt(self) -> None:
        for batch_id, attempts in getattr(self, "attempts", {}).items():
            shown = self.target.shown(batch_id)
            assert any(shown <= attempt for attempt in attempts), "no attempts are mixed"
            if batch_id < self.batch_id:
                assert shown == self.ended[batch_id], "what Spark has ended is visible, whole and once"

    def teardown(self) -> None:
        if hasattr(self, "cleanup"):
            self.cleanup.close()


TestCoordinator = CoordinatorModel.TestCase
TestCoordinator.settings = settings(max_examples=examples(100, 200, 2_000), stateful_step_count=30, deadline=None)
