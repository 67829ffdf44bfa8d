"""Where Spark can read the state of a query."""

from __future__ import annotations

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.stored_pointers import require_readable


@pytest.mark.parametrize("location", ["/data/a-b_c.d~e", "s3a://bucket/a=b/c+d@e", "hdfs://host:9000/a", "/d/ü/日本"])
def test_locations_that_are_as_in_a_url(location: str) -> None:
    require_readable(location)


@pytest.mark.parametrize("name", ["a b", "a%20b", "100%", "a#b", "a?b", "a[b", "{b}", "a|b", "a\\b", "a\u00a0b"])
def test_locations_that_spark_would_escape_are_refused(name: str) -> None:
    """It would look for another location, where another query may be."""
    with pytest.raises(InvalidArgumentError, match="has such characters"):
        require_readable(f"/data/{name}/query")
