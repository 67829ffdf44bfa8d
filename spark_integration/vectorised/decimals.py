"""Division of decimals as Spark divides a sum by a count: rounded half up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.errors import InvalidArgumentError

_LOW = (1 << 64) - 1


def divided(totals: pa.Array, counts: pa.Array, t: pa.Decimal128Type) -> pa.Array:
    """Return decimals divided by integers, null where either is.

    The totals' scale is no larger than that of `t`, the quotients' type. Raises `InvalidArgumentError` if a quotient
    has more digits than `t`.
    """
    is_null = totals.is_null().to_numpy(zero_copy_only=False) | counts.is_null().to_numpy(zero_copy_only=False)
    by: npt.NDArray[np.object_] = np.where(is_null, 1, counts.fill_null(1).to_numpy()).astype(object)
    unscaled = np.where(is_null, 0, _unscaled(totals)) * 10 ** (t.scale - totals.type.scale)
    halves = (2 * np.abs(unscaled) + by) // (2 * by)
    quotients = np.where(unscaled < 0, -halves, halves)
    if len(quotients) and int(halves.max()) >= 10**t.precision:
        raise InvalidArgumentError("an average has more digits than its type holds", type=str(t))
    return _of_unscaled(quotients, is_null, t)


def _unscaled(values: pa.Array) -> npt.NDArray[np.object_]:
    """Return decimals as integers: their digits."""
    words = np.frombuffer(values.buffers()[1], np.uint64)[2 * values.offset : 2 * (values.offset + len(values))]
    low, high = words[0::2].astype(object), words[1::2].view(np.int64).astype(object)
    digits: npt.NDArray[np.object_] = high * (_LOW + 1) + low
    return digits


def _of_unscaled(digits: npt.NDArray[np.object_], is_null: npt.NDArray[np.bool_], t: pa.Decimal128Type) -> pa.Array:
    words = np.empty(2 * len(digits), np.uint64)
    words[0::2] = (digits & _LOW).astype(np.uint64)
    words[1::2] = (digits >> 64).astype(np.int64).view(np.uint64)
    validity = pa.array(~is_null).buffers()[1] if len(digits) else None
    return pa.Array.from_buffers(t, len(digits), [validity, pa.py_buffer(words)])
