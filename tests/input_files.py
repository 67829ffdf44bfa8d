"""Files as a stream's input, each a micro-batch of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_FIRST_FILE_S = 1_700_000_000


def add_file(folder: Path, number: int, table: pa.Table) -> Path:
    """Add a whole file to the input, newer than those with lower numbers, and return it.

    Spark takes the oldest file first, and files of the same millisecond in any order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unseen, path = folder / f".{number}", folder / f"{number:03d}.parquet"
    pq.write_table(table, unseen)
    os.utime(unseen, (_FIRST_FILE_S + number, _FIRST_FILE_S + number))
    return unseen.rename(path)
