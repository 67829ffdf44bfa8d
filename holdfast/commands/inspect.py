"""``holdfast inspect``: the health of queries, and a state directory's operators, tables, shards and sizes."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import click

from holdfast import clock
from holdfast.commands.target import SMALL_COMMITS, StateDirectory, moment, on_state_dir, opened, plain, size, table
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.health import (
    Failure,
    Health,
    OperatorSigns,
    counted,
    health_of,
    own_batches,
    read_failures,
    reports,
    signs_of,
    tables_of,
)
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.ownership.queries import find_noted, find_origin
from holdfast.snapshotter.sink_log import SinkState, StoredSink
from holdfast.snapshotter.upkeep.catalogue import OperatorListing, ShardListing, StateSizes
from holdfast.spark_integration.client.connection import recent_batches
from holdfast.spark_integration.lookup.places import find_state_dir, location_of, query_at
from holdfast.spark_integration.lookup.stored_query import open_query
from holdfast.spark_integration.spark_state.query_location import LoggedTimes

_KINDS = ("commit", "snapshot", "part", "probe", "trouble", "unknown")
#: Upper limit of queries whose recorded location is read.
_NOTED_MAX = 8
_COLOURS = {"running": "green", "stopped": "", "stale": "yellow", "failing": "red"}


@click.command()
@on_state_dir
@click.option("--shards", "with_shards", is_flag=True, help="Also list each shard.")
@click.option(
    "--checkpoint-location",
    "location",
    metavar="LOCATION",
    help="A query's checkpointLocation: Spark's log there tells its pace. Default: the one recorded in the directory.",
)
def inspect(
    url: str, operator: str | None, options: dict[str, str], as_json: bool, with_shards: bool, location: str | None
) -> None:
    """Show the health of queries and their state.

    Lists operators with their tables, sizes and failures. The exit status is 1 if a query is failing. Costs
    one list request, one small get per operator, sink and failure shown (at most 20 failures), and at most 32 per
    operator for the sizes of snapshots. Reads Spark's log at the recorded locations of at most 8 queries.
    """
    url, location = _places(url, location, options)
    with opened(url, options, operator) as target:
        listings = target.listing.operators.values()
        signs = list(target.executor.map(partial(OperatorSigns.of, target.storage), listings))
        found = [(listing, one.record) for listing, one in zip(listings, signs, strict=True)]
        owners = {record.query_id for _, record in found if isinstance(record, OperatorRecord)}
        by_query: dict[str, list[OperatorSigns]] = {}
        for one in signs:
            by_query.setdefault(one.query_id, []).append(one)
        noted = _NotedLogs(target, options, {} if location else by_query)
        healths = _healths(target, by_query, _logs(target, location, options, owners) if location else noted.logs)
        committed = {name: health.committed for health in healths for name in health.operators}
        if as_json:
            operators = [_document(target, listing, record, committed.get(listing.name)) for listing, record in found]
            sinks = [_sink_document(target, sink) for sink in target.listing.sinks]
            queries = [asdict(health) | {"location": noted.locations.get(health.query_id)} for health in healths]
            unknown = len(target.listing.unknown)
            target.show({"queries": queries, "operators": operators, "sinks": sinks, "unknown_objects": unknown})
        else:
            for health in healths:
                _show_health(target, health)
                noted.show(health.query_id)
            for listing, record in found:
                document = _document(target, listing, record, committed.get(listing.name))
                _show(target, listing, record, document)
                if with_shards:
                    _show_shards(target, document["shards"])
            _show_sinks(target)
            if target.listing.unknown:
                target.console.print(f"{len(target.listing.unknown):,} objects outside operators are not holdfast's")
    if any(health.state == "failing" for health in healths):
        sys.exit(1)


def _places(url: str, location: str | None, options: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the state directory, and the query's location if `url` is a location."""
    if location is None and (query_id := query_at(url, options)) is not None:
        with suppress(HoldfastError):  # no state yet: opening the directory reports it
            return find_state_dir(url, options, query_id), url
    return url, location


