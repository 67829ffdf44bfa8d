"""Commits micro-batches to a sink in two phases; ends, at each start, what the last run left half-done.

    start     read the log ─▶ what is left ─▶ append "begin" ─▶ what the target shows ─▶ commit the newest decision
                                                                                     ─▶ abort what is left
    finish    confirm ─▶ append the decision ─▶ commit ─▶ prune

The log is a fence: `holdfast.snapshotter.sink_log`. Two rules make two drivers harmless, wherever each of them stops:

closed     a driver aborts only what it listed before it appended an entry, and what no decision up to that entry
           names: nobody can decide it any more
decided    what a decision names is committed by whoever finds it, and never aborted. If storing a decision failed,
           the next entry of the same number tells whether it counts

The newest start wins: the driver before it fails at its next decision, or earlier. But a start is refused while another
process of the same machine runs the query, as the query's shards would refuse it (decision 0023).

===========================  =========================================================================================
what a start finds           what it means, and what is done
===========================  =========================================================================================
prepared, no decision        the micro-batch is repeated: abort
a decision, the same batch   decided, and perhaps visible: commit its handles; no row is written a second time
a decision, a later batch    Spark has ended it, so it was committed, unless a user's function swallowed the commit's
                             error: commit again. A target that forgets what it committed long ago, as Kafka does, may
                             say that it is gone, unless the target shows no more than an earlier one
a decision, an earlier one   Spark's checkpoint location was turned back, or is an older copy: refused
the same, of another plan    the location was turned back: Spark has planned the micro-batch anew. Refused
target shows a later one     the state directory is another, or was deleted: refused, unless Spark has ended it
target shows an earlier one  the target was emptied, or restored from a backup: refused
another query's decision     `replaces` names it, or the query was restored and continues the sink: committed under that
                             one's id, before the target is taken over. A micro-batch of this query for which it
                             stands is decided
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

_ANOTHER_NAME = "To begin anew with an empty target, give the sink another name"


@dataclass(frozen=True)
class Prepared:
    """What the tasks of a micro-batch have prepared."""

    handles: tuple[Handle, ...]  #: By partition; of those that had rows
    rows: int
    #: Whether other attempts may have prepared the same: a task was repeated, or had a twin
    repeated: bool = False
    unused: tuple[Handle, ...] = ()  #: Spare handles that no attempt was given, or has begun with


@dataclass(frozen=True)
class _Past:
    """The log and the prepared work, by query, before a driver appended an entry."""

    entry: Entry | None
    decision: Entry | None
    left: Mapping[str, Sequence[Handle]]

    def undecided(self, query_id: str, handles: Iterable[Handle] = ()) -> list[Handle]:
        """Return what a query prepared, except what a decision or `handles` name."""
        named = {*map(_canonical, handles), *map(_canonical, self.decision.handles if self.decision else ())}
        return [handle for handle in self.left[query_id] if _canonical(handle) not in named]


class Coordinator:
    """One run's two-phase commits of one query to one sink, on the driver, by one thread at a time.

    `retained`: entries of the log to keep; `process`: the query's, if it has only one, which fences others here;
    `location`: Spark's checkpoint location, if known, which tells a copy from a restart.
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
        # The newest entry that this run has read or appended, and the decision that counts as of it.
        self._entry: Entry | None = None
        self._decision: Entry | None = None
        # A twin of a repeated task may prepare after any number of micro-batches.
        self._has_zombies = False

    @property
    def number(self) -> int:
        """The number of the entry under which this run acts."""
        return self._entry.number if self._entry else 0

    def start(self, batch_id: int, schema: pa.Schema, plan: str = "") -> None:
        """Begin a run with its first micro-batch, whose plan in Spark is `plan`; first end what the last run left.

        Raises `ConflictError` if another query has the name, or Spark and the sink disagree; `StateLostError` if the
        target lacks what was decided, or shows more; and as `TwoPhaseSink.open` and `TwoPhaseSink.commit`.
        """
        past, shown = self._begin(batch_id, schema, plan)
        with self._unless_overtaken():
            self._end_the_past(past, batch_id, schema, shown)
        self._prune()

    def _end_the_past(self, past: _Past, batch_id: int, schema: pa.Schema, shown: int | None) -> None:
        mine = past.decision if past.decision and past.decision.query_id == self._query.query_id else None
        if past.entry is not None:
            self._settle_replaced(past)
            shown = self._open(past.entry, self._known(past.entry, mine), schema)
            self._compare(batch_id, mine, shown)
        if mine is not None:
            # What was ended and is shown no longer needs the target to know its handles.
            may_be_forgotten = (shown is None or shown >= _batch(mine)) and batch_id > _batch(mine)
            try:
                self._commit_beside_others(mine)
            except StateLostError as exc:
                if not may_be_forgotten:
                    raise
                _log.info("sink %r no longer knows micro-batch %d: %s", self._query.sink, mine.batch_id, exc)
        self._abort_still_left(past, self._query.query_id)
        if self._entry is not None and self._entry.ending:  # they are settled
            settled = self._next(decided=mine.number if mine else 0)
            # What the target holds goes before this query's first results: no later start may name another one.
            is_first = mine is None and settled.stands_for is None
            self._append(replace(settled, stands_for=-1) if is_first else settled)
        self._decision = mine

    def _known(self, found: Entry, mine: Entry | None) -> SinkQuery:
        """Return the query with the micro-batch that its target must show: the newest before the last decision."""
        if mine is not None:
            return replace(self._query, was_shown=mine.before)
        continues = found.continues and found.query_id == self._query.query_id
        has_opened = continues and not (found.decided or found.ending)
        return replace(self._query, was_shown=-1 if has_opened else None)

    def _open(self, found: Entry, query: SinkQuery, schema: pa.Schema) -> int | None:
        """Open the target, which may still belong to the query that this one replaces."""
        before = [*found.ending, found.query_id] if found.continues else []
        others = [query_id for query_id in before if query_id not in (query.query_id, query.replaces)]
        for query_id in others:
            try:
                return self._sink.open(replace(query, replaces=query_id), schema)
            except ConflictError:  # it is another one's by now
                continue
        return self._sink.open(query, schema)

    def resume(self, number: int) -> None:
        """Go on with a run that another process has started. Raises `ConflictError` if its entry is gone."""
        try:
            self._entry = self._log.read(number)
            self._decision = self._log.decision(self._entry)
        except NotFoundError as exc:
            raise self._second(ConflictError) from exc

    def is_decided(self, batch_id: int) -> bool:
        """Tell whether a micro-batch was decided before, so that its rows must not be written again."""
        if self._decision is not None:
            return self._decision.batch_id == batch_id
        return self._entry is not None and self._entry.stands_for == batch_id

    def warn_of_dropped_rows(self, rows: int) -> None:
        """Warn if a decided micro-batch, whose rows are dropped, now has a different number of rows."""
        if self._decision is not None and rows != self._decision.rows:
            _log.warning(
                "sink %r: micro-batch %d was decided with %d rows, which are shown; now it has %d, which are "
                "dropped. If the query gives the same rows each time, Spark's checkpoint location was rolled back, "
                "or one micro-batch calls this sink twice: give it their union",
                *(self._query.sink, self._decision.batch_id, self._decision.rows, rows),
            )

    def finish(self, batch_id: int, prepared: Prepared, plan: str = "") -> None:
        """Decide a micro-batch and make it visible, for good. Raises `ConflictError` if another driver has begun.

        Raises `UnavailableError` if storage or target did not answer; the next start commits what is decided.
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
        """End the run after a failure: abort what is undecided, if possible. Raises `FencedError` if replaced."""
        number = self.number + 1

        def close() -> None:
            self._refuse_overtaken()  # a sink may end what is at work under its name, to see what is left
            past = self._past()
            self._append(self._next())
            self._abort(past.undecided(self._query.query_id))

        try:
            self._warn_if_it_fails(close)
        except FencedError:
            # A stored entry may be this run's own decision, whose reply was lost: the next start commits it.
            with suppress(HoldfastError):
                if self._log.read(number).driver == self._driver:
                    return
            raise

    def _begin(self, batch_id: int, schema: pa.Schema, plan: str) -> tuple[_Past, int | None]:
        """Append the beginning of this run to the log as it was read; return what lies before it.

        In an empty log only once the target is opened: a query that it refuses then does not block others.
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
        raise AssertionError("looks has raised")

    def _past(self, others: Iterable[str] = ()) -> _Past:
        """List the work prepared so far, by this query and others that it has replaced."""
        queries = sorted({self._query.query_id, *others})
        return _Past(self._entry, self._decision, {each: self._sink.leftovers(self._of(each)) for each in queries})

    def _of(self, query_id: str) -> SinkQuery:
        is_mine = query_id == self._query.query_id
        return self._query if is_mine else replace(self._query, query_id=query_id, replaces=None)

    def _next(self, *, decided: int | None = None, ending: tuple[str, ...] = ()) -> Entry:
        """Return the next entry: by default, one with which a driver continues from the newest."""
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
            raise self._second(type(exc)) from exc
        self._entry = entry

    def _decide(self, batch_id: int, rows: int, handles: tuple[Handle, ...], plan: str) -> _Past | None:
        """Append a decision; return the work prepared before it, if others may have prepared the same."""
        before = _batch(self._decision) if self._decision else -1
        entry = self._next(decided=self.number + 1)
        entry = replace(entry, batch_id=batch_id, before=before, rows=rows, handles=handles, plan=plan, stands_for=None)
        try:
            past = self._confirmed(batch_id, handles)
            self._append(entry)
        except FencedError:  # it does not count, and nobody else can have decided what this run prepared
            self._warn_if_it_fails(lambda: self._abort(handles))
            raise
        except Exception:
            self.give_up()
            raise
        self._decision = entry
        return past

    def _confirmed(self, batch_id: int, handles: tuple[Handle, ...]) -> _Past | None:
        """Let the sink confirm a micro-batch. Raises `FencedError` if it fails because another driver has begun."""
        try:
            self._sink.confirm(self._query, batch_id, handles)
            return self._past() if self._has_zombies else None
        except HoldfastError:
            self._refuse_overtaken()
            raise

    @contextmanager
    def _unless_overtaken(self) -> Iterator[None]:
        """Raise FencedError if an error is due to a newer driver."""
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
            raise self._second(FencedError)

    def _second(self, error: type[ConflictError]) -> ConflictError:
        return error(
            "another driver of this query has begun since this one did, so this one ends: let one run", **self._facts
        )

    def _refuse_others(self, found: Entry | None, decision: Entry | None) -> None:
        """Raise ConflictError if another query writes here, unless it has replaced this one and got no further."""
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
        """Raise ConflictError if Spark goes back, before anything is fenced: a copy must not end the query."""
        decided = None if found is None else found.newest_batch(decision, self._query.query_id)
        if decided is not None and batch_id < decided:
            raise ConflictError(
                "Spark goes back to a micro-batch before the last decided one: another driver of this query has gone "
                "on, or the checkpoint location was rolled back, or is an older copy, and what it repeats may differ "
                f"from what the sink shows. {_ANOTHER_NAME}",
                **self._facts,
                batch=batch_id,
                decided=decided,
            )
        planned = decision or found
        if planned is not None and batch_id == decided and not planned.is_of_plan(plan):
            raise ConflictError(
                "Spark has planned this micro-batch anew, and the sink shows it as it was planned before: the "
                "checkpoint location was rolled back, is an older copy, or has lost its last file. Start the query "
                f"from the location that has offsets/{batch_id} as it was. {_ANOTHER_NAME}",
                **self._facts,
                batch=batch_id,
            )

    def _refuse_repeats(self, found: Entry | None, decision: Entry | None) -> None:
        """Raise `ConflictError` if a restored query would repeat what the query it replaces has shown."""
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
                "the replaced query has shown a micro-batch that was not saved, so this one would show it again: end "
                "that query, make a savepoint and restore it with --continue-sinks (continue_sinks=True). To show it "
                "again anyway, give the sink another name",
                **facts,
                shown=more[1],
                by=more[0],
            )

    def _shown_more(
        self, origin: QueryOrigin, replaced: str, found: Entry, decision: Entry | None
    ) -> tuple[str, int] | None:
        """Return a query and its micro-batch that is, or may be, shown and is missing from a restored query's state."""
        shown = found.newest_batch(decision, origin.of_query)
        if shown is not None:
            return (origin.of_query, shown) if shown > origin.batch_id else None
        # Others that were restored from the same query have followed it.
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
        """Raise `ConflictError` if a process here, or with another location, runs the query; else the newest wins.

        One at another location that has ended here does not: the location was moved.
        """
        # A clock may have been set back since.
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
                f"this query has worked with another checkpoint location within {minutes} minutes: a copy of a "
                "location needs its own spark.holdfast.state.dir, and its own sink. If the location was moved, start "
                f"the query {minutes} minutes after it was stopped",
                **self._facts,
            )

    def _settle_replaced(self, past: _Past) -> None:
        """Commit a replaced query's last decision, and abort everything else that replaced queries prepared."""
        decision = past.decision
        if decision is not None and decision.query_id != self._query.query_id:
            try:
                self._commit_beside_others(decision)
            except StateLostError as exc:
                advice = f". If its results are complete, delete {FOLDER}/{self._query.sink} in the state directory"
                continues = past.entry is not None and past.entry.continues
                raise StateLostError(
                    "the last decision of the replaced query can no longer be committed: "
                    f"{exc.message}{'' if continues else advice}",
                    **exc.facts,
                ) from exc
        for query_id in sorted(past.left.keys() - {self._query.query_id}):
            self._abort_still_left(past, query_id)

    def _compare(self, batch_id: int, decision: Entry | None, shown: int | None) -> None:
        """Raise if Spark, the decisions and the target disagree."""
        if shown is None:
            return
        newest = _batch(decision) if decision else -1
        facts = {**self._facts, "batch": batch_id, "decided": newest, "shown": shown}
        if shown > newest and batch_id <= shown:
            raise StateLostError(
                "the target shows a micro-batch that this state directory does not know, and Spark is about to "
                "repeat it: the directory is not the one used before, or its contents were deleted. Set "
                f"spark.holdfast.state.dir to the original directory. {_ANOTHER_NAME}",
                **facts,
            )
        # The newest may be decided and not yet visible, also where Spark has ended it: a user's function may have
        # swallowed the error of its commit. What came before it was visible.
        if shown < (decision.before if decision else -1):
            raise StateLostError(
                "the target does not show what was committed to it: it was emptied, recreated, or restored from a "
                f"backup. Restore it as it was. {_ANOTHER_NAME}",
                **facts,
            )

    def _commit_beside_others(self, decision: Entry) -> None:
        """Commit what the previous driver may be committing at this moment."""
        query, batch_id = self._of(decision.query_id), _batch(decision)
        try:
            self._sink.commit(query, batch_id, decision.handles)
        except (NotFoundError, StateLostError):
            # It may have been faster and deleted what this one was about to read: then everything is visible.
            self._sink.commit(query, batch_id, decision.handles)

    def _abort_still_left(self, past: _Past, query_id: str) -> None:
        """Abort what no decision names and a fresh listing still shows: listings may lag behind commits."""
        left = past.undecided(query_id)
        if left:
            now = {_canonical(handle) for handle in self._sink.leftovers(self._of(query_id))}
            self._abort([handle for handle in left if _canonical(handle) in now], query_id)

    def _abort(self, handles: Sequence[Handle], query_id: str | None = None) -> None:
        if handles:
            self._sink.abort(self._of(query_id or self._query.query_id), handles)

    def _warn_if_it_fails(self, abort: Callable[[], None]) -> None:
        """Abort early what the next start would; a failure must not hide the micro-batch's own error."""
        try:
            abort()
        except FencedError:
            raise
        except Exception as exc:  # noqa: BLE001  what a sink's own error says may hold anything
            said = exc if isinstance(exc, HoldfastError) else type(exc).__name__
            _log.warning("transactions prepared in sink %r remain for now: %s", self._query.sink, said)

    def _prune(self) -> None:
        assert self._entry is not None
        try:
            self._log.prune(self._entry, self._retained)
        except HoldfastError as exc:  # a right may be gone, too
            _log.warning("old entries in the log of sink %r stay for now: %s", self._query.sink, exc)


def _owners(found: Entry | None, decision: Entry | None) -> set[str]:
    """Return the queries that may have left decided work, or work to abort."""
    entries = [entry for entry in (found, decision) if entry is not None]
    return {entry.query_id for entry in entries} | set(found.ending if found else ())


def _batch(decision: Entry) -> int:
    assert decision.batch_id is not None
    return decision.batch_id


def _canonical(handle: Handle) -> str:
    return json.dumps(handle, sort_keys=True)
