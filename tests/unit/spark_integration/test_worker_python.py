from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from holdfast.spark_integration.worker_python import problem_of

OTHER_VERSION = """#!/bin/sh
exec {python} -c '
import sys
sys.version_info = (3, 8, 1)
exec(sys.argv.pop(2))
' "$@"
"""


def environment(folder: Path, *, with_packages: bool) -> str:
    """Make a virtual environment, with this process's packages or empty, and return its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python3"
    if with_packages:
        ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
        found = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        Path(found.stdout.strip(), "ours.pth").write_text(ours)
    return str(python)


def test_this_programs_own_python_is_good() -> None:
    """Tasks in the same environment are never refused, by whichever of its names it is called."""
    assert problem_of(sys.executable) is None
    assert problem_of(os.path.join(os.path.dirname(sys.executable), "python3")) is None


def test_an_environment_without_the_packages_says_which_are_missing(tmp_path: Path) -> None:
    """The usual fault, an environment that is not activated, is seen before Spark starts a worker in it."""
    assert problem_of(environment(tmp_path, with_packages=False)) == "which has no pandas, pyarrow, holdfast"


def test_another_environment_with_the_packages_is_good(tmp_path: Path) -> None:
    """What works is not refused: driver and workers may have environments of their own."""
    assert problem_of(environment(tmp_path, with_packages=True)) is None


def test_a_python_on_the_path_is_the_one_that_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark looks a bare name up on the PATH, and so does the check."""
    python = environment(tmp_path, with_packages=False)
    monkeypatch.setenv("PATH", os.path.dirname(python), prepend=os.pathsep)
    link = tmp_path / "bin" / "python-of-the-path"
    link.symlink_to(python)
    assert problem_of(link.name) == "which has no pandas, pyarrow, holdfast"


def test_a_python_that_cannot_start_says_so(tmp_path: Path) -> None:
    """A path that is wrong, or no program, is named before Spark fails to start it."""
    assert problem_of(str(tmp_path / "nowhere")) == "which is not there"
    broken = tmp_path / "broken"
    broken.write_text("no program")
    broken.chmod(0o700)
    assert str(problem_of(str(broken))).startswith("which does not start (")


def test_another_version_of_python_is_refused(tmp_path: Path) -> None:
    """Spark refuses to unpickle functions in another minor version; the message says so before any job."""
    other = tmp_path / "python3.8"
    other.write_text(OTHER_VERSION.format(python=sys.executable))
    other.chmod(0o700)
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert problem_of(str(other)) == f"which is Python 3.8 and not {ours}"
