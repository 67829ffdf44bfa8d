"""The example's sink as a data source."""

from __future__ import annotations

from holdfast.examples.sinks.csv_folder import CsvFolder
from holdfast.sinks import SinkSource, TwoPhaseSink


class CsvSource(SinkSource):
    arguments = ("path",)

    @classmethod
    def name(cls) -> str:
        return "csv-folder"

    def sink(self) -> TwoPhaseSink:
        return CsvFolder(self.options["path"])
