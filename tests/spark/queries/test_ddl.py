"""Schemas as text mean the same to Spark, and one that cannot be read says whose it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.spark_types import parse_struct
from holdfast.testing.ddl import parse_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
@pytest.mark.parametrize("text", ["n lonk", "n long total double", ""])
def test_ddl_that_cannot_be_read_says_whose_it_is(spark: SparkSession, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="stateStructType"):
        parse_struct(text, "stateStructType")
    assert parse_struct("n long, total double", "it").names == ["n", "total"]


@pytest.mark.spark
def test_ddl_means_the_same_to_spark(spark: Any) -> None:
    for ddl in ("a int, b string not null", "a: decimal(5,2), b map<string,array<struct<x:int,y:timestamp_ntz>>>"):
        assert parse_schema(ddl) == StructType.fromDDL(ddl)
