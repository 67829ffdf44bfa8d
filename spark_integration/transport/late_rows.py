"""Late rows in blobs: found by *marks*, small rows beside the blobs, of which Spark drops those that are late.

::

    sent   route  blob   event time                 watermark 1,000 ms
           7      ▒▒▒▒   `NEVER_LATE`               stays
           7      null   1,000,000 µs               dropped: the blob's rows up to 1,000 ms are late
           7      null   1,001,000 µs               stays, the earliest mark that does
           7      null   1,004,000 µs               stays

A watermark is a whole number of milliseconds, and a row is late up to and including it. So the rows of one millisecond,
(0, 1,000] µs and so on, are late together or not at all, and one mark a millisecond is enough. With which watermark
Spark compares, that of this micro-batch or of the one before, is Spark's matter.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.spark_integration.transport.transport import EVENT_TIME, EventTime, Gather, Received, moments_of

_Longs = npt.NDArray[np.int64]
#: The event time of blobs, in microseconds since 1970. No null, beside which pandas would round marks.
NEVER_LATE = int(np.iinfo(np.int64).max)
NO_MARKS = np.empty(0, np.int64)


def marks_of(batches: list[pa.RecordBatch], event_time: EventTime) -> _Longs:
    """Return the event times of the marks for rows; one without a time needs none, and is never late."""
    columns = [moments_of(batch.column(event_time.column)).view(pa.int64()) for batch in batches]
    known = pa.concat_arrays(columns).drop_null().to_numpy()
    last_ms = pc.unique(pa.array(_last_ms(known))).to_numpy() + event_time.watermark.held_back_ms
    return np.where(last_ms > NEVER_LATE // 1000, NEVER_LATE, last_ms * 1000)


class Marks:
    """The marks that arrive in one shard and micro-batch."""

    def __init__(self) -> None:
        self._earliest_us = NEVER_LATE

    def noted(self, chunk: pd.DataFrame) -> pd.DataFrame:
        """Return a chunk whose marks have been noted."""
        if len(chunk):
            self._earliest_us = min(self._earliest_us, int(chunk[EVENT_TIME].min()))
        return chunk

    def drop_late(self, rows: pa.Table, event_time: EventTime, gather: Gather) -> Received:
        """Return the rows that are not late, once all marks are noted."""
        late = [self._are_late(batch, event_time) for batch in rows.to_batches()]
        count = sum(int(np.count_nonzero(is_late)) for is_late in late)
        return Received(gather(_without(rows, late)) if count else rows, count)

    def _are_late(self, rows: pa.RecordBatch, event_time: EventTime) -> npt.NDArray[np.bool_]:
        times = moments_of(rows.column(event_time.column)).view(pa.int64()).fill_null(NEVER_LATE).to_numpy()
        first_ms = _last_ms(np.array([self._earliest_us])) - event_time.watermark.held_back_ms
        is_late: npt.NDArray[np.bool_] = _last_ms(times) < first_ms
        return is_late


def _without(rows: pa.Table, late: list[npt.NDArray[np.bool_]]) -> Iterator[pa.Table]:
    for batch, is_late in zip(rows.to_batches(), late, strict=True):
        yield pa.Table.from_batches([batch.filter(pa.array(~is_late))])


def _last_ms(times_us: _Longs) -> _Longs:
    """Return the last millisecond of each time: the earliest watermark that makes it late."""
    ms = times_us // 1000
    return ms + (ms * 1000 != times_us)
