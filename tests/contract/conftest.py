"""Which cases of the contracts ``make test`` has."""

from __future__ import annotations

import pytest

from tests.contract.sampled_contract import mark_the_others


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_others(items)
