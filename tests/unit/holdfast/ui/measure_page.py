"""How long the page takes, and how much memory, with a directory of many shards.

``python -m tests.unit.holdfast.ui.measure_page 10000`` makes such a directory, lists it, opens each view, and prints a
line of JSON for each.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from holdfast.ui.app import make_app
from holdfast.ui.site import open_site
from tests.ram import place_in_ram
from tests.unit.holdfast.ui import sample_state

TOKEN = "token"
VIEWS = (
    "",
    "0/totals/",
    "0/totals/?measure=lag",
    "0/totals/?first=4300&last=4400",
    "0/totals/shard/321",
    "0/totals/upkeep",
    "0/totals/upkeep?check=verify&first=321",
)


def measured(root: Path) -> Iterator[dict[str, Any]]:
    """Yield how long the first listing and each view take, how large the page is, and memory in MB since the start."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ExitStack() as stack:
        begun = time.perf_counter()
        requests, surveys = stack.enter_context(ThreadPoolExecutor(8)), stack.enter_context(ThreadPoolExecutor(1))
        site = open_site([str(root)], {}, requests, surveys, stack)
        objects = len(site.directory(0).surveyor.latest().found.operators["totals"].objects)
        yield {"listed": objects, **_figures(begun, before_kb)}
        page = make_app(site, TOKEN, ["localhost"]).test_client()
        for view in VIEWS:
            begun = time.perf_counter()
            answer = page.get(f"/{TOKEN}/{view}")
            assert answer.status_code == 200, answer.text
            yield {"view": view, "bytes": len(answer.data), **_figures(begun, before_kb)}


def _figures(begun: float, before_kb: int) -> dict[str, float]:
    used_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    return {"seconds": round(time.perf_counter() - begun, 3), "peak_mb": used_kb // 1024}


if __name__ == "__main__":
    shards, commits = int(sys.argv[1]), int((*sys.argv[2:], 14)[0])
    with tempfile.TemporaryDirectory(dir=place_in_ram()) as folder:
        directory = sample_state.make_huge(Path(folder) / "state", shards, commits)
        for figures in measured(directory):
            print(json.dumps(figures), flush=True)