class _NotedLogs:
    """Spark's logs at the checkpoint locations that the state directory records."""

    def __init__(self, target: StateDirectory, options: Mapping[str, str], queries: Iterable[str]) -> None:
        self.locations: dict[str, str] = {}  #: Recorded locations, by query
        self.logs: dict[str, list[LoggedTimes]] = {}  #: Readable logs, by query
        self._target = target
        self._unread: dict[str, str] = {}
        self._options = options
        list(target.executor.map(self._look, islice(filter(None, queries), _NOTED_MAX)))

    def _look(self, query_id: str) -> None:
        states = self._target.storage
        try:
            noted = find_noted(states, query_id)
            if noted is not None:
                self.locations[query_id] = noted.location
                location = location_of(noted, states, self._options)
                found = _logs(self._target, location, self._options, (query_id,))
                self.logs.update((one, times) for one, times in found.items() if one == query_id)
        except HoldfastError as exc:
            self._unread[query_id] = exc.message

    def show(self, query_id: str) -> None:
        """Print a query's recorded location, and the error if it could not be read."""
        parts = [self.locations.get(query_id, ""), self._unread.get(query_id, "")]
        if any(parts):
            text = ": ".join(filter(None, parts))
            self._target.console.print(f"checkpointLocation {plain(text)}", soft_wrap=True)


def _logs(
    target: StateDirectory, location: str, options: Mapping[str, str], known: Container[str]
) -> dict[str, list[LoggedTimes]]:
    """Return a query's log by the query id in its state, which for a clone may be its original's."""
    with open_query(location, target.storage.url, options) as query:
        origin = find_origin(target.storage, query.query_id)
        times = own_batches(query.times(), origin)
        owner = origin.state_id if origin else query.query_id
        if owner in known:
            return {owner: times}
        named: Mapping[str, str] = {}
        with suppress(HoldfastError):  # nothing is committed, or its pointers cannot be read
            named = query.directories()
        # State created by a task that did not know its query has a substitute id.
        return {found: times for found in named.values() if found in known} or {owner: times}


def _healths(
    target: StateDirectory, by_query: Mapping[str, list[OperatorSigns]], logs: Mapping[str, list[LoggedTimes]]
) -> list[Health]:
    """Return the queries' health. Raises `InvalidArgumentError` if a log belongs to a different query."""
    if elsewhere := logs.keys() - by_query.keys():
        raise InvalidArgumentError(
            "none of the operators shown belongs to that query: name its own state directory, and omit --operator",
            query=next(iter(elsewhere)),
            queries=", ".join(sorted(by_query)),
        )
    live, healths = recent_batches(), []
    for query_id, operators in by_query.items():
        if query_id:
            signs_found = signs_of(query_id, operators, logs.get(query_id), live)
            failures = read_failures(target.storage, signs_found.failing[:1])
            names = [one.name for one in operators]
            healths.append(health_of(query_id, names, signs_found, failures, clock.now_ms()))
    return healths


def _facts(shard: ShardListing) -> dict[str, Any]:
    newest = shard.versions[-1] if shard.versions else None
    return {
        "shard": shard.prefix,
        "objects": {kind: len(shard.of_kind(kind)) for kind in _KINDS},
        "bytes": {kind: sum(o.size_bytes for o in shard.of_kind(kind)) for kind in _KINDS},
        "newest_version": newest and str(newest.pointer),
        "stored_ms": max((o.modified_ms for o in shard.versions), default=None),
        "commits_since_snapshot": shard.commits_since_snapshot,
    }


def _document(
    target: StateDirectory, listing: OperatorListing, record: OperatorRecord | HoldfastError, committed: int | None
) -> dict[str, Any]:
    if isinstance(record, OperatorRecord):
        about = {name: value for name, value in record.to_json().items() if name not in ("operator", "schemas")}
        tables = tables_of(target.storage, record)
        if isinstance(tables, HoldfastError):
            about["error"] = str(tables)
        else:
            about["tables"] = {
                table: {side: [{"name": name, "type": kind} for name, kind in columns] for side, columns in of.items()}
                for table, of in tables.items()
            }
    else:
        about = {"error": str(record)}
    shards = {"shard_count": about.pop("shards", None), "shards": [_facts(s) for s in listing.shards.values()]}
    failures = read_failures(target.storage, reports(listing.shards.values(), committed))
    troubles = [asdict(failure) for failure in failures]
    size_of = StateSizes(target.storage, target.executor).of_operator(listing)
    state = {"state_bytes": size_of.state_bytes, "shards_estimated": size_of.estimated}
    return {"operator": listing.name, **about, **state, **shards, "troubles": troubles}


