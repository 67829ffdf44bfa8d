"""Removes what an operator leaves in its local directory: the notes of former runs, and folders without shards."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from holdfast.spark_integration.executor.local_dirs import CLAIM_SUFFIX, RUNS, SHARD_PREFIX

#: The current run, and one that may still be ending.
RUNS_KEPT = 2


def remove_if_empty(operator_directory: Path) -> None:
    """Remove the directory of an operator that has no shards left here; if its query has none, the query's too.

    A query notes its runs under the operator's name even if the operator's shards are in another directory; see
    `holdfast.spark_integration.shard.operator_directory`.
    """
    query = operator_directory.parent
    if not any(query.glob(f"*/{SHARD_PREFIX}*")):
        going = [*query.glob("*"), query]
    elif not any(operator_directory.glob(f"{SHARD_PREFIX}*")):
        going = [operator_directory]
    else:
        return
    for folder in going:
        shutil.rmtree(folder / RUNS, ignore_errors=True)
        with suppress(OSError):  # something else is there
            folder.rmdir()


def remove_old_runs(query_directory: Path) -> None:
    """Remove the notes of all but the newest runs of a query."""
    for runs in query_directory.glob(f"*/{RUNS}"):
        _remove_old_notes(runs)


def _remove_old_notes(runs: Path) -> None:
    modified: dict[str, float] = {}
    notes = list(runs.glob("*"))
    for note in notes:
        with suppress(OSError):
            run = note.name.removesuffix(CLAIM_SUFFIX)
            modified[run] = max(note.stat().st_mtime, modified.get(run, 0))
    old = set(sorted(modified, key=modified.__getitem__)[:-RUNS_KEPT])
    for note in notes:
        if note.name.removesuffix(CLAIM_SUFFIX) in old:
            with suppress(OSError):
                note.unlink()
