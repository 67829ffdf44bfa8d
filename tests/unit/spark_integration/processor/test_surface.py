"""What a processor may call is all there: each public method of Spark's classes, with Spark's parameters."""

from __future__ import annotations

import inspect

import pytest
from pyspark.sql.streaming import StatefulProcessorHandle
from pyspark.sql.streaming.stateful_processor import ListState, MapState, ValueState

from holdfast.spark_integration.processor.handle import ProcessorHandle
from holdfast.spark_integration.processor.state.states import ProcessorListState, ProcessorMapState, ProcessorValueState

CLASSES = [
    (StatefulProcessorHandle, ProcessorHandle),
    (ValueState, ProcessorValueState),
    (ListState, ProcessorListState),
    (MapState, ProcessorMapState),
]
METHODS = [
    pytest.param(ours, name, method, id=f"{of_spark.__name__}.{name}")
    for of_spark, ours in CLASSES
    for name, method in inspect.getmembers(of_spark, inspect.isfunction)
    if not name.startswith("_")
]


@pytest.mark.parametrize(("ours", "name", "of_spark"), METHODS)
def test_a7_a8_each_method_of_spark_is_ours(ours: type, name: str, of_spark: object) -> None:
    """A7, A8: one that a new version of Spark adds would else ask Spark's state server, which is not there."""
    assert name in vars(ours)
    assert list(inspect.signature(vars(ours)[name]).parameters) == list(inspect.signature(of_spark).parameters)  # type: ignore[arg-type]
