"""What a processor may change at a restart: variables, their columns, TTL; and what is refused, with Spark's classes.

Spark runs with Avro as encoding, without which it lets no column change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.errors import UnavailableError
from holdfast.spark_integration.client.connection import client_of
from holdfast.spark_integration.executor.local_dirs import LOCK_NAME
from tests.spark.answers import text_of
from tests.spark.parity.engines import Open, Trial
from tests.spark.processors.engines import (
    BY_ROW,
    ENGINES,
    OPERATOR,
    SPARK_ROW,
    ProcessorEngine,
    by_engine,
    engines,
    later,
    ours,
)
from tests.spark.processors.showing import SHOWN, as_output
from tests.tiers import cases

pytestmark = [
    pytest.mark.spark,
    pytest.mark.live,
    pytest.mark.slow(10),
    pytest.mark.filterwarnings("ignore:this definition of .* cannot continue the state"),
]

_AVRO = {"spark.sql.streaming.stateStore.encodingFormat": "avro"}
Declared = Mapping[str, tuple[Any, ...]]
"""By variable its kind, schemas and, for what has one, TTL."""


class Restarting(StatefulProcessor):
    """Declares what it is told to, and carries out what rows say: expressions over variables, shown with results."""

    def __init__(self, api: str, declared: Declared, deleted: tuple[str, ...] = ()) -> None:
        self._api, self._declared, self._deleted = api, declared, deleted

    def init(self, handle: StatefulProcessorHandle) -> None:
        for name in self._deleted:
            handle.deleteIfExists(name)
        makers = {"value": handle.getValueState, "list": handle.getListState, "map": handle.getMapState}
        self._states: dict[str, Any] = {
            name: makers[kind](name, *arguments) for name, (kind, *arguments) in self._declared.items()
        }

    def handleInputRows(self, key: tuple[Any, ...], rows: Any, timerValues: Any) -> Iterator[Any]:
        found = [row.do for row in rows] if self._api == "row" else [do for frame in rows for do in frame["do"]]
        for do in ";".join(found).split(";"):
            yield as_output(self._api, what=do, shown=repr(eval(do, {"Row": Row, **self._states})))


def settings_of(engine: ProcessorEngine) -> dict[str, str]:
    """Return the settings of a query that ends, also with processing time; ours is run by an operator without Avro."""
    settings = {"spark.sql.shuffle.partitions": "2", "spark.sql.streaming.noDataMicroBatches.enabled": "false"}
    return settings | (_AVRO if engine.is_spark else {})


def restart(
    on: Trial,
    engine: ProcessorEngine,
    declared: Declared,
    do: str,
    *,
    modes: tuple[str, str] = ("append", "none"),
    **called: Any,
) -> dict[str, str]:
    """Start the query once more, with one row; return what its key has seen."""
    on.run(define(on, engine, declared, do, modes=modes, **called), modes[0])
    return dict(on.batches[-1])


def define(
    on: Trial,
    engine: ProcessorEngine,
    declared: Declared,
    do: str,
    *,
    deleted: tuple[str, ...] = (),
    keys: tuple[str, ...] = ("key",),
    modes: tuple[str, str] = ("append", "none"),
) -> Any:
    at = pa.array([10**12], pa.timestamp("us", "UTC"))
    on.feed_table(pa.table({"key": ["a"], "other": [1], "do": [do], "at": at}))
    delay = "1 hour" if modes[1] == "eventTime" else None
    source = on.source("key string, other long, do string, at timestamp", delay=delay)
    return engine.transform(source, list(keys), Restarting(engine.api, declared, deleted), SHOWN, *modes)


def variables(**declared: tuple[Any, ...]) -> Declared:
    return declared


def servers_below(local: Path) -> set[int]:
    """Return the processes of the state servers that answer; waits for the first one, which no micro-batch does."""
    found: set[int] = set()
    deadline = time.monotonic() + 60
    while not found:
        assert time.monotonic() < deadline, "no state server answers"
        for lock in local.glob(f"**/{LOCK_NAME}"):
            with suppress(UnavailableError):
                found.add(client_of(lock.parent).call("statistics")["pid"])
        time.sleep(0.1)
    return found


FIRST = variables(
    kept=("value", "n int"),
    gone=("map", "k string", "n int"),
    wide=("map", "k string", "n int, f float"),
    grown=("list", "n int"),
    shrunk=("value", "n int, note string"),
    moved=("value", "n int, note string"),
)
SECOND = variables(
    wide=("map", "k string", "n long, f double"),
    kept=("value", "n int"),
    grown=("list", "n int, note string"),
    shrunk=("value", "n int"),
    moved=("value", "note string, n int"),
    new=("list", "s string"),
)
THIRD = variables(**{**SECOND, "gone": FIRST["gone"], "shrunk": FIRST["shrunk"]})


@by_engine(engines(3))
def test_e6_e3_variables_and_columns_come_and_go(engine: ProcessorEngine, run_on: Open, local_state: Path) -> None:
    """E6, E3, E2: by name. What is left out stays, and is found again; so are columns of rows not written since.

    The state server lives on from run to run, and opens the shards for each with the tables that it declares.
    """
    with run_on(engine, **settings_of(engine)) as on:
        restart(
            on,
            engine,
            FIRST,
            "kept.update((1,));gone.updateValue(('x',), (2,));wide.updateValue(('x',), (3, 0.5));"
            "grown.appendValue((4,));shrunk.update((5, 'five'));moved.update((6, 'six'))",
        )
        servers = set() if engine.is_spark else servers_below(local_state)
        do = "kept.get();list(wide.values());list(grown.get());shrunk.get();moved.get();new.exists()"
        assert list(restart(on, engine, SECOND, do).values()) == [
            "(1,)",
            "[(3, 0.5)]",
            "[(4, None)]",
            "(5,)",
            "('six', 6)",
            "False",
        ]
        restart(on, engine, SECOND, "wide.updateValue(('y',), (2**40, 1e300));grown.appendValue((7, 'n'))")
        do = "gone.getValue(('x',));sorted(wide.values());list(grown.get());shrunk.get()"
        assert list(restart(on, engine, THIRD, do).values()) == [
            "Row(n=2)",
            f"[(3, 0.5), ({2**40}, 1e+300)]",
            "[(4, None), (7, 'n')]",
            "(5, 'five')",
        ]
        assert engine.is_spark or servers <= servers_below(local_state), "other servers than before"


# By variable: its columns at the first start and at the second, what is written first, and what is found then.
EVOLUTION = {
    "added": ("n int, s string", "n int, s string, x double", "(1, 'a')", "(1, 'a', None)"),
    "dropped": ("n int, s string", "n int", "(1, 'a')", "(1,)"),
    "moved": ("n int, s string", "s string, n int", "(1, 'a')", "('a', 1)"),
    "longer": ("n int", "n long", "(-1,)", "(-1,)"),
    "doubled": ("n int", "n double", "(2147483647,)", "(2147483647.0,)"),
    "wider": ("f float", "f double", "(0.5,)", "(0.5,)"),
    "nested": ("p struct<x: int>", "p struct<x: int, y: string>", "(Row(x=1),)", "(Row(x=1, y=None),)"),
    "renamed": ("n int, s string", "n int, s string", "(1, 'a')", "(1, 'a')"),
}


@by_engine(later(ENGINES))
def test_e3_each_change_of_columns_side_by_side(engine: ProcessorEngine, run_on: Open) -> None:
    """E3: the same is found. But Spark takes a column that is renamed for a new one, and loses what it held: Q."""
    before, after = ({name: ("value", of[start]) for name, of in EVOLUTION.items()} for start in (0, 1))
    renamed = {**after, "renamed": ("value", "m int, s string")}
    with run_on(engine, **settings_of(engine)) as on:
        restart(on, engine, before, ";".join(f"{name}.update({of[2]})" for name, of in EVOLUTION.items()))
        found = restart(on, engine, after, ";".join(f"{name}.get()" for name in EVOLUTION))
        assert found == {f"{name}.get()": of[3] for name, of in EVOLUTION.items()}
        if engine.is_spark:
            assert restart(on, engine, renamed, "renamed.get()") == {"renamed.get()": "(None, 'a')"}
        else:
            text = text_of(on.failure(define(on, engine, renamed, "1"), "append"))
            assert "to rename, pass stateChanges={'renamed': {'rename': {'n': 'm'}}}" in text


_VALUE = "[STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION] Schema evolution is not possible"
_KEY = "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE"
_KIND = "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE"
_CONFIG = "STATE_STORE_INVALID_CONFIG_AFTER_RESTART"
_BEGUN = variables(v=("value", "n long, note string"), m=("map", "k long", "n int"))

_BY_EVENT_TIME = ("append", "eventTime")

# By item: what the second start declares, how it is called, and Spark's class; what Spark does not refuse is ours.
REFUSED: dict[str, tuple[Declared, dict[str, Any], str]] = {
    "E4 the grouping key": (_BEGUN, {"keys": ("other",)}, _KEY),
    "E4 one more grouping key": (_BEGUN, {"keys": ("key", "other")}, _KEY),
    "E4 the key of a map": ({**_BEGUN, "m": ("map", "k string", "n int")}, {}, _KEY),
    "E5 the time mode": (_BEGUN, {"modes": _BY_EVENT_TIME}, _CONFIG),
    "E5 the output mode": (_BEGUN, {"modes": ("update", "none")}, _CONFIG),
    "E5 the kind of a variable": ({**_BEGUN, "v": ("list", "n long, note string")}, {}, _KIND),
    "E3 another type": ({**_BEGUN, "v": ("value", "n string, note string")}, {}, _VALUE),
    "E3 a narrower type": ({**_BEGUN, "v": ("value", "n int, note string")}, {}, _VALUE),
}
BY_US_ONLY: dict[str, tuple[Declared, dict[str, Any], str]] = {
    "Q a renamed column": (
        {**_BEGUN, "v": ("value", "m long, note string")},
        {},
        "to rename, pass stateChanges={'v': {'rename': {'n': 'm'}}}",
    ),
    "E7 a column becomes NOT NULL": (
        {**_BEGUN, "v": ("value", "n long not null, note string")},
        {},
        "n: it is NOT NULL",
    ),
    "E7 a key becomes NOT NULL": (
        {**_BEGUN, "m": ("map", "k long not null", "n int")},
        {},
        "entry.k: it is NOT NULL",
    ),
    "E7 a column that is NOT NULL": (
        {**_BEGUN, "v": ("value", "n long, note string, b boolean not null")},
        {},
        "b: it is NOT NULL",
    ),
}


def began_with(called: dict[str, Any]) -> tuple[str, str]:
    """Return the modes of the first start."""
    return ("append", "processingTime" if called.get("modes") == _BY_EVENT_TIME else "none")


def files_of(on: Trial) -> set[str]:
    """Return the names of the durable files; those of claims change by themselves."""
    durable = on.folder / "durable"
    return {str(path) for path in durable.rglob("*") if path.is_file() and path.parent.name != "claims"}


@pytest.mark.all
@pytest.mark.parametrize("name", list(REFUSED))
def test_e4_e5_what_spark_refuses(name: str, run_on: Open) -> None:
    """E3 to E5: so that we learn when it changes."""
    declared, called, condition = REFUSED[name]
    with run_on(SPARK_ROW, **settings_of(SPARK_ROW)) as on:
        do = "v.update((1, 'one'));m.updateValue((1,), (2,))"
        restart(on, SPARK_ROW, _BEGUN, do, modes=began_with(called))
        frame = define(on, SPARK_ROW, declared, "1", **called)
        assert condition in text_of(on.failure(frame, called.get("modes", ("append",))[0]))


_MODES = [name for name, (_, called, _) in REFUSED.items() if "modes" in called]
_NOT_MODES = [name for name in (*REFUSED, *BY_US_ONLY) if name not in _MODES]


@by_engine(ours(5, BY_ROW))
def test_what_a_restart_must_not_change(engine: ProcessorEngine, run_on: Open) -> None:
    """E3, E4, E5, E7: with Spark's class, both schemas and the remedy; nothing is written, the old one goes on."""
    with run_on(engine, **settings_of(engine)) as on:
        restart(on, engine, _BEGUN, "v.update((1, 'one'));m.updateValue((1,), (2,))")
        before = files_of(on)
        for name in cases(_NOT_MODES, quick=3):
            declared, called, words = (REFUSED | BY_US_ONLY)[name]
            text = text_of(on.failure(define(on, engine, declared, "1", **called), "append"))
            assert words in text, name
            assert "stored=" in text
            assert "declared=" in text
            assert "start over with a new checkpointLocation" in text
        assert files_of(on) == before, "nothing was written"
        found = restart(on, engine, _BEGUN, "v.get();m.getValue((1,))")
        assert list(found.values()) == ["(1, 'one')", "Row(n=2)"]


