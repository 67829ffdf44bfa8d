"""Checks that the state directory knows a shard's history before the shard continues from local copies.

::

    pointer ──▶ commit, carried ──▶ commits/41 ──▶ … ──▶ snapshots/30
                │                   └─ in the state directory: none of it there, and only this executor has the state
                └─ in Spark's state: all that there is of a young shard

An executor reads nothing of what it has itself. So a directory that somebody has emptied, or another one under the same
name, would show only when the executor is gone, and the state with it.
"""

from __future__ import annotations

import logging

from holdfast.backends.base import Pointer
from holdfast.errors import NotFoundError, StateLostError
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, find_operator
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.spark_integration.executor.per_process import kept_per_process

_log = logging.getLogger(__name__)
_BRING_IT_BACK = (
    "Set spark.holdfast.state.dir to the directory that has it, or bring its objects back: what is missing is left in "
    "this executor's copy alone"
)


@kept_per_process(1)
def _checked() -> set[tuple[str, str, str]]:
    """Return this process's finished checks: storage, run, and shard or warned operator."""
    return set()


def require_stored_once(log: ObjectCommitLog, record: OperatorRecord, pointer: Pointer, lineage: Lineage) -> None:
    """Check that the directory holds the objects of a shard's version, once per process, run and shard.

    Raises `StateLostError` if the directory has no version of the shard at all, or only such as are older than all that
    the pointer names.

    Parameters
    ----------
    record : OperatorRecord
        The one that this run would write.
    pointer : Pointer
        The version that the shard goes on from.
    lineage : Lineage
        Of that version.

    Notes
    -----
    Cost: 1 get.
    """
    of, of_operator = (
        (log.storage.url, record.run_id, log.objects.prefix),
        (log.storage.url, record.run_id, record.operator),
    )
    if of in _checked():
        return
    if lineage.chain:
        _require_versions(log, pointer, lineage)
    elif of_operator not in _checked() and find_operator(log.storage, record.operator) is None:
        _log.warning(
            "the state directory %s does not know the operator %r, which the query's pointers say it does: it was "
            "emptied, or is another one. Nothing of the state is lost, because the pointers carry all of it",
            *(log.storage.url, record.operator),
        )
        _checked().add(of_operator)
    _checked().add(of)


def _require_versions(log: ObjectCommitLog, pointer: Pointer, lineage: Lineage) -> None:
    newest = lineage.chain[-1]
    try:
        log.objects.get_range(newest.key, 0, 1)
        return
    except NotFoundError:
        stored = list_shard(log.objects).versions
        if stored and stored[-1].version >= newest.version:
            return  # where only a part is gone, restoring goes around it, or says what is missing
    raise StateLostError(
        "the state directory has only older versions than the query's pointer names: it was restored from an older "
        f"backup, or is another one. {_BRING_IT_BACK}"
        if stored
        else "the state directory has nothing of the state that the query's pointer names: it was emptied, or is "
        f"another one. {_BRING_IT_BACK}",
        shard=log.objects.prefix,
        version=pointer,
        missing=newest.key,
        newest_stored=stored[-1].pointer if stored else None,
        storage=log.storage.url,
    )
