"""The interface of all destinations of results, and the plain one: files that Spark writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import pandas as pd
import pyarrow.parquet as pq

from holdfast import sinks
from holdfast.examples.flights.data import TOTALS
from holdfast.examples.flights.report import Check, differences
from holdfast.examples.flights.results import looking
from holdfast.examples.flights.results.looking import Look
from holdfast.snapshotter.storage.object_storage import ObjectStorage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Writer: TypeAlias = "Callable[[DataFrame, int], None]"
#: Prefix of the settings for the demo's sink.
SINK_OPTIONS = "spark.holdfast.sink.demo."
COLUMNS = ("batch", "kind", "name", *TOTALS)
PATIENCE_S = 10


class Results(ABC):
    """A destination of results.

    Parameters
    ----------
    output : pathlib.Path
        Its folder in the work directory.
    run : str
        Identifies this run of the demo.
    options : mapping of str to str
        The settings below `SINK_OPTIONS`.
    """

    called: ClassVar[str]  #: The destination in words

    def __init__(self, output: Path, run: str, options: Mapping[str, str]) -> None:
        self.output, self.run, self.options = output, run, options

    @property
    def where(self) -> str:
        """The location in words."""
        return f"{self.called} {self.output}"

    def settings(self) -> dict[str, str]:
        """Return the Spark settings that the destination needs."""
        return {}

    def prepare(self) -> None:  # noqa: B027  optional
        """Check, before anything starts, that results can be written.

        Raises `InvalidArgumentError` with a remedy if a package or a server is missing.
        """

    @abstractmethod
    def writer(self, before: int = 0) -> Writer:
        """Return the function for Spark's ``foreachBatch``; `before` micro-batches precede the query's own."""

    @abstractmethod
    def read(self) -> pd.DataFrame:
        """Return all rows that a reader sees, ordered by micro-batch."""

    def look(self, query: Path, open_state_dir: Callable[[], ObjectStorage]) -> Look | None:
        """Read the results while no driver runs; None if they are exactly-once only at the end.

        `query` is Spark's checkpoint location; `open_state_dir` opens the state directory.
        """
        return None

    def checks(self, flights: pd.DataFrame, expected: pd.DataFrame, batches: int) -> list[Check]:
        """Compare the results after the last of `batches` micro-batches with plain pandas."""
        return [self._newest(self.read(), expected)]

    def _newest(self, rows: pd.DataFrame, expected: pd.DataFrame) -> Check:
        wrong = differences(looking.newest(rows), expected)
        return Check("equal", f"{self.called} and plain pandas, all {len(expected):,} subjects, all totals", wrong)

    def remove(self, query_id: str | None) -> None:  # noqa: B027  optional
        """Remove data outside the work directory; `query_id` is Spark's id, if the query has started."""


class OutputFiles(Results):
    """Parquet files, written by Spark."""

    called = "output"

    @property
    def where(self) -> str:
        return str(self.output)

    def writer(self, before: int = 0) -> Writer:
        def write(rows: DataFrame, batch_id: int) -> None:
            # A repeated micro-batch overwrites its output.
            rows.coalesce(1).write.mode("overwrite").parquet(str(self.output / f"batch={batch_id}"))

        return write

    def read(self) -> pd.DataFrame:
        # A restored query's output follows, since its numbers start at 0 again.
        outputs = sorted(self.output.parent.glob(f"{self.output.name}*"))
        folders = [folder for output in outputs for folder in sorted(output.glob("batch=*"), key=_number)]
        return pd.concat([pq.read_table(str(folder), partitioning=None).to_pandas() for folder in folders])


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("batch="))


class SinkResults(Results):
    """An exactly-once sink, under a new name for each run of the demo."""

    reader: ClassVar[str]  #: The independent reader in words

    def __init__(self, output: Path, run: str, options: Mapping[str, str]) -> None:
        super().__init__(output, run, options)
        self.name = f"demo-{run}"

    def settings(self) -> dict[str, str]:
        return {f"spark.holdfast.sink.{self.name}.{option}": value for option, value in self.options.items()}

    def prepare(self) -> None:
        self.sink()

    @abstractmethod
    def sink(self) -> sinks.TwoPhaseSink:
        """Return the sink of this destination."""

    def writer(self, before: int = 0) -> Writer:
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        write = sinks.exactly_once(self.sink())
        return lambda rows, batch_id: write(self.shape(rows.withColumn("batch", F.lit(before + batch_id))), batch_id)

    def shape(self, rows: DataFrame) -> DataFrame:
        """Return rows in the sink's schema."""
        return rows

    def read(self) -> pd.DataFrame:
        return self.rows().sort_values("batch", kind="stable", ignore_index=True)

    def look(self, query: Path, open_state_dir: Callable[[], ObjectStorage]) -> Look | None:
        with open_state_dir() as storage:
            decided = looking.newest_decision(storage, self.name)
        return Look(self.read(), looking.ended(query), decided, self.called, self.reader)

    def checks(self, flights: pd.DataFrame, expected: pd.DataFrame, batches: int) -> list[Check]:
        rows = self.read()
        what = f"each of {batches} micro-batches in the {self.called}, all {len(rows):,} rows, by {self.reader}"
        return [self._newest(rows, expected), Check("once", what, looking.not_once(rows, flights, batches))]

    @abstractmethod
    def rows(self) -> pd.DataFrame:
        """Return all rows that the reader sees, in any order."""

    def remove(self, query_id: str | None) -> None:
        """Abort the leftovers of a failed query."""
        if query_id is not None:
            query = sinks.SinkQuery(self.name, query_id, None, self.options)
            self.sink().abort(query, self.sink().leftovers(query))
