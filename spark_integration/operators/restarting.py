"""What an operator may change at a restart."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.backends.schema import NEW_QUERY, TableSchema
from holdfast.errors import SchemaMismatchError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.operators.accumulators import computations
from holdfast.spark_integration.tables.restarting import require_same_api


def require_same_operator(stored: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Check that state is opened by the operator that wrote it, with the same windows or ranking.

    Parameters
    ----------
    stored, now : mapping of str to str
        What an operator lets nobody change: of the run that began, and of this one.

    Raises
    ------
    SchemaMismatchError
        It is not.
    """
    require_same_api(stored, now)
    for name, value in now.items():
        if stored.get(name, value) != value:
            raise SchemaMismatchError(
                f"the {name} has changed, and stored rows are of the old one: set it back, {NEW_QUERY}",
                stored=stored[name],
                defined=value,
            )


def require_same_aggregates(stored: StoredTables, declared: Mapping[str, TableSchema]) -> None:
    """Check that each column is computed as in all runs that have declared it, which stored columns say themselves.

    Raises
    ------
    SchemaMismatchError
        One is not.
    """
    for table in declared.keys() & stored.live.keys():
        before = computations(stored.live[table].value)
        for column, now in computations(declared[table].value).items():
            if before.get(column, now) != now:
                raise SchemaMismatchError(
                    f"column {column} was computed by another aggregate: give the new one another name, {NEW_QUERY}",
                    stored=before[column],
                    defined=now,
                )
