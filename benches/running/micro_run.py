"""The micro-benchmarks of one module, run by pytest-benchmark in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from holdfast.benches.runs.child_process import call_in_child

_MACHINE = ("cpu", "python_version", "system")
# No configuration is read, so that it is the same wherever holdfast is installed.
_PLAIN = (
    "-c",
    os.devnull,
    "--import-mode=importlib",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--quiet",
    "--tb=short",
)


def run_micro(module: str, limit_s: float | None = None) -> dict[str, Any]:
    """Return the JSON of pytest-benchmark, without the times of single rounds and the name of the machine."""
    call = f"{__name__}:_run_pytest"
    found: dict[str, Any] = call_in_child(f"the micro-benchmarks of {module}", call, module, limit_s=limit_s)
    found["machine_info"] = {name: found["machine_info"][name] for name in _MACHINE}
    found.pop("commit_info", None)
    for benchmark in found["benchmarks"]:
        benchmark["stats"].pop("data", None)
    return found


def _run_pytest(module: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        result, file = Path(folder, "micro.json"), Path(__file__).parents[1] / "micro" / f"{module}.py"
        command = [sys.executable, "-m", "pytest", str(file), *_PLAIN, "--benchmark-only", f"--benchmark-json={result}"]
        subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, check=True)
        return json.loads(result.read_text())
