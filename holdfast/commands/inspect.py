"""``holdfast inspect``: what lies in a state directory: operators, their tables, shards and sizes."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import click

from holdfast.commands.target import Target, moment, on_checkpoint, opened, plain, size, table
from holdfast.errors import CorruptionError, HoldfastError, NotFoundError
from holdfast.snapshotter.decisions import Decisions, StoredSink
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, described, read_operator
from holdfast.snapshotter.ownership.stored_tables import stored_tables
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import OperatorListing, ShardListing
from holdfast.snapshotter.upkeep.troubles import read_trouble

_KINDS = ("commit", "snapshot", "part", "probe", "trouble", "unknown")
_TROUBLES_SHOWN = 20


@click.command()
@on_checkpoint
@click.option("--shards", "with_shards", is_flag=True, help="Also list each shard.")
def inspect(url: str, operator: str | None, options: dict[str, str], as_json: bool, with_shards: bool) -> None:
    """Show what a state directory holds: operators with their query, tables, size and failures, and sinks.

    Costs one listing, and one small request for each operator, sink and failure shown (at most 20 failures).
    """
    with opened(url, options, operator) as target:
        found = [(o, _record(target, o.name)) for o in target.listing.operators.values()]
        if as_json:
            operators = [_document(target, listing, record) for listing, record in found]
            sinks = [_sink_document(target, sink) for sink in target.listing.sinks]
            target.show({"operators": operators, "sinks": sinks, "unknown_objects": len(target.listing.unknown)})
            return
        for listing, record in found:
            _show(target, listing, record)
            if with_shards:
                _show_shards(target, listing)
        _show_sinks(target)
        if target.listing.unknown:
            target.console.print(f"{len(target.listing.unknown):,} objects outside operators are not holdfast's")


def _record(target: Target, name: str) -> OperatorRecord | HoldfastError:
    """Return an operator's record, with the tables that its state holds by now."""
    try:
        record = read_operator(target.storage, name)
        return replace(record, tables=described(stored_tables(target.storage, record).live))
    except (CorruptionError, NotFoundError) as exc:  # damaged, or deleted since it was listed
        return exc


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


def _troubles(target: Target, listing: OperatorListing) -> list[dict[str, Any]]:
    """Return what fails in the background, the newest failures first."""
    told = sorted(((o.modified_ms, s.prefix, o.key) for s in listing.shards.values() for o in s.troubles), reverse=True)
    found = []
    for stored_ms, prefix, key in told[:_TROUBLES_SHOWN]:
        try:
            trouble = asdict(read_trouble(PrefixedStorage(target.storage, prefix), key))
        except NotFoundError:  # over since the listing
            continue
        except CorruptionError as exc:
            trouble = {"what": key, "error": str(exc)}
        found.append({"shard": prefix, **trouble, "stored_ms": stored_ms})
    return found


def _document(target: Target, listing: OperatorListing, record: OperatorRecord | HoldfastError) -> dict[str, Any]:
    if isinstance(record, OperatorRecord):
        about = {name: value for name, value in asdict(record).items() if name not in ("operator", "schemas")}
        about["tables"] = {
            table: {side: [{"name": name, "type": kind} for name, kind in columns] for side, columns in sides.items()}
            for table, sides in record.tables.items()
        }
    else:
        about = {"error": str(record)}
    shards = {"shard_count": about.pop("shards", None), "shards": [_facts(s) for s in listing.shards.values()]}
    return {"operator": listing.name, **about, **shards, "troubles": _troubles(target, listing)}


