"""Ways to run a processor over a table: a batch query on Spark and on ours, or a stream of one micro-batch on ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from tests.spark.processors.engines import BY_PANDAS, BY_ROW, OURS, SPARK, Api, ProcessorEngine
from tests.tiers import cases

if TYPE_CHECKING:
    from tests.spark.parity.engines import Trial


@dataclass(frozen=True)
class Way:
    """An engine, and whether it runs a batch query or a stream."""

    engine: ProcessorEngine
    is_batch: bool

    @property
    def name(self) -> str:
        return f"{self.engine.name}-batch" if self.is_batch and not self.is_spark else self.engine.name

    @property
    def api(self) -> Api:
        return self.engine.api

    @property
    def is_spark(self) -> bool:
        return self.engine.is_spark

    def rows(
        self,
        on: Trial,
        table: pa.Table,
        schema: str,
        keys: Sequence[Any],
        processor: Any,
        output: str,
        time_mode: str = "none",
    ) -> list[tuple[Any, ...]]:
        """Run a processor over a table, and return what it emits."""
        on.feed_table(table)

        def transformed(frame: Any) -> Any:
            return self.engine.transform(frame, keys, processor, output, "append", time_mode)

        if self.is_batch:
            frame = transformed(on.session.read.schema(schema).parquet(str(on.folder / "input")))
            return [tuple(row) for row in frame.collect()]
        on.run(transformed(on.source(schema, delay=None)), "append")
        return [row for batch in on.batches for row in batch]


def ways(turn: int = 0, *, api: Api | None = None, batch_only: bool = False) -> list[Way]:
    """Return all ways, or in ``make test`` some of them.

    Parameters
    ----------
    turn : int
        So that modules take different ones.
    api : {"row", "pandas"}, optional
        Only this one.
    batch_only : bool
        With processing time a stream does not end by itself.
    """

    def among(engines: Sequence[ProcessorEngine], *, is_batch: bool) -> list[Way]:
        found = [Way(engine, is_batch) for engine in engines if api in (None, engine.api)]
        shift = turn % len(found)
        return cases(found[shift:] + found[:shift])

    streams = [] if batch_only else among(OURS, is_batch=False)
    return [*among(SPARK, is_batch=True), *streams, *among([BY_PANDAS[0], BY_ROW[0]], is_batch=True)]


def by_way(found: Sequence[Way]) -> pytest.MarkDecorator:
    """Parametrise a test by way."""
    return pytest.mark.parametrize("way", found, ids=lambda way: way.name)


Run = Callable[..., list[tuple[Any, ...]]]
"""The fixture `run`: runs a processor over a table, with settings of Spark for it, and returns what it emits."""
