"""What a user may say of state columns, and what is refused when an operator is defined."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from holdfast.backends.column_names import ColumnChanges
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.plan.arguments import changes_of_tables, changes_of_variables
from holdfast.spark_integration.processor.state.variables import StateVariable

ONE = {"state": ["n", "total"]}
TWO = {"a": ["n"], "b": ["n"]}
COLUMNS = StructType([StructField("total", LongType())])


def test_changes_by_table_and_by_variable() -> None:
    """An operator with one table need not name it."""
    wanted = {"state": ColumnChanges(frozenset({"m"}), {"old": "total"})}
    given: dict[str, Any] = {"drop": ["m"], "rename": {"old": "total"}}
    assert changes_of_tables(given, ONE) == changes_of_tables({"state": given}, ONE) == wanted
    assert changes_of_tables(None, ONE) == changes_of_tables({}, ONE) == {}
    assert changes_of_tables({"b": {"drop": ("m",)}}, TWO) == {"b": ColumnChanges(frozenset({"m"}))}
    variables = [StateVariable("sum", "value", COLUMNS), StateVariable("drop", "map", COLUMNS, COLUMNS)]
    assert changes_of_variables({"drop": given}, variables) == {"m.drop": wanted["state"]}
    assert changes_of_variables(None, variables) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["m"], "it is a mapping"),
        ({"dorp": ["m"]}, "that the operator declares; did you mean 'drop'?, unknown=['dorp']"),
        ({"sate": {"drop": ["m"]}}, "did you mean 'state'?, unknown=['sate']"),
        ({"state": {"drop": ["m"], "renmae": {"m": "n"}}}, "'drop' and 'rename'; did you mean 'rename'?"),
        ({"rename": {"m": "totl"}}, "one that is not declared; did you mean 'total'?"),
        ({"drop": ["m"], "add": ["x"]}, "nothing but 'drop' and 'rename'"),
        ({"state": ["m"]}, "nothing but 'drop' and 'rename'"),
        ({"drop": "m"}, "'drop' is a list of column names"),
        ({"drop": [1]}, "'drop' is a list of column names"),
        ({"rename": ["m"]}, "'rename' has new column names by old ones"),
        ({"rename": {"m": 1}}, "'rename' has new column names by old ones"),
        ({"drop": ["m"], "rename": {"m": "n"}}, "either dropped or renamed"),
        ({"drop": ["n"]}, "and declared as well"),
        ({"rename": {"n": "total"}}, "and declared as well"),
        ({"rename": {"m": "x"}}, "renamed to one that is not declared"),
        ({"rename": {"m": "n", "x": "n"}}, "two columns are renamed to one"),
        ({"drop": ["expires_ms"]}, "may be holdfast's own"),
        ({"rename": {"expires_ms": "n"}}, "may be holdfast's own"),
    ],
    ids=str,
)
def test_what_is_no_change(given: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match="stateChanges looks like") as caught:
        changes_of_tables(given, ONE)
    assert words in str(caught.value)


def test_changes_of_what_is_not_declared() -> None:
    """A table that is left out for now is changed when it is back."""
    with pytest.raises(InvalidArgumentError, match="name a state table that the operator declares"):
        changes_of_tables({"c": {"drop": ["m"]}}, TWO)
    with pytest.raises(InvalidArgumentError, match="name a state variable that the operator declares"):
        changes_of_variables({"drop": ["m"]}, [StateVariable("sum", "value", COLUMNS)])
    with pytest.raises(InvalidArgumentError, match="did you mean 'sum'"):
        changes_of_variables({"sums": {"drop": ["m"]}}, [StateVariable("sum", "value", COLUMNS)])
