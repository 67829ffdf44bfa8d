"""Options of the rocksdb backend."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.errors import InvalidArgumentError


def test_options_are_read() -> None:
    found = RocksDBBackend.parse_options("rocksdb", {"memory": "1g", "compression": "ZSTD"})
    assert found == {"memory_bytes": 1 << 30, "compression": "zstd"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "15m"}, r"spark\.holdfast\.rocksdb\.memory is too small.*16m or more"),
        ({"memory": "much"}, "a size such as 512m"),
        ({"compression": "gzip"}, "must be one of none, lz4, zstd, snappy"),
        ({"blockSize": "4k"}, "unknown setting"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, Any], message: str) -> None:
    """On the driver, before a query starts."""
    with pytest.raises(InvalidArgumentError, match=message):
        RocksDBBackend.parse_options("rocksdb", options)
