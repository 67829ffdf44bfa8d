"""What becomes of the operators of a savepoint that is restored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.savepoints.manifest import SavedOperator, Savepoint, read_manifest, unnamed
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.processor.state.variable_tables import find_shown
from holdfast.spark_integration.savepoints.changes import Changes, plans_of
from tests.unit.snapshotter.savepoints.sample import a_savepoint


@pytest.fixture
def quiet() -> Savepoint:
    """Return a savepoint of two operators, the second of which had had no rows."""
    with open_storage("memory://quiet") as target:
        made = a_savepoint(target)
    name = unnamed(1, {of.name for of in made.operators})
    alerts = SavedOperator(name, 1, "applyInPandasWithState", False, 4, {}, {}, True, {}, (), ())
    return read_manifest(replace(made, operators=(*made.operators, alerts), left_out=()).encode(), "one", "here")


def planned(savepoint: Savepoint, **changes: Any) -> dict[str, bool]:
    return {plan.name: plan.is_reset for plan in plans_of(savepoint, Changes(**changes))}


def test_an_operator_without_a_name_is_given_one(quiet: Savepoint) -> None:
    """It begins without state; the other one, which may be renamed too, goes on with its own."""
    assert planned(quiet, rename={"unnamed-1": "alerts"}) == {"totals": False, "alerts": True}
    assert planned(quiet, rename={"unnamed-1": "totals", "totals": "alerts"}) == {"alerts": False, "totals": True}
    assert planned(quiet, skip=frozenset({"unnamed-1"})) == {"totals": False}


def test_a_name_is_asked_for(quiet: Savepoint) -> None:
    """Or the check for misspelt names would have to let any operator pass."""
    for changes in ({}, {"rename": {"totals": "alerts"}}, {"reset": frozenset({"unnamed-1"})}):
        with pytest.raises(InvalidArgumentError, match=r"--rename unnamed-1=alerts.*operators=unnamed-1"):
            plans_of(quiet, Changes(**changes))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="its own name"):
        planned(quiet, rename={"unnamed-1": "totals"})
    with pytest.raises(NotFoundError, match=r"no operator of this name to rename.*operators='totals, unnamed-1'"):
        planned(quiet, rename={"unnamed-0": "alerts"})


def test_an_operator_without_tables_is_no_choice(quiet: Savepoint) -> None:
    """Who reads or edits the one operator that has tables need not name it."""
    assert quiet.find_operator(None).name == "totals"
    only = replace(quiet, operators=quiet.operators[1:])
    assert only.find_operator(None).name == "unnamed-1"
    with pytest.raises(NotFoundError, match="it has had no rows"):
        find_shown(only.operators[0].tables, "state")


def test_an_index_is_no_choice_and_the_error_says_so(quiet: Savepoint) -> None:
    """It has the keys of another table in the order of their times; users read that one."""
    tables = quiet.operators[0].tables
    for name in ("timers_by_due", *(f"{table}.expiring" for table in tables)):
        with pytest.raises(NotFoundError, match=rf"is an index: .*choose that one, table={name} tables="):
            find_shown(tables, name)
    with pytest.raises(NotFoundError, match="no such table: choose one"):
        find_shown(tables, "others.expiring")


def test_an_operator_that_is_called_so_has_its_name() -> None:
    """Of two that would have one name, that without rows gives way."""
    with open_storage("memory://named") as target:
        (named,) = a_savepoint(target).operators
    assert not replace(named, name="unnamed-1").is_unnamed
    assert unnamed(1, {"unnamed-1", "unnamed-1-"}) == "unnamed-1--"


def test_an_operator_with_more_shards_than_any_has_is_refused(quiet: Savepoint) -> None:
    """Nothing could open it. One that begins without state has as many as the query says."""
    totals, alerts = quiet.operators
    many = replace(quiet, operators=(replace(totals, shards=70_000), replace(alerts, shards=70_000)))
    named = {"rename": {"unnamed-1": "alerts"}}
    with pytest.raises(InvalidArgumentError, match=r"at most 65536 shards.*choose shards.*70000"):
        planned(many, **named)
    assert planned(many, **named, shards=4) == {"totals": False, "alerts": True}
    assert planned(many, **named, reset=frozenset({"totals"})) == {"totals": True, "alerts": True}
