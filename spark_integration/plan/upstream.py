"""The operators in a stream's lineage: a second one of the same name is refused when it is defined.

Each operator of a stream aliases its input with its name, which Spark keeps only in downstream plans: it pins no alias
with a query. Operators of other queries and of batches are in no such plan. An operator behind two parallel ones sees
both; without one, their first micro-batch refuses them.

The names are private to PySpark, and used here only: `tests/spark/queries/test_refused.py` and `connect_query.py` fail
where they are gone. Then the check moves to the first micro-batch.
"""

from __future__ import annotations

import re
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame

from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.ownership.operator_record import SAME_NAME
from holdfast.spark_integration.spark_versions import is_classic

_MARK = "holdfast-operator"
# A line of the plan: Spark's own has the alias as it is, Connect's as one of the node's arguments.
_MARKED = re.compile(rf"^\W*SubqueryAlias .*{_MARK}:([\w.-]+):(\w+)\W*$", re.MULTILINE)


def marked(frame: DataFrame, operator: str, definition_id: str) -> DataFrame:
    """Return an operator's input, marked as such for operators behind it."""
    return frame.alias(f"{_MARK}:{operator}:{definition_id}")


def require_new_name(df: DataFrame, operator: str) -> None:
    """Refuse an operator with a name used upstream, or two upstream of one name. Raises `InvalidArgumentError`."""
    names = [name for name, _ in sorted(set(_MARKED.findall(_plan_of(df))))] + [operator]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(SAME_NAME, operator=name)


def _plan_of(df: DataFrame) -> str:
    """Return Spark's plan, a line for each step; empty if unknown. One that is used twice is in it twice."""
    frame: Any = df
    try:
        if is_classic(df.sparkSession):
            return str(frame._jdf.queryExecution().analyzed().toString())  # noqa: SLF001
        return str(frame._plan.print())  # noqa: SLF001
    except (Py4JError, AttributeError):
        return ""
