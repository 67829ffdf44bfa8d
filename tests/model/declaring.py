"""What an operator declares, without what it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.run import TableSchema
from holdfast.snapshotter.ownership.stored_tables import StoredTables


@dataclass(frozen=True)
class Declaring:
    """As much of a `ShardFunction` as is asked at a restart; takes any schemas that rows can be read with."""

    declared: Mapping[str, TableSchema]
    columns: Mapping[str, ColumnChanges] = field(default_factory=dict)

    def tables(self) -> Mapping[str, TableSchema]:
        return self.declared

    def changes(self) -> Mapping[str, ColumnChanges]:
        return self.columns

    def configuration(self) -> Mapping[str, str]:
        return {}

    def require_restartable(self, stored: StoredTables, configuration: Mapping[str, str]) -> None:
        """Leave it to `StoredTables.with_declared`."""
