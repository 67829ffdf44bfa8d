"""Whoever has lost a checkpoint location learns it between two long parts of the work.

Not when all is stored: what it writes into a location by then would be part of somebody else's query. The parts
themselves, which need Spark, are played: all that counts here is what is asked between them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import ConflictError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.copies import cloning, rescaling
from holdfast.spark_integration.savepoints import by_spark, new_query, restoring, seeding, tasks
from holdfast.spark_integration.savepoints.new_query import NewQuery
from tests.unit.snapshotter.savepoints.sample import a_savepoint

SPARK: Any = SimpleNamespace(conf=SimpleNamespace(getAll={}))


def committed(location: ObjectStorage, batch_id: int) -> None:
    location.put(f"offsets/{batch_id}", b'v1\n{"conf":{}}\n-')
    location.put(f"commits/{batch_id}", b'v1\n{"nextBatchWatermarkMs":0}')


CLONE, RESCALE, RESTORE = "clone", "rescale", "restore"


@pytest.mark.parametrize("what", [CLONE, RESCALE, RESTORE])
def test_before_the_next_part_of_a_new_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Another attempt takes its location for one that was left, while tasks or the stub run.

    A clone does not take it back, as well where the original has moved on meanwhile.
    """
    location = tmp_path / "location"
    begun: list[object] = []
    went_on: list[object] = []

    def taken(*arguments: object) -> None:
        begun.append(arguments)
        with open_storage(str(location)) as taking:
            new_query.forget(taking, new_query.begin(taking, "other"))
        with open_storage(str(tmp_path / "query")) as original:
            original.delete(["offsets/0", "commits/0"])
            committed(original, 1)

    def stub(_: object, __: object, new: NewQuery, operators: object) -> None:
        taken()
        new.require()

    def go_on(*arguments: object, **_: object) -> None:
        went_on.append(arguments)

    with open_storage(str(tmp_path / "savepoints")) as target:
        a_savepoint(target)
    with open_storage(str(tmp_path / "query")) as query:
        query.put("metadata", b'{"id":"5d1f"}')
        committed(query, 0)
    monkeypatch.setattr(tasks, "stored_steps", lambda *_: [])
    monkeypatch.setattr(cloning, "_copy_operators", taken)
    monkeypatch.setattr(cloning, "copy_location", go_on)
    monkeypatch.setattr(rescaling, "save", taken)
    monkeypatch.setattr(rescaling, "restore_into", go_on)
    monkeypatch.setattr(restoring, "plans_of", lambda *_: [])
    monkeypatch.setattr(by_spark, "state_by_stub", stub)
    monkeypatch.setattr(seeding, "seed", go_on)
    spark: Any = SimpleNamespace(conf=SimpleNamespace(getAll={"spark.holdfast.state.dir": str(tmp_path / "durable")}))
    work: dict[str, Callable[[], object]] = {
        CLONE: lambda: cloning.clone(spark, tmp_path / "query", location, to_state_dir=tmp_path / "green"),
        RESCALE: lambda: rescaling.rescale(spark, tmp_path / "query", location, shards=3),
        RESTORE: lambda: restoring.restore(spark, tmp_path / "savepoints", "one", location),
    }
    with pytest.raises(ConflictError, match="another restore writes this checkpoint location"):
        work[what]()
    assert (len(begun), went_on) == (1, [])
    assert [path.name for path in location.iterdir() if path.is_file()] == ["holdfast-restoring-other"]
