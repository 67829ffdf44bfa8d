"""Where Spark can read the state of a query, and what it says of an operator there."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import CorruptionError, InvalidArgumentError
from holdfast.snapshotter.storage.local import LocalStorage
from holdfast.spark_integration.savepoints.by_spark import properties_of, require_readable
from holdfast.spark_integration.spark_state.pointers import stored_steps
from holdfast.spark_integration.spark_state.query_location import LoggedBatch
from tests.unit.spark_integration.spark_state.test_operators import metadata, put


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


@pytest.mark.parametrize("described", [0, 1])
def test_an_operator_whose_metadata_is_missing_is_not_left_out(tmp_path: Path, described: int) -> None:
    """A savepoint or a clone without one of two operators would look whole."""
    for number in range(2):
        (tmp_path / f"state/{number}/0").mkdir(parents=True)
        (tmp_path / f"state/{number}/0/1.delta").write_bytes(b"rows")
    for number in range(described):
        put(tmp_path, f"{number}/_metadata/metadata", metadata(number, "stateStoreSave"))
    batch = LoggedBatch(0, "v1", '{"conf": {}}', (), 0)
    with (
        LocalStorage(str(tmp_path)) as location,
        pytest.raises(CorruptionError, match=f"metadata of an operator with state is missing.*number={described}"),
    ):
        stored_steps(location, batch)
