"""Files of Spark's default state store, ``HDFSBackedStateStoreProvider``: rows by version, as changes and as a whole.

::

    state/0/3/                operator 0, partition 3
        7.delta               what micro-batch 6 changed
        8.delta
        6.snapshot            all rows of version 6

Version 8 is the newest snapshot not above it, and all changes since. What stands in them is told in
`holdfast.spark_integration.spark_state.row_streams`; each file is a stream of the codec that Spark has pinned.

Source: Spark 4.3's ``HDFSBackedStateStoreProvider``, and locations that it wrote.
"""

from __future__ import annotations

from holdfast.errors import NotFoundError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.spark_state.compressed import decompressed
from holdfast.spark_integration.spark_state.row_streams import Named, Rows, RowStream, require_few


def read_rows(partition: ObjectStorage, at: Named, codec: str, limit_bytes: int) -> Rows:
    """Return the rows of a version.

    Parameters
    ----------
    partition : ObjectStorage
        Its root is the folder of the partition.
    at : Named
        This store has no ids.
    codec : str
    limit_bytes : int
        How large each file may be, what it holds, and all rows.

    Raises
    ------
    NotFoundError
        A file is missing: Spark has purged the version, or has not made it yet.
    CorruptionError
        A file is damaged, or too large.
    """
    found = {info.key for info in partition.list("")}
    first = at.version
    while first > 0 and f"{first}.snapshot" not in found and f"{first}.delta" in found:
        first -= 1
    rows: Rows = {}
    if first > 0:
        stream_of(partition, f"{first}.snapshot", codec, limit_bytes).apply_to(rows)
    for number in range(first + 1, at.version + 1):
        stream_of(partition, f"{number}.delta", codec, limit_bytes).apply_to(rows)
        require_few(rows, limit_bytes, partition.url)
    return rows


def stream_of(partition: ObjectStorage, name: str, codec: str, limit_bytes: int) -> RowStream:
    """Return a file's content; raises NotFoundError if Spark has purged it."""
    source = f"{partition.url}/{name}"
    try:
        data = partition.get(name, limit_bytes)
    except NotFoundError as exc:
        raise NotFoundError("Spark has purged this version of its state, or has not made it", file=source) from exc
    return RowStream(decompressed(data, codec, limit_bytes, source), source, limit_bytes)
