"""`holdfast.testing`: one import gives a plug-in's author every contract."""

from __future__ import annotations

import inspect

import pytest

from holdfast import testing


@pytest.mark.parametrize("name", ["BackendContract", "SinkContract", "StorageContract"])
def test_contracts_are_imported_from_the_package(name: str) -> None:
    """A plug-in's author copies this import from the guide; a contract without tests would pass anything."""
    contract = getattr(testing, name)
    assert name in testing.__all__
    assert [n for n, _ in inspect.getmembers(contract, inspect.isfunction) if n.startswith("test_")]
