"""Names of a processor's variables: any text, and none that another variable's table gets in the way of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql.types import LongType

from tests.unit.spark_integration.processor.processor_shard import ProcessorShard, Scripted, columns

N = columns(n=LongType())


def test_variables_may_have_any_names_and_columns_those_of_keys(tmp_path: Path) -> None:
    """Spark takes blanks, dots and slashes; a grouping column may be called as a column of ours."""

    def declare(handle: Any) -> Any:
        return [
            handle.getListState("a /b.ü", columns(key=LongType())),
            handle.getMapState("x", columns(key=LongType()), N),
        ]

    shard = ProcessorShard(tmp_path / "shard", Scripted(declare))
    shard.each(["k"], lambda states, *_: (states[0].appendValue((1,)), states[1].updateValue((2,), (3,)))[:0])
    seen = shard.each(["k"], lambda states, *_: (list(states[0].get()), list(states[1].iterator())))
    assert seen == {"k": repr(([(1,)], [((2,), (3,))]))}


def test_what_is_deleted_leaves_a_variable_of_a_similar_name(tmp_path: Path) -> None:
    """The index of one with a time to live is called as the variable, and `.expiring`: so may be another one."""

    def keeps(handle: Any) -> Any:
        return handle.getValueState("x.expiring", N)

    def deletes(handle: Any) -> Any:
        handle.deleteIfExists("x")
        return keeps(handle)

    shard = ProcessorShard(tmp_path / "shard", Scripted(keeps))
    shard.each(["a"], lambda value, *_: value.update((1,)))
    shard.restart(Scripted(deletes))
    assert shard.each(["a"], lambda value, *_: value.get()) == {"a": "(1,)"}


def test_the_index_of_a_time_to_live_is_no_variable_to_delete(tmp_path: Path) -> None:
    """Without its index, values would not expire."""

    def keeps(handle: Any) -> Any:
        return handle.getValueState("x", N, 1000)

    def deletes(handle: Any) -> Any:
        handle.deleteIfExists("x.expiring")
        return keeps(handle)

    shard = ProcessorShard(tmp_path / "shard", Scripted(keeps), "ProcessingTime")
    shard.each(["a"], lambda value, *_: value.update((1,)), 1)
    shard.restart(Scripted(deletes))
    assert shard.each(["a"], lambda value, *_: value.get(), 2) == {"a": "(1,)"}
    shard.each([], lambda *_: None, 5000)
    assert shard.stored("v.x") == []
