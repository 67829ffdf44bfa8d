"""Passes a tested processor's rows through unconverted: for tests that declare no types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.types import Row

from holdfast.backends.arrow.rows import IntArray
from holdfast.spark_integration.keyed.key_order import KeyOrder
from holdfast.spark_integration.keyed.slabs import KeySlabs
from holdfast.spark_integration.processor.exchange import Exchange, KeyTuple, ProcessorOutput, frames_of


@dataclass(frozen=True)
class GivenExchange:
    """An `Exchange` that takes the pieces that a test gives, and keeps what the processor returns.

    Attributes
    ----------
    typed : Exchange
        For keys, and for what the test does declare.
    pieces : sequence or None
        What ``handleInputRows`` iterates over, one for each row of the micro-batch; None if rows are typed.
    kept : KeptOutput or None
        None if output is typed.
    """

    typed: Exchange
    pieces: Sequence[Any] | None
    kept: KeptOutput | None

    def slabs(self, rows: pa.Table, order: KeyOrder) -> KeySlabs[Any]:
        if self.pieces is None:
            return self.typed.slabs(rows, order)
        return _GivenPieces(rows, order.rows, order.starts, self.pieces)

    def keys(self, shown: pa.Table) -> list[KeyTuple]:
        return self.typed.keys(shown)

    def output(self) -> ProcessorOutput:
        return self.typed.output() if self.kept is None else self.kept


class KeptOutput:
    """What a processor returned; nothing leaves the shard.

    Parameters
    ----------
    checked : callable
        Iterates over what was returned for a key, and fails where a query would.

    Attributes
    ----------
    elements : list of Row or of pandas.DataFrame
    """

    failed_key: KeyTuple | None = None

    def __init__(self, checked: Callable[[Any], Iterable[Any]]) -> None:
        self._checked = checked
        self.elements: list[Any] = []

    def add_all(self, returned: Any, key: KeyTuple) -> Iterator[pa.RecordBatch]:
        """Keep what was returned for a key."""
        self.elements.extend(self._checked(returned))
        yield from ()

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield nothing."""
        yield from ()


def kept_rows() -> KeptOutput:
    """Return where the output of a processor by `Row` goes."""
    return KeptOutput(_rows_of)


def kept_frames() -> KeptOutput:
    """Return where the output of a processor by frames goes."""
    return KeptOutput(frames_of)


def _rows_of(returned: Any) -> Iterator[Row]:
    for row in returned:
        row.asDict()  # a query takes nothing else: a tuple and a `Row` without names fail here as there
        yield row


def concatenated(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Return frames as one; none as one without columns."""
    full = [frame for frame in frames if len(frame)]
    if not full:
        return frames[0] if frames else pd.DataFrame()
    return pd.concat(full, ignore_index=True)


class _GivenPieces(KeySlabs[Any]):
    """Pieces by key; the micro-batch has their numbers."""

    def __init__(self, rows: pa.Table, order: IntArray, starts: IntArray, pieces: Sequence[Any]) -> None:
        super().__init__(rows, order, starts, max(1, len(pieces)))
        self._pieces = pieces

    def cut(self, rows: pa.Table, bounds: IntArray) -> Iterator[Iterator[Any]]:
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            yield self.convert(rows.slice(start, end - start))

    def convert(self, rows: pa.Table) -> Iterator[Any]:
        return iter([self._pieces[at] for at in rows.column(0).to_pylist()])
