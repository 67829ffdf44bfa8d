"""Chooses the directory of one operator of one query below the state directory.

::

    spark.holdfast.state.dir
        totals/                 the first query that uses the name
        totals@<query id>/      any other query with an operator of this name: a DataFrame started twice, a query whose
                                checkpoint location was deleted

A query that was restored or cloned has an object that says which operators it began with; a clone goes on under the id
of the query that was cloned, which its pointers name.

A shard without a pointer chooses; from then on its pointer names the directory, whatever else changes. So two shards
of a query may choose differently without harm: each finds its own again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from typing import TypeVar

from holdfast.errors import ConflictError, SchemaMismatchError
from holdfast.snapshotter.ownership.operator_record import find_operator
from holdfast.snapshotter.ownership.query_origin import QueryOrigin
from holdfast.snapshotter.storage.object_storage import ObjectStorage

OPERATOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
QUERY_ID = re.compile(r"[A-Za-z0-9-]{1,64}")

_log = logging.getLogger(__name__)
_Claim = TypeVar("_Claim")


def directory_of_query(operator: str, query_id: str) -> str:
    """Return the directory that only this query chooses."""
    return f"{operator}@{query_id}"


def operator_of(directory: str) -> str | None:
    """Return the operator that a directory's name says it belongs to; None if it is not such a name."""
    name, found, query_id = directory.partition("@")
    if not OPERATOR_NAME.fullmatch(name) or (found and not QUERY_ID.fullmatch(query_id)):
        return None
    return name


def require_restored(origin: QueryOrigin, operator: str, allowed: Collection[str]) -> None:
    """Check that an operator which begins without state in a restored query is one that should.

    Raises `SchemaMismatchError` if it has no state, and nobody has named it: most likely its name is misspelt.

    `allowed`: operators that may, as the session says.
    """
    if operator in origin.operators or operator in origin.empty or origin.unnamed:
        return
    restored = ", ".join(sorted(origin.operators)) or "none"
    if operator not in allowed:
        raise SchemaMismatchError(
            "this query was restored without state for this operator: give it the name of the restored operator that "
            "it continues. If it should begin without state, set spark.holdfast.restore.allowNew to its name",
            operator=operator,
            restored=restored,
        )
    _log.warning("%r begins without state in a query that was restored with the operators %s", operator, restored)


def begin_directory(
    storage: ObjectStorage, operator: str, query_id: str, claim: Callable[[str], _Claim], *, is_run_known: bool
) -> tuple[str, _Claim]:
    """Choose and claim the directory of a shard that has no pointer; return it, and what `claim` returned.

    Raises `ConflictError` if another operator of this query has the name, or another application runs the query;
    `FencedError` if a newer run of this query is at work; `SchemaMismatchError` if the state was written with other
    columns or another number of shards.

    `claim`: claims a directory; raises ConflictError if it is another query's;
    `is_run_known`: whether the task knows for certain which run it belongs to. If not, it must not begin under the
    shared name.
    """
    own = directory_of_query(operator, query_id)
    stored = find_operator(storage, operator)
    is_ours = stored is not None and stored.query_id == query_id
    if is_ours or (is_run_known and stored is None and find_operator(storage, own) is None):
        try:
            return operator, claim(operator)
        except ConflictError as exc:
            # Moving elsewhere helps only against another query: a copy of this one, a newer run, or another of its
            # operators would be there, too.
            if exc.facts.get("owner") in (None, query_id):
                raise
            _log.warning("%s", exc)
    _log.warning("the directory %r belongs to another query; the state of query %s goes to %r", operator, query_id, own)
    return own, claim(own)
