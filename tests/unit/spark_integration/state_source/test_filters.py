"""Filters say where rows are only where their values are certain; else all is read, and Spark filters."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import datasource as spark
from pyspark.sql.variant_utils import VariantUtils

from holdfast.spark_integration.lookup.spark_hash import hash_of_key
from holdfast.spark_integration.state_source.filters import wanted_hashes

pytestmark = pytest.mark.skipif(not hasattr(spark, "EqualTo"), reason="Spark hands over filters from 4.1 on")
KEY = pa.schema([("k", pa.decimal128(38, 1))])


def handed_over(text: str) -> Decimal:
    """Return a decimal as Spark's planning process gives it to a data source."""
    found = VariantUtils.to_python(*VariantUtils.parse_json(text))
    assert isinstance(found, Decimal)
    return found


def test_a_decimal_that_spark_rounds_says_nothing_about_the_hash() -> None:
    """The rows of the key would be left out, and nobody would know."""
    text = "1234567890123456789012345678901234567.5"
    long = handed_over(text)
    assert long != Decimal(text), "Spark keeps all digits by now: drop this exception"
    assert wanted_hashes([spark.EqualTo(("k",), long)], KEY) is None
    assert wanted_hashes([spark.In(("k",), (Decimal(1), long))], KEY) is None
    short = handed_over("1234567.5")
    assert wanted_hashes([spark.EqualTo(("k",), short)], KEY) == {hash_of_key([pa.scalar(short, KEY.field("k").type)])}
