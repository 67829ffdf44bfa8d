"""Savepoints and restores that are stopped: there is nothing, or the whole, and the next try succeeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import savepoints
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from holdfast.spark_integration.savepoints import creating, restoring
from tests.repetitions import sample
from tests.spark.conftest import Lab
from tests.spark.savepoints.queries import CASES, restored, run, saved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Buffer

    from holdfast.snapshotter.storage.object_storage import ObjectStorage

# The long profile stops at every operation.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

CASE = CASES[0]
NEVER = 10_000


class Killed(BaseException):
    """As if the process had been killed: nothing of it that is left does anything."""


class Power:
    """Is cut off when a driver is about to change the storage for the n-th time, counted from 0."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.changes = 0

    def open(self, url: str, options: Mapping[str, object]) -> ObjectStorage:
        return _Powered(open_storage(url, options), self)

    def change(self) -> None:
        if self.changes >= self.after:
            raise Killed
        self.changes += 1


class _Powered(WrappedStorage):
    def __init__(self, inner: ObjectStorage, power: Power) -> None:
        super().__init__(inner)
        self._power = power

    def put(self, key: str, data: Buffer) -> None:
        self._power.change()
        super().put(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        for key in list(keys):  # one at a time, so that it stops between two
            self._power.change()
            super().delete([key])


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Any:
    def cut(after: int) -> Power:
        found = Power(after)
        for module in (creating, restoring):
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
    for after in sample(range(whole.changes), quick=2):
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
    for after in sample(range(whole.changes - 1), quick=3):  # the last one removes the mark of a restore
        power(after)
        with pytest.raises(Killed):
            restored(lab, shards=3)
        assert not (lab.folder / "again/metadata").exists()
    power(NEVER)
    restored(lab, shards=3)
    assert sorted(path.name for path in (lab.folder / "again").iterdir() if path.is_file()) == ["metadata"]
    assert not list(lab.folder.glob("again-restoring-*"))
    assert run(lab, CASE, "again", "durable-again") == original
    assert not (lab.folder / "durable-again").glob("totals@*") or not list(
        (lab.folder / "durable-again").glob("totals@*")
    )
