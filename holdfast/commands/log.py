"""``holdfast log``: the stored versions and snapshots of each shard, newest first."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click

from holdfast.commands.target import (
    SMALL_COMMITS,
    StateDirectory,
    moment,
    number_option,
    on_state_dir,
    opened,
    plain,
    size,
    table,
)
from holdfast.errors import HoldfastError, InvalidArgumentError, UnavailableError
from holdfast.snapshotter.ownership.operator_record import read_operator
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import Headers, ShardListing, StoredObject


@click.command()
@on_state_dir
@number_option("--shard", least=0, text="Only this shard of each operator.")
@number_option("--limit", default=10, text="Versions to list per shard, newest first; each costs a request.")
def log(url: str, operator: str | None, options: dict[str, str], as_json: bool, shard: int | None, limit: int) -> None:
    """List each shard's stored versions and snapshots.

    A commit holds everything written since the previous one, possibly several versions: small commits stay in Spark's
    own state until enough have accumulated. Times are the store's, in UTC.
    """
    with opened(url, options, operator) as target:
        shards = [
            listing
            for found in target.listing.operators.values()
            for prefix, listing in found.shards.items()
            if shard is None or prefix.endswith(f"/shard-{shard:04d}")
        ]
        if shard is not None and not shards:
            _require_shard(target, shard)
        wanted = [(s, stored) for s in shards for stored in [*reversed(s.versions)][:limit]]
        headers = {s.prefix: Headers(PrefixedStorage(target.storage, s.prefix)) for s in shards}
        described = target.executor.map(lambda pair: describe(headers[pair[0].prefix], pair[1]), wanted)
        rows: dict[str, list[dict[str, Any]]] = {s.prefix: [] for s in shards}
        for (listing, _), row in zip(wanted, described, strict=True):
            rows[listing.prefix].append(row)
        if as_json:
            target.show({"shards": [{**_totals(s), "newest": rows[s.prefix]} for s in shards]})
        else:
            _show(target, shards, rows)


def _require_shard(target: StateDirectory, shard: int) -> None:
    """Raise `InvalidArgumentError` if no operator has this shard."""
    counts: dict[str, int] = {}
    for name in target.listing.operators:
        with suppress(HoldfastError):  # without a readable record, the number of shards is unknown
            counts[name] = read_operator(target.storage, name).shards
    if len(counts) == len(target.listing.operators) and shard >= max(counts.values()):
        raise InvalidArgumentError(
            "no operator has this shard; numbers start at 0",
            shard=shard,
            shards=", ".join(f"{name} has {shards}" for name, shards in counts.items()),
        )


def describe(headers: Headers, stored: StoredObject) -> dict[str, Any]:
    """Describe a stored commit or snapshot; ``error`` says why it cannot be read."""
    row: dict[str, Any] = {
        "kind": stored.kind,
        "version": str(stored.pointer),
        "stored_ms": stored.modified_ms,
        "size_bytes": stored.size_bytes,
    }
    try:
        if stored.kind == "commit":
            commit = headers.commit(stored)
            chain = commit.lineage.chain
            return {
                **row,
                "rows": dict(commit.rows),
                "covers": [str(pointer) for pointer in commit.lineage.since],
                "chain": len(chain) + 1,
                "begins": chain[0].key if chain else stored.key,
            }
        manifest = headers.manifest(stored)
    except (InvalidArgumentError, UnavailableError):
        raise
    except HoldfastError as exc:
        return {**row, "error": str(exc)}
    return {
        **row,
        "backend": manifest.backend,
        "files": len(manifest.files),
        "stored_bytes": manifest.stored_bytes,
        "new_bytes": manifest.new_bytes,
    }


def _totals(shard: ShardListing) -> dict[str, Any]:
    kinds = {kind: shard.of_kind(kind) for kind in ("commit", "snapshot", "part")}
    return {
        "shard": shard.prefix,
        **{f"{kind}s": len(found) for kind, found in kinds.items()},
        **{f"{kind}s_bytes": sum(o.size_bytes for o in found) for kind, found in kinds.items()},
    }


def _show(target: StateDirectory, shards: list[ShardListing], rows: dict[str, list[dict[str, Any]]]) -> None:
    if not any(shard.versions for shard in shards):
        target.console.print(f"nothing is stored: {SMALL_COMMITS}")
    for shard in shards:
        totals = _totals(shard)
        target.console.print(
            f"[bold]{plain(shard.prefix)}[/]: {totals['commits']:,} commits, {size(totals['commits_bytes'])}; "
            f"{totals['snapshots']:,} snapshots, {size(totals['parts_bytes'])}"
        )
        shown = table("stored", "version", "what", "size", "", right=("size",), whole=("stored", "version", "what"))
        for row in rows[shard.prefix]:
            colour = "[cyan]snapshot[/]" if row["kind"] == "snapshot" else "commit"
            shown.add_row(moment(row["stored_ms"]), plain(row["version"]), colour, size(size_of(row)), plain(note(row)))
        target.console.print(shown)


def size_of(row: dict[str, Any]) -> int:
    """Return the bytes of a commit, or of a snapshot with its files."""
    return int(row["size_bytes"] + row.get("stored_bytes", 0))


def note(row: dict[str, Any]) -> str:
    """Describe what a commit or snapshot holds, for the last column."""
    if "error" in row:
        return str(row["error"])
    if row["kind"] == "snapshot":
        return f"{row['backend']}, {row['files']:,} files, {size(row['new_bytes'])} of them new"
    counts = ", ".join(f"{count:,} {name}" for name, count in row["rows"].items()) or "no rows"
    covers = f"; {len(row['covers'])} versions" if len(row["covers"]) > 1 else ""
    return f"{counts}{covers}; chain of {row['chain']}"
