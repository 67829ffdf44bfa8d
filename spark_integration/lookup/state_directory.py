"""Finds a query's state directory from its checkpoint location: the newest pointer in Spark's state names it.

A pointer names the directory that its micro-batch wrote to, so a state directory that was moved is found again after
the query's next micro-batch. What is found must have the state of this query: a location may have been copied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, find_operator
from holdfast.snapshotter.ownership.query_origin import find_origin
from holdfast.snapshotter.ownership.stored_claims import find_claim
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.lookup.query_pointers import QueryPointers
from holdfast.spark_integration.shard.pointer_row import PointerRow, operator_of
from holdfast.spark_integration.spark_state.query_location import QueryLocation

_THREADS = 16
#: Of a query with many operators, so many say when it was at work.
_CLAIMS_MAX = 8
_IS_RECORD = re.compile(r"[^/]+/operator")
_NAME_IT = "name the state directory with --state-dir, or as the argument state_dir"


def find_state_dir(location: str | Path, options: Mapping[str, object]) -> str:
    """Return the state directory of the query that has this checkpoint location.

    Raises `InvalidArgumentError` if this is not the checkpoint location of a query with durable state, or Spark's state
    cannot be read without Spark; `NotFoundError` if no micro-batch is committed yet; or the pointers name a directory
    that does not have this query's state.

    `options`: of both storages, as `parse_storage_options` returned them.
    """
    with open_storage(str(location), options) as storage, ThreadPoolExecutor(_THREADS) as executor:
        query_id, newest = _query_of(storage), _newest(QueryPointers(storage, executor))
    assert newest.state_dir is not None
    with open_storage(newest.state_dir, options) as states:
        _require_state_of(states, query_id, newest)
    return newest.state_dir


def require_query(location: str | Path, options: Mapping[str, object]) -> None:
    """Raise `InvalidArgumentError` if this is not the checkpoint location of a query."""
    with open_storage(str(location), options) as storage:
        _query_of(storage)


def _query_of(location: ObjectStorage) -> str:
    try:
        return QueryLocation(location).query_id()
    except InvalidArgumentError:
        require_no_state_directory(location)
        raise


def query_at(location: str | Path, options: Mapping[str, object]) -> str | None:
    """Return the id of the query at a checkpoint location; None for other locations."""
    with open_storage(str(location), options) as storage:
        try:
            return QueryLocation(storage).query_id()
        except (InvalidArgumentError, CorruptionError):
            return None


def _newest(pointers: QueryPointers) -> PointerRow:
    try:
        batch_id = pointers.batch(None).batch_id
    except NotFoundError as exc:
        raise NotFoundError(f"{exc.message}, so nothing tells its state directory: {_NAME_IT}", **exc.facts) from exc
    try:
        rows = [row for held in pointers.held(batch_id) for row in held.rows]
    except InvalidArgumentError as exc:
        message = f"without Spark, this query's pointers do not tell its state directory: {_NAME_IT} ({exc.message})"
        raise InvalidArgumentError(message, **exc.facts) from exc
    named = [row for row in rows if row.state_dir is not None]
    if not named:
        why = (
            "has state that is not durable, because it runs without spark.holdfast.state.dir"
            if rows
            else f"has no holdfast state yet, so nothing says where that will be: {_NAME_IT}"
        )
        raise InvalidArgumentError(f"the query {why}", location=pointers.url)
    return max(named, key=lambda row: row.batch_ms)


def _require_state_of(storage: ObjectStorage, query_id: str, row: PointerRow) -> None:
    assert row.directory is not None
    record = find_operator(storage, row.directory)
    if record is None or record.query_id != row.query:
        raise NotFoundError(
            f"the state directory that the query's pointers name does not have its state: if it was moved, {_NAME_IT}",
            state_dir=row.state_dir,
            operator_directory=row.directory,
            owner=None if record is None else record.query_id,
            query=row.query,
        )
    # State that began in a task which Spark told no query bears an id made of the run's.
    is_substitute = row.query.startswith(record.run_id)
    if query_id != row.query and not is_substitute and find_origin(storage, query_id) is None:
        raise NotFoundError(
            "this query is a clone that has not run yet, so its pointers name the original's state directory: "
            f"{_NAME_IT}",
            query=query_id,
            original=row.query,
        )


def require_no_state_directory(location: ObjectStorage) -> None:
    """Raise InvalidArgumentError if the location is a state directory, not a checkpoint location."""
    try:
        records = [info.key for info in location.list("") if _IS_RECORD.fullmatch(info.key)]
        found = [find_operator(location, key.removesuffix("/operator")) for key in sorted(records)]
        queries = _described(location, [one for one in found if one is not None])
    except HoldfastError:  # as of a folder that is not ours to list: what is known of it already says more
        return
    if found:
        raise InvalidArgumentError(
            "this is a state directory: name the checkpointLocation of a query instead, which is enough to find its "
            "state directory, and whose file metadata has the query's id",
            given=location.url,
            queries=queries,
        )


def _described(storage: ObjectStorage, records: list[OperatorRecord]) -> str:
    """Return the queries of a state directory by what people know them by: name, operators, when they worked last."""
    by_query: dict[str, list[OperatorRecord]] = {}
    for record in records:
        by_query.setdefault(record.query_id, []).append(record)
    return "; ".join(_of_query(storage, query_id, of) for query_id, of in sorted(by_query.items()))


def _of_query(storage: ObjectStorage, query_id: str, records: list[OperatorRecord]) -> str:
    claims = [find_claim(storage, record.operator) for record in records[:_CLAIMS_MAX]]
    own = [claim for claim in claims if claim is not None and claim.query_id == query_id]
    facts = [f"operators {', '.join(operator_of(one.operator) or one.operator for one in records)}"]
    if own:
        newest = max(own, key=lambda claim: claim.holder.seen_ms)
        facts.insert(0, f"named {newest.query_name}") if newest.query_name else None
        at = datetime.fromtimestamp(newest.holder.seen_ms / 1000, UTC)
        facts.append(f"at work until {at:%Y-%m-%d %H:%M} UTC on {newest.host}")
    return f"{query_id} ({', '.join(facts)})"