def _show(
    target: StateDirectory,
    listing: OperatorListing,
    record: OperatorRecord | HoldfastError,
    document: Mapping[str, Any],
) -> None:
    console, error = target.console, f"[red]{plain(document.get('error', ''))}[/]"
    if isinstance(record, HoldfastError):
        console.print(f"[bold]{plain(listing.name)}[/] {error}", soft_wrap=True)
    else:
        console.print(
            f"[bold]{plain(listing.name)}[/] of query {plain(record.query_id)}: "
            f"{len(listing.shards):,} of {record.shards:,} shards have objects here"
        )
        if "tables" in document:
            tables = table("table", "column", "", "type")
            for name, sides in document["tables"].items():
                for side, columns in sides.items():
                    for column in columns:
                        is_key = "key" if side == "key" else ""
                        tables.add_row(plain(name), plain(column["name"]), is_key, plain(column["type"]))
            console.print(tables)
        else:
            console.print(error, soft_wrap=True)
    estimated = f", {document['shards_estimated']:,} shards estimated" if document["shards_estimated"] else ""
    console.print(f"{size(document['state_bytes'])} of state{estimated}")
    if not document["state_bytes"]:
        console.print(SMALL_COMMITS)
    shown = table("", "objects", "size", right=("objects", "size"))
    for kind in _KINDS:
        objects = sum(f["objects"][kind] for f in document["shards"])
        if objects or kind in ("commit", "snapshot", "part"):
            words = {"part": "parts of files", "unknown": "unknown"}.get(kind, f"{kind}s")
            shown.add_row(words, f"{objects:,}", size(sum(f["bytes"][kind] for f in document["shards"])))
    console.print(shown)
    longest = max(listing.shards.values(), key=lambda shard: shard.commits_since_snapshot, default=None)
    if longest is not None:
        commits = counted(longest.commits_since_snapshot, "commit")
        since = "since a shard's newest snapshot" if longest.newest_snapshot else "and no snapshot yet"
        console.print(f"at most {commits} {since}: {plain(longest.prefix)}")
    for trouble in document["troubles"]:
        console.print(f"[red]{plain(Failure(**trouble).sentence(clock.now_ms()))}[/]", soft_wrap=True)


def _show_health(target: StateDirectory, health: Health) -> None:
    console, now_ms = target.console, clock.now_ms()
    since = f" since {moment(health.since_ms)} UTC" if health.since_ms else ""
    colour = _COLOURS[health.state] or "none"
    console.print(f"[bold]query {plain(health.query_id)}[/] is [bold {colour}]{health.state}[/]{since}", soft_wrap=True)
    console.print(plain(health.why), soft_wrap=True)
    if health.failure:
        console.print(f"[red]{plain(health.failure.sentence(now_ms))}[/]", soft_wrap=True)
    shown = table("", "", "known from")
    for figure in health.figures:
        shown.add_row(figure.name.lower(), figure.value, plain(figure.known_from))
    console.print(shown)


def _sink_document(target: StateDirectory, sink: StoredSink) -> dict[str, Any]:
    found = SinkState.read(target.storage, sink)
    newest: dict[str, Any] = {"batch": None} | ({"error": found.error} if found.error else {})
    if found.decision is not None:
        decision = found.decision
        newest = {"batch": decision.batch_id, "rows": decision.rows, "parts": len(decision.handles)}
    return {
        "sink": sink.sink,
        "query": found.query_id,
        "entries": len(sink.numbers),
        "newest": newest,
        "size_bytes": sink.size_bytes,
        "stored_ms": sink.modified_ms,
    }


def _show_sinks(target: StateDirectory) -> None:
    if not target.listing.sinks:
        return
    shown = table("sink", "query", "newest decision", "rows", "parts", "stored", "entries", right=("rows", "parts"))
    for document in (_sink_document(target, sink) for sink in target.listing.sinks):
        newest = document["newest"]
        batch = "none" if newest["batch"] is None else f"micro-batch {newest['batch']:,}"
        shown.add_row(
            plain(document["sink"]),
            plain(document["query"] or ""),
            f"[red]{plain(newest['error'])}[/]" if "error" in newest else batch,
            f"{newest['rows']:,}" if "rows" in newest else "",
            f"{newest['parts']:,}" if "parts" in newest else "",
            moment(document["stored_ms"]),
            f"{document['entries']:,}",
        )
    target.console.print(shown)


def _show_shards(target: StateDirectory, shards: Iterable[Mapping[str, Any]]) -> None:
    shown = table(
        *("shard", "newest stored version", "stored", "commits since snapshot", "objects", "size"),
        right=("commits since snapshot", "objects", "size"),
    )
    for facts in shards:
        shown.add_row(
            plain(facts["shard"]),
            plain(facts["newest_version"] or ""),
            moment(facts["stored_ms"]) if facts["stored_ms"] is not None else "",
            f"{facts['commits_since_snapshot']:,}{'' if facts['objects']['snapshot'] else ', no snapshot yet'}",
            f"{sum(facts['objects'].values()):,}",
            size(sum(facts["bytes"].values())),
        )
    target.console.print(shown)
