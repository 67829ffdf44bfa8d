"""Names of operators: what they are called where nobody names them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.plan.arguments import operator_name


class _Hidden:
    pass


def __hidden_too() -> None:
    pass


@pytest.mark.parametrize(
    ("func", "name", "chosen"),
    [(_Hidden, None, "Hidden"), (__hidden_too, None, "hidden_too"), (_Hidden, "totals", "totals")],
)
def test_a_private_class_or_function_gives_its_name_without_underscores(
    func: Any, name: str | None, chosen: str
) -> None:
    """Spark takes private classes, and readers of savepoints pass over folders that begin with an underscore."""
    assert operator_name(func, name) == chosen


@pytest.mark.parametrize(("func", "name"), [(type("_", (), {}), None), (lambda: None, None), (_Hidden, "_hidden")])
def test_what_names_no_operator_is_refused(func: Any, name: str | None) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot name an operator: pass name="):
        operator_name(func, name)
