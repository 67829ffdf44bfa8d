"""One run of one engine, in a process of its own: reads the order from standard input, writes what it measured.

A fresh process means a fresh JVM, fresh Python workers and no state from an earlier run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from holdfast.benches.instruments.measured import Places
from holdfast.benches.instruments.processes import adopt_orphans
from holdfast.benches.jobs.by_name import read_job
from holdfast.benches.runs.by_name import ENGINES
from holdfast.benches.runs.child_process import end_below, end_with_lifeline, order_of_lifeline


def main() -> None:
    """Run the engine that standard input names."""
    lifeline = sys.stdin.fileno()
    order = order_of_lifeline(lifeline)
    adopt_orphans()
    end_with_lifeline(lifeline, [order["disk"], order["memory"]])
    try:
        carry_out(order)
    finally:
        end_below(psutil.Process())


def carry_out(order: Mapping[str, Any]) -> None:
    """Run the engine that an order names."""
    profile = order["profile"]
    places = Places(Path(order["disk"]), Path(order["memory"]), Path(profile) if profile else None)
    measured = ENGINES[order["engine"]].run(read_job(order["job"]), places)
    Path(order["result"]).write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
