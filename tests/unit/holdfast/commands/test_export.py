"""``holdfast export`` without Spark: what it says where a package is missing."""

from __future__ import annotations

import sys
from typing import cast

import pytest
from pyspark.sql import DataFrame

from holdfast.commands.export import write
from holdfast.errors import InvalidArgumentError


def test_delta_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is read or written."""
    monkeypatch.delitem(sys.modules, "holdfast.spark_integration.sinks.delta.exporting", raising=False)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'holdfast\[delta\]'.*missing=deltalake"):
        write(cast("DataFrame", None), "nowhere", "delta")
