"""State variables of a processor, and the tables that hold them.

::

    variable                                   table       key            value
    getValueState("total", "n long")           v.total     k…             n
    getListState("visits", "page string")      l.visits    k…, seq        page
    getMapState("seen", "id long", "n long")   m.seen      k…, entry.id   n

A variable with a TTL also has the column ``expires_ms`` and an index: `holdfast.spark_integration.ttl.expiry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.types import StructType

from holdfast.backends.run import TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.processor.state.variable_tables import ENTRY, SEQUENCE, Kind, free_name, table_of
from holdfast.spark_integration.spark_types import arrow_schema, require_key_types
from holdfast.spark_integration.ttl.expiry import EXPIRES, expiring_tables


@dataclass(frozen=True)
class StateVariable:
    """A declaration by ``getValueState``, ``getListState`` or ``getMapState``."""

    name: str
    kind: Kind
    schema: StructType  #: The schema of the value, of an element or of an entry's value
    user_key: StructType | None = None  #: The schema of a map's keys
    ttl_ms: int | None = None  #: Time to live after the last write of a value, element or entry; None if unlimited

    @property
    def table(self) -> str:
        """The name of the variable's table."""
        return table_of(self.kind, self.name)

    @property
    def what(self) -> str:
        """The variable's description in errors."""
        return f"{self.kind} state {self.name!r}"

    def tables(self, key_types: pa.Schema) -> Mapping[str, TableSchema]:
        """Return the schemas of the variable's tables for these types of keys. Raises `InvalidArgumentError`."""
        values = arrow_schema(self.schema, self.what, keep_not_null=True)
        keys = pa.schema([*key_types, *self._own_key_types(key_types)])
        if self.ttl_ms is None:
            return {self.table: TableSchema.of(self.table, keys, values)}
        if EXPIRES in values.names:
            raise InvalidArgumentError(f"{self.what}: with a TTL, holdfast adds a column {EXPIRES!r}: rename yours")
        return expiring_tables(self.table, keys, values)

    def _own_key_types(self, key_types: pa.Schema) -> pa.Schema:
        if self.kind == "list":
            return pa.schema([pa.field(free_name(SEQUENCE, key_types), pa.int64())])
        if self.user_key is None:
            return pa.schema([])
        require_key_types(list(self.user_key))
        types = arrow_schema(self.user_key, f"the key of {self.what}", keep_not_null=True)
        return pa.schema([field.with_name(free_name(ENTRY + field.name, key_types)) for field in types])
