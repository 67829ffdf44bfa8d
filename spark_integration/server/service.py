"""What the state server answers, by Arrow Flight.

::

    ping                        whether it lives
    committed                   a shard has a new version: what became of its snapshots
    snapshot                    write one now
    statistics, recent          what it has done, and what the last micro-batches have measured
    drain                       wait until all that was announced is done
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pyarrow.flight as flight

from holdfast import clock
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.spark_integration.client.messages import Committed, decode, encode_error, field
from holdfast.spark_integration.server.batches import MeasuredBatches
from holdfast.spark_integration.server.durable_logs import DurableLogs
from holdfast.spark_integration.server.exposition import Exposition
from holdfast.spark_integration.server.housekeeping import Housekeeping
from holdfast.spark_integration.server.snapshotting import Snapshotting

_log = logging.getLogger(__name__)


@contextmanager
def _answering(what: str) -> Iterator[None]:
    """Send our own errors to the worker as they are; log any other as a defect, and end the call."""
    try:
        yield
    except HoldfastError as exc:
        raise flight.FlightServerError(type(exc).__name__, extra_info=encode_error(exc)) from exc
    except flight.FlightError:
        raise  # the connection broke: there is nobody to tell
    except Exception:
        _log.exception("%r failed", what)
        raise


class StateService(flight.FlightServerBase):
    """See the module.

    Parameters
    ----------
    location : str
    housekeeping : Housekeeping
    snapshotting : Snapshotting
    logs : DurableLogs
    batches : MeasuredBatches
    exposition : Exposition
    """

    def __init__(
        self,
        location: str,
        housekeeping: Housekeeping,
        snapshotting: Snapshotting,
        logs: DurableLogs,
        batches: MeasuredBatches,
        exposition: Exposition,
    ) -> None:
        self._housekeeping = housekeeping
        self._snapshotting = snapshotting
        self._logs = logs
        self._batches = batches
        self._exposition = exposition
        super().__init__(location)  # last: from here on it answers

    def do_action(self, context: object, action: flight.Action) -> Iterator[bytes]:
        """Answer one action with one JSON value."""
        with _answering(action.type):
            answer = self._act(action.type, action.body.to_pybytes())
            return iter([json.dumps(answer).encode()])

    def _act(self, kind: str, body: bytes) -> Any:
        if kind == "ping":
            return None
        if kind == "committed":
            committed = Committed.decode(body)
            self._housekeeping.announce(committed)
            news = self._snapshotting.announce(committed)
            self._batches.announce(committed)
            self._exposition.announce(committed)  # last: it may wait for a name to be resolved
            return asdict(news)
        if kind == "recent":
            return self._batches.recent()
        if kind == "snapshot":
            return self._snapshotting.write_now(Committed.decode(body))
        if kind == "statistics":
            return self._statistics()
        if kind == "drain":
            return self._drain(field(decode(body), "timeout_seconds", float))
        raise InvalidArgumentError("no such action", action=kind)

    def _statistics(self) -> dict[str, Any]:
        found = self._housekeeping.statistics()
        found["counters"] |= self._snapshotting.counters
        found["counters"]["metrics_errors"] = self._exposition.failures
        return found | {
            "metrics_port": self._exposition.port,
            "snapshot_errors": self._snapshotting.errors(),
            "requests": self._logs.requests(),
        }

    def _drain(self, timeout_seconds: float) -> bool:
        end_ms = clock.monotonic_ms() + int(timeout_seconds * 1000)
        queues = (self._housekeeping.queue, self._snapshotting.queue)
        drained = [queue.drain(max(0, end_ms - clock.monotonic_ms()) / 1000) for queue in queues]
        return all(drained)
