"""``holdfast verify``: read all objects; report which are damaged or missing, and the versions lost with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict

import click

from holdfast.commands.progress import bytes_shown
from holdfast.commands.target import (
    SMALL_COMMITS,
    StateDirectory,
    on_state_dir,
    opened,
    plain,
    retain_option,
    size,
    table,
)
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.snapshotter.ownership.claims import FOLDER as CLAIMS
from holdfast.snapshotter.ownership.claims import retained_versions
from holdfast.snapshotter.ownership.operator_record import read_operator
from holdfast.snapshotter.ownership.stored_tables import FOLDER, stored_tables
from holdfast.snapshotter.sink_log import damages as damages_of
from holdfast.snapshotter.upkeep.retention import RETAINED_VERSIONS
from holdfast.snapshotter.upkeep.verification import Damage, verify_shard

_RANGES_SHOWN = 6


@click.command()
@on_state_dir
@retain_option("Versions before the newest that a query may return to; objects of older versions may be missing.")
def verify(url: str, operator: str | None, options: dict[str, str], as_json: bool, retain: int | None) -> None:
    """Read everything in a state directory and compare checksums.

    Names each damaged or missing object, the versions lost with it, and those still restorable without it, from
    an older snapshot and the commits since. The exit status is 1 if anything is damaged or missing.
    """
    with opened(url, options, operator) as target:
        damages = [
            Damage(f"{name}/operator", "is missing, although the operator has shards", ("the whole operator",))
            for name in target.listing.without_record()
        ]
        work = [(shard, n) for name, n in _retained(target, retain, damages) for shard in target.shards(name)]
        with bytes_shown("reading", sum(o.size_bytes for shard, _ in work for o in shard.objects.values())) as on_read:
            reports = [verify_shard(target.of(shard), target.executor, n, on_read) for shard, n in work]
        damages += [damage for report in reports for damage in report.damages]
        sinks = target.listing.sinks
        damages += [Damage(key, problem) for sink in sinks for key, problem in damages_of(target.storage, sink)]
        facts = {
            "objects": sum(report.objects for report in reports) + sum(len(sink.numbers) for sink in sinks),
            "size_bytes": sum(report.size_bytes for report in reports) + sum(sink.size_bytes for sink in sinks),
            "versions": sum(report.versions for report in reports),
        }
        if as_json:
            target.show({**facts, "damages": [asdict(damage) for damage in damages]})
        else:
            _show(target, damages, facts)
    if damages:
        sys.exit(1)


def _retained(target: StateDirectory, retain: int | None, damages: list[Damage]) -> Iterator[tuple[str, int]]:
    """Yield each operator with its number of retained versions; add damage to `damages`."""
    for name, listing in target.listing.operators.items():
        number = RETAINED_VERSIONS
        try:
            record = read_operator(target.storage, name)
        except (CorruptionError, NotFoundError) as exc:
            damages.append(Damage(f"{name}/operator", str(exc), ("the whole operator",)))
        else:
            try:
                stored_tables(target.storage, record)
            except CorruptionError as exc:
                damages.append(Damage(f"{name}/{FOLDER}", str(exc), ("the whole operator",)))
            try:
                number = retained_versions(target.storage, record)
            except CorruptionError as exc:
                newest = listing.claim()
                damages.append(Damage(f"{name}/{CLAIMS}/{newest.key if newest else ''}", str(exc)))
        yield name, retain or number


def _show(target: StateDirectory, damages: list[Damage], facts: dict[str, int]) -> None:
    if damages:
        shown = table("object", "problem", "versions lost", "still restorable", whole=("object",))
        for damage in damages:
            shown.add_row(
                f"[red]{plain(damage.key)}[/]", plain(damage.problem), _short(damage.lost), _short(damage.around)
            )
        target.console.print(shown)
    verdict = f"[red]{len(damages):,} objects are damaged or missing[/]" if damages else "[green]all intact[/]"
    target.console.print(
        f"{facts['objects']:,} objects read, {size(facts['size_bytes'])}: {verdict}; "
        f"{facts['versions']:,} stored versions can be restored"
    )
    if not facts["objects"]:
        target.console.print(SMALL_COMMITS)


def _short(pointers: tuple[str, ...]) -> str:
    """Format version numbers as ranges."""
    if not pointers:
        return "none"
    numbers = sorted({pointer.partition("-")[0] for pointer in pointers}, key=lambda text: (len(text), text))
    if not all(number.isdigit() for number in numbers):
        return plain(", ".join(numbers))
    ranges: list[list[int]] = []
    for number in map(int, numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
    return ", ".join(shown[:_RANGES_SHOWN]) + (" …" if len(shown) > _RANGES_SHOWN else "")
