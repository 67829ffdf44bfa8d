"""The live rows of one version of a shard, read from durable storage into memory."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.backends.base import Pointer
from holdfast.backends.run import Run, merge_runs
from holdfast.snapshotter.commits import ObjectCommitLog


def read_tables(log: ObjectCommitLog, pointer: Pointer, tables: Collection[str]) -> dict[str, Run]:
    """Return the live rows by table, one run each; a table without rows may be absent.

    Parameters
    ----------
    log : ObjectCommitLog
        Without a backend, so that it returns rows.
    tables : collection of str
        The tables to return.

    Raises
    ------
    StateLostError, CorruptionError, UnavailableError
        See `ObjectCommitLog.restore`.

    Notes
    -----
    Memory: the rows, twice while they are merged. A long chain of commits is merged step by step.
    """
    rows: dict[str, Run] = {}
    reached: list[Pointer] = []
    while reached != [pointer]:
        with log.restore(pointer, reached) as restored:
            newer = {name: run for name, run in restored.runs.items() if name in tables}
        for name, run in newer.items():
            older = [rows[name]] if name in rows else []
            rows[name] = merge_runs([*older, run], drop_deletes=True)
        reached = [restored.pointer]
    return rows
