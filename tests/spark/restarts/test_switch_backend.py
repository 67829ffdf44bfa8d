"""A query moves from one backend to another at a restart, by one key of the configuration."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.spark.conftest import Lab

pytestmark = pytest.mark.spark

# What each keeps of a query below an executor's directory.
LOCAL_FILES = {
    "memory": "memory/{query}/totals/shard-*/versions/*",
    "filesystem": "disk/{query}/totals/shard-*/versions/*",
    "rocksdb": "disk/{query}/totals/shard-*/versions/*",
}


def test_a_query_goes_on_with_another_backend(lab: Lab) -> None:
    """Commits do not know who wrote them: nothing is lost or counted twice, also on the way back to old local files."""
    seen: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for step, backend in enumerate(["memory", "rocksdb", "filesystem", "memory", "rocksdb"]):
        lab.configure({"backend": backend})
        for batch in range(2):
            # Some keys come with every step, some with one only, and must be carried over.
            rows = [(key, 10 * step + batch) for key in ("always", f"step {step}", f"step {step - 2}", "always")]
            lab.feed(rows)
            for key, value in rows:
                seen[key] += 1
                total[key] += value
        outputs = lab.run(lab.totals())
        assert len(outputs) == 2
        assert {row["key"]: (row["n"], row["total"]) for row in outputs[-1]} == {
            key: (seen[key], total[key]) for key, _ in rows
        }
        query = json.loads((lab.folder / "query" / "metadata").read_text())["id"]
        assert list(lab.local.glob(f"*/executor-*/{LOCAL_FILES[backend].format(query=query)}"))
        assert lab.state() == {key: (seen[key], total[key]) for key in seen}
