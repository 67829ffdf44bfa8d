"""Columns of state that are added, widened, left out, renamed and dropped at a restart of a real query."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, Row
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.state import GroupState

import holdfast
from holdfast import savepoints
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.schema import TableSchema
from holdfast.snapshotter.ownership.operator_record import read_operator
from holdfast.snapshotter.ownership.stored_tables import declare_tables, stored_tables
from holdfast.snapshotter.storage.opening import open_storage
from tests.spark.conftest import Lab, count
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.tiers import cases

_REFUSED = "this definition of .* cannot continue the state"
pytestmark = [pytest.mark.spark, pytest.mark.slow(20), pytest.mark.filterwarnings(f"ignore:{_REFUSED}")]

OUT = "key string, n long, seen string"
BACKENDS = ["memory", "filesystem", "rocksdb"]


def counted(count: str, **others: str) -> Callable[[holdfast.ShardBatch], pa.Table]:
    """Return a function that counts in one column, writes texts to others, and gives out what it found in these."""

    def function(batch: holdfast.ShardBatch) -> pa.Table:
        old = batch.state.get()
        n = pc.add(pc.coalesce(old[count], 0), batch.groups.count())
        seen = pa.array([json.dumps(row) for row in old.drop_columns([count]).to_pylist()])
        texts = {name: pa.array([text] * len(old), pa.string()) for name, text in others.items()}
        batch.state.put(**{count: n}, **texts)
        return batch.keys.append_column("n", n).append_column("seen", seen)

    return function


def start(
    lab: Lab, function: Any, state: Any, changes: Mapping[str, Any] | None = None, query: str = "query"
) -> list[list[dict[str, Any]]]:
    lab.feed([("a", 1)])
    grouped = holdfast.stream(lab.source()).groupBy("key")
    return lab.run(
        grouped.applyInArrowWithState(function, OUT, state, "update", name="totals", stateChanges=changes), query
    )


def the_row(batches: list[list[dict[str, Any]]]) -> tuple[int, dict[str, Any]]:
    ((row,),) = batches
    return row["n"], json.loads(row["seen"])


@pytest.mark.parametrize("backend", cases(BACKENDS))
def test_columns_are_renamed_and_dropped_by_consent(lab: Lab, backend: str) -> None:
    """Values stay under the new name; the consent may stay, too; a dropped name that comes back begins empty."""
    lab.configure({"backend": backend, "snapshot.maxCommits": "2"})
    lab.feed([("quiet", 1)])
    start(lab, counted("n", m="begun", kept="kept"), "n int, m string, kept string")
    changes = {"drop": ["m"], "rename": {"n": "total"}}
    now, renamed = "kept string, total long", counted("total", kept="kept")
    assert the_row(start(lab, renamed, now, changes)) == (2, {"kept": "kept"})
    assert lab.state() == {"a": ("kept", 2), "quiet": ("kept", 1)}
    lab.lose_local_state()
    assert the_row(start(lab, renamed, now, changes)) == (3, {"kept": "kept"})

    again = counted("total", kept="kept", m="again")
    assert the_row(start(lab, again, f"{now}, m string"))[1] == {"kept": "kept", "m": None}
    assert lab.state() == {"a": ("kept", 4, "again"), "quiet": ("kept", 1, None)}, "not what was dropped"

    one, two = ({"total": n, "kept": "kept", "m": m} for n, m in ((4, "again"), (1, None)))
    savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    loaded = savepoints.load(lab.spark, lab.folder / "savepoints", "one").drop("shard").toArrow().to_pylist()
    assert sorted(loaded, key=lambda row: row["key"]) == [{"key": "a", **one}, {"key": "quiet", **two}]
    facts, tables = savepoints.diff(lab.folder / "savepoints", "one", "one")
    assert (facts, [found.differs for found in tables]) == ([], [False])
    lab.configure({"backend": cases([name for name in BACKENDS if name != backend])[0]})
    lab.configure({"state.dir": str(lab.folder / "elsewhere")})
    savepoints.restore(lab.spark, lab.folder / "savepoints", "one", lab.folder / "restored")
    found = start(lab, again, f"{now}, m string", {"rename": {"n": "total"}}, query="restored")
    assert the_row(found) == (5, {"kept": "kept", "m": "again"})
    assert lab.state(query="restored") == {"a": ("kept", 5, "again"), "quiet": ("kept", 1, None)}


@pytest.mark.all
def test_what_asks_for_no_consent_and_what_is_refused(lab: Lab) -> None:
    """Columns come, go, move and widen by name; a refusal names columns, types and remedy, and leaves no trace."""
    start(lab, counted("n", m="one"), "n int, m string")
    assert the_row(start(lab, counted("n"), "n long")) == (2, {}), "m is hidden, and gone from the row written"
    assert the_row(start(lab, counted("n", x="two", m="two"), "x string, m string, n long"))[1] == {
        "m": None,
        "x": None,
    }
    before = sorted(lab.folder.glob("durable/totals/schemas/*"))
    for state, changes, words in (
        ("x string, m string, n int", None, "n: int64 → int32: stored values cannot be converted"),
        ("x string, m string, n double", None, "n: int64 → double: stored values cannot be converted"),
        ("x string, note string, n long", None, "to rename, pass stateChanges={'rename': {'m': 'note'}}"),
        ("x string, d date, n long", None, "to delete the values, pass stateChanges={'drop': ['m']}; to keep them"),
        ({"other": "n long"}, None, "new=['other'] missing=['state']"),
    ):
        with pytest.warns(match=_REFUSED), pytest.raises(StreamingQueryException, match=re.escape(words)):
            start(lab, counted("n", x="", m=""), state, changes)
    assert sorted(lab.folder.glob("durable/totals/schemas/*")) == before
    grouped = holdfast.stream(lab.source()).groupBy("key")
    found = lab.run(
        grouped.applyInArrowWithState(
            counted("n", x="three", m="three"), OUT, "x string, m string, n long", "update", name="totals"
        )
    )
    assert [batch[0]["n"] for batch in found] == [4, 5, 6, 7, 8]


def narrowed(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Say in words what was a number, and the number in fewer bytes."""
    words = pc.binary_join_element_wise(
        rows["n"].cast(pa.large_string()), pa.scalar("rows", pa.large_string()), pa.scalar(" ", pa.large_string())
    )
    return pa.record_batch({"key": rows["key"], "words": words, "n": rows["n"].cast(pa.int32())})


