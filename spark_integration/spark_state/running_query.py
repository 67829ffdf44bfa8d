"""Gets a running query's plan of a micro-batch and its checkpoint location from this process's JVM; reads no files.

::

    activeStreamingQueries ─▶ StreamExecution ─▶ offsetLog ─▶ get(7) ─▶ the lines of offsets/7
                                              ─▶ resolvedCheckpointRoot ─▶ file:/data/app-spark

The names are private to Spark and used only in this module. `tests/spark/sinks/test_exactly_once.py` and
`tests/spark/lookup/test_one_path.py` check them on each version. Without them the result is unknown, never an error.

Source: ``StreamExecution``, ``SharedState``, ``OffsetSeqLog`` of Spark 4.0 to 4.3.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError

from holdfast.errors import CorruptionError
from holdfast.spark_integration.spark_state.query_location import PlannedOffsets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_log = logging.getLogger(__name__)


def running_location(session: SparkSession, query_id: str) -> str | None:
    """Return the checkpoint location of a query running in a classic session's application, or None if unknown."""
    try:
        return str(_execution(session, query_id).resolvedCheckpointRoot())
    except (Py4JError, AttributeError, OSError) as exc:  # the query or Spark has ended
        _log.info("the checkpoint location of query %s is unknown: %s", query_id, exc)
        return None


def _execution(session: SparkSession, query_id: str) -> Any:
    """Return Spark's object of a query, or None if the query is not running."""
    jvm: Any = session._jvm  # noqa: SLF001
    queries = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
    return queries.get(jvm.java.util.UUID.fromString(query_id))


class RunningQuery:
    """A query of a classic session; `session` is any session of its application."""

    def __init__(self, session: SparkSession, query_id: str) -> None:
        jvm: Any = session._jvm  # noqa: SLF001
        self._new_buffer = jvm.java.io.ByteArrayOutputStream
        self._offset_log: Any = None
        try:
            self._offset_log = _execution(session, query_id).offsetLog()
        except (Py4JError, AttributeError) as exc:
            _log.warning(
                "Spark's plan of micro-batches is unreadable: after a rollback of the checkpoint location, a sink "
                "cannot tell a repeated micro-batch from a new one with its number: %s",
                exc,
            )

    def plan(self, batch_id: int) -> str:
        """Return Spark's plan of a micro-batch, in the form of `plan_of`; empty if unknown."""
        if self._offset_log is None:
            return ""
        try:
            offsets, text = self._offset_log.get(batch_id), self._new_buffer()
            if offsets.isEmpty():
                return ""
            self._offset_log.serialize(offsets.get(), text)
            return PlannedOffsets.parse(text.toString("UTF-8"), f"offsets/{batch_id}").plan
        except (Py4JError, CorruptionError) as exc:
            _log.warning("Spark's plan of micro-batch %d is unreadable: %s", batch_id, exc)
            return ""
