"""What `make dist` builds of what is checked out here, once for the tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel, built from a copy."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    build(source, dist, "--sdist", "--wheel")
    return dist


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))
UV = SCRIPTS / "uv"


def started(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program that must succeed; return what it prints."""
    done = started(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, to: Path, *kinds: str) -> None:
    run(UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, *kinds, "--out-dir", to, cwd=source)


def pip(python: Path, *arguments: str | Path) -> None:
    """Change what is installed in an environment, as pip does."""
    command, *rest = arguments
    run(UV, "pip", command, "--quiet", "--python", python, *rest, cwd=python.parent)


def installed(wheel: Path, environment: Path, *, declared: bool = False) -> Path:
    """Install a wheel into an empty environment, with what it declares or beside what is here; return its Python."""
    run(UV, "venv", "--quiet", "--python", sys.executable, environment, cwd=environment.parent)
    python = environment / "bin" / "python"
    if declared:
        pip(python, "install", f"{wheel}[demo]")
    else:
        pip(python, "install", "--no-deps", wheel)
        (site_packages,) = environment.glob("lib/python3*/site-packages")
        # By a .pth file: those of a folder that it names do nothing, so this repository is not linked in.
        (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python