@pytest.mark.all
def test_what_no_restart_may_do_is_done_to_a_savepoint(lab: Lab) -> None:
    """By a function, in tasks; one that fails leaves a location in which the restore is done again."""
    lab.feed([("quiet", 1)])
    start(lab, counted("n", m="old"), "n long, m string")
    savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    lab.configure({"state.dir": str(lab.folder / "elsewhere"), "backend": cases(BACKENDS)[0]})

    def restore(function: Any) -> None:
        migrate = {"totals": function}
        savepoints.restore(lab.spark, lab.folder / "savepoints", "one", lab.folder / "restored", migrate=migrate)

    def fails(rows: pa.RecordBatch) -> pa.RecordBatch:
        if rows.num_rows:
            raise WrongError
        return narrowed(rows)

    with pytest.raises(holdfast.InvalidArgumentError, match="it failed: KeyError"):
        restore(lambda rows: rows["other"])
    assert not (lab.folder / "restored").exists(), "asked before anything was written"
    with pytest.raises(holdfast.InvalidArgumentError, match="it failed: WrongError"):
        restore(fails)
    assert not (lab.folder / "restored/metadata").exists(), "nobody starts it"
    restore(narrowed)
    assert lab.state(query="restored") == {"a": ("1 rows", 1), "quiet": ("1 rows", 1)}
    found = start(lab, counted("n", words="now"), "n int, words string", query="restored")
    assert the_row(found) == (2, {"words": "1 rows"})
    assert lab.state(query="restored") == {"a": (2, "now"), "quiet": (1, "1 rows")}


class WrongError(Exception):
    """Of a user's function."""


