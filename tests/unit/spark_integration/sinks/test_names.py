"""A sink's name is checked in one way, whatever the sink."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast import sinks
from holdfast.errors import InvalidArgumentError
from holdfast.sinks import TwoPhaseSink

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
