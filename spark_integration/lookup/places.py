"""Finds a query's checkpoint location from its state directory, and the reverse.

::

    checkpointLocation ── newest pointer ─▶ spark.holdfast.state.dir
                       ◀───── note ────────

A pointer names the directory that its micro-batch wrote to, so a moved directory is found after the query's next
micro-batch. The directory must hold this query's state, since a location may have been copied.

A note (`holdfast.snapshotter.ownership.queries`) is untrusted text and may be outdated. So its location is opened only
if it is a local path or on the state directory's store. A note is valid only if its location has the query's id, has
pointers that name this state directory, and has a micro-batch planned that is no older than the newest claim.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.ownership.claims import find_claim
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, find_operator
from holdfast.snapshotter.ownership.queries import NotedLocation, find_noted, find_origin
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import StorageUrl, parse_url
from holdfast.spark_integration.lookup.query_pointers import QueryPointers
from holdfast.spark_integration.shard.pointer_row import PointerRow, operator_of
from holdfast.spark_integration.spark_state.query_location import QueryLocation

_THREADS = 16
#: Upper limit of claims that are read to find when a query was last active.
_CLAIMS_MAX = 8
#: Upper limit of queries described in an error; each description takes several requests.
_DESCRIBED_MAX = 20
_IS_RECORD = re.compile(r"[^/]+/operator")
_NAME_IT = "name the state directory with --state-dir, or as the argument state_dir"
_NAME_LOCATION = "name the query's checkpointLocation in place of the state directory"
_NOTED = "the checkpointLocation that the state directory records"


def places_of(
    given: str | Path, state_dir: str | Path | None, options: Mapping[str, object], operator: str | None = None
) -> tuple[str, str]:
    """Return a query's checkpoint location and state directory, given one or both of them.

    With `state_dir`, `given` is the location and nothing is checked. `operator` selects the query.
    """
    if state_dir is not None and not _is_same(str(given), str(state_dir)):
        return str(given), str(state_dir)
    found = find_places(given, options, operator)
    if found is not None:
        return found
    with open_storage(str(given), options) as storage:
        query_id = QueryLocation(storage).query_id()  # raises a clear error
        return str(given), _state_dir_of(storage, query_id, options)


def find_places(
    given: str | Path, options: Mapping[str, object], operator: str | None = None
) -> tuple[str, str] | None:
    """Like `places_of` for a single directory; returns None if `given` is neither."""
    with open_storage(str(given), options) as storage:
        query_id = QueryLocation(storage).find_id()
        if query_id is not None:
            return str(given), _state_dir_of(storage, query_id, options)
        by_query = _records_by_query(storage)
        if not by_query:
            return None
        of_operator = {
            query: records
            for query, records in by_query.items()
            if operator is None or any(operator_of(record.operator) == operator for record in records)
        }
        return _noted(storage, of_operator or by_query, options), storage.url


def find_state_dir(location: str | Path, options: Mapping[str, object], query_id: str | None = None) -> str:
    """Return the state directory of the query at this checkpoint location; `query_id` overrides the query's id."""
    with open_storage(str(location), options) as storage:
        return _state_dir_of(storage, query_id or _query_of(storage), options)


def require_query(location: str | Path, options: Mapping[str, object]) -> None:
    """Raise `InvalidArgumentError` if this is not the checkpoint location of a query."""
    with open_storage(str(location), options) as storage:
        _query_of(storage)


def query_at(location: str | Path, options: Mapping[str, object]) -> str | None:
    """Return the id of the query at a checkpoint location, or None for other locations."""
    with open_storage(str(location), options) as storage:
        return QueryLocation(storage).find_id()


def require_no_state_directory(location: ObjectStorage) -> None:
    """Raise `InvalidArgumentError` if the location is a state directory, not a checkpoint location."""
    by_query = _records_by_query(location)
    if by_query:
        raise _is_state_directory(location, "", by_query)


def location_of(noted: NotedLocation, states: ObjectStorage, options: Mapping[str, object]) -> str:
    """Verify the checkpoint location that a state directory records, and return it. Raises `NotFoundError`."""
    facts = {"checkpoint_location": noted.location, "noted_on": noted.host, "query": noted.query_id}
    place, home = parse_url(noted.location), parse_url(states.url)
    if place.scheme == home.scheme == "hdfs" and not home.authority:  # on fs.defaultFS, whose name Spark adds to URLs
        place = place._replace(authority="")
    if place.scheme != "file" and place.store != home.store:
        raise NotFoundError(
            f"{_NOTED} is on a different store, which holdfast opens only on request: if it is right, {_NAME_LOCATION}",
            **facts,
        )
    with open_storage(str(place), options) as location:
        _require_agreement(noted, location, states, facts)
    return str(place)


def _require_agreement(
    noted: NotedLocation, location: ObjectStorage, states: ObjectStorage, facts: Mapping[str, str]
) -> None:
    query = QueryLocation(location)
    if query.find_id() != noted.query_id:
        raise NotFoundError(
            f"{_NOTED} lacks the query, which was moved or deleted, or is on a different machine; {_NAME_LOCATION}",
            **facts,
        )
    try:
        newest = _newest_of(location)
    except (InvalidArgumentError, NotFoundError) as exc:
        raise NotFoundError(
            f"{_NOTED} does not show whose state it uses; name both directories: {exc.message}",
            **facts,
        ) from exc
    assert newest.state_dir is not None
    assert newest.directory is not None
    if newest.query != noted.state_id or not _is_same(newest.state_dir, states.url):
        raise NotFoundError(
            f"{_NOTED} has a query whose pointers name a different state directory: if this one was moved or copied, "
            "name the location, and this directory with --state-dir or as the argument state_dir",
            **facts,
            state_dir=newest.state_dir,
        )
    claim = find_claim(states, newest.directory)
    claimed = claim.holder.batch_id if claim is not None and claim.query_id == noted.state_id else None
    planned = query.newest_planned()
    if claimed is not None and (planned is None or planned < claimed):
        raise NotFoundError(
            f"the query has run a later micro-batch than {_NOTED} has planned: it continued in a copy, or was rolled "
            f"back; {_NAME_LOCATION}",
            **facts,
            planned=planned,
            at_work=claimed,
        )


