"""The facts that a measurement depends on: the machine and the versions of what ran."""

from __future__ import annotations

import importlib.metadata
import os
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
    """Return processor, cores, memory and operating system, but not the machine's name."""
    return {
        "cpu": _processor(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "os": f"{platform.system()} {_kernel_version()} {platform.machine()}",
    }


def busy_cores(over_s: float = 1.0) -> float:
    """Return how many cores are busy right now, including those that other guests of the host steal."""
    shares = psutil.cpu_times_percent(over_s)
    idle: float = shares.idle + getattr(shares, "iowait", 0.0)
    return (100 - idle) / 100 * (psutil.cpu_count() or 1)


def _kernel_version() -> str:
    # A suffix names the build.
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
    """Return the versions of holdfast, Python, Java and the main libraries."""
    shown = subprocess.run([ensure_java() / "bin" / "java", "-version"], capture_output=True, text=True, check=True)
    return {
        "holdfast": holdfast_version(Path(holdfast.__file__).parents[1]),
        "python": platform.python_version(),
        # standard error begins: openjdk version "17.0.1" 2021-10-19
        "java": shown.stderr.splitlines()[0].replace('"', ""),
    } | {name: importlib.metadata.version(name) for name in _LIBRARIES}


def holdfast_version(root: Path) -> str:
    """Return holdfast's version; in a checkout with the commit: ``0.1.0+g0123456789ab.dirty``."""
    if not _git(root, "ls-files", "holdfast/__init__.py"):
        return __version__  # installed, perhaps inside an unrelated repository
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    dirty = ".dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    return f"{__version__}+g{commit}{dirty}" if commit else __version__


def _git(root: Path, *arguments: str) -> str:
    """Return git's output for a repository, or an empty string; ignores git variables of the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
