"""The state variables of a processor during one call of a shard."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.backends.run import Keys, TableSchema
from holdfast.mvcc import Transaction
from holdfast.spark_integration.processor.state.list_state import ProcessorListState
from holdfast.spark_integration.processor.state.map_state import ProcessorMapState
from holdfast.spark_integration.processor.state.slab import Slab
from holdfast.spark_integration.processor.state.state_rows import StateRows, UserKeys
from holdfast.spark_integration.processor.state.value_state import ProcessorValueState
from holdfast.spark_integration.processor.state.variable_tables import KINDS, table_of
from holdfast.spark_integration.processor.state.variables import StateVariable
from holdfast.spark_integration.shard.operator import BatchTimes
from holdfast.spark_integration.tables.entry_rows import EntryRows
from holdfast.spark_integration.tables.key_rows import Expiry, expiry_of, index_of
from holdfast.spark_integration.tables.timers import is_by_time

State = ProcessorValueState | ProcessorListState | ProcessorMapState


class ProcessorStates:
    """Opens variables as they are declared, and writes and evicts all of them.

    `tables`: the operator's; `grouping`: number of columns of the grouping key.
    """

    def __init__(
        self,
        transaction: Transaction,
        tables: Mapping[str, TableSchema],
        grouping: int,
        slab: Slab,
        times: BatchTimes,
    ) -> None:
        self._transaction = transaction
        self._tables = tables
        self._grouping = grouping
        self._slab = slab
        self._times = times
        self._opened: dict[str, State] = {}
        self._expiries: list[Expiry] = []
        self._deleted: list[str] = []

    def open(self, variable: StateVariable) -> State:
        """Return the state of a variable."""
        expiry = expiry_of(self._transaction, variable.table, variable.ttl_ms, self._times)
        if expiry is not None:
            self._expiries.append(expiry)
        state = self._state(variable, expiry)
        self._opened[variable.name] = state
        return state

    def _state(self, variable: StateVariable, expiry: Expiry | None) -> State:
        rows = StateRows(variable.schema, variable.what)
        if variable.kind == "value":
            return ProcessorValueState(self._transaction, variable.table, expiry, rows, self._slab)
        entries = EntryRows(self._transaction, self._tables[variable.table], self._grouping, expiry)
        if variable.user_key is None:
            return ProcessorListState(variable.name, entries, rows, self._slab, self._transaction.version)
        user_keys = UserKeys(variable.user_key, f"the key of {variable.what}")
        return ProcessorMapState(variable.name, entries, user_keys, rows, self._slab, variable.schema.names)

    def drop(self, name: str) -> None:
        """Remember to remove all values of a variable; if it was opened, its state cannot be used any more."""
        self._deleted.append(name)
        if name in self._opened:
            self._opened.pop(name).drop(name)

    def drop_deleted(self) -> None:
        """Remove all values of the variables that ``deleteIfExists`` named."""
        tables = self._transaction.tables
        for table in [table_of(kind, name) for kind in KINDS for name in self._deleted]:
            for part, is_index in ((table, False), (index_of(table), True)):
                # A variable's name may be that of another's index.
                if part in tables and is_by_time(tables[part]) == is_index:
                    for run in self._transaction.scan(part):
                        self._transaction.delete(part, Keys(run.hashes, run.keys))

    def begin(self) -> None:
        """Begin a slab."""
        for state in self._opened.values():
            state.begin()

    def flush(self) -> None:
        """Write what a slab has changed.

        Raises `StateValueError` if a value does not fit its column; ``row`` is the place of its key in the slab.
        """
        for state in self._opened.values():
            state.flush()

    def evict(self) -> None:
        """Remove what has expired."""
        for expiry in self._expiries:
            expiry.evict(self._transaction)

    def next_expiry_ms(self) -> int | None:
        """Return when the next values expire, once `evict` has run; None if none ever do."""
        found = (expiry.earliest(self._transaction) for expiry in self._expiries)
        return min((at for at in found if at is not None), default=None)
