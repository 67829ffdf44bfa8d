"""A sink's name is checked in one way, whatever the sink, and its settings are found by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast import sinks
from holdfast.errors import InvalidArgumentError
from holdfast.sinks import TwoPhaseSink
from holdfast.spark_integration.sinks.exactly_once import warn_of_other_sinks

SINKS: list[Callable[[str], TwoPhaseSink]] = [
    lambda name: sinks.parquet(name, "/data/out"),
    lambda name: sinks.delta(name, "/data/out"),
    lambda name: sinks.postgres(name, "totals"),
    lambda name: sinks.kafka(name, "alerts"),
]


@pytest.mark.parametrize("make", SINKS)
@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "a.b", "ä", "a" * 101])
def test_a_name_that_no_key_can_hold_is_refused(make: Callable[[str], TwoPhaseSink], name: str) -> None:
    """At definition: it becomes a part of keys, settings and transactions' names."""
    with pytest.raises(InvalidArgumentError, match="a sink's name has letters"):
        make(name)


@pytest.mark.parametrize("make", SINKS)
def test_the_longest_name_is_taken(make: Callable[[str], TwoPhaseSink]) -> None:
    """The limit itself is allowed."""
    assert make("a" * 100).name == "a" * 100


def test_settings_of_a_misspelt_sink_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing would read them. A name that another sink of the program has, or may have elsewhere, is none."""
    sinks.exactly_once(sinks.parquet("orders-us", "/data/out"))

    def told(*names: str) -> list[str]:
        caplog.clear()
        warn_of_other_sinks({f"spark.holdfast.sink.{name}.secret": "not-to-be-seen" for name in names}, "orders-eu")
        assert "not-to-be-seen" not in caplog.text
        return [record.getMessage().split(".*")[0] for record in caplog.records]

    assert told() == told("orders-eu") == told("orders-eu", "orders-us") == told("orders-eu", "alerts") == []
    assert told("orders-eu", "order-eu", "alerts") == ["spark.holdfast.sink.order-eu"]
    assert told("orders-eu", "ORDERS-EU") == ["spark.holdfast.sink.ORDERS-EU"]
    assert told("postgres", "orders-us") == ["spark.holdfast.sink.postgres"]
