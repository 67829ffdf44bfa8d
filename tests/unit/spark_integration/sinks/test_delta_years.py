"""What a Delta table cannot show is refused by the task; what it can, arrives as it is."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from holdfast import clock
from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery

DAYS = [-719_163, -719_162, 2_932_896, 2_932_897, 2**31 - 1]
SHOWN = slice(1, 3)


class Rows:
    """A query whose rows have a number and a date."""

    def __init__(self, url: str, keys: list[str] | None, partition_by: list[str], kind: pa.DataType) -> None:
        self.schema = pa.schema([pa.field("id", pa.int64()), pa.field("at", kind)])
        self.sink = DeltaSink("out", url, keys, partition_by, create=True)
        self.query = SinkQuery("out", clock.new_uuid())
        self.sink.open(self.query, self.schema)

    def prepared(self, batch: int, at: pa.Array) -> Handle:
        """Write and prepare rows."""
        transaction = self.sink.begin(SinkAttempt(self.query, batch, 0, clock.new_id() + clock.new_id()), self.schema)
        transaction.write(pa.record_batch([list(range(len(at))), at], schema=self.schema))
        return transaction.prepare()


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

    rows = Rows(str(tmp_path / "table"), keys, partition_by, kind)
    for day in [*DAYS[: SHOWN.start], *DAYS[SHOWN.stop :]]:
        with pytest.raises(SchemaMismatchError, match="years 1 to 9999"):
            rows.prepared(0, of([day, 0]))
    for batch in range(2):
        rows.sink.commit(rows.query, batch, [rows.prepared(batch, of(DAYS[SHOWN]))])
    assert DeltaTable(rows.sink.url).to_pyarrow_table().num_rows == (2 if keys else 4)


def test_appended_dates_may_be_of_any_year(tmp_path: Path) -> None:
    rows = Rows(str(tmp_path / "table"), None, [], pa.date32())
    at = pa.array(DAYS, pa.int32()).cast(pa.date32())
    rows.sink.commit(rows.query, 0, [rows.prepared(0, at)])
    assert DeltaTable(rows.sink.url).to_pyarrow_table()["at"].cast(pa.int32()).to_pylist() == DAYS
