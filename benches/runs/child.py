"""One run of one engine, in a process of its own: reads the job from standard input, writes what it measured.

A fresh process means a fresh JVM, fresh Python workers and no state from an earlier run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from holdfast.benches.instruments.measured import Places
from holdfast.benches.instruments.processes import adopt_orphans
from holdfast.benches.jobs.by_name import read_job
from holdfast.benches.runs.engines import ENGINES


def main() -> None:
    """Run the engine that standard input names."""
    order = json.load(sys.stdin)
    profile = order["profile"]
    places = Places(Path(order["disk"]), Path(order["memory"]), Path(profile) if profile else None)
    adopt_orphans()
    measured = ENGINES[order["engine"]].run(read_job(order["job"]), places)
    Path(order["result"]).write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
