"""What a Delta table cannot show is refused by the task; what it can, arrives as it is."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from tests.unit.spark_integration.sinks.delta_writer import opened

DAYS = [-719_163, -719_162, 2_932_896, 2_932_897, 2**31 - 1]
SHOWN = slice(1, 3)


def schema_of(kind: pa.DataType) -> pa.Schema:
    """Return the columns of rows with a number and a date."""
    return pa.schema([("id", pa.int64()), ("at", kind)])


@pytest.mark.parametrize(
    ("keys", "partition_by", "kind"),
    [
        (["id"], [], pa.date32()),
        (["id", "at"], [], pa.date32()),
        (["id", "at"], ["at"], pa.date32()),
        (None, ["at"], pa.date32()),
        (["id", "at"], [], pa.timestamp("us", "UTC")),
        (["id"], [], pa.struct([("in", pa.list_(pa.date32()))])),
        (["id"], [], pa.map_(pa.string(), pa.date32())),
    ],
)
def test_a_date_that_no_table_can_show_is_met_before_the_decision(
    tmp_path: Path, keys: list[str] | None, partition_by: list[str], kind: pa.DataType
) -> None:
    """Decided, it would stop the query for good; in the log, as a partition's, the table could not be opened again."""

    def of(days: list[int]) -> pa.Array:
        if pa.types.is_timestamp(kind):  # beyond what a timestamp holds: the last one
            return pa.array([min(day * 86_400_000_000, 2**63 - 1) for day in days], pa.int64()).cast(kind)
        dates = pa.array(days, pa.int32()).cast(pa.date32())
        each = range(len(days) + 1)
        if pa.types.is_struct(kind):
            return pa.StructArray.from_arrays([pa.ListArray.from_arrays(each, dates)], ["in"]).cast(kind)
        return dates if kind == pa.date32() else pa.MapArray.from_arrays(each, ["day"] * len(days), dates)

    writer = opened(DeltaSink("out", str(tmp_path / "table"), keys, partition_by, create=True), schema_of(kind))
    for day in [*DAYS[: SHOWN.start], *DAYS[SHOWN.stop :]]:
        with pytest.raises(SchemaMismatchError, match="years 1 to 9999"):
            writer.prepared(0, [[0, 1], of([day, 0])])
    for batch in range(2):
        writer.write(batch, [[0, 1], of(DAYS[SHOWN])])
    assert DeltaTable(writer.sink.url).to_pyarrow_table().num_rows == (2 if keys else 4)


def test_appended_dates_may_be_of_any_year(tmp_path: Path) -> None:
    writer = opened(DeltaSink("out", str(tmp_path / "table"), create=True), schema_of(pa.date32()))
    writer.write(0, [list(range(len(DAYS))), pa.array(DAYS, pa.int32()).cast(pa.date32())])
    assert DeltaTable(writer.sink.url).to_pyarrow_table()["at"].cast(pa.int32()).to_pylist() == DAYS
