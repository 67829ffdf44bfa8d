"""A DataFrame whose session was stopped is refused in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.errors import PySparkAttributeError

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.plan.session import require_session


def test_a_stopped_session_is_said_to_be_stopped() -> None:
    """It was an AssertionError without words, of the next function of Spark's that a definition calls."""
    context: Any = object.__new__(SparkContext)
    context._jsc = None  # as `SparkContext.stop` leaves it
    session: Any = SimpleNamespace(sparkContext=context)
    with pytest.raises(
        InvalidArgumentError, match="the Spark session of this DataFrame was stopped: start another one"
    ):
        require_session(session)
    context._jsc = SimpleNamespace(startTime=lambda: 1)
    require_session(session)


def test_a_session_of_connect_has_no_context_to_ask() -> None:
    class Session:
        @property
        def sparkContext(self) -> Any:  # noqa: N802  Spark's name
            raise PySparkAttributeError("no JVM here")

    session: Any = Session()
    require_session(session)