@by_engine(later(BY_ROW))
@pytest.mark.parametrize("name", _MODES)
def test_e5_modes_stay(name: str, engine: ProcessorEngine, run_on: Open) -> None:
    """E5: Spark's operator underneath says so."""
    declared, called, condition = REFUSED[name]
    with run_on(engine, **settings_of(engine)) as on:
        restart(on, engine, _BEGUN, "v.update((1, 'one'))", modes=began_with(called))
        assert condition in text_of(on.failure(define(on, engine, declared, "1", **called), called["modes"][0]))
        assert restart(on, engine, _BEGUN, "v.get()", modes=began_with(called)) == {"v.get()": "(1, 'one')"}


@by_engine(later(BY_ROW))
def test_e6_what_was_left_out_comes_back_as_it_was_or_not_at_all(engine: ProcessorEngine, run_on: Open) -> None:
    """E6, E5: its state waits, so its kind and its keys are those of before."""
    less = {"v": _BEGUN["v"]}
    with run_on(engine, **settings_of(engine)) as on:
        restart(on, engine, _BEGUN, "v.update((1, 'one'));m.updateValue((1,), (2,))")
        restart(on, engine, less, "v.get()")
        for declared, condition in (
            (("list", "n int"), _KIND),
            (("map", "k string", "n int"), _KEY),
            (("map", "k long", "n string"), _VALUE),
        ):
            assert condition in text_of(on.failure(define(on, engine, {**less, "m": declared}, "1"), "append"))
        assert restart(on, engine, _BEGUN, "m.getValue((1,))") == {"m.getValue((1,))": "Row(n=2)"}


