"""The micro-benchmarks of one module, run by pytest-benchmark in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from holdfast.benches.instruments.processes import adopt_orphans
from holdfast.benches.runs.child_process import end_below, end_with_lifeline, order_of_lifeline, run_child
from holdfast.benches.runs.paired import BenchError

_MACHINE = ("cpu", "python_version", "system")


def run_micro(module: str, limit_s: float | None = None) -> dict[str, Any]:
    """Return the JSON of pytest-benchmark, without the times of single rounds and the name of the machine.

    Parameters
    ----------
    module : str
        Of ``benches/micro``.

    Raises
    ------
    BenchError
        A benchmark failed, or they took too long; the message has the end of the log.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        file = Path(folder) / "micro.json"
        order = {"module": module, "folder": folder, "result": str(file)}
        ended = run_child(order, limit_s=limit_s, program=__name__)
        if ended.exit_status != 0:
            raise BenchError(f"the micro-benchmarks of {module} failed or took too long:\n{ended.log}", limit_s=limit_s)
        found: dict[str, Any] = json.loads(file.read_text())
    found["machine_info"] = {name: found["machine_info"][name] for name in _MACHINE}
    found.pop("commit_info", None)
    for benchmark in found["benchmarks"]:
        benchmark["stats"].pop("data", None)
    return found


def main() -> None:
    """Run pytest as the order on standard input says."""
    lifeline = sys.stdin.fileno()
    order = order_of_lifeline(lifeline)
    adopt_orphans()
    end_with_lifeline(lifeline, [order["folder"]])
    try:
        done = subprocess.run(_pytest(order), cwd=order["folder"], stdin=subprocess.DEVNULL, check=False)
    finally:
        end_below(psutil.Process())
    sys.exit(done.returncode)


def _pytest(order: dict[str, Any]) -> list[str]:
    """Return a command that reads no configuration, so that it is the same wherever holdfast is installed."""
    file = Path(__file__).parents[1] / "micro" / f"{order['module']}.py"
    plain = [
        "-c",
        os.devnull,
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--quiet",
        "--tb=short",
    ]
    return [
        sys.executable,
        "-m",
        "pytest",
        str(file),
        *plain,
        "--benchmark-only",
        f"--benchmark-json={order['result']}",
    ]


if __name__ == "__main__":
    main()