def _show(target: Target, listing: OperatorListing, record: OperatorRecord | HoldfastError) -> None:
    console = target.console
    if isinstance(record, HoldfastError):
        console.print(f"[bold]{plain(listing.name)}[/] [red]{plain(record)}[/]", soft_wrap=True)
    else:
        console.print(
            f"[bold]{plain(listing.name)}[/] of query {plain(record.query_id)}: "
            f"{len(listing.shards):,} of {record.shards:,} shards hold state"
        )
        shown = table("table", "column", "", "type")
        for name, sides in record.tables.items():
            for side, columns in sides.items():
                for column, kind in columns:
                    shown.add_row(plain(name), plain(column), "key" if side == "key" else "", plain(kind))
        console.print(shown)
    shown = table("", "objects", "size", right=("objects", "size"))
    facts = [_facts(shard) for shard in listing.shards.values()]
    for kind in _KINDS:
        objects = sum(f["objects"][kind] for f in facts)
        if objects or kind in ("commit", "snapshot", "part"):
            words = {"part": "parts of files", "unknown": "unknown"}.get(kind, f"{kind}s")
            shown.add_row(words, f"{objects:,}", size(sum(f["bytes"][kind] for f in facts)))
    console.print(shown)
    longest = max(facts, key=lambda f: f["commits_since_snapshot"], default=None)
    if longest is not None:
        console.print(
            f"at most {longest['commits_since_snapshot']:,} commits since a shard's newest snapshot: "
            f"{plain(longest['shard'])}"
        )
    _show_troubles(target, listing)


def _show_troubles(target: Target, listing: OperatorListing) -> None:
    for trouble in _troubles(target, listing):
        in_a_row = f", {trouble['in_a_row']} times in a row" if "in_a_row" in trouble else ""
        host = f", on {plain(trouble['host'])}" if "host" in trouble else ""
        target.console.print(
            f"[red]{plain(trouble['shard'])}: {plain(trouble['what'])} fails{in_a_row}[/], last at "
            f"{moment(trouble['stored_ms'])}{host}: {plain(trouble['error'])}",
            soft_wrap=True,
        )


def _sink_document(target: Target, sink: StoredSink) -> dict[str, Any]:
    newest: dict[str, Any] = {"batch": None}
    if sink.decided:
        newest["batch"] = sink.decided[-1]
        try:
            decision = Decisions(target.storage, sink.sink, sink.query_id).read(sink.decided[-1])
            newest |= {"rows": decision.rows, "parts": len(decision.handles)}
        except (CorruptionError, NotFoundError) as exc:  # damaged, or deleted since it was listed
            newest["error"] = str(exc)
    return {
        "sink": sink.sink,
        "query": sink.query_id,
        "decisions": len(sink.decided),
        "newest": newest,
        "size_bytes": sink.size_bytes,
        "stored_ms": sink.modified_ms,
    }


def _show_sinks(target: Target) -> None:
    if not target.listing.sinks:
        return
    shown = table("sink", "query", "newest decision", "rows", "parts", "stored", "decisions", right=("rows", "parts"))
    for document in (_sink_document(target, sink) for sink in target.listing.sinks):
        newest = document["newest"]
        batch = "none" if newest["batch"] is None else f"micro-batch {newest['batch']:,}"
        shown.add_row(
            plain(document["sink"]),
            plain(document["query"]),
            f"[red]{plain(newest['error'])}[/]" if "error" in newest else batch,
            f"{newest['rows']:,}" if "rows" in newest else "",
            f"{newest['parts']:,}" if "parts" in newest else "",
            moment(document["stored_ms"]),
            f"{document['decisions']:,}",
        )
    target.console.print(shown)


def _show_shards(target: Target, listing: OperatorListing) -> None:
    shown = table(
        *("shard", "newest stored version", "stored", "commits since snapshot", "objects", "size"),
        right=("commits since snapshot", "objects", "size"),
    )
    for facts in map(_facts, listing.shards.values()):
        shown.add_row(
            plain(facts["shard"]),
            plain(facts["newest_version"] or ""),
            moment(facts["stored_ms"]) if facts["stored_ms"] is not None else "",
            f"{facts['commits_since_snapshot']:,}",
            f"{sum(facts['objects'].values()):,}",
            size(sum(facts["bytes"].values())),
        )
    target.console.print(shown)