def _noted(storage: ObjectStorage, by_query: Mapping[str, list[OperatorRecord]], options: Mapping[str, object]) -> str:
    """Return the recorded location of a state directory's only query."""
    if len(by_query) > 1:
        raise _is_state_directory(storage, ", of several queries", by_query)
    try:
        noted = find_noted(storage, *by_query)
    except CorruptionError as exc:
        raise CorruptionError(f"{exc.message}; {_NAME_LOCATION}", **exc.facts) from exc
    if noted is None:
        raise _is_state_directory(storage, ", which does not record where its query is", by_query)
    return location_of(noted, storage, options)


def _is_state_directory(
    location: ObjectStorage, what: str, by_query: Mapping[str, list[OperatorRecord]]
) -> InvalidArgumentError:
    shown = sorted(by_query.items())[:_DESCRIBED_MAX]
    with ThreadPoolExecutor(_THREADS) as executor:
        queries = list(executor.map(lambda one: _described(location, *one), shown))
    if len(by_query) > _DESCRIBED_MAX:
        queries.append(f"and {len(by_query) - _DESCRIBED_MAX:,} more")
    return InvalidArgumentError(
        f"this is a state directory{what}: name the checkpointLocation of a query instead, which leads to the state "
        "directory; the query's id is in its file metadata",
        given=location.url,
        queries="; ".join(queries),
    )


def _is_same(one: str, other: str) -> bool:
    first, second = parse_url(one), parse_url(other)
    return first.store == second.store and _path_of(first) == _path_of(second)


def _path_of(url: StorageUrl) -> str:
    return os.path.realpath(url.path) if url.scheme == "file" else url.path


def _query_of(location: ObjectStorage) -> str:
    try:
        return QueryLocation(location).query_id()
    except InvalidArgumentError:
        require_no_state_directory(location)
        raise


def _state_dir_of(location: ObjectStorage, query_id: str, options: Mapping[str, object]) -> str:
    newest = _newest_of(location)
    assert newest.state_dir is not None
    with open_storage(newest.state_dir, options) as states:
        _require_state_of(states, query_id, newest)
    return newest.state_dir


def _newest_of(location: ObjectStorage) -> PointerRow:
    with ThreadPoolExecutor(_THREADS) as executor:
        pointers = QueryPointers(location, executor)
        try:
            batch_id = pointers.batch(None).batch_id
        except NotFoundError as exc:
            message = f"{exc.message}, so its state directory is unknown: {_NAME_IT}"
            raise NotFoundError(message, **exc.facts) from exc
        rows = [row for held in pointers.held(batch_id) for row in held.rows]
    named = [row for row in rows if row.state_dir is not None]
    if not named:
        why = (
            "has state that is not durable, because it runs without spark.holdfast.state.dir"
            if rows
            else f"has no holdfast state yet, so its state directory is unknown: {_NAME_IT}"
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
    # If a task did not know its query, the new state's query id is derived from the run's id.
    is_substitute = row.query.startswith(record.run_id)
    if query_id != row.query and not is_substitute and find_origin(storage, query_id) is None:
        raise NotFoundError(
            "this query is a clone that has not run yet, so its pointers name the original's state directory: "
            f"{_NAME_IT}",
            query=query_id,
            original=row.query,
        )


def _records_by_query(location: ObjectStorage) -> dict[str, list[OperatorRecord]]:
    """Return the operators' records of a state directory by query; empty if it is unreadable or has none."""

    def read(key: str) -> OperatorRecord | None:
        with suppress(CorruptionError):  # other queries are still listed
            return find_operator(location, key.removesuffix("/operator"))
        return None

    by_query: dict[str, list[OperatorRecord]] = {}
    try:
        records = sorted(info.key for info in location.list("") if _IS_RECORD.fullmatch(info.key))
        with ThreadPoolExecutor(_THREADS) as executor:
            found = list(executor.map(read, records))
    except HoldfastError:  # such as a folder without list permission: the caller's error says more
        return by_query
    for record in found:
        if record is not None:
            by_query.setdefault(record.query_id, []).append(record)
    return by_query


def _described(storage: ObjectStorage, query_id: str, records: list[OperatorRecord]) -> str:
    """Describe a query by its name, operators, last activity and host."""
    own, noted = [], None
    with suppress(HoldfastError):  # damaged objects: describe the rest
        claims = [find_claim(storage, record.operator) for record in records[:_CLAIMS_MAX]]
        own = [claim for claim in claims if claim is not None and claim.query_id == query_id]
        noted = find_noted(storage, query_id)
    facts = [f"operators {', '.join(operator_of(one.operator) or one.operator for one in records)}"]
    if own:
        newest = max(own, key=lambda claim: claim.holder.seen_ms)
        facts.insert(0, f"named {newest.query_name}") if newest.query_name else None
        at = datetime.fromtimestamp(newest.holder.seen_ms / 1000, UTC)
        facts.append(f"active until {at:%Y-%m-%d %H:%M} UTC on {newest.host}")
    facts.append(f"checkpointLocation {noted.location}") if noted else None
    return f"{query_id} ({', '.join(facts)})"
