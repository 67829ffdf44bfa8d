"""Ways to run a processor over a table: a batch query on Spark and on ours, or a stream of one micro-batch on ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from tests.spark.processors.engines import BY_PANDAS, BY_ROW, OURS, SPARK, WITHOUT_TEMPLATES, Api, ProcessorEngine, ours
from tests.tiers import ALL

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
            return on.collect(frame)
        on.run(transformed(on.source(schema, delay=None)), "append")
        return [row for batch in on.batches for row in batch]


def ways(number: int = 0, *, api: Api | None = None, batch_only: bool = False, streams: bool = ALL) -> list[Way]:
    """Return Spark's ways, which answer as recorded, and ours: in ``make test`` one by `number`, a batch query."""

    def of_api(engines: Sequence[ProcessorEngine]) -> list[ProcessorEngine]:
        return [engine for engine in engines if api in (None, engine.api)]

    of_spark = [Way(engine, is_batch=True) for engine in of_api(SPARK)]
    in_streams = [Way(engine, is_batch=False) for engine in ours(number, of_api(OURS))]
    in_memory = of_api([BY_PANDAS[0], BY_ROW[0], WITHOUT_TEMPLATES])
    in_batches = [Way(engine, is_batch=True) for engine in ours(number, in_memory)]
    return [*of_spark, *(in_streams if streams and not batch_only else []), *in_batches]


def by_way(found: Sequence[Way]) -> pytest.MarkDecorator:
    """Parametrise a test by way."""
    return pytest.mark.parametrize("way", found, ids=lambda way: way.name)


Run = Callable[..., list[tuple[Any, ...]]]
"""The fixture `run`: runs a processor over a table, with settings of Spark for it, and returns what it emits."""
