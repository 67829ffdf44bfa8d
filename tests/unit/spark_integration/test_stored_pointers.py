"""Where Spark can read the state of a query, and what it says of an operator there."""

from __future__ import annotations

import pytest

from holdfast.errors import CorruptionError, InvalidArgumentError
from holdfast.spark_integration.stored_pointers import properties_of, require_readable


@pytest.mark.parametrize("location", ["/data/a-b_c.d~e", "s3a://bucket/a=b/c+d@e", "hdfs://host:9000/a", "/d/ü/日本"])
def test_locations_that_are_as_in_a_url(location: str) -> None:
    require_readable(location)


@pytest.mark.parametrize("name", ["a b", "a%20b", "100%", "a#b", "a?b", "a[b", "{b}", "a|b", "a\\b", "a\u00a0b"])
def test_locations_that_spark_would_escape_are_refused(name: str) -> None:
    """It would look for another location, where another query may be."""
    with pytest.raises(InvalidArgumentError, match="has such characters"):
        require_readable(f"/data/{name}/query")


@pytest.mark.parametrize("text", ["{", "[1]", "7", "[" * 100_000])
def test_properties_of_an_operator_that_are_damaged(text: str) -> None:
    assert properties_of(None, 3) == properties_of("", 3) == {}
    with pytest.raises(CorruptionError, match="metadata of an operator with state is damaged, number=3"):
        properties_of(text, 3)