def by_key(count: str, *, fails: bool = False) -> Callable[..., Iterator[pd.DataFrame]]:
    def function(key: tuple[str], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n, m = state.get if state.exists else (0, None)
        state.update((n + sum(map(len, frames)), "new"))
        if fails:
            raise WrongError
        yield pd.DataFrame({"key": [key[0]], "n": [n + 1], "seen": [m]})

    function.__name__ = count
    return function


@pytest.mark.all
def test_a_start_that_died_between_its_schemas_and_its_first_commit(lab: Lab) -> None:
    """Nothing of the state has changed, though the rename stands: the next start of the new code goes on."""

    def run(count: str, changes: Any = None, *, fails: bool = False) -> list[list[dict[str, Any]]]:
        source = holdfast.stream(lab.source()).groupBy("key")
        state = f"{count} long, m string"
        frame = source.applyInPandasWithState(
            by_key(count, fails=fails), OUT, state, "update", "NoTimeout", name="totals", stateChanges=changes
        )
        return lab.run(frame)

    lab.feed([("a", 1)])
    run("n")
    changes = {"rename": {"n": "total"}, "drop": ["never"]}
    lab.feed([("a", 1)])
    with pytest.raises(StreamingQueryException, match="WrongError"):
        run("total", changes, fails=True)
    assert not list(lab.folder.glob("durable/totals/schemas/*")), "declared with the first commit"
    with open_storage(str(lab.folder / "durable")) as storage:
        record = read_operator(storage, "totals")
        stored = stored_tables(storage, record).with_changes({"state": ColumnChanges(rename={"n": "total"})})
        columns = pa.schema([("total", pa.int64()), ("m", pa.string())])
        declared = {"state": TableSchema.of("state", stored.held["state"].key, columns)}
        declare_tables(storage, record, stored.with_declared(declared))
    with pytest.raises(StreamingQueryException, match=r"stateChanges=\{'rename': \{'total': 'n'\}\}"):
        run("n")
    assert run("total", changes) == [[{"key": "a", "n": 2, "seen": "new"}]]
    lab.feed([("a", 1)])
    assert run("n", {"rename": {"total": "n"}}) == [[{"key": "a", "n": 3, "seen": "new"}]], "back again"
    assert lab.state() == {"a": (3, "new")}


class Counting(StatefulProcessor):
    """Counts in a value, and in the entries of a map."""

    def __init__(self, column: str) -> None:
        self._column = column

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", f"{self._column} long")
        self._seen = handle.getMapState("seen", "id string", f"{self._column} long, text string")

    def handleInputRows(self, key: tuple[str], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (n,) = self._total.get() if self._total.exists() else (0,)
        n += len(list(rows))
        self._total.update((n,))
        (m, _) = self._seen.getValue(("x",)) if self._seen.containsKey(("x",)) else (0, "")
        self._seen.updateValue(("x",), (m + 10, "text"))
        yield Row(key=key[0], n=n, seen=str(m))


@pytest.mark.all
@pytest.mark.parametrize("backend", cases(BACKENDS))
def test_a_processors_columns_are_renamed_by_variable(lab: Lab, backend: str) -> None:
    """With the words of the refusal of what looks like a rename."""
    lab.configure({"backend": backend})

    def run(column: str, changes: Any = None) -> list[list[dict[str, Any]]]:
        grouped = holdfast.stream(lab.source()).groupBy("key")
        return lab.run(
            grouped.transformWithState(Counting(column), OUT, "update", "None", name="totals", stateChanges=changes)
        )

    with configured(lab.spark, dict(NEEDED)):
        lab.feed([("a", 1)])
        run("n")
        lab.feed([("a", 1)])
        with pytest.raises(StreamingQueryException, match=r"stateChanges=\{'total': \{'rename': \{'n': 'm'\}\}\}"):
            run("m")
        changes = {"total": {"rename": {"n": "m"}}, "seen": {"rename": {"n": "m"}}}
        assert run("m", changes) == [[{"key": "a", "n": 2, "seen": "10"}]]
        lab.feed([("a", 1)])
        assert run("m", changes) == [[{"key": "a", "n": 3, "seen": "20"}]]
        assert holdfast.read_state(lab.spark, lab.folder / "query", "totals", table="total").to_pylist() == [
            {"key": "a", "m": 3}
        ]


@pytest.mark.all
@pytest.mark.parametrize("backend", cases(BACKENDS))
def test_what_may_be_null_inside_of_keys_may_change(lab: Lab, backend: str) -> None:
    """Any change of a query may change it, such as another source; the keys are the same."""
    lab.configure({"backend": backend})

    def start(part: Column) -> dict[Any, int]:
        lab.feed([("a", 1), (None, 1)])
        key = F.struct(part.alias("part"), F.array(part).alias("array"))
        keyed = holdfast.stream(lab.source()).groupBy(key.alias("k"))
        out = "k struct<part:string,array:array<string>>, n long"
        [batch] = lab.run(keyed.applyInArrowWithState(count, out, "n long", "update", name="counts"))
        assert all(row["k"]["array"] == [row["k"]["part"]] for row in batch)
        return {row["k"]["part"]: row["n"] for row in batch}

    nullable, never_null = F.col("key"), F.coalesce("key", F.lit("none"))
    assert start(never_null) == {"a": 1, "none": 1}
    assert start(nullable) == {"a": 2, None: 1}
    lab.lose_local_state()
    assert start(never_null) == {"a": 3, "none": 2}
    state = holdfast.read_state(lab.spark, lab.folder / "query", "counts").to_pylist()
    assert {row["k"]["part"]: row["n"] for row in state} == {"a": 3, "none": 2, None: 1}
