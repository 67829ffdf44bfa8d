"""What a reader finds in a sink, at the kill and at the end, and what it must find.

Each row of the results carries the number of its micro-batch, and the number of flights that its subject had by then.
So all that must be there follows from the flights, by plain pandas, and from where one micro-batch ended and the next
one began.
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
    """What was found when the driver was dead, and no other one started.

    Attributes
    ----------
    rows : pandas.DataFrame
        What the reader saw.
    ended : int
        How many micro-batches Spark had ended, and logged.
    decided : dict of int to int
        The newest micro-batch that was decided, and how many rows it has.
    called, reader : str
        Where the rows are and who read them, in words.
    """

    rows: pd.DataFrame
    ended: int
    decided: dict[int, int]
    called: str
    reader: str

    @property
    def underway(self) -> int | None:
        """The micro-batch that was decided, and that Spark had not ended."""
        return self.ended if self.ended in self.decided else None

    @property
    def newest(self) -> int:
        """The newest micro-batch that is there, with all its rows."""
        is_whole = self.underway is not None and self._seen(self.underway) == self.decided[self.underway]
        return self.ended if is_whole else self.ended - 1

    def wrong(self) -> list[str]:
        """Return in words which micro-batches are missing, and which are there that must not be."""
        seen = set(self.rows["batch"].tolist())
        allowed = set(range(self.ended + (self.underway is not None)))
        wrong = [f"micro-batch {batch} is missing" for batch in sorted(set(range(self.ended)) - seen)]
        wrong += [f"micro-batch {batch} is visible, and not decided" for batch in sorted(seen - allowed)]
        return wrong + [
            f"micro-batch {batch} has {self._seen(batch)} rows, not {rows}"
            for batch, rows in self.decided.items()
            if batch < self.ended and self._seen(batch) != rows
        ]

    def said(self) -> str:
        """Say what was seen, with rich's markup."""
        seen = f"{self.rows['batch'].min()} to {self.rows['batch'].max()}, {len(self.rows):,} rows"
        return (
            f"at the kill the state is after micro-batch {self.ended - 1}, as Spark's log says; {self.reader} finds "
            f"micro-batches {seen}, in the {self.called}: {self._verdict()}"
        )

    def check(self, state: pd.DataFrame) -> Check:
        """Compare with the state as it was after `newest`."""
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
            return "[green]one more, which was decided[/]: the next start ends it and writes no row again"
        visible = f"{seen:,} of its {rows:,} rows are visible" if seen else "is not visible yet"
        return f"[green]the same[/]; {self.underway} was decided, and {visible}: the next start commits it"

    def _seen(self, batch: int) -> int:
        return int((self.rows["batch"] == batch).sum())


def newest_decision(storage: ObjectStorage, sink: str) -> dict[int, int]:
    """Return the newest micro-batch that was decided, if there is one, and how many rows it has."""
    _, newest = SinkLog(storage, sink).latest()
    return {newest.batch_id: newest.rows} if newest and newest.batch_id is not None else {}


def query_id(query: Path) -> str | None:
    """Return Spark's id of the query at a checkpoint location; None if it has not begun."""
    metadata = query / "metadata"
    return str(json.loads(metadata.read_text())["id"]) if metadata.exists() else None


def ended(query: Path) -> int:
    """Return how many micro-batches Spark has ended, by its own log."""
    return 1 + max((int(path.name) for path in (query / "commits").glob("[0-9]*")), default=-1)


def newest(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the newest row of each subject; the order is that of micro-batches."""
    return rows.drop_duplicates(["kind", "name"], keep="last")


def not_once(rows: pd.DataFrame, flights: pd.DataFrame, batches: int) -> list[str]:
    """Return in words which rows of which micro-batch are missing, there more than once, or should not be there."""
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
    """Return by micro-batch how many flights there were at its end: the sum over all carriers."""
    carriers = found[found["kind"] == "carrier"].drop_duplicates(["batch", "name"])
    return carriers.pivot(index="batch", columns="name", values="flights").ffill().sum(axis=1).astype(int).tolist()


def _wanted(flights: pd.DataFrame, ends: Sequence[int]) -> pd.DataFrame:
    """Return what each micro-batch must show of each subject in it: its flights up to there."""
    batch = pd.Series(ends).searchsorted(flights["seq"], side="right")
    names = {
        kind: reduce(lambda name, more: name + "-" + more, (flights[column].fillna("") for column in columns))
        for kind, columns in SUBJECTS.items()
    }
    events = pd.concat([pd.DataFrame({"batch": batch, "kind": kind, "name": name}) for kind, name in names.items()])
    counts = events.groupby(["kind", "name", "batch"]).size()
    return counts.groupby(level=["kind", "name"]).cumsum().rename("flights").reset_index()[_ROW]
