"""Accumulators of estimated distinct counts and percentiles.

::

    approx_count_distinct("user")        n.registers   [(register 3, rank 5), (17, 1), …]
    percentile_approx("delay", 0.9)      p.ranked      [(value -2.0, count 1, slack 0), (0.5, 40, 12), …]

`Registers` are those of Spark's HyperLogLog++, initially 0. A hash's first bits select a register; the hash's rank is
the number of zeros that follow, plus 1. A register keeps the largest rank. State lists non-zero registers as integers.

`Ranked` lists a sample of a key's values in order (Greenwald and Khanna, 2001). A value's ``count`` is the number of
values after the previous listed value, up to and including this value. A value's rank is at least the sum of the counts
up to it, and at most its ``slack`` more. Two rules keep each rank within n / accuracy of a listed value's rank::

    merge      a value of one state may be on either side of values that the other omits: slack grows by their maximum
    compress   a value is omitted while ``count + slack - 1`` of the next listed value is at most 2 ⌊n / accuracy⌋

So the ranks of listed neighbours differ by at most 2 ⌊n / accuracy⌋ + 1, and each rank is within half of that of a
neighbour. Omitting a value adds no uncertainty to other ranks: errors do not accumulate over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import BoolArray, IntArray, storage_type
from holdfast.spark_integration.operators.accumulators import Accumulator, elements, lists
from holdfast.spark_integration.vectorised.arrays import ranks
from holdfast.spark_integration.vectorised.groups import Groups

#: Low bits of the integer, which hold the rank; the bits above hold the register's number.
_RANK_BITS = 6
#: Upper limit of a register number's bits for number and rank to fit into a signed 16-bit integer.
_FEW_BITS = 9


@dataclass(frozen=True)
class Registers(Accumulator):
    """Spark's estimate of the number of distinct values, from their hashes."""

    bits: int  #: Bits of a register's number

    @property
    def _type(self) -> pa.DataType:
        return pa.large_list(pa.int16() if self.bits <= _FEW_BITS else pa.int32())

    def fields(self) -> list[pa.Field]:
        return [pa.field(f"{self.name}.registers", self._type)]

    def lift(self, values: pa.Array) -> list[pa.Array]:
        hashes = values.drop_null().to_numpy().view(np.uint64)
        rest = (hashes << np.uint64(self.bits)) | np.uint64(1 << (self.bits - 1))
        # Clear the bit below each set bit, so that no number is rounded up to the next power of 2.
        length = np.frexp((rest & ~(rest >> np.uint64(1))).astype(np.float64))[1]
        register = (hashes >> np.uint64(64 - self.bits)).astype(np.int64)
        return [self._lists(values.is_valid().to_numpy(zero_copy_only=False), register << _RANK_BITS | (65 - length))]

    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        of, registers = elements(states[0])
        bits = self.bits + _RANK_BITS
        found = np.sort(groups.index[of] << bits | registers.to_numpy())
        largest = found[np.diff(found >> _RANK_BITS, append=-1) != 0]
        return [self._lists(np.bincount(largest >> bits, minlength=len(groups)), largest & ((1 << bits) - 1))]

    def result(self, states: Sequence[pa.Array]) -> pa.Array:
        of, registers = elements(states[0])
        rank = registers.cast(pa.int64()).to_numpy() & ((1 << _RANK_BITS) - 1)
        m, n = 1 << self.bits, len(states[0])
        zeros = m - np.bincount(of, minlength=n)
        raw = _ALPHA.get(self.bits, 0.7213 / (1 + 1.079 / m)) * m * m / (zeros + np.bincount(of, 0.5**rank, n))
        with np.errstate(divide="ignore"):
            linear = m * np.log(m / zeros)
        estimate = np.where(raw < 5 * m, self._without_bias(raw), raw)
        estimate = np.where((zeros > 0) & (raw <= 2.5 * m), linear, estimate)
        return pa.array(np.floor(estimate + 0.5).astype(np.int64))

    def _without_bias(self, raw: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the number of values whose expected raw estimate equals the given estimate."""
        m = 1 << self.bits
        per_register, rank = np.linspace(0, 6, 601), np.arange(64)[:, np.newaxis]
        # The expected value of 0.5**rank, from the probability that no value of a register has a larger rank.
        expected = (np.exp(-per_register * 0.5**rank) * 0.5 ** (rank + 1)).sum(axis=0)
        return np.interp(raw, _RAW * m / expected, per_register * m)

    def _lists(self, lengths: IntArray | BoolArray, registers: IntArray) -> pa.Array:
        return lists(lengths, pa.array(registers, self._type.value_type), self._type)


#: The published constants for few registers, by `Registers.bits`; and 1 / (2 ln 2), the limit for many registers.
_ALPHA, _RAW = {4: 0.673, 5: 0.697, 6: 0.709}, 0.5 / np.log(2)


@dataclass(frozen=True)
class Ranked(Accumulator):
    """The values at the requested percentiles; a rank is off by at most 1 / accuracy of the values."""

    type: pa.DataType  #: The type of a value
    shown: pa.DataType  #: The type of the result: a value, or a list with a value per percentage
    percentages: tuple[float, ...]  #: Fractions from 0 to 1
    accuracy: int

    @property
    def _type(self) -> pa.DataType:
        parts = {"value": storage_type(self.type), "count": pa.int64(), "slack": pa.int64()}
        return pa.large_list(pa.struct(list(parts.items())))

    def fields(self) -> list[pa.Field]:
        return [pa.field(f"{self.name}.ranked", self._type)]

    def lift(self, values: pa.Array) -> list[pa.Array]:
        kept = values.drop_null()
        alone = np.ones(len(kept), np.int64)
        return [self._lists(values.is_valid().to_numpy(zero_copy_only=False), kept, alone, alone - 1)]

    def reduce(self, groups: Groups, states: Sequence[pa.Array]) -> list[pa.Array]:
        of, values, count, slack = _ranked(states[0])
        unsure = np.zeros(len(states[0]), np.int64)
        np.maximum.at(unsure, of, count + slack - 1)
        group = groups.index[of]
        slack = slack - unsure[of] + np.bincount(groups.index, unsure, len(groups)).astype(np.int64)[group]
        order = np.lexsort([ranks(values), group])
        group, count, slack = group[order], count[order], slack[order]
        first, last = np.diff(group, prepend=-1) != 0, np.diff(group, append=-1) != 0
        slack[first | last] = 0  # the smallest and largest values are always listed
        up_to = np.cumsum(count)
        room = 2 * (np.bincount(group, count, len(groups)) // self.accuracy).astype(np.int64)[group]
        begins = np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))
        kept = _linked(last, np.maximum(np.searchsorted(up_to, up_to + slack - 1 - room), begins))
        lengths, rows = np.bincount(group[kept], minlength=len(groups)), pa.array(order[kept])
        return [self._lists(lengths, values.take(rows), np.diff(up_to[kept], prepend=0), slack[kept])]

    def result(self, states: Sequence[pa.Array]) -> pa.Array:
        of, values, count, slack = _ranked(states[0])
        n = np.bincount(of, count, len(states[0]))
        least = np.cumsum(count) - (np.cumsum(n) - n)[of]
        starts = np.flatnonzero(np.diff(of, prepend=-1))
        found = np.full((len(n), len(self.percentages)), -1)
        for i, percentage in enumerate(self.percentages):
            wanted = np.maximum(np.ceil(percentage * n), 1)[of]
            off = np.maximum(wanted - least, least + slack - wanted)
            fewest = np.repeat(np.minimum.reduceat(off, starts), np.diff(starts, append=len(of)))
            nearest = np.flatnonzero(off == fewest)
            found[of[starts], i] = nearest[np.searchsorted(nearest, starts)]
        has_any = n > 0
        if not pa.types.is_list(self.shown):
            return values.take(pa.array(found[:, 0], mask=~has_any))
        listed = values.take(pa.array(found[has_any].ravel()))
        each = lists(has_any * len(self.percentages), listed, storage_type(self.shown))
        return pc.if_else(pa.array(has_any), each, pa.scalar(None, each.type))

    def _lists(self, lengths: IntArray | BoolArray, values: pa.Array, count: IntArray, slack: IntArray) -> pa.Array:
        fields = [self._type.value_type.field(i) for i in range(3)]
        items = pa.StructArray.from_arrays([values, pa.array(count), pa.array(slack)], fields=fields)
        return lists(lengths, items, self._type)


def _ranked(states: pa.Array) -> tuple[IntArray, pa.Array, IntArray, IntArray]:
    """Return each value's state number, the values, their counts and their slacks."""
    of, items = elements(states)
    values, count, slack = items.flatten()
    return of, values, count.to_numpy(), slack.to_numpy()


def _linked(kept: BoolArray, before: IntArray) -> BoolArray:
    """Return the kept places with all of their direct and indirect predecessors."""
    while True:
        more = kept.copy()
        more[before[kept]] = True
        if np.array_equal(more, kept):
            return kept
        # Each round doubles the distance.
        kept, before = more, before[before]
