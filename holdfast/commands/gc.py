"""``holdfast gc``: delete objects that no retained version needs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from holdfast.commands.progress import items_shown
from holdfast.commands.target import StateDirectory, on_state_dir, opened, plain, retain_option, size, table
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.ownership.claims import retained_versions
from holdfast.snapshotter.ownership.operator_record import read_operator, shard_prefix
from holdfast.snapshotter.ownership.queries import RESCALING, find_origin
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import Headers, OperatorListing, ShardListing, list_shard
from holdfast.snapshotter.upkeep.retention import (
    CleanUpPlan,
    History,
    carry_out,
    needed_in_storage,
    plan,
    store_time_ms,
)

_ROWS_SHOWN = 40
_HOUR_MS = 60 * 60_000


@dataclass
class Outcome:
    """The plan for a shard, or for objects outside shards, and its result."""

    plan: CleanUpPlan
    sizes: dict[str, int]  #: Size by key, for all objects to delete
    error: HoldfastError | None = None  #: Why planning or a deletion failed


@click.command()
@on_state_dir
@retain_option(
    "Versions to keep before the newest; fewer than Spark's minBatchesToRetain may delete versions a restart needs."
)
@click.option(
    "--grace",
    "grace_hours",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Keep objects newer than this; set it above your longest upload.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
def gc(
    url: str,
    operator: str | None,
    options: dict[str, str],
    as_json: bool,
    retain: int | None,
    grace_hours: float,
    dry_run: bool,
    yes: bool,
) -> None:
    """Delete objects that no retained version needs.

    URL is the state directory, as in spark.holdfast.state.dir. Running queries clean up by themselves; this
    cleans up after queries that have ended, executors that died, and uploads that were never finished. It is safe
    while queries run, and keeps what a stopped query needs to start again.
    """
    grace_ms = grace_hours * _HOUR_MS
    if not math.isfinite(grace_ms):
        raise InvalidArgumentError("--grace must be a number of hours", given=grace_hours)
    with opened(url, options, operator) as target:
        if not target.listing.operators:
            raise NotFoundError(
                "the directory holds only sink decisions, which queries delete by themselves",
                storage=target.storage.url,
            )
        if not (dry_run or yes or (sys.stdin.isatty() and not as_json)):
            raise InvalidArgumentError(
                "cannot ask for confirmation here: pass --yes to delete, or --dry-run to preview"
            )
        now_ms = store_time_ms(PrefixedStorage(target.storage, next(iter(target.listing.operators))))
        before_ms = now_ms - int(grace_ms)
        outcomes, owned = _plans(target, retain, now_ms, before_ms)
        if not as_json:
            _show(target, outcomes, dry_run=dry_run)
        to_delete = [outcome for outcome in outcomes if outcome.plan.delete]
        count = sum(len(outcome.plan.delete) for outcome in to_delete)
        if dry_run or (to_delete and not yes and not click.confirm(f"Delete {count:,} objects?")):
            aborted = None
        else:
            with items_shown("deleting", count) as on_done:
                for outcome in target.executor.map(partial(_carry_out, target), to_delete):
                    on_done(len(outcome.plan.delete))
            folders = [*owned, *([] if operator else [RESCALING])]
            aborted = _abort_uploads(target, folders, before_ms, outcomes)
        if as_json:
            target.show({"dry_run": dry_run, "now_ms": now_ms, **_document(outcomes, aborted)})
        else:
            _summarize(target, outcomes, aborted)
    if any(outcome.error for outcome in outcomes):
        sys.exit(1)


def _plans(target: StateDirectory, retain: int | None, now_ms: int, before_ms: int) -> tuple[list[Outcome], list[str]]:
    """Return the plans, and the operators with a readable record; other folders may not be holdfast's."""
    work, outcomes, owned = [], _interrupted_rescales(target, before_ms), []
    for name, operator in target.listing.operators.items():
        try:
            record = read_operator(target.storage, name)
            owned.append(name)
            outcomes.append(_outside_shards(operator, before_ms))
            retained = retain or retained_versions(target.storage, record)
        except (CorruptionError, NotFoundError) as exc:
            outcomes.append(Outcome(CleanUpPlan(name, 0), {}, exc))
            continue
        # A folder that only looks like a shard of this operator is left alone.
        prefixes = {shard_prefix(record.operator, number) for number in range(record.shards)}
        work += [(shard, retained) for prefix, shard in operator.shards.items() if prefix in prefixes]
    outcome_of = partial(_outcome, target, now_ms=now_ms, grace_ms=now_ms - before_ms)
    with items_shown("examining shards", len(work)) as on_done:
        for outcome in target.executor.map(lambda pair: outcome_of(pair[0], retain=pair[1]), work):
            outcomes.append(outcome)
            on_done(1)
    return outcomes, owned


def _interrupted_rescales(target: StateDirectory, before_ms: int) -> list[Outcome]:
    """Plan the deletion of objects that interrupted rescales left and no process still writes."""
    outcomes = []
    for folder, infos in target.listing.rescaling.items():
        sizes = {info.key: info.size_bytes for info in infos}
        try:
            written_ms = [*(info.modified_ms for info in infos), *_restored_ms(target, folder)]
        except CorruptionError as exc:
            reason = "could not determine which state this rescale writes"
            outcomes.append(Outcome(CleanUpPlan(folder, 0, dict.fromkeys(sizes, reason)), {}, exc))
            continue
        if max(written_ms) <= before_ms:
            reason = "the savepoint of an interrupted rescale"
            outcomes.append(Outcome(CleanUpPlan(folder, 0, {}, dict.fromkeys(sizes, reason)), sizes))
    return outcomes


