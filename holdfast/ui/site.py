"""What the page shows: checkpoint directories, each with its latest survey."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from holdfast.errors import NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.ui.survey import Surveyor, survey
from holdfast.ui.views.growth import GrowthReader


@dataclass(frozen=True)
class Directory:
    """A checkpoint directory.

    Attributes
    ----------
    place : int
        In the order in which they were given; part of URLs.
    storage : ObjectStorage
    executor : concurrent.futures.Executor
        For requests side by side.
    surveyor : Surveyor
    growth : GrowthReader
    """

    place: int
    storage: ObjectStorage
    executor: Executor
    surveyor: Surveyor
    growth: GrowthReader

    @classmethod
    def of(cls, place: int, storage: ObjectStorage, executor: Executor, surveys: Executor) -> Directory:
        """Return a directory; `surveys` must not be `executor`, for which a survey may wait."""
        surveyor = Surveyor(partial(survey, storage), surveys)
        return cls(place, storage, executor, surveyor, GrowthReader(storage, executor))


@dataclass(frozen=True)
class Site:
    """All that the page shows.

    Attributes
    ----------
    directories : tuple of Directory
    """

    directories: tuple[Directory, ...]

    def directory(self, place: int) -> Directory:
        """Return a directory.

        Raises
        ------
        NotFoundError
            There is none of this number.
        """
        if not 0 <= place < len(self.directories):
            raise NotFoundError("the page shows no such directory", directory=place, directories=len(self.directories))
        return self.directories[place]
