"""Two-phase commit of micro-batches to a sink, and recovery of the last run's unfinished work at each start.

    start     read the log ─▶ list leftovers ─▶ append "begin" ─▶ open the target ─▶ commit the newest decision
                                                                                 ─▶ abort undecided leftovers
    finish    confirm ─▶ append the decision ─▶ commit ─▶ prune

The log is a fence: `holdfast.snapshotter.sink_log`. Two rules keep two drivers safe, wherever either of them stops:

closed     a driver aborts only handles that it listed before appending an entry and that no decision up to that entry
           contains: no driver can decide them any more
decided    the handles in a decision are committed by any driver that finds it, and never aborted. If storing a
           decision failed, the entry found under its number shows whether the decision counts

The newest start wins: the previous driver fails at its next decision or earlier. However, a start is refused while
another process on the same machine runs the query, as the query's shards would refuse it (decision 0023).

===========================  =========================================================================================
what a start finds           meaning and action
===========================  =========================================================================================
prepared, no decision        Spark repeats the micro-batch: abort
a decision, same batch       decided, perhaps visible: commit its handles again; no row is written a second time
a decision, later batch      Spark has finished the decided batch, so it was committed, unless a user's function
                             swallowed the error: commit again. A target that forgets old commits, as Kafka does, may
                             report it lost, unless the target's newest visible batch is older
a decision, earlier batch    Spark's checkpoint location was rolled back, or is an older copy: refuse
same batch, different plan   the location was rolled back: Spark has planned the micro-batch again. Refuse
target shows a later batch   the state directory is a different one, or was deleted: refuse, unless Spark finished it
target shows an earlier one  the target was emptied, or restored from a backup: refuse
another query's decision     `replaces` names that query, or this one was restored from it and continues the sink:
                             commit under that query's id before taking over the target. The micro-batch of this query
                             that the decision stands for is decided
===========================  =========================================================================================
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import pyarrow as pa

from holdfast import clock
from holdfast.errors import (
    ConflictError,
    FencedError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    StateLostError,
)
from holdfast.snapshotter.fence import looks
from holdfast.snapshotter.fields import QUERY_ID
from holdfast.snapshotter.ownership.claims import ALIVE_MS
from holdfast.snapshotter.ownership.queries import QueryOrigin, find_origin
from holdfast.snapshotter.sink_log import FOLDER, Entry, SinkLog, checked_sink, place_digest
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.probe import probe_storage
from holdfast.spark_integration.executor.processes import ProcessId, lives, place_of
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery, TwoPhaseSink, another_query

_log = logging.getLogger(__name__)

_ANOTHER_NAME = "To start over with an empty target, give the sink another name"


@dataclass(frozen=True)
class Prepared:
    """The work that a micro-batch's tasks have prepared."""

    handles: tuple[Handle, ...]  #: One per partition with rows, in partition order
    rows: int
    #: Whether other attempts may have prepared the same rows: a task was repeated or ran speculatively
    repeated: bool = False
    unused: tuple[Handle, ...] = ()  #: Spare handles that no attempt has used


@dataclass(frozen=True)
class _Past:
    """The newest log entries and each query's prepared work, read before a driver appended an entry."""

    entry: Entry | None
    decision: Entry | None
    left: Mapping[str, Sequence[Handle]]

    def undecided(self, query_id: str, handles: Iterable[Handle] = ()) -> list[Handle]:
        """Return the query's prepared handles that are neither decided nor in `handles`."""
        named = {*map(_canonical, handles), *map(_canonical, self.decision.handles if self.decision else ())}
        return [handle for handle in self.left[query_id] if _canonical(handle) not in named]


