"""What a new checkpoint location is filled with: the settings that its state was made with, and nothing by halves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.savepoints.manifest import SavedQuery, SavedSource
from holdfast.snapshotter.savepoints.savepoints import savepoint_folder
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints.seeding import pinned, seed

PINNED = {"spark.sql.shuffle.partitions": "2", "spark.sql.a": "1"}
BATCH = json.dumps({"batchWatermarkMs": 7, "batchTimestampMs": 9, "conf": PINNED})
QUERY = SavedQuery("query", 41, "v1", BATCH, 8, (SavedSource("0", '{"logOffset":3}', ()),))


def seeded(folder: Path, of_stub: Mapping[str, str], *, fresh: bool = False) -> Path:
    """Fill a location from a stub that pinned some settings, and return it."""
    stub, location = folder / "stub", folder / "location"
    for name, text in {
        "offsets/0": f"v1\n{json.dumps({'batchWatermarkMs': 0, 'conf': of_stub})}\n-",
        "commits/0": 'v1\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{"0":[["a"]]}}',
        "state/0/0/1.delta": "?",
    }.items():
        (stub / name).parent.mkdir(parents=True, exist_ok=True)
        (stub / name).write_text(text)
    with (
        open_storage(str(location)) as new,
        open_storage(str(stub)) as old,
        open_storage(str(folder / "savepoints")) as savepoints,
    ):
        seed(new, old, savepoint_folder(savepoints, "one"), QUERY, pinned(QUERY, None), fresh=fresh)
    return location


def lines(file: Path) -> list[Any]:
    return [json.loads(line) if line.startswith("{") else line for line in file.read_text().splitlines()]


def test_what_a_later_spark_pins_holds_of_the_state_that_it_has_made(tmp_path: Path) -> None:
    """A savepoint is the way from one Spark to the next."""
    of_stub = {**PINNED, "spark.sql.since.then": "true"}
    location = seeded(tmp_path, of_stub)
    assert lines(location / "offsets/0") == [
        "v1",
        {"batchWatermarkMs": 7, "batchTimestampMs": 9, "conf": of_stub},
        {"logOffset": 3},
    ]
    assert lines(location / "commits/0") == ["v1", {"nextBatchWatermarkMs": 8, "stateUniqueIds": {"0": [["a"]]}}]


@pytest.mark.parametrize("of_stub", [{"spark.sql.shuffle.partitions": "2"}, {**PINNED, "spark.sql.a": "2"}])
def test_what_is_not_pinned_as_it_was_is_named(tmp_path: Path, of_stub: dict[str, str]) -> None:
    """By an older Spark, say: nothing has been written then."""
    with pytest.raises(InvalidArgumentError, match=r"or a later one, settings=spark\.sql\.a$"):
        seeded(tmp_path, of_stub)
    assert not (tmp_path / "location").exists() or not list((tmp_path / "location").iterdir())


def test_sources_that_begin_anew_have_no_positions_and_no_watermark(tmp_path: Path) -> None:
    """What they read again must not be late."""
    location = seeded(tmp_path, PINNED, fresh=True)
    _, batch, offset = lines(location / "offsets/0")
    assert (batch["batchWatermarkMs"], offset) == (0, "-")
    assert lines(location / "commits/0")[1]["nextBatchWatermarkMs"] == 0
