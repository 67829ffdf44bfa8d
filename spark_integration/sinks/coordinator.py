"""Commits micro-batches to a sink in two phases; ends, at each start, what the last run left half-done.

::

    start     who writes under this name ─▶ what the target shows ─▶ commit the newest decision ─▶ abort leftovers
    finish    confirm ─▶ store the decision ─▶ commit ─▶ prune

Which of a run's calls were made is known from what is stored, never from a clock:

===========================  =========================================================================================
what a start finds           what it means, and what is done
===========================  =========================================================================================
prepared, no decision        the micro-batch is repeated: abort
a decision, the same batch   decided, and perhaps visible: commit its handles; no row is written a second time
a decision, a later batch    Spark has ended it, so it was committed, unless a user's function swallowed the commit's
                             error: commit again. A target that forgets what it committed long ago, as Kafka does, may
                             say that it is gone, unless the target shows no more than an earlier one
a decision, an earlier one   Spark's checkpoint location was turned back, or is an older copy: refused
target shows a later one     the state directory is another, or was deleted: refused, unless Spark has ended it
target shows an earlier one  the target was emptied, or restored from a backup: refused
===========================  =========================================================================================
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from holdfast.errors import ConflictError, HoldfastError, InvalidArgumentError, StateLostError, UnavailableError
from holdfast.snapshotter.decisions import FOLDER, QUERY_ID, Decision, Decisions, checked_sink
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery, TwoPhaseSink

_log = logging.getLogger(__name__)

_ANOTHER_NAME = "To begin anew with an empty target, give the sink another name"


@dataclass(frozen=True)
class Prepared:
    """What the tasks of a micro-batch have prepared.

    Attributes
    ----------
    handles : tuple of Handle
        By partition; of those that had rows.
    rows : int
    repeated : bool
        Whether other attempts may have prepared the same: some task was not the first, or had a twin.
    unused : tuple of Handle
        Spare handles that no attempt was given, or has begun with.
    """

    handles: tuple[Handle, ...]
    rows: int
    repeated: bool = False
    unused: tuple[Handle, ...] = ()


class Coordinator:
    """One run's two-phase commits of one query to one sink.

    Parameters
    ----------
    sink : TwoPhaseSink
    query : SinkQuery
    storage : ObjectStorage
        The state directory.
    retained : int
        How many decisions are kept.

    Notes
    -----
    Threads: one at a time, on the driver. Durability: when `finish` returns, the micro-batch is visible and will stay.
    """

    def __init__(self, sink: TwoPhaseSink, query: SinkQuery, storage: ObjectStorage, retained: int) -> None:
        checked_sink(query.sink)
        if not QUERY_ID.fullmatch(query.query_id):
            raise InvalidArgumentError("Spark gave no query id", query=query.query_id)
        if query.replaces is not None and not QUERY_ID.fullmatch(query.replaces):
            raise InvalidArgumentError(
                "replaces must be the other query's id, Spark's StreamingQuery.id",
                sink=query.sink,
                replaces=query.replaces,
            )
        self._sink, self._query, self._storage, self._retained = sink, query, storage, retained
        self._decisions = Decisions(storage, query.sink, query.query_id)
        self._newest: Decision | None = None
        # Whether all that may be decided is committed.
        self._is_settled = False
        # A twin of a repeated task may prepare after any number of micro-batches.
        self._has_zombies = False

    def start(self, batch_id: int, schema: pa.Schema) -> None:
        """Begin a run with a micro-batch: end what the last run left, before anything is written.

        Parameters
        ----------
        batch_id : int
            The first micro-batch of the run.
        schema : pyarrow.Schema

        Raises
        ------
        ConflictError
            Another query writes under this name, or Spark and the sink disagree about what was decided.
        StateLostError
            The target has lost what was decided, or shows what no decision here tells of.
        HoldfastError
            As `TwoPhaseSink.open` and `TwoPhaseSink.commit` raise.
        """
        is_new = self._take_name()
        try:
            replaced = self._replaced()
            if replaced is not None:
                self._settle_replaced(replaced)
            has_decided = bool(self._decisions.batches())
            shown = self._sink.open(replace(self._query, has_decided=has_decided), schema)
        except BaseException:
            if is_new:  # it has written nothing, and is in nobody's way
                self._withdraw()
            raise
        # Read after what is shown, which another driver may have decided while the target was opened.
        batches = self._decisions.batches()
        self._newest = self._decisions.read(batches[-1]) if batches else None
        self._compare(batch_id, batches, shown)
        if self._newest is not None:
            # What was ended and is shown no longer needs the target to know its handles.
            is_shown = shown is None or shown >= self._newest.batch_id
            self._commit_again(self._newest, may_be_forgotten=is_shown and batch_id > self._newest.batch_id)
        self._is_settled = True
        self._abort_leftovers()
        if replaced is not None:
            replaced.delete()

    def resume(self) -> None:
        """Go on with a run that another process has started, which left nothing half-done."""
        self._newest = _newest(self._decisions)
        self._is_settled = True

    def is_decided(self, batch_id: int) -> bool:
        """Tell whether a micro-batch was decided before, so that its rows must not be written again."""
        return self._newest is not None and self._newest.batch_id == batch_id

    def tell_of_dropped(self, rows: int) -> None:
        """Warn if a decided micro-batch has come with another number of rows than were decided; they are dropped."""
        assert self._newest is not None
        if rows != self._newest.rows:
            _log.warning(
                "sink %r: micro-batch %d was decided with %d rows, which are shown; now it has %d, which are "
                "dropped. If the query gives the same rows each time, Spark's checkpoint location was rolled back, "
                "or one micro-batch calls this sink twice: give it their union",
                self._query.sink,
                self._newest.batch_id,
                self._newest.rows,
                rows,
            )

    def finish(self, batch_id: int, prepared: Prepared) -> None:
        """Decide a micro-batch and make it visible.

        Raises
        ------
        UnavailableError
            The storage or the target did not answer. If the decision stands, the next start commits.
        ConflictError
            Another driver of the same query decided this micro-batch.
        """
        if prepared.handles:
            handles = tuple(map(dict, prepared.handles))
            decision = Decision(self._query.sink, self._query.query_id, batch_id, prepared.rows, handles)
            try:
                self._sink.confirm(self._query, batch_id, prepared.handles)
                self._refuse_second(batch_id)
                self._decide(decision)
            except Exception:
                # Not all that is left, which may be another driver's; nor what a put that has failed may have decided.
                self._abort_if_settled(lambda: self._sink.abort(self._query, _but(handles, _newest(self._decisions))))
                raise
            self._sink.commit(self._query, batch_id, handles)
            self._newest, self._is_settled = decision, True
        self._has_zombies |= prepared.repeated
        if self._has_zombies:
            self.give_up(batch_id + 1)
        try:
            self._decisions.prune(self._retained)
        except UnavailableError as exc:
            _log.warning("old decisions about sink %r stay for now: %s", self._query.sink, exc)

    def give_up(self, batch_id: int) -> None:
        """Abort what was prepared and does not count, if the target answers; else the next start does it.

        So it does where another driver has decided the micro-batch, or a later one: what is prepared may be that one's.
        """
        self._abort_if_settled(lambda: None if self._is_overtaken(batch_id) else self._abort_leftovers())

    def _abort_if_settled(self, abort: Callable[[], None]) -> None:
        if not self._is_settled:  # what was prepared may be decided
            return
        try:
            abort()
        except HoldfastError as exc:
            _log.warning("what was prepared in sink %r stays until the next start: %s", self._query.sink, exc)
        except Exception as exc:  # noqa: BLE001  it must not hide why a micro-batch failed; its text may hold anything
            _log.warning(
                "what was prepared in sink %r stays until the next start: %s", self._query.sink, type(exc).__name__
            )

    def _refuse_second(self, batch_id: int) -> None:
        # The put itself refuses another decision of the micro-batch; but that one may be pruned, and later ones stand.
        if self._is_overtaken(batch_id):
            raise self._second(batch_id)

    def _second(self, batch_id: int) -> ConflictError:
        return ConflictError(
            "another driver of this query has decided this micro-batch or a later one, so two run: this one ends",
            sink=self._query.sink,
            query=self._query.query_id,
            batch=batch_id,
            storage=self._storage.url,
        )

    def _decide(self, decision: Decision) -> None:
        """Store a decision; where that fails, whether it stands may be unknown."""
        self._is_settled = False
        try:
            self._decisions.put(decision)
        except ConflictError as exc:
            self._is_settled = True
            raise self._second(decision.batch_id) from exc
        except InvalidArgumentError:  # it does not stand
            self._is_settled = True
            raise

    def _take_name(self) -> bool:
        """Put this query's sign, look who else has one, and withdraw if another has; tell whether it is new."""
        allowed = {self._query.query_id, self._query.replaces}
        known = self._decisions.queries()
        self._refuse_others(known - allowed)
        if self._query.query_id in known:
            return False
        self._decisions.begin()
        try:
            self._refuse_others(self._decisions.queries() - allowed)
        except ConflictError:
            self._withdraw()
            raise
        return True

    def _withdraw(self) -> None:
        try:
            self._decisions.withdraw()
        except HoldfastError as exc:
            _log.warning("query %s stays noted under sink %r: %s", self._query.query_id, self._query.sink, exc)

    def _refuse_others(self, others: Iterable[str | None]) -> None:
        other = min(filter(None, others), default=None)
        if other is not None:
            raise ConflictError(
                "another query writes to this sink, or did: give the sink another name or, if this query continues "
                "the other one's results and the other one has ended for good, name it: replaces=<its id>",
                sink=self._query.sink,
                query=self._query.query_id,
                other_query=other,
                storage=self._storage.url,
            )

    def _replaced(self) -> Decisions | None:
        other = self._query.replaces
        if other is None or other == self._query.query_id or other not in self._decisions.queries():
            return None
        return Decisions(self._storage, self._query.sink, other)

    def _settle_replaced(self, decisions: Decisions) -> None:
        """Commit what the replaced query decided last, and abort what else it prepared."""
        query = replace(self._query, query_id=decisions.query_id, replaces=None)
        newest = _newest(decisions)
        if newest is not None:
            try:
                self._sink.commit(query, newest.batch_id, newest.handles)
            except StateLostError as exc:
                raise StateLostError(
                    f"the last decision of the replaced query can no longer be committed: {exc.message}. If its "
                    f"results are complete, delete {FOLDER}/{decisions.sink}/{decisions.query_id} in the state "
                    "directory",
                    **exc.facts,
                ) from exc
        self._sink.abort(query, _but(self._sink.leftovers(query), newest))

    def _compare(self, batch_id: int, batches: Sequence[int], shown: int | None) -> None:
        """Refuse to go on where Spark, the decisions and the target tell different stories."""
        newest = batches[-1] if batches else -1
        facts = {"sink": self._query.sink, "query": self._query.query_id, "batch": batch_id, "decided": newest}
        if batch_id < newest:
            raise ConflictError(
                "Spark goes back to a micro-batch before the last decided one: its checkpoint location was rolled "
                f"back, or is an older copy, and what it repeats may differ from what the sink shows. {_ANOTHER_NAME}",
                **facts,
            )
        if shown is None:
            return
        if shown > newest and batch_id <= shown:
            raise StateLostError(
                "the target shows a micro-batch that this state directory does not know, and Spark is about to "
                "repeat it: the directory is not the one used before, or its contents were deleted. Set "
                f"spark.holdfast.state.dir to the original directory. {_ANOTHER_NAME}",
                **facts,
                shown=shown,
            )
        # The newest may be decided and not yet visible, also where Spark has ended it: a user's function may have
        # swallowed the error of its commit. What came before it was visible.
        if shown < (batches[-2] if len(batches) > 1 else -1):
            raise StateLostError(
                "the target does not show what was committed to it: it was emptied, recreated, or restored from a "
                f"backup. Restore it as it was. {_ANOTHER_NAME}",
                **facts,
                shown=shown,
            )

    def _commit_again(self, decision: Decision, *, may_be_forgotten: bool) -> None:
        try:
            self._sink.commit(self._query, decision.batch_id, decision.handles)
        except StateLostError as exc:
            if not may_be_forgotten:
                raise
            _log.info("sink %r no longer knows micro-batch %d: %s", decision.sink, decision.batch_id, exc)

    def _is_overtaken(self, batch_id: int) -> bool:
        return max(self._decisions.batches(), default=-1) >= batch_id

    def _abort_leftovers(self) -> None:
        left = self._sink.leftovers(self._query)
        if left:
            # Read after them: another driver of the query may have decided some of them meanwhile.
            left = _but(left, _newest(self._decisions))
        if left:
            _log.info("sink %r: aborted %d parts of attempts that did not count", self._query.sink, len(left))
            self._sink.abort(self._query, left)


def _newest(decisions: Decisions) -> Decision | None:
    batches = decisions.batches()
    return decisions.read(batches[-1]) if batches else None


def _but(handles: Sequence[Handle], decision: Decision | None) -> list[Handle]:
    """Return the handles that a decision does not name."""
    decided = {_canonical(handle) for handle in decision.handles} if decision else set()
    return [handle for handle in handles if _canonical(handle) not in decided]


def _canonical(handle: Handle) -> str:
    return json.dumps(handle, sort_keys=True)
