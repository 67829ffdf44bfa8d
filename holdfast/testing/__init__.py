"""Contract tests for those who write a backend or an object storage for holdfast.

A plug-in is right when it passes the same suites as the ones that holdfast ships; they are importable code without
dependencies on this project's own tests. They need pytest.
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.backend_contract", f"{__name__}.backend_rows_contract")
pytest.register_assert_rewrite(f"{__name__}.state_rows", f"{__name__}.storage_contract")

from holdfast.testing.backend_contract import BackendContract  # noqa: E402  after the lines that must stand first
from holdfast.testing.backend_rows_contract import MakeBackend  # noqa: E402

__all__ = ["BackendContract", "MakeBackend"]
