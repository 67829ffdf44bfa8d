"""The facts that a measurement depends on: the machine and the versions of what ran."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil

import holdfast
from holdfast import __version__
from holdfast.spark_integration.java import ensure_java

_LIBRARIES = ("numpy", "pandas", "pyarrow", "pyspark")


def machine() -> dict[str, Any]:
    """Return the processor, its cores, the memory and the operating system; no name of the machine."""
    return {
        "cpu": _processor(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "os": f"{platform.system()} {_kernel_version()} {platform.machine()}",
    }


def busy_cores(over_s: float = 1.0) -> float:
    """Return how many cores everything on this machine, and beside it on its host, keeps busy.

    Unlike the load, which falls over minutes, it holds nothing of a run that has ended.

    Parameters
    ----------
    over_s : float
        How long to look; the call takes as long.
    """
    shares = psutil.cpu_times_percent(over_s)
    idle: float = shares.idle + getattr(shares, "iowait", 0.0)
    return (100 - idle) / 100 * (psutil.cpu_count() or 1)


def _kernel_version() -> str:
    """Return the numbers of the kernel's version; what follows them names a build, not a version."""
    numbers = re.match(r"[0-9.]+", platform.release())
    return numbers.group().rstrip(".") if numbers else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    """Return the versions of holdfast, Python, Java and the libraries that do the work."""
    found = {"holdfast": __version__, "python": platform.python_version(), "java": _java_version()}
    return found | {name: importlib.metadata.version(name) for name in _LIBRARIES}


def commit() -> str:
    """Return the commit of the checkout that holdfast runs from, with ``-dirty`` where files differ from it.

    Nothing for a holdfast that was installed: its version says as much.
    """
    root = Path(holdfast.__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _java_version() -> str:
    java = ensure_java() / "bin" / "java"
    shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=True)
    # The version stands on the first line of standard error: openjdk version "17.0.1" 2021-10-19
    return shown.stderr.splitlines()[0].replace('"', "")
