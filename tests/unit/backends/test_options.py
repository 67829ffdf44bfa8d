"""Options of backends: sizes as Spark writes them, and every mistake named with its full key."""

from __future__ import annotations

import pytest

from holdfast.backends.options import did_you_mean, nearest_name, parse_options, parse_size
from holdfast.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("65536", 1 << 16), ("512m", 512 << 20), ("2G", 2 << 30), ("1kb", 1024), (" 3 t ", 3 << 40), ("7b", 7)],
)
def test_sizes_are_read_as_spark_reads_them(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "m", "0", "-1m", "1.5g", "2 gigs", "1x", "1mm"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """Zero too: it would mean no room at all."""
    with pytest.raises(ValueError, match="512m"):
        parse_size(text)


def test_values_are_read_and_mistakes_named() -> None:
    known = {"memory": parse_size, "maxOpenFiles": int}
    assert parse_options("rocksdb", known, {"memory": "1g"}) == {"memory": 1 << 30}
    with pytest.raises(InvalidArgumentError, match=r"did you mean spark.holdfast.rocksdb.maxOpenFiles"):
        parse_options("rocksdb", known, {"maxopenfiles": "1"})
    with pytest.raises(InvalidArgumentError, match=r"known are spark.holdfast.rocksdb.memory, spark.holdfast.rocksdb"):
        parse_options("rocksdb", known, {"zzzzzzzz": "1"})
    with pytest.raises(
        InvalidArgumentError, match=r"spark.holdfast.rocksdb.memory cannot be 'much': it must be a size"
    ):
        parse_options("rocksdb", known, {"memory": "much"})
    with pytest.raises(InvalidArgumentError, match="backend 'mine' has no options"):
        parse_options("mine", {}, {"a": "1"})


def test_the_nearest_name_is_suggested_and_nothing_far() -> None:
    """A hint that has nothing to do with what was written would mislead."""
    assert nearest_name("memroy", ["rocksdb", "memory"]) == "memory"
    assert nearest_name("zzz", ["rocksdb", "memory"]) is None
    assert nearest_name("memory", []) is None
    assert did_you_mean("memroy", ["rocksdb", "memory"]) == "; did you mean 'memory'?"
    assert did_you_mean("zzz", ["rocksdb", "memory"]) == ""
