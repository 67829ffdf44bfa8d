"""Frames and states against Spark itself: every type with every kind of value, and whatever chance makes of it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.types import DataType, StructType

from holdfast.spark_integration.keyed.frames import FrameFormat, OutputFrames
from holdfast.spark_integration.transport.output import RowsOutput
from tests.fuzz.output_values import COLUMNS, OF_ARROW, TYPES
from tests.fuzz.spark_worker import returned_by_spark
from tests.tiers import LONG, repetitions

_SAFE, _UNSAFE = FrameFormat("America/New_York"), FrameFormat("America/New_York", safecheck=False)
_PAIRS = sorted((data_type, name) for data_type in TYPES for name in COLUMNS)
# All but the long tier take one of so many; a prime, so that all types and all columns have their turn.
_ONE_OF = 1 if LONG else 17


def of_spark(returned: list[Any], schema: StructType, frame_format: FrameFormat) -> pa.Array | None:
    """Return the only column of what Spark makes of what functions return for keys; None where it fails."""
    try:
        return returned_by_spark(returned, schema, frame_format).column(0).combine_chunks()
    except Exception:  # noqa: BLE001 - anything that a conversion raises
        return None


def of_ours(returned: list[Iterable[pd.DataFrame]], schema: StructType, frame_format: FrameFormat) -> pa.Array | None:
    """Return the same of what ours makes, once Spark's worker has converted it for the JVM."""
    output = OutputFrames(schema, frame_format, 10_000)
    try:
        batches = [batch for key, frames in enumerate(returned) for batch in output.add_all(frames, (key,))]
        batches += output.finish()
    except Exception:  # noqa: BLE001 - as above
        return None
    return returned_by_spark([list(RowsOutput(schema).send(batches))], schema, frame_format).column(0).combine_chunks()


def is_same(left: pa.Array | None, right: pa.Array | None) -> bool:
    """Tell whether two columns hold the same, NaN being itself."""
    if left is None or right is None:
        return left is right
    return left.type == right.type and (left.equals(right) or str(left) == str(right))


def schema_of(data_type: DataType) -> StructType:
    return StructType().add("x", data_type)


@pytest.mark.smoke
@pytest.mark.parametrize("frame_format", [_SAFE, _UNSAFE], ids=["safe", "unsafe"])
def test_a_frame_becomes_what_spark_makes_of_it(frame_format: FrameFormat) -> None:
    """Each pair of a declared type and a column: the same rows, or an error on both."""
    wrong = []
    for data_type, name in _PAIRS[:: _ONE_OF if frame_format is _SAFE else 3 * _ONE_OF]:
        schema, returned = schema_of(TYPES[data_type]), [[pd.DataFrame({"x": COLUMNS[name]})]]
        sparks, ours = of_spark(returned, schema, frame_format), of_ours(returned, schema, frame_format)
        if not is_same(sparks, ours):
            wrong.append((data_type, name, sparks, ours))
    assert not wrong


@pytest.mark.parametrize("seed", repetitions(10, 600))
def test_keys_returned_together_become_what_spark_makes_of_each(seed: int) -> None:
    """No key's frame changes what becomes of another's: as on Spark where it calls each key in a micro-batch alone."""
    chance = random.Random(seed)
    data_type = chance.choice(list(TYPES))
    schema = schema_of(TYPES[data_type])
    rows: list[pa.Array] = []
    returned: list[list[pd.DataFrame]] = []
    for name in chance.sample(list(COLUMNS), len(COLUMNS)):
        frame = pd.DataFrame({"x": COLUMNS[name]})
        alone = of_spark([[frame]], schema, _SAFE)
        if alone is not None:
            returned.append([frame])
            rows.append(alone)
        if len(rows) == 5:
            break
    ours = of_ours([*returned, []], schema, _SAFE)
    assert is_same(ours, pa.concat_arrays(rows)), (data_type, [frame["x"] for [frame] in returned])


@pytest.mark.parametrize("seed", repetitions(10, 300))
def test_frames_of_one_dtype_become_what_spark_makes_of_them_together(seed: int) -> None:
    """Where Spark's worker gathers the frames of several keys, and need not change their dtypes."""
    chance = random.Random(seed)
    data_type, name = chance.choice(list(TYPES)), chance.choice(list(COLUMNS))
    values = COLUMNS[name]
    schema = schema_of(TYPES[data_type])
    returned = [[pd.DataFrame({"x": values})] for _ in range(chance.randint(2, 5))]
    if isinstance(values.dtype, np.dtype):  # else Spark's empty frame for this key would change it
        returned.insert(chance.randint(0, len(returned)), [])
    assert is_same(of_spark(returned, schema, _SAFE), of_ours(returned, schema, _SAFE)), (data_type, name)


@pytest.mark.parametrize("name", OF_ARROW)
def test_columns_of_arrow_that_spark_refuses_are_kept(name: str) -> None:
    """Spark's worker fails with all of them, ours with none: also where several keys return them."""
    types = [
        (data_type, frame)
        for data_type, frame in ((t, pd.DataFrame({"x": OF_ARROW[name]})) for t in TYPES.values())
        if of_ours([[frame]], schema_of(data_type), _SAFE) is not None
    ]
    assert types
    for data_type, frame in types:
        assert of_spark([[frame]], schema_of(data_type), _SAFE) is None
        one = of_ours([[frame]], schema_of(data_type), _SAFE)
        assert is_same(of_ours([[frame], [frame]], schema_of(data_type), _SAFE), pa.concat_arrays([one, one]))
