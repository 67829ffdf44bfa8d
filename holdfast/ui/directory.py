"""A named location, presumably a state directory, with the queries whose state lies there."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from holdfast.errors import HoldfastError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.state_size import StateSizes
from holdfast.spark_integration.shard.pointer_row import operator_of
from holdfast.ui.inquiry import Inquiry, Patience, answers
from holdfast.ui.named_query import NamedQuery
from holdfast.ui.survey import Survey, survey
from holdfast.ui.views.heat_map import RowCounter
from holdfast.ui.views.time_line import GrowthReader

_EMPTY = (
    "Empty, or it does not exist: check the spelling. A state directory fills when a query commits with "
    "spark.holdfast.state.dir set to it, and a checkpointLocation when its query starts."
)


@dataclass(frozen=True)
class Awaited:
    """A location that shows nothing yet."""

    location: str
    what: str  #: What is awaited, or what is wrong, in a sentence
    is_wrong: bool = False  #: Whether waiting does not help


@dataclass(frozen=True)
class Directory:
    """A named location, presumably a state directory."""

    place: int  #: In the order in which they were given; part of URLs
    location: str  #: As it was given
    storage: ObjectStorage
    executor: Executor  #: For requests side by side
    surveys: Executor  #: For what is asked now and then
    surveyor: Inquiry[Survey]
    growth: GrowthReader
    rows: RowCounter
    queries: tuple[NamedQuery, ...] = ()  #: The named queries whose state lies here

    @classmethod
    def of(cls, place: int, storage: ObjectStorage, executor: Executor, surveys: Executor) -> Directory:
        """Return a directory; `surveys` must not be `executor`, for which a survey may wait."""
        sizes = StateSizes(storage, executor)
        surveyor = Inquiry(partial(survey, storage, sizes), surveys, storage.url)
        growth = GrowthReader(storage, executor, sizes)
        return cls(place, storage.url, storage, executor, surveys, surveyor, growth, RowCounter())

    @property
    def awaited(self) -> Awaited | None:
        """What an empty directory waits for; None if it is not empty, or unknown."""
        known = self.surveyor.known
        return Awaited(self.location, _EMPTY) if known and known.is_empty else None

    def query_of(self, directory: str, patience: Patience) -> tuple[NamedQuery, str] | None:
        """Return the query whose pointers name an operator's directory, and what it calls the operator; or None."""
        failed = None
        pointers = answers({place: one.pointers for place, one in enumerate(self.queries)}, patience)
        for place, told in pointers.items():
            if isinstance(told, HoldfastError):  # which need not be the one
                failed = told
            elif directory in told.found.named:
                return self.queries[place], operator_of(directory) or directory
            else:
                failed = told.error or failed
        if failed:
            raise failed
        return None
