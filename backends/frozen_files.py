"""Files of a frozen version, fetched block by block as they are read.

::

    stored       000012.sst ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
    local        000012.sst ·······▒▒··················▒▒▒▒    same size, with holes that read as zeros

A read from gigabytes thus fetches only the blocks that hold the wanted rows. `Backend.open_frozen` takes sparse files;
`Backend.thaw` takes whole files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class ByteRange(NamedTuple):
    """The bytes of a file from `start` to `end`."""

    name: str
    start: int
    end: int


class FrozenFiles(ABC):
    """The files of one frozen version; safe for many threads."""

    folder: Path  #: Holds the files under their names, at full size; private to one owner
    sizes: Mapping[str, int]  #: Bytes of each file

    @abstractmethod
    def require(self, name: str, start: int = 0, end: int | None = None) -> None:
        """Fetch and verify the bytes from `start` to `end`, by default the file's end."""

    def bring(self, places: Sequence[ByteRange]) -> None:
        """Fetch at least these bytes, perhaps unverified: a reader checks blocks, and calls `require` on damage."""
        for place in places:
            self.require(*place)
