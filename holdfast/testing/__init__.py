"""Test functions and processors without Spark, and test plug-ins with the contract suites.

`PandasWithStateTester` runs an ``applyInPandasWithState`` function, and `TwsTester` a `StatefulProcessor`, on the rows
and times of a test. A backend, object storage or sink is correct if it passes `BackendContract`, `StorageContract` or
`SinkContract`, as holdfast's own do. The suites need pytest, but no other part of this project's tests.
"""

import pytest

_CONTRACTS = "backend_contract backend_rows_contract state_rows storage_contract sink_contract sink_scenario"
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _CONTRACTS.split()))

from holdfast.testing.backend_contract import BackendContract  # noqa: E402  after register_assert_rewrite
from holdfast.testing.backend_rows_contract import MakeBackend  # noqa: E402
from holdfast.testing.pandas_with_state_tester import PandasWithStateTester  # noqa: E402
from holdfast.testing.sink_contract import SECRET, SinkContract  # noqa: E402
from holdfast.testing.storage_contract import StorageContract  # noqa: E402
from holdfast.testing.tws_tester import TwsTester  # noqa: E402

__all__ = [
    "SECRET",
    "BackendContract",
    "MakeBackend",
    "PandasWithStateTester",
    "SinkContract",
    "StorageContract",
    "TwsTester",
]
