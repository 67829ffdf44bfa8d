"""Compares the rows that a reader finds in a sink, at the kill and at the end, with the expected rows.

Each row of the results has a micro-batch's number, and the flights of a carrier, an aircraft or a route so far. So
plain pandas can compute all expected rows from the flights and the boundaries of micro-batches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import pandas as pd

from holdfast.examples.flights.data import SUBJECTS
from holdfast.examples.flights.report import Check, differences
from holdfast.snapshotter.sink_log import SinkLog
from holdfast.snapshotter.storage.object_storage import ObjectStorage

_ROW = ["batch", "kind", "name", "flights"]


@dataclass(frozen=True)
class Look:
    """The results as read while no driver was running."""

    rows: pd.DataFrame  #: The rows that the reader saw
    ended: int  #: Micro-batches in Spark's commit log
    decided: dict[int, int]  #: The number of rows of the newest decided micro-batch
    called: str  #: The destination in words
    reader: str  #: The reader in words

    @property
    def underway(self) -> int | None:
        """The micro-batch that was decided but not yet logged by Spark."""
        return self.ended if self.ended in self.decided else None

    @property
    def newest(self) -> int:
        """The newest micro-batch with all its rows."""
        is_whole = self.underway is not None and self._seen(self.underway) == self.decided[self.underway]
        return self.ended if is_whole else self.ended - 1

    def wrong(self) -> list[str]:
        """Describe micro-batches that are missing, incomplete or unexpected."""
        seen = set(self.rows["batch"].tolist())
        allowed = set(range(self.ended + (self.underway is not None)))
        wrong = [f"micro-batch {batch} is missing" for batch in sorted(set(range(self.ended)) - seen)]
        wrong += [f"micro-batch {batch} is visible but was not decided" for batch in sorted(seen - allowed)]
        return wrong + [
            f"micro-batch {batch} has {self._seen(batch)} rows, not {rows}"
            for batch, rows in self.decided.items()
            if batch < self.ended and self._seen(batch) != rows
        ]

    def said(self) -> str:
        """Describe the results, with rich's markup."""
        seen = f"{self.rows['batch'].min()} to {self.rows['batch'].max()}, {len(self.rows):,} rows"
        return (
            f"at the kill the state is after micro-batch {self.ended - 1}, as Spark's log says; {self.reader} finds "
            f"micro-batches {seen}, in the {self.called}: {self._verdict()}"
        )

    def check(self, state: pd.DataFrame) -> Check:
        """Compare the results with the state after `newest`."""
        after = f"{self.called} at the kill and state after micro-batch {self.newest}"
        wrong = self.wrong() + differences(newest(self.rows[self.rows["batch"] <= self.newest]), state)
        return Check("equal", f"{after}, all {len(state):,} subjects, all totals", wrong)

    def _verdict(self) -> str:
        wrong = self.wrong()
        if wrong:
            return f"[bold red]not the same[/]: {wrong[0]}"
        if self.underway is None:
            return "[green]the same[/]"
        seen, rows = self._seen(self.underway), self.decided[self.underway]
        if seen == rows:
            return "[green]one more, which was decided[/]: the next start completes it without writing rows again"
        visible = f"{seen:,} of its {rows:,} rows are visible" if seen else "is not visible yet"
        return f"[green]the same[/]; {self.underway} was decided, and {visible}: the next start commits it"

    def _seen(self, batch: int) -> int:
        return int((self.rows["batch"] == batch).sum())


def newest_decision(storage: ObjectStorage, sink: str) -> dict[int, int]:
    """Return the newest decided micro-batch, if any, and its number of rows."""
    _, newest = SinkLog(storage, sink).latest()
    return {newest.batch_id: newest.rows} if newest and newest.batch_id is not None else {}


def query_id(query: Path) -> str | None:
    """Return Spark's id of the query at a checkpoint location; None if it has not started."""
    metadata = query / "metadata"
    return str(json.loads(metadata.read_text())["id"]) if metadata.exists() else None


def ended(query: Path) -> int:
    """Return the number of micro-batches in Spark's commit log."""
    return 1 + max((int(path.name) for path in (query / "commits").glob("[0-9]*")), default=-1)


def newest(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the newest row of each subject; rows are ordered by micro-batch."""
    return rows.drop_duplicates(["kind", "name"], keep="last")


def not_once(rows: pd.DataFrame, flights: pd.DataFrame, batches: int) -> list[str]:
    """Describe rows that are missing, repeated or unexpected, by micro-batch."""
    found = rows[_ROW].assign(name=rows["name"].fillna(""))
    wanted = _wanted(flights, _ends(found))
    wrong = [f"micro-batch {batch}: missing" for batch in sorted(set(range(batches)) - set(found["batch"]))]
    times = found.groupby(_ROW).size().rename("times").reset_index()
    both = wanted.merge(times, how="outer", on=_ROW, indicator="where")
    for where, problem in (("left_only", "missing"), ("right_only", "unexpected")):
        wrong += _named(both[both["where"] == where], problem)
    return wrong + _named(both[both["times"] > 1], "more than once")


def _named(rows: pd.DataFrame, problem: str) -> list[str]:
    columns = [rows[name] for name in _ROW]
    return [
        f"micro-batch {batch}: {kind} {name} with {flights} flights: {problem}"
        for batch, kind, name, flights in zip(*columns, strict=True)
    ]


def _ends(found: pd.DataFrame) -> Sequence[int]:
    """Return the total number of flights at the end of each micro-batch, summed over carriers."""
    carriers = found[found["kind"] == "carrier"].drop_duplicates(["batch", "name"])
    return carriers.pivot(index="batch", columns="name", values="flights").ffill().sum(axis=1).astype(int).tolist()


def _wanted(flights: pd.DataFrame, ends: Sequence[int]) -> pd.DataFrame:
    """Return the expected rows of each micro-batch: its subjects with their flights so far."""
    batch = pd.Series(ends).searchsorted(flights["seq"], side="right")
    names = {
        kind: reduce(lambda name, more: name + "-" + more, (flights[column].fillna("") for column in columns))
        for kind, columns in SUBJECTS.items()
    }
    events = pd.concat([pd.DataFrame({"batch": batch, "kind": kind, "name": name}) for kind, name in names.items()])
    counts = events.groupby(["kind", "name", "batch"]).size()
    return counts.groupby(level=["kind", "name"]).cumsum().rename("flights").reset_index()[_ROW]
