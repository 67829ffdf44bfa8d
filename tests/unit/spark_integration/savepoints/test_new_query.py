"""What a stopped attempt at a new query has left is deleted by the next one, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends.run import TableSchema
from holdfast.errors import ConflictError
from holdfast.settings import Settings
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.ownership.query_origin import QueryOrigin, declare_origin, take_directories
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.savepoints import seeding
from holdfast.spark_integration.savepoints.new_query import new_query

TABLE = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))
RECORD = OperatorRecord.of("totals", "original", "def-1", "run-1", 2, {"state": TABLE}, 100)
NO_SPARK: Any = None


def stopped(folder: Path, query_id: str) -> QueryOrigin:
    """Leave what a clone leaves that is killed once it has declared itself."""
    with open_storage(str(folder / query_id)) as location, open_storage(str(folder / "green")) as storage:
        seeding.begin(location, query_id)
        origin = QueryOrigin(query_id, "original", "original", 7, {"totals": "original"})
        declare_origin(storage, origin)
    return origin


def filled(storage: ObjectStorage) -> None:
    declare_operator(storage, RECORD)
    storage.put("totals/shard-0000/commits/1-aa", b"state")


def repeat(folder: Path, query_id: str) -> set[str]:
    """Begin again in the location of a stopped clone; return what the checkpoint directory holds then."""
    settings = Settings.parse({"spark.holdfast.checkpoint.dir": str(folder / "green")})
    with (
        new_query(NO_SPARK, settings, {}, folder / query_id),
        open_storage(str(folder / "green")) as storage,
    ):
        return {info.key for info in storage.list("")}


def test_a_killed_clone_that_is_repeated_leaves_what_another_one_filled(tmp_path: Path) -> None:
    """Both records name the original: only the clone that had taken the directory may clear it."""
    stopped(tmp_path, "a")
    other = QueryOrigin("b", "original", "original", 7, {"totals": "original"})
    with open_storage(str(tmp_path / "green")) as storage:
        declare_origin(storage, other)
        with pytest.raises(ConflictError, match=r"begun and stopped.*operators=totals query=a"):
            take_directories(storage, other)
        filled(storage)  # by b, had it begun before a was there
    assert repeat(tmp_path, "a") == {"_queries/b", "totals/operator", "totals/shard-0000/commits/1-aa"}


def test_a_killed_clone_that_is_repeated_clears_what_it_filled(tmp_path: Path) -> None:
    origin = stopped(tmp_path, "a")
    with open_storage(str(tmp_path / "green")) as storage:
        take_directories(storage, origin)
        filled(storage)
        storage.put("other/operator", b"of another query")
    assert repeat(tmp_path, "a") == {"other/operator"}
