"""What all places of results have in common, and the plain one, files that Spark writes."""

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
#: Options of the demo's sink are set below this.
SINK_OPTIONS = "spark.holdfast.sink.demo."
COLUMNS = ("batch", "kind", "name", *TOTALS)
PATIENCE_S = 10


class Results(ABC):
    """Where results go.

    Parameters
    ----------
    output : pathlib.Path
        A folder in the work directory, which is theirs.
    run : str
        Tells this run of the demo from all others.
    options : mapping of str to str
        What is set below `SINK_OPTIONS`.

    Attributes
    ----------
    called : str
        What they are, in words.
    """

    called: ClassVar[str]

    def __init__(self, output: Path, run: str, options: Mapping[str, str]) -> None:
        self.output, self.run, self.options = output, run, options

    @property
    def where(self) -> str:
        """Where they are, in words."""
        return f"{self.called} {self.output}"

    def settings(self) -> dict[str, str]:
        """Return what Spark's session needs for them."""
        return {}

    def prepare(self) -> None:  # noqa: B027  optional
        """Look, before anything is started, whether results can go there.

        Raises
        ------
        InvalidArgumentError
            A package or a server is missing; the message says how to get it.
        """

    @abstractmethod
    def writer(self, before: int = 0) -> Writer:
        """Return the function for Spark's ``foreachBatch``, of a query that goes on after so many micro-batches."""

    @abstractmethod
    def read(self) -> pd.DataFrame:
        """Return all rows that a reader sees, micro-batch by micro-batch."""

    def look(self, query: Path, open_state_dir: Callable[[], ObjectStorage]) -> Look | None:
        """Return what is there while no driver runs, if each micro-batch is there once also at such a moment.

        Parameters
        ----------
        query : pathlib.Path
            Spark's checkpoint location.
        open_state_dir : callable
            Opens the state directory.
        """
        return None

    def checks(self, flights: pd.DataFrame, expected: pd.DataFrame, batches: int) -> list[Check]:
        """Compare with plain pandas what is there at the end, after so many micro-batches."""
        return [self._newest(self.read(), expected)]

    def _newest(self, rows: pd.DataFrame, expected: pd.DataFrame) -> Check:
        wrong = differences(looking.newest(rows), expected)
        return Check("equal", f"{self.called} and plain pandas, all {len(expected):,} subjects, all totals", wrong)

    def remove(self, query_id: str | None) -> None:  # noqa: B027  optional
        """Remove what is outside of the work directory; `query_id` is Spark's, if the query has begun."""


class OutputFiles(Results):
    """Parquet files, written by Spark."""

    called = "output"

    @property
    def where(self) -> str:
        return str(self.output)

    def writer(self, before: int = 0) -> Writer:
        def write(rows: DataFrame, batch_id: int) -> None:
            # Overwritten when a micro-batch is repeated, so the output holds each one once, too.
            rows.coalesce(1).write.mode("overwrite").parquet(str(self.output / f"batch={batch_id}"))

        return write

    def read(self) -> pd.DataFrame:
        # Then those of a restored query, whose micro-batches have numbers of their own.
        outputs = sorted(self.output.parent.glob(f"{self.output.name}*"))
        folders = [folder for output in outputs for folder in sorted(output.glob("batch=*"), key=_number)]
        return pd.concat([pq.read_table(str(folder), partitioning=None).to_pandas() for folder in folders])


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("batch="))


class SinkResults(Results):
    """A sink that shows each micro-batch once.

    Attributes
    ----------
    reader : str
        Who reads it, in words.
    name : str
        The sink's: another one in each run, as another query writes.
    """

    reader: ClassVar[str]

    def __init__(self, output: Path, run: str, options: Mapping[str, str]) -> None:
        super().__init__(output, run, options)
        self.name = f"demo-{run}"

    def settings(self) -> dict[str, str]:
        return {f"spark.holdfast.sink.{self.name}.{option}": value for option, value in self.options.items()}

    def prepare(self) -> None:
        self.sink()

    @abstractmethod
    def sink(self) -> sinks.TwoPhaseSink:
        """Return the sink."""

    def writer(self, before: int = 0) -> Writer:
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        write = sinks.exactly_once(self.sink())
        return lambda rows, batch_id: write(self.shape(rows.withColumn("batch", F.lit(before + batch_id))), batch_id)

    def shape(self, rows: DataFrame) -> DataFrame:
        """Return rows as the sink takes them."""
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
        """Give up what a query that failed has left half-done."""
        if query_id is not None:
            query = sinks.SinkQuery(self.name, query_id, None, self.options)
            self.sink().abort(query, self.sink().leftovers(query))