def _restored_ms(target: StateDirectory, folder: str) -> Iterator[int]:
    """Yield the times of the objects of a rescale's new query, whose id ends the name of `folder`."""
    origin = find_origin(target.storage, folder.rpartition("/")[2])
    for directory in origin.directories if origin else ():
        operator = target.listing.operators.get(directory)
        for shard in operator.shards.values() if operator else ():
            yield from (stored.modified_ms for stored in shard.objects.values())


def _outside_shards(operator: OperatorListing, before_ms: int) -> Outcome:
    found = dict.fromkeys(operator.probes(), "left by a storage probe")
    found |= dict.fromkeys(operator.besides(), "the claim of a second concurrent run")
    old = {info: reason for info, reason in found.items() if info.modified_ms <= before_ms}
    sizes = {info.key: info.size_bytes for info in old}
    return Outcome(CleanUpPlan(operator.name, 0, {}, {info.key: reason for info, reason in old.items()}), sizes)


def _outcome(target: StateDirectory, shard: ShardListing, *, retain: int, now_ms: int, grace_ms: int) -> Outcome:
    try:
        try:
            planned = _plan(target, shard, retain, now_ms, grace_ms)
        except NotFoundError:  # deleted since the listing by another clean-up
            shard = list_shard(target.of(shard))
            planned = _plan(target, shard, retain, now_ms, grace_ms)
    except InvalidArgumentError:  # such as access denied, which affects more than this shard
        raise
    except HoldfastError as exc:
        unknown = dict.fromkeys(shard.objects, "what is needed could not be determined")
        return Outcome(CleanUpPlan(shard.prefix, 0, unknown), {}, exc)
    return Outcome(planned, {key: shard.objects[key].size_bytes for key in planned.delete})


def _plan(target: StateDirectory, shard: ShardListing, retain: int, now_ms: int, grace_ms: int) -> CleanUpPlan:
    history = History(shard, Headers(target.of(shard)))
    return plan(history, needed_in_storage(retain, history), now_ms, grace_ms)


def _carry_out(target: StateDirectory, outcome: Outcome) -> Outcome:
    try:
        carry_out(PrefixedStorage(target.storage, outcome.plan.shard), outcome.plan)
    except HoldfastError as exc:
        outcome.error = exc
    return outcome


def _abort_uploads(target: StateDirectory, folders: list[str], before_ms: int, outcomes: list[Outcome]) -> int:
    """Abort abandoned uploads and return their number; report a failure as an outcome."""
    try:
        return sum(target.storage.abort_unfinished_uploads(f"{name}/", before_ms) for name in folders)
    except HoldfastError as exc:
        outcomes.append(Outcome(CleanUpPlan("unfinished uploads", 0), {}, exc))
        return 0


def _show(target: StateDirectory, outcomes: list[Outcome], *, dry_run: bool) -> None:
    rows = [(o, key, reason) for o in outcomes for key, reason in o.plan.delete.items()]
    if rows:
        shown = table("object", "size", "reason", right=("size",), whole=("object",))
        for outcome, key, reason in rows[:_ROWS_SHOWN]:
            shown.add_row(plain(f"{outcome.plan.shard}/{key}"), size(outcome.sizes[key]), plain(reason))
        target.console.print(shown)
    if len(rows) > _ROWS_SHOWN:
        target.console.print(f"… and {len(rows) - _ROWS_SHOWN:,} more; --json lists all")


def _summarize(target: StateDirectory, outcomes: list[Outcome], aborted: int | None) -> None:
    console = target.console
    deleted, kept = sum(len(o.plan.delete) for o in outcomes), sum(len(o.plan.keep) for o in outcomes)
    failed = [o for o in outcomes if o.error]
    partly = any(outcome.plan.delete for outcome in failed)
    verb = "would be deleted" if aborted is None else "were to be deleted" if partly else "deleted"
    console.print(f"{deleted:,} objects {verb}, {size(sum(sum(o.sizes.values()) for o in outcomes))}; {kept:,} kept")
    if aborted:
        console.print(f"{aborted:,} unfinished uploads were removed")
    if target.listing.unknown:
        console.print(f"{len(target.listing.unknown):,} objects outside operators were left alone")
    for outcome in failed:
        what = "could not delete everything" if outcome.plan.delete else "nothing can be deleted"
        console.print(f"[red]{plain(outcome.plan.shard)}: {what}[/]: {plain(outcome.error)}", soft_wrap=True)


def _document(outcomes: list[Outcome], aborted: int | None) -> dict[str, Any]:
    return {
        "objects": sum(len(o.plan.delete) for o in outcomes),
        "size_bytes": sum(sum(o.sizes.values()) for o in outcomes),
        "kept": sum(len(o.plan.keep) for o in outcomes),
        "unfinished_uploads_removed": aborted or 0,
        "shards": [
            {
                "shard": o.plan.shard,
                "needed_from": o.plan.needed_from,
                "delete": {key: {"why": why, "size_bytes": o.sizes[key]} for key, why in o.plan.delete.items()},
                "keep": dict(o.plan.keep),
                "error": str(o.error) if o.error else None,
            }
            for o in outcomes
        ],
    }
