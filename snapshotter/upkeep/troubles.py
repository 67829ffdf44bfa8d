"""Failure reports of all executors, in durable storage.

::

    <operator>/shard-0003/troubles/snapshot-<id>         snapshots fail: micro-batches will have to wait
                                   clean-up-<id>         clean-ups fail: storage grows
                                   micro-batch-42-<id>   the shard's call failed in this micro-batch

Each further failure of a kind replaces the report; consecutive background failures are counted. A newer snapshot
supersedes a snapshot report, and the micro-batch's commit a micro-batch report; a successful clean-up deletes clean-up
reports at once, and other reports after the grace period. If the storage is down, failures appear only in logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated

from holdfast import clock
from holdfast.errors import HoldfastError
from holdfast.snapshotter.fields import Stored
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

NAME = re.compile(r"(snapshot|clean-up|micro-batch-([0-9]{1,18}))-[0-9a-z]{8,40}")
_WHAT = re.compile(r"snapshot|clean-up|micro-batch-[0-9]{1,18}")
_BATCH = "micro-batch-"
_TEXT_MAX = 1_000


def of_batch(batch_id: int) -> str:
    """Return the kind of report for a micro-batch."""
    return f"{_BATCH}{batch_id}"


def batch_of(key: str) -> int | None:
    """Return the micro-batch that a report is about; None for a background failure."""
    match = NAME.fullmatch(key.rpartition("/")[2])
    return int(match[2]) if match and match[2] else None


@dataclass(frozen=True)
class Trouble(Stored, kind="trouble", notice=True):
    """A reported failure."""

    what: Annotated[str, _WHAT]  #: ``snapshot``, ``clean-up`` or ``micro-batch-42``
    error: str  #: The message of the newest failure
    in_a_row: int  #: Consecutive failures of one executor; always 1 for a micro-batch
    host: str  #: Host of the executor
    written_ms: int  #: Time of the report, by that host's clock, in ms since 1970
    shard: str  #: The prefix of the shard's objects


def report_trouble(shard: PrefixedStorage, what: str, error: Exception, in_a_row: int, host: str, now_ms: int) -> None:
    """Replace the previous report of this kind; if that cannot be deleted, store nothing."""
    older = [info.key for info in shard.list("troubles/") if _is_about(info.key, what)]
    if older:
        shard.delete(older)
    text = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
    text = text.encode(errors="backslashreplace").decode()  # a local path may hold any bytes
    trouble = Trouble(what, text[:_TEXT_MAX], in_a_row, host, now_ms, shard.prefix)
    shard.put(f"troubles/{what}-{clock.new_id()}", trouble.encode())


def _is_about(key: str, what: str) -> bool:
    """Return whether a key is that of a report of this kind; reports of any micro-batch are of one kind."""
    match = NAME.fullmatch(key.rpartition("/")[2])
    return match is not None and (match[1] == what or (match[1].startswith(_BATCH) and what.startswith(_BATCH)))


def read_trouble(shard: PrefixedStorage, key: str) -> Trouble:
    """Read a report. Raises `NotFoundError`, `CorruptionError`, `UnavailableError`."""
    match = NAME.fullmatch(key.rpartition("/")[2])
    found = Trouble.decode(shard.get(key), f"{shard.url}/{key}", shard=shard.prefix, what=match and match[1])
    return replace(found, error=found.error[:_TEXT_MAX])