class Coordinator:
    """The driver's two-phase commits for one run of one query with one sink; used by one thread at a time.

    `retained`: the number of log entries to keep; `process`: the query's process, if it has only one, which blocks
    other processes on this machine; `location`: Spark's checkpoint location, if known, to tell a copy from a restart.
    """

    def __init__(
        self,
        sink: TwoPhaseSink,
        query: SinkQuery,
        storage: ObjectStorage,
        retained: int,
        process: ProcessId | None = None,
        now_ms: Callable[[], int] = clock.now_ms,
        location: str | None = None,
    ) -> None:
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
        self._log, self._driver, self._now_ms = SinkLog(storage, query.sink), clock.new_id(), now_ms
        self._process = place_of(process) if process else ""
        self._location = place_digest(location) if location else ""
        self._facts = {"sink": query.sink, "query": query.query_id, "storage": storage.url}
        # The newest entry that this run has read or appended, and the decision in force as of that entry.
        self._entry: Entry | None = None
        self._decision: Entry | None = None
        # A zombie attempt of a repeated task may prepare its work any number of micro-batches later.
        self._has_zombies = False

    @property
    def number(self) -> int:
        """The number of the run's newest log entry; 0 before the first."""
        return self._entry.number if self._entry else 0

    def start(self, batch_id: int, schema: pa.Schema, plan: str = "") -> None:
        """Begin a run at its first micro-batch, which Spark planned as `plan`; settle the last run's leftovers.

        Raises `ConflictError` if another query owns the sink's name, or Spark and the log disagree; `StateLostError` if
        the target lacks decided work or shows undecided work; and the errors of `TwoPhaseSink.open` and `commit`.
        """
        past, shown = self._begin(batch_id, schema, plan)
        with self._unless_overtaken():
            self._settle_past(past, batch_id, schema, shown)
        self._prune()

    def _settle_past(self, past: _Past, batch_id: int, schema: pa.Schema, shown: int | None) -> None:
        mine = past.decision if past.decision and past.decision.query_id == self._query.query_id else None
        if past.entry is not None:
            self._settle_replaced(past)
            shown = self._open(past.entry, self._known(past.entry, mine), schema)
            self._compare(batch_id, mine, shown)
        if mine is not None:
            # The target may have forgotten the handles of a visible micro-batch that Spark has finished.
            may_be_forgotten = (shown is None or shown >= _batch(mine)) and batch_id > _batch(mine)
            try:
                self._commit_concurrently(mine)
            except StateLostError as exc:
                if not may_be_forgotten:
                    raise
                _log.info("sink %r has forgotten micro-batch %d: %s", self._query.sink, mine.batch_id, exc)
        self._abort_leftovers(past, self._query.query_id)
        if self._entry is not None and self._entry.ending:  # the replaced queries' work is settled
            settled = self._next(decided=mine.number if mine else 0)
            # The takeover precedes this query's first results: no later start may name a different replaced query.
            is_first = mine is None and settled.stands_for is None
            self._append(replace(settled, stands_for=-1) if is_first else settled)
        self._decision = mine

    def _known(self, found: Entry, mine: Entry | None) -> SinkQuery:
        """Return the query with `was_shown` set: the newest micro-batch before the last decision."""
        if mine is not None:
            return replace(self._query, was_shown=mine.before)
        continues = found.continues and found.query_id == self._query.query_id
        has_opened = continues and not (found.decided or found.ending)
        return replace(self._query, was_shown=-1 if has_opened else None)

    def _open(self, found: Entry, query: SinkQuery, schema: pa.Schema) -> int | None:
        """Open the target, which may still belong to a replaced query."""
        before = [*found.ending, found.query_id] if found.continues else []
        others = [query_id for query_id in before if query_id not in (query.query_id, query.replaces)]
        for query_id in others:
            try:
                return self._sink.open(replace(query, replaces=query_id), schema)
            except ConflictError:  # it already belongs to a different query
                continue
        return self._sink.open(query, schema)

    def resume(self, number: int) -> None:
        """Continue a run that a different process started. Raises `ConflictError` if its log entry is gone."""
        try:
            self._entry = self._log.read(number)
            self._decision = self._log.decision(self._entry)
        except NotFoundError as exc:
            raise self._overtaken(ConflictError) from exc

    def is_decided(self, batch_id: int) -> bool:
        """Return whether a micro-batch is already decided, so its rows must not be written again."""
        if self._decision is not None:
            return self._decision.batch_id == batch_id
        return self._entry is not None and self._entry.stands_for == batch_id

    def warn_of_dropped_rows(self, rows: int) -> None:
        """Warn if a decided micro-batch's repeat, whose rows are dropped, has a different number of rows."""
        if self._decision is not None and rows != self._decision.rows:
            _log.warning(
                "sink %r: micro-batch %d was decided with %d rows, which stay visible; its repeat has %d, which are "
                "dropped. If the query is deterministic, Spark's checkpoint location was rolled back, or one "
                "micro-batch calls this sink twice: pass it the union of both DataFrames",
                *(self._query.sink, self._decision.batch_id, self._decision.rows, rows),
            )

    def finish(self, batch_id: int, prepared: Prepared, plan: str = "") -> None:
        """Decide a micro-batch and make it visible. Raises `ConflictError` if another driver has begun since.

        Raises `UnavailableError` if storage or target did not answer; the next start commits a stored decision.
        """
        self._has_zombies |= prepared.repeated
        handles = tuple(map(dict, prepared.handles))
        if not handles:
            return
        past = self._decide(batch_id, prepared.rows, handles, plan)
        with self._unless_overtaken():
            self._sink.commit(self._query, batch_id, handles)
        if past is not None:
            self._warn_if_it_fails(lambda: self._abort(past.undecided(self._query.query_id, handles)))
        self._prune()

    def give_up(self) -> None:
        """End the run after a failure; try to abort undecided work. Raises `FencedError` if overtaken."""
        number = self.number + 1

        def close() -> None:
            self._refuse_overtaken()  # listing leftovers may end the newer driver's transactions
            past = self._past()
            self._append(self._next())
            self._abort(past.undecided(self._query.query_id))

        try:
            self._warn_if_it_fails(close)
        except FencedError:
            # The entry may be this run's own decision, stored although the reply was lost: the next start commits it.
            with suppress(HoldfastError):
                if self._log.read(number).driver == self._driver:
                    return
            raise

    def _begin(self, batch_id: int, schema: pa.Schema, plan: str) -> tuple[_Past, int | None]:
        """Append this run's first entry to the log; return the past before it, and the result of `open` if called.

        If the log is empty, open the target first: a query that the target refuses then does not block others.
        """
        for _ in looks(self._storage.url):
            (found, decision), shown = self._log.latest(), None
            self._refuse_others(found, decision)
            self._refuse_older(batch_id, plan, found, decision)
            self._refuse_repeats(found, decision)
            self._refuse_a_live_driver(found)
            self._entry, self._decision = found, decision
            if found is None:
                probe_storage(self._storage, f"{FOLDER}/{self._query.sink}/probes")
                with self._unless_overtaken():
                    shown = self._sink.open(self._query, schema)
                    self._compare(batch_id, None, shown)
            ending = tuple(sorted(_owners(found, decision) - {self._query.query_id}))
            past = self._past(ending + (found.ended if found else ()))
            with suppress(ConflictError):
                self._append(self._next(ending=ending))
                return past, shown
        raise AssertionError("unreachable: the last look raises")

    def _past(self, others: Iterable[str] = ()) -> _Past:
        """List the work prepared so far by this query and by `others`, which it has replaced."""
        queries = sorted({self._query.query_id, *others})
        return _Past(self._entry, self._decision, {each: self._sink.leftovers(self._of(each)) for each in queries})

    def _of(self, query_id: str) -> SinkQuery:
        is_mine = query_id == self._query.query_id
        return self._query if is_mine else replace(self._query, query_id=query_id, replaces=None)

    def _next(self, *, decided: int | None = None, ending: tuple[str, ...] = ()) -> Entry:
        """Return the entry that follows the newest; by default, the decision in force stays."""
        if decided is None:
            decided = self._entry.decided if self._entry else 0
        begun = Entry(self._query.sink, self.number + 1, self._query.query_id, self._driver, decided, ending)
        ended = self._entry.ended_before(self._query.query_id, ending) if self._entry else ()
        begun = replace(begun, process=self._process, location=self._location, at_ms=self._now_ms(), ended=ended)
        if self._entry is None or not self._entry.continues or self._entry.query_id != self._query.query_id:
            return begun
        return replace(begun, stands_for=self._entry.stands_for, plan=self._entry.plan)

    def _append(self, entry: Entry) -> None:
        try:
            self._log.append(entry)
        except ConflictError as exc:
            raise self._overtaken(type(exc)) from exc
        self._entry = entry

    def _decide(self, batch_id: int, rows: int, handles: tuple[Handle, ...], plan: str) -> _Past | None:
        """Append a decision; return the work prepared before it if other attempts may have prepared the same rows."""
        before = _batch(self._decision) if self._decision else -1
        entry = self._next(decided=self.number + 1)
        entry = replace(entry, batch_id=batch_id, before=before, rows=rows, handles=handles, plan=plan, stands_for=None)
        try:
            past = self._confirmed(batch_id, handles)
            self._append(entry)
        except FencedError:  # the decision does not count, and no other driver can decide this run's work
            self._warn_if_it_fails(lambda: self._abort(handles))
            raise
        except Exception:
            self.give_up()
            raise
        self._decision = entry
        return past

    def _confirmed(self, batch_id: int, handles: tuple[Handle, ...]) -> _Past | None:
        """Confirm a micro-batch with the sink. Raises `FencedError` if that fails and a newer driver has begun."""
        try:
            self._sink.confirm(self._query, batch_id, handles)
            return self._past() if self._has_zombies else None
        except HoldfastError:
            self._refuse_overtaken()
            raise

    @contextmanager
    def _unless_overtaken(self) -> Iterator[None]:
        """Raise `FencedError` in place of an error if a newer driver has begun."""
        try:
            yield
        except ConflictError:
            raise
        except HoldfastError:
            self._refuse_overtaken()
            raise

    def _refuse_overtaken(self) -> None:
        newest = self._log.newest()
        if newest is not None and newest.number > self.number:
            raise self._overtaken(FencedError)

    def _overtaken(self, error: type[ConflictError]) -> ConflictError:
        return error("a newer driver of this query has started, so this one stops: run only one", **self._facts)

    def _refuse_others(self, found: Entry | None, decision: Entry | None) -> None:
        """Raise `ConflictError` if another query owns the sink, unless its takeover from this one is incomplete."""
        if found is None:
            return
        mine = {self._query.query_id, self._query.replaces}
        if found.continues and found.query_id not in mine:
            raise ConflictError(
                "another query continues this sink, from a savepoint or as a replacement: start that one, or give the "
                "sink another name",
                **self._facts,
                continued_by=found.query_id,
            )
        if not _owners(found, decision) & mine:
            raise another_query(self._query, found.query_id, storage=self._storage.url)

    def _refuse_older(self, batch_id: int, plan: str, found: Entry | None, decision: Entry | None) -> None:
        """Raise `ConflictError` if Spark went back: checked before fencing, so that a copy cannot stop the query."""
        decided = None if found is None else found.newest_batch(decision, self._query.query_id)
        if decided is not None and batch_id < decided:
            raise ConflictError(
                "Spark repeats a micro-batch older than the last decided one: another driver of this query has "
                "advanced, or the checkpoint location was rolled back or is an older copy, and the repeated rows may "
                f"differ from those that the sink shows. {_ANOTHER_NAME}",
                **self._facts,
                batch=batch_id,
                decided=decided,
            )
        planned = decision or found
        if planned is not None and batch_id == decided and not planned.is_of_plan(plan):
            raise ConflictError(
                "Spark has planned this micro-batch again, but the sink shows the rows of the earlier plan: the "
                "checkpoint location was rolled back, is an older copy, or has lost its last file. Start the query "
                f"from the location with the original offsets/{batch_id}. {_ANOTHER_NAME}",
                **self._facts,
                batch=batch_id,
            )

    def _refuse_repeats(self, found: Entry | None, decision: Entry | None) -> None:
        """Raise `ConflictError` if a restored query would repeat visible results of the query that it replaces."""
        replaced = self._query.replaces
        if replaced is None or (found is not None and found.query_id == self._query.query_id):
            return
        origin = find_origin(self._storage, self._query.query_id)
        if origin is None:
            return
        facts = {**self._facts, "replaces": replaced, "saved": origin.batch_id}
        if found is None and origin.of_query == replaced:
            raise ConflictError(
                "this state directory lacks the replaced query's decisions, so some of its micro-batches could be "
                f"shown twice: once it has ended for good, copy {FOLDER}/"
                f"{self._query.sink} from its state directory into this one",
                **facts,
            )
        more = None if found is None else self._shown_more(origin, replaced, found, decision)
        if more is not None:
            raise ConflictError(
                "the replaced query has shown a micro-batch that is not in the savepoint, so this one would show it "
                "again: end that query, create a savepoint and restore it with --continue-sinks "
                "(continue_sinks=True). To show it again anyway, give the sink another name",
                **facts,
                shown=more[1],
                by=more[0],
            )

    def _shown_more(
        self, origin: QueryOrigin, replaced: str, found: Entry, decision: Entry | None
    ) -> tuple[str, int] | None:
        """Return a query and its possibly visible micro-batch that a restored query's state lacks, if there is one."""
        shown = found.newest_batch(decision, origin.of_query)
        if shown is not None:
            return (origin.of_query, shown) if shown > origin.batch_id else None
        # Other queries restored from the same one may have succeeded it: follow the chain back.
        heir, shown, known = replaced, found.newest_batch(decision, replaced), set[str]()
        more = (heir, shown) if shown is not None and shown >= 0 else None
        while heir and heir not in known and (before := find_origin(self._storage, heir)):
            is_of_saved = before.of_query == origin.of_query
            if before.batch_id > (origin.batch_id if is_of_saved else 0):
                more = more or (before.of_query, before.batch_id)
            if is_of_saved:
                return more
            known.add(heir)
            heir = before.of_query
        return None

    def _refuse_a_live_driver(self, found: Entry | None) -> None:
        """Raise `ConflictError` if a process on this machine, or at a different location, may still run the query.

        A process on this machine that has ended does not count: the location was moved.
        """
        # `abs`, because a clock may have been set back.
        if found is None or abs(self._now_ms() - found.at_ms) > ALIVE_MS:
            return
        if self._process and found.process == self._process:
            return
        alive, minutes = lives(found.process), ALIVE_MS // 60_000
        if alive and self._process:
            raise ConflictError(
                "another process on this machine runs this query, or ran it within "
                f"{minutes} minutes and is still alive: stop it. A copy of a checkpoint location needs its "
                "own spark.holdfast.state.dir, and its own sink",
                **self._facts,
                process=found.process.partition(".")[2].partition("-")[0],
            )
        is_elsewhere = found.query_id == self._query.query_id and self._location != found.location
        if is_elsewhere and self._location and found.location and alive is not False:
            raise ConflictError(
                f"this query ran with another checkpoint location within the last {minutes} minutes: a copy of a "
                "location needs its own spark.holdfast.state.dir, and its own sink. If the location was moved, start "
                f"the query {minutes} minutes after it stopped",
                **self._facts,
            )

    def _settle_replaced(self, past: _Past) -> None:
        """Commit a replaced query's last decision, and abort the undecided work of replaced queries."""
        decision = past.decision
        if decision is not None and decision.query_id != self._query.query_id:
            try:
                self._commit_concurrently(decision)
            except StateLostError as exc:
                advice = f". If its results are complete, delete {FOLDER}/{self._query.sink} in the state directory"
                continues = past.entry is not None and past.entry.continues
                raise StateLostError(
                    "the last decision of the replaced query can no longer be committed: "
                    f"{exc.message}{'' if continues else advice}",
                    **exc.facts,
                ) from exc
        for query_id in sorted(past.left.keys() - {self._query.query_id}):
            self._abort_leftovers(past, query_id)

    def _compare(self, batch_id: int, decision: Entry | None, shown: int | None) -> None:
        """Raise if Spark, the decisions and the target disagree."""
        if shown is None:
            return
        newest = _batch(decision) if decision else -1
        facts = {**self._facts, "batch": batch_id, "decided": newest, "shown": shown}
        if shown > newest and batch_id <= shown:
            raise StateLostError(
                "the target shows a micro-batch that is not in this state directory, and Spark is about to repeat it: "
                "the directory has changed, or its contents were deleted. Set "
                f"spark.holdfast.state.dir to the original directory. {_ANOTHER_NAME}",
                **facts,
            )
        # The newest decided micro-batch may not be visible yet, even if Spark has finished it: a user's function may
        # have swallowed the commit's error. Earlier micro-batches were visible.
        if shown < (decision.before if decision else -1):
            raise StateLostError(
                "the target no longer shows committed micro-batches: it was emptied, recreated, or restored from a "
                f"backup. Restore its contents. {_ANOTHER_NAME}",
                **facts,
            )

    def _commit_concurrently(self, decision: Entry) -> None:
        """Commit a decision that the previous driver may be committing concurrently."""
        query, batch_id = self._of(decision.query_id), _batch(decision)
        try:
            self._sink.commit(query, batch_id, decision.handles)
        except (NotFoundError, StateLostError):
            # That driver may have finished first and deleted the files; all rows are visible then, so a retry succeeds.
            self._sink.commit(query, batch_id, decision.handles)

    def _abort_leftovers(self, past: _Past, query_id: str) -> None:
        """Abort undecided work that a fresh listing still contains: listings may lag behind commits."""
        left = past.undecided(query_id)
        if left:
            now = {_canonical(handle) for handle in self._sink.leftovers(self._of(query_id))}
            self._abort([handle for handle in left if _canonical(handle) in now], query_id)

    def _abort(self, handles: Sequence[Handle], query_id: str | None = None) -> None:
        if handles:
            self._sink.abort(self._of(query_id or self._query.query_id), handles)

    def _warn_if_it_fails(self, abort: Callable[[], None]) -> None:
        """Run `abort`, which the next start would repeat: its failure must not hide the micro-batch's error."""
        try:
            abort()
        except FencedError:
            raise
        except Exception as exc:  # noqa: BLE001  a sink's own error may have any type and text
            shown = exc if isinstance(exc, HoldfastError) else type(exc).__name__
            _log.warning("sink %r keeps prepared transactions until the next start: %s", self._query.sink, shown)

    def _prune(self) -> None:
        assert self._entry is not None
        try:
            self._log.prune(self._entry, self._retained)
        except HoldfastError as exc:  # the permission may also have been revoked
            _log.warning("old entries stay in the log of sink %r for now: %s", self._query.sink, exc)


def _owners(found: Entry | None, decision: Entry | None) -> set[str]:
    """Return the queries that may have left decided work or work to abort."""
    entries = [entry for entry in (found, decision) if entry is not None]
    return {entry.query_id for entry in entries} | set(found.ending if found else ())


def _batch(decision: Entry) -> int:
    assert decision.batch_id is not None
    return decision.batch_id


def _canonical(handle: Handle) -> str:
    return json.dumps(handle, sort_keys=True)
