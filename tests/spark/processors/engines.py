"""The engines that run one processor side by side: Spark's operator and ours, each by Row and by pandas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyspark
import pytest

import holdfast
from holdfast.spark_integration.spark_versions import minor_version
from tests.spark.parity.engines import FRAME_TEMPLATES, Engine
from tests.tiers import ALL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Spark's operator, which runs ours, too, needs this state store.
NEEDED = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    )
}
OPERATOR = "parity"
Api = Literal["row", "pandas"]


@dataclass(frozen=True)
class ProcessorEngine(Engine):
    """Who runs a processor, and by which of the two APIs."""

    api: Api = "row"

    @property
    def is_spark(self) -> bool:
        return self.name.startswith("spark")

    def require(self) -> None:
        """Skip the test on a Spark whose own operator does otherwise."""
        if self.is_spark and minor_version(pyspark.__version__) < (4, 3):
            pytest.skip("what Spark does is stated of Spark 4.3")

    def transform(self, frame: DataFrame, keys: Sequence[Any], *arguments: Any, **named: Any) -> DataFrame:
        """Group a frame and call ``transformWithState`` or ``transformWithStateInPandas``, Spark's or ours."""
        if self.is_spark:
            grouped: Any = frame.groupBy(*keys)
        else:
            grouped = holdfast.stream(frame).groupBy(*keys)
            named = {"name": OPERATOR, **named}
        call = grouped.transformWithState if self.api == "row" else grouped.transformWithStateInPandas
        return call(*arguments, **named)


def _of_spark(api: Api) -> ProcessorEngine:
    return ProcessorEngine(f"spark-{api}", NEEDED, api)


def _of_holdfast(backend: str, api: Api) -> ProcessorEngine:
    return ProcessorEngine(f"{backend}-{api}", {**NEEDED, "spark.holdfast.backend": backend}, api)


SPARK = SPARK_ROW, SPARK_PANDAS = [_of_spark("row"), _of_spark("pandas")]
BY_ROW = [_of_holdfast(backend, "row") for backend in ("memory", "filesystem", "rocksdb")]
BY_PANDAS = [_of_holdfast(backend, "pandas") for backend in ("memory", "filesystem", "rocksdb")]
# With all frames made by pandas itself.
WITHOUT_TEMPLATES = ProcessorEngine(
    "memory-pandas-without-templates", {**BY_PANDAS[0].settings, FRAME_TEMPLATES: "false"}, "pandas"
)
OURS = [*(engine for pair in zip(BY_ROW, BY_PANDAS, strict=True) for engine in pair), WITHOUT_TEMPLATES]
ENGINES = [*SPARK, *OURS]


def ours(number: int, among: Sequence[ProcessorEngine] = OURS) -> list[ProcessorEngine]:
    """Return our engines; in ``make test`` one of them, another one for another number."""
    return list(among) if ALL else [among[number % len(among)]]


def later(among: Sequence[ProcessorEngine] = OURS) -> list[Any]:
    """Return engines for ``make test-all`` alone."""
    return [pytest.param(engine, marks=pytest.mark.all) for engine in among]


def engines(number: int) -> list[ProcessorEngine]:
    """Return Spark's engines, which answer as recorded, and `ours`."""
    return [*SPARK, *ours(number)]


def by_engine(engines: Sequence[ProcessorEngine]) -> pytest.MarkDecorator:
    """Parametrise a test by engine."""
    return pytest.mark.parametrize("engine", engines, ids=lambda engine: engine.name)
