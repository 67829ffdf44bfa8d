"""Savepoints and restores that are stopped: there is nothing, or the whole, and the next try succeeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import savepoints
from holdfast.errors import CorruptionError
from holdfast.spark_integration.copies import cloning
from holdfast.spark_integration.savepoints import by_spark, creating, new_query, restoring
from tests.power import NEVER, Killed, Power
from tests.spark.conftest import Lab
from tests.spark.savepoints.queries import CASES, restored, run, saved
from tests.tiers import cases

# ``make test-all`` stops at every operation.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

CASE = CASES[0]


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Any:
    def cut(after: int) -> Power:
        found = Power(after)
        for module in (creating, restoring, new_query, cloning, by_spark):
            monkeypatch.setattr(module, "open_storage", found.open)
        return found

    return cut


def test_a_savepoint_is_there_as_a_whole_or_not_at_all(lab: Lab, power: Any) -> None:
    for file in CASE.files()[:2]:
        lab.feed(file)
    run(lab, CASE)
    target = lab.folder / "savepoints"
    whole = power(NEVER)
    savepoints.create(lab.spark, lab.folder / "query", target, "whole")
    for after in cases(whole.stops(), quick=2):
        power(after)
        with pytest.raises(Killed):
            savepoints.create(lab.spark, lab.folder / "query", target, "one")
        assert "one" not in {found.name for found in savepoints.listed(target) if found.savepoint}
    power(NEVER)
    savepoints.create(lab.spark, lab.folder / "query", target, "one")
    assert savepoints.verify(target, "one") == []


def test_a_query_starts_from_a_whole_restore_only(lab: Lab, power: Any) -> None:
    """Stopped at any step, and at another one of the next try, it leaves no location that Spark would start from."""
    (later, *_) = saved(lab, CASE)
    lab.feed(later)
    original = run(lab, CASE)
    whole = power(NEVER)
    restored(lab, "first")
    for after in cases(whole.stops(), quick=3):
        power(after)
        with pytest.raises(Killed):
            restored(lab, shards=3)
        assert not (lab.folder / "again/metadata").exists()
    power(NEVER)
    restored(lab, shards=3)
    assert sorted(path.name for path in (lab.folder / "again").iterdir() if path.is_file()) == ["metadata"]
    assert not list(lab.folder.glob("again-restoring-*"))
    assert run(lab, CASE, "again", "durable-again") == original
    require_one_query(lab, "durable-again")


def require_one_query(lab: Lab, durable: str) -> None:
    """Nothing is left of those that were stopped."""
    (query,) = [path for path in (lab.folder / durable / "_queries").iterdir() if not path.suffix]
    assert query.name in (lab.folder / "again/metadata").read_text()
    assert all(path.read_text() == query.name for path in query.parent.glob("*.fills"))
    assert {path.relative_to(lab.folder / durable).parts[0] for path in contents(lab.folder / durable)} == {
        "_queries",
        "totals",
    }


def copied(lab: Lab, how: str, query: str = "again") -> str:
    where = {"to_state_dir": lab.folder / f"durable-{query}"}
    lab.configure({"state.dir": str(lab.folder / "durable")})
    if how == "clone":
        return savepoints.clone(lab.spark, lab.folder / "query", lab.folder / query, **where)
    return savepoints.rescale(lab.spark, lab.folder / "query", lab.folder / query, shards=3, **where)


@pytest.mark.all
@pytest.mark.parametrize("how", cases(["rescale", "clone"]))
def test_a_query_starts_from_a_whole_copy_only(lab: Lab, power: Any, how: str) -> None:
    """As with a restore; the original goes on whatever becomes of it."""
    files = CASE.files()
    for file in files[:2]:
        lab.feed(file)
    lab.configure({"commit.carriedBytes": "0"})
    run(lab, CASE)
    whole = power(NEVER)
    copied(lab, how, "first")
    before = contents(lab.folder / "durable") | contents(lab.folder / "query")
    for after in cases(whole.stops(), quick=3):
        power(after)
        with pytest.raises(Killed):
            copied(lab, how)
        assert not (lab.folder / "again/metadata").exists()
    power(NEVER)
    copied(lab, how)
    assert sorted(path.name for path in (lab.folder / "again").iterdir() if path.is_file()) == ["metadata"]
    assert contents(lab.folder / "durable") | contents(lab.folder / "query") == before
    require_one_query(lab, "durable-again")
    lab.feed(files[2])
    original = run(lab, CASE)
    assert run(lab, CASE, "again", "durable-again") == original


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "claims" not in path.parts}


@pytest.mark.all
def test_what_fails_leaves_nothing(lab: Lab) -> None:
    """An error after the state was written: location and directory are as before."""
    saved(lab, CASE)
    (piece, *_) = (lab.folder / "savepoints/one/operators/totals").glob("*/*.arrow")
    piece.write_bytes(piece.read_bytes()[:-50] + bytes(50))
    with pytest.raises(CorruptionError, match=piece.name):
        restored(lab)
    assert [path for folder in ("again", "durable-again") for path in contents(lab.folder / folder)] == []
