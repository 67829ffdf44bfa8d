"""Numbers of a list's elements: they only grow, so that appending needs no look at the list.

An element's number is the version that its micro-batch commits, times 2³², plus a count within the call of the shard.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.run import Run
from holdfast.errors import CorruptionError

_NUMBERS_PER_VERSION = 1 << 32


def first_number(version: int) -> int:
    """Return the number of the first element that a version appends."""
    return version * _NUMBERS_PER_VERSION


def renumbered(run: Run, versions: int) -> Run:
    """Return elements, or their expiry index, renumbered as if written some versions earlier, in the same order.

    A restored query counts its versions anew: elements that it appends must come after those that it was given.

    Raises
    ------
    CorruptionError
        There are no such numbers.
    """
    place = 1 + len(run.schema.key)  # the number is the last key column, behind hash and deletion mark
    if run.batch.column(place).type != pa.int64():
        raise CorruptionError("the table of a list has no element numbers", table=run.schema.name)
    try:
        numbers = pc.subtract_checked(run.batch.column(place), pa.scalar(first_number(versions), pa.int64()))
    except (OverflowError, pa.ArrowInvalid) as exc:
        raise CorruptionError(
            "elements of a list have numbers that no query gives them", table=run.schema.name, versions=versions
        ) from exc
    return Run(run.schema, run.batch.set_column(place, run.batch.schema.field(place), numbers))