@by_engine(later(ENGINES))
def test_e11_deleted_variables(engine: ProcessorEngine, run_on: Open) -> None:
    """E11, D7: `deleteIfExists` drops what a variable holds, also one that is left out."""
    with run_on(engine, **settings_of(engine)) as on:
        restart(on, engine, _BEGUN, "v.update((1, 'one'));m.updateValue((1,), (2,))")
        restart(on, engine, {"v": _BEGUN["v"]}, "v.get()", deleted=("m",))
        found = restart(on, engine, _BEGUN, "v.get();list(m.keys())")
        assert list(found.values()) == ["(1, 'one')", "[]"]


_HOUR = 3_600_000


@pytest.mark.all
@by_engine(ours(9))
def test_e8_e9_ttl_and_the_api_come_and_go(engine: ProcessorEngine, run_on: Open) -> None:
    """E8, E9, TL7: where Spark refuses it. What was written without a time to live lives until it is written again."""
    without = variables(v=("value", "n long"), m=("map", "k long", "n int"))
    within = variables(v=("value", "n long", 1), m=("map", "k long", "n int", _HOUR))
    modes = ("append", "processingTime")
    with run_on(engine, **settings_of(engine)) as on:
        restart(on, engine, without, "v.update((1,));m.updateValue((1,), (2,))", modes=modes)
        by_the_other_api = replace(engine, api="row" if engine.api == "pandas" else "pandas")
        do = "v.get();m.getValue((1,));m.updateValue((2,), (3,))"
        found = restart(on, by_the_other_api, within, do, modes=modes)
        assert list(found.values())[:2] == ["(1,)", "Row(n=2)"]
        restart(on, engine, within, "v.update((5,))", modes=modes)
        found = restart(on, engine, within, "v.get();sorted(m.values())", modes=modes)
        assert list(found.values()) == ["None", "[(2,), (3,)]"], "v had a millisecond"
        restart(on, engine, within, "v.update((6,))", modes=modes)
        restart(on, engine, without, "v.update((7,))", modes=modes)
        found = restart(on, engine, within, "v.get();sorted(m.values())", modes=modes)
        assert list(found.values()) == ["(7,)", "[(2,), (3,)]"]


@pytest.mark.all
def test_read_state_shows_what_was_declared_last(run_on: Open) -> None:
    """And the tables of variables that are left out; rows of any age have the columns of now."""
    [engine] = BY_ROW[:1]
    with run_on(engine, **settings_of(engine)) as on:
        restart(on, engine, FIRST, "shrunk.update((5, 'five'));grown.appendValue((4,));gone.updateValue(('x',), (2,))")
        restart(on, engine, SECOND, "new.appendValue(('s',))")

        def read(table: str) -> list[dict[str, Any]]:
            rows = holdfast.read_state(on.session, on.folder / "query", OPERATOR, table=table).to_pylist()
            return [{name: value for name, value in row.items() if name not in ("key", "seq")} for row in rows]

        assert read("v.shrunk") == [{"n": 5}]
        assert read("l.grown") == [{"n": 4, "note": None}]
        assert read("m.gone") == [{"entry.k": "x", "n": 2}]
        assert read("l.new") == [{"s": "s"}]
