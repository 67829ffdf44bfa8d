"""Whoever has lost a savepoint's name learns it between two long parts of the work, not when all of it is stored.

The parts themselves, which need Spark, are played: all that counts here is what is asked between them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import ConflictError
from holdfast.snapshotter.savepoints.savepoints import delete_savepoint
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints.writing import from_spark as taking_over
from holdfast.spark_integration.savepoints.writing import write as writing
from tests.unit.snapshotter.savepoints.sample import a_savepoint

SPARK: Any = SimpleNamespace(conf=SimpleNamespace(getAll={}))


class Work:
    """Long parts of the making of the savepoint ``one``; during the first the name is lost."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)
        self.parts = 0

    def part(self, *_: object) -> None:
        self.parts += 1
        with open_storage(self.target) as target:
            delete_savepoint(target, "one")


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path / "savepoints")


def test_between_two_operators_of_spark(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_storage(str(tmp_path / "query")) as location:
        location.put("metadata", b'{"id":"5d1f"}')
        location.put("offsets/0", b'v1\n{"conf":{}}\n-')
        location.put("commits/0", b'v1\n{"nextBatchWatermarkMs":0}')
    monkeypatch.setattr(taking_over, "_steps", lambda *_: [SimpleNamespace(number=number) for number in range(3)])
    monkeypatch.setattr(taking_over, "_saved", work.part)
    names = {0: "a", 1: "b", 2: "c"}
    with pytest.raises(ConflictError, match="somebody else"):
        taking_over.from_spark(SPARK, tmp_path / "query", work.target, "one", names, shards=1)
    assert work.parts == 1


def test_between_the_copy_and_the_edited_tables(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_storage(work.target) as target:
        a_savepoint(target, "base")
    monkeypatch.setattr(writing, "edited_tables", lambda *_: [])
    monkeypatch.setattr(writing, "_copy_rest", work.part)
    monkeypatch.setattr(writing.TableSetWriter, "written", work.part)
    frame: Any = SimpleNamespace(sparkSession=SPARK)
    with pytest.raises(ConflictError, match="somebody else"):
        writing.edit(frame, work.target, "base", "one")
    assert work.parts == 1
