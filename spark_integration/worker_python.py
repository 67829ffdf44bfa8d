"""Check the Python that Spark starts for tasks on this machine against the program's own.

Spark takes ``PYSPARK_PYTHON``, or else the ``python3`` of the PATH, unless a setting of the session names another. A
program started by an IDE, cron or ``venv/bin/python app.py`` has an environment that is not on the PATH. Its tasks then
fail, each with a page of Java: without PySpark in that ``python3``, the worker does not even start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipimport
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark

import holdfast
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.spark_versions import is_classic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PROBE = """
import importlib.util, sys
def missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except ImportError:
        return True
print("%d.%d" % sys.version_info[:2], *filter(missing, sys.argv[1:]))
"""
_START_TIMEOUT_S = 60
#: Takes precedence over PYSPARK_PYTHON.
_SETTING = "spark.sql.execution.pyspark.python"
_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


def require_worker_python(session: SparkSession) -> None:
    """Refuse a local session whose tasks would run an unsuitable Python; checking a different Python takes 50 ms."""
    if not is_classic(session) or not str(session.sparkContext.master).startswith("local"):
        return
    program = session.conf.get(_SETTING, None) or session.sparkContext.pythonExec
    problem = problem_of(program)
    if problem is not None:
        raise InvalidArgumentError(
            f"Spark would run this program's tasks in a different Python, {problem}: set the environment variable "
            f"PYSPARK_PYTHON to {sys.executable} before the session starts, or activate the environment; with "
            "spark-submit, set spark.pyspark.python",
            workers=program,
        )


@lru_cache
def problem_of(program: str) -> str | None:
    """Return why workers cannot run in a Python; None if they can."""
    found = shutil.which(program)
    if found is None:
        return "which does not exist"
    if _is_own(Path(found)):
        return None
    needed = ["pandas", "pyarrow"] if _spark_sends_pyspark() else ["pyspark", "pandas", "pyarrow"]
    # A zip file comes from spark.submit.pyFiles, which also sends it to the workers.
    if not isinstance(holdfast.__spec__.loader, zipimport.zipimporter):
        needed.append(f"{holdfast.__name__}.spark_integration")
    try:
        probe = subprocess.run(
            [found, "-c", _PROBE, *needed],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"which does not start ({exc})"
    version, *missing = probe.stdout.split() or [""]
    if probe.returncode != 0 or version != _VERSION:
        return f"which is {f'Python {version}' if version else 'too old'} and not {_VERSION}"
    return f"which has no {', '.join(name.partition('.')[0] for name in missing)}" if missing else None


def _spark_sends_pyspark() -> bool:
    """Return whether Spark puts its own PySpark on the workers' path: a zip file, which uv does not install."""
    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    return Path(home, "python", "lib", "pyspark.zip").is_file()


def _is_own(program: Path) -> bool:
    """Return whether a program is this process's Python, folder included: environments may share an interpreter."""
    own = Path(sys.executable)
    return program.parent.samefile(own.parent) and program.samefile(own)
