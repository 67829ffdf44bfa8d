"""Savepoints of every release are restored by each later one; see FORMAT.md."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest

from holdfast import savepoints
from tests.formats.savepoint_samples import CASES, keys
from tests.spark.conftest import Lab
from tests.spark.conftest import configured as placed
from tests.spark.parity.engines import configured
from tests.spark.savepoints import waiting
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SAMPLES = sorted(
    (folder, name)
    for folder in Path(__file__).parent.iterdir()
    if folder.name.startswith("savepoints-")
    for name in CASES
)


def ids(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def test_there_is_a_sample_of_each_api() -> None:
    assert {name for _, name in SAMPLES} == set(CASES)
    assert SAMPLES


@pytest.mark.parametrize(("folder", "name"), SAMPLES, ids=ids)
def test_an_old_savepoint_is_whole_and_opens_with_pyarrow(folder: Path, name: str) -> None:
    """State, timers in both orders, and rows that expire: one of each key."""
    assert savepoints.verify(folder, name) == []
    found = savepoints.read(folder, name)
    assert {listed.name for listed in savepoints.listed(folder) if listed.savepoint} == set(CASES)
    (operator,) = found.operators
    assert set(operator.rows.values()) == {len(waiting.KEYS)}
    assert {"timers", "timers_by_due"} < set(operator.rows)
    table = next(table for table in operator.rows if table.split(".")[-1] in ("counts", "state"))
    pieces = [ipc.open_stream(folder / name / piece.key).read_all() for piece in operator.of_table(table)]
    rows = pa.concat_tables(pieces).sort_by("key.key")
    assert rows["key.key"].to_pylist() == list(waiting.KEYS)
    assert rows["value.n"].to_pylist() == [1] * len(waiting.KEYS)


@pytest.mark.spark
@pytest.mark.smoke
@pytest.mark.parametrize(("folder", "name"), cases(SAMPLES), ids=ids)
def test_a_query_goes_on_from_an_old_savepoint(spark: SparkSession, tmp_path: Path, folder: Path, name: str) -> None:
    """Each key's timer, which was overdue, fires with the key's state."""
    copied = shutil.copytree(folder, tmp_path / "savepoints")
    case, lab = CASES[name], Lab(spark, tmp_path, tmp_path / "local")
    with placed(lab), configured(spark, case.settings):
        savepoints.restore(spark, copied, name, tmp_path / "query", shards=3)
        found = waiting.run_once(lab, case, "query", "durable", keys(spark))
    due = [f"{{'key': '{key}', 'n': 1, 'is_due': True}}" for key in waiting.KEYS]
    assert [row for row in found if "'z'" not in row] == due
    assert len(found) > len(due), "what came next"
