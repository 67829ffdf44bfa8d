"""The hash of a key without Spark: of all its digits. That it is Spark's is told in tests/spark/state_source."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
import xxhash

from holdfast.spark_integration.lookup.keys import hash_of_key

SEED = 42


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("12345678901234567890123456789012345678", 0),
        ("-99999999999999999999999999999999999999", 0),
        ("123456789012345678901234567890.12345678", 8),
        ("1.000000000000000000000000000000000001", 36),
    ],
)
def test_a_decimal_is_hashed_with_all_its_digits(text: str, scale: int) -> None:
    """Python's decimals keep 28 unless they are told otherwise: a look-up then finds nothing, and says so."""
    unscaled = int(text.replace(".", ""))
    data = unscaled.to_bytes(unscaled.bit_length() // 8 + 1, "big", signed=True)
    key = pa.scalar(Decimal(text), pa.decimal128(38, scale))
    assert hash_of_key([key]) == xxhash.xxh64_intdigest(data, SEED)
