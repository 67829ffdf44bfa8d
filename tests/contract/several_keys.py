"""Rows of an upsert by several columns, a boolean and nulls among them: most of what can go wrong by one cannot."""

from __future__ import annotations

import pyarrow as pa

KEYS = ["flag", "key", "word"]


class SeveralKeys:
    """Rows for a `SinkContract` of a sink that upserts by `KEYS`."""

    def schema(self) -> pa.Schema:
        return pa.schema([("flag", pa.bool_()), ("key", pa.int64()), ("word", pa.string()), ("amount", pa.float64())])

    def rows(self, n: int, seed: int, attempt: int = 0) -> pa.Table:
        flags = [(None, True, False)[i % 3] for i in range(n)]
        keys = [i // 3 or None for i in range(n)]
        amounts = [attempt + i / 4 for i in range(n)]
        return pa.table([flags, keys, [f"seed {seed}"] * n, amounts], schema=self.schema())
