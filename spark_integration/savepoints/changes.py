"""How a restored query differs from its savepoint: names and shards of operators, operators that are gone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from holdfast.backends.options import did_you_mean
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.settings import MOST_SHARDS
from holdfast.snapshotter.savepoints.manifest import NAME, SHARDS_LIMIT, SavedOperator, Savepoint
from holdfast.spark_integration.savepoints.migrating import Migrate, Migration, migrations_of
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE, STATE_VARIABLES

_NO_CHARACTER = re.compile("[\ud800-\udfff]")
_MODES = {"timeMode": "None", "outputMode": "update"}
_KNOWN_MODES = {"none", "processingtime", "eventtime", "append", "update", "complete"}
Sources = Literal["saved", "fresh"]


@dataclass(frozen=True)
class Changes:
    """How a restored query differs from its savepoint; see `holdfast.savepoints.restore`."""

    shards: int | None = None
    partitions: int | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()
    reset: frozenset[str] = frozenset()
    sources: Sources = "saved"
    migrate: Mapping[str, Migrate | Mapping[str, Migrate]] = field(default_factory=dict)
    continue_sinks: bool = False

    def __post_init__(self) -> None:
        if self.sources not in get_args(Sources):
            raise InvalidArgumentError("sources must be 'saved' or 'fresh'", sources=self.sources)
        require_counts(shards=self.shards, partitions=self.partitions)
        if self.continue_sinks and self.sources == "fresh":
            raise InvalidArgumentError(
                "sinks are continued from where the sources were: sources that begin anew would show results twice"
            )
        twice = self.skip & (self.reset | self.rename.keys() | self.migrate.keys())
        if twice:
            raise InvalidArgumentError("an operator that is skipped is not in the new query", operator=min(twice))


def require_counts(**counts: int | None) -> None:
    """Check numbers of shards or partitions, which may be left out. Raises `InvalidArgumentError`."""
    for what, count in counts.items():
        most = MOST_SHARDS if what == "shards" else SHARDS_LIMIT - 1
        if count is not None and (type(count) is not int or not 1 <= count <= most):
            raise InvalidArgumentError(f"{what} must be a whole number from 1 to {most}", given=count)


def require_comment(comment: object) -> None:
    """Check a savepoint's comment. Raises `InvalidArgumentError`."""
    if not isinstance(comment, str) or _NO_CHARACTER.search(comment):
        raise InvalidArgumentError("comment must be a string of valid characters", comment=ascii(comment))


@dataclass(frozen=True)
class Plan:
    """What becomes of an operator that keeps its place in the query."""

    saved: SavedOperator
    name: str  #: In the new query
    shards: int
    is_reset: bool  #: Whether it begins without state, by choice or because it had none
    migrations: Mapping[str, Migration]  #: By table what gives it other columns


def plans_of(savepoint: Savepoint, changes: Changes) -> list[Plan]:
    """Return what becomes of each operator that is not skipped, in the order of the query's plan.

    Spark numbers operators with state in the order of the plan, without gaps, and refuses a query that has more or
    fewer of them than its checkpoint location: so the others move up.

    Raises `InvalidArgumentError` or `NotFoundError` if the savepoint cannot be restored so; `CorruptionError` if it
    describes an operator that no release has.
    """
    operators = sorted(savepoint.operators, key=lambda operator: operator.number)
    names = {operator.name for operator in operators}
    for what, given, known in (
        ("rename", changes.rename.keys(), names),
        ("skip", changes.skip, {*names, *savepoint.left_out}),
        ("reset", changes.reset, names),
        ("migrate", changes.migrate.keys(), names),
    ):
        unknown = set(given) - known
        if unknown:
            raise NotFoundError(
                f"the savepoint has no operator of this name to {what}{did_you_mean(min(unknown), known)}",
                operator=min(unknown),
                operators=", ".join(sorted(known)),
            )
    _require_whole(savepoint, changes)
    kept = [operator for operator in operators if operator.name not in changes.skip]
    if not kept:
        raise InvalidArgumentError("no operator is left to restore", skip=", ".join(sorted(changes.skip)))
    nameless = [operator.name for operator in kept if operator.is_unnamed and operator.name not in changes.rename]
    if nameless:
        raise InvalidArgumentError(
            "an operator had had no rows when the query was saved, so its name is unknown: name it, as in --rename "
            f"{nameless[0]}=alerts, or skip it if the new query does not have it",
            operators=", ".join(nameless),
        )
    for operator in kept:
        modes = [operator.configuration.get(name, default) for name, default in _MODES.items()]
        if operator.host not in (GROUP_STATE, STATE_VARIABLES) or any(
            mode.lower() not in _KNOWN_MODES for mode in modes
        ):
            raise CorruptionError("the savepoint has an operator of an unknown kind", operator=operator.name)
    plans = [
        Plan(
            of,
            changes.rename.get(of.name, of.name),
            changes.shards or of.shards,
            of.name in changes.reset or of.is_unnamed,
            migrations_of(of, changes.migrate[of.name]) if of.name in changes.migrate else {},
        )
        for of in kept
    ]
    if any(plan.shards > MOST_SHARDS for plan in plans if not plan.is_reset):
        raise InvalidArgumentError(
            f"an operator has at most {MOST_SHARDS} shards, and one of the savepoint has more: choose shards",
            shards=max(plan.shards for plan in plans if not plan.is_reset),
        )
    new_names = [plan.name for plan in plans]
    for new in new_names:
        if not NAME.fullmatch(new) or new_names.count(new) > 1:
            raise InvalidArgumentError("each operator needs its own name, as in a query", name=new)
    return plans


def _require_whole(savepoint: Savepoint, changes: Changes) -> None:
    """Check that every operator of the query that was saved has a place in the new one, or is skipped."""
    operators = sorted(savepoint.operators, key=lambda operator: operator.number)
    in_the_way = sorted(set(savepoint.left_out) - changes.skip)
    if in_the_way:
        raise InvalidArgumentError(
            "the saved query had other stateful operators, which cannot start fresh in a restored location: skip "
            "them if the new query does not have them",
            left_out=", ".join(in_the_way),
        )
    numbers = [operator.number for operator in operators]
    if numbers != (sorted(set(numbers)) if savepoint.left_out else list(range(len(numbers)))):
        raise CorruptionError("the savepoint numbers its operators differently from Spark", numbers=str(numbers))
