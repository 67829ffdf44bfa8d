"""The map of shards: equal ones look equal, however many a cell stands for, and a hot one shows."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.health.health import OperatorSigns
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.testing.state_rows import COUNTS
from holdfast.ui.survey import OperatorSurvey, StoredObjects
from holdfast.ui.views.heat_map import CELLS_MAX, LEVELS, MEASURES, HeatMap, heat_map, measured


def mapped(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> HeatMap:
    """Return the map by size of an operator whose shards have these sizes."""
    shards = np.arange(len(values), dtype=np.int64)
    zeros = np.zeros(len(values), np.int64)
    objects = StoredObjects(zeros.astype(np.int8), shards, zeros, values, zeros, shards)
    record = OperatorRecord.of("totals", "query-1", "definition-1", "run-1", len(values), {"counts": COUNTS}, 100)
    signs = OperatorSigns("totals", 0, (), (), is_lost=False, awaits_start=False)
    operator = OperatorSurvey("totals", record, objects, values, 0, signs, 0)
    return heat_map(operator, measured(operator, MEASURES["size"]))


@pytest.mark.parametrize("shards", [1, 16, 240, 241, 500, 2_000, 10_000])
def test_equal_shards_look_equal(shards: int) -> None:
    """2,000 shards were a checkerboard: cells of 8 shards beside cells of 9, and their sums differ."""
    found = mapped(np.full(shards, 1_000, np.int64))
    assert {cell.level for cell in found.cells} == {LEVELS}
    assert len(found.cells) <= CELLS_MAX
    covered = [number for cell in found.cells for number in range(cell.first, cell.last + 1)]
    assert covered == list(range(shards))


def test_a_hot_shard_among_many_shows() -> None:
    """One of nine in a cell is as hot as it is; the cell says its greatest and its sum."""
    values = np.full(2_000, 1_000, np.int64)
    values[1_234] = 9_000
    found = mapped(values)
    (hot,) = [cell for cell in found.cells if cell.level == LEVELS]
    assert hot.first <= 1_234 <= hot.last
    assert hot.text == "9.0 kB at most, 17.0 kB in all"
    assert {cell.level for cell in found.cells if cell is not hot} == {1}


def test_the_legend_has_figures() -> None:
    """Each colour stands for values up to a figure; the last one is the greatest value."""
    found = mapped(np.array([0, 4_500, 9_000], np.int64))
    assert (found.legend[0], found.legend[3], found.legend[LEVELS]) == ("0 B", "3.0 kB", "9.0 kB")
    assert [cell.level for cell in found.cells] == [0, 5, 9]
