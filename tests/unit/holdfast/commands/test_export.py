"""``holdfast export`` without Spark: which LOCATION is a query's, and what it says where a package is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest
from pyspark.sql import DataFrame

from holdfast.commands.export import export, is_of_query, write
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.storage.opening import open_storage
from tests.unit.snapshotter.savepoints.sample import a_savepoint


def test_delta_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is read or written."""
    monkeypatch.delitem(sys.modules, "holdfast.spark_integration.sinks.delta.exporting", raising=False)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'holdfast-spark\[delta\]'.*missing=deltalake"):
        write(cast("DataFrame", None), "nowhere", "delta")


@pytest.mark.parametrize("damage", [b"", b"?"])
def test_the_variable_makes_no_query_of_a_savepoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    """It is set for other commands; the option says that LOCATION is a query's, whatever lies there."""
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target, "one")
    if damage:
        (tmp_path / "one/savepoint").write_bytes(damage)

    def is_query(location: str, *arguments: str) -> bool:
        given = [str(tmp_path / location), "--to", "elsewhere", *arguments]
        return is_of_query(export.make_context("export", given), {})

    assert not is_query("one")
    monkeypatch.setenv("HOLDFAST_STATE_DIR", "/data/app")
    assert not is_query("one")
    assert is_query("query")
    assert is_query("query of ours")
    assert is_query("one", "--state-dir", "/data/app")
