"""What the `ShardFunction` of each operator in one line has in common: what a restart may change."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.backends.column_names import ColumnChanges
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.shard.operator import ShardFunction
from holdfast.spark_integration.tables.restarting import require_readable_tables, require_same_operator


class OperatorFunction(ShardFunction):
    """A `ShardFunction` that goes on with the tables of the same operator, whose columns nobody drops or renames."""

    def changes(self) -> Mapping[str, ColumnChanges]:
        return {}

    def require_restartable(self, stored: StoredTables, configuration: Mapping[str, str]) -> None:
        require_same_operator(configuration, self.configuration())
        self.require_same_columns(stored)
        require_readable_tables(stored, self.tables())

    def require_same_columns(self, stored: StoredTables) -> None:
        """Check that stored columns are what the operator takes them for; where names and types say all, they are."""
