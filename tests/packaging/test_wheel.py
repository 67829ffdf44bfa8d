"""What `make dist` builds: a wheel that has everything, and runs the demo where nothing else of the repository is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
UV = Path(sysconfig.get_path("scripts")) / "uv"


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program that must succeed; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, to: Path, *kinds: str) -> None:
    run(UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, *kinds, "--out-dir", to, cwd=source)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel of what is checked out here, built from a copy."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    build(source, dist, "--sdist", "--wheel")
    return dist


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """Return the wheel."""
    (wheel,) = dist.glob("*.whl")
    return wheel


def files_of(wheel: Path) -> dict[str, int]:
    """Return names and checksums of a wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist() if not info.filename.endswith("RECORD")}


def test_the_wheel_has_every_package_and_nothing_else(wheel: Path) -> None:
    """A folder that pyproject.toml forgets would be missing at users only."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = files_of(wheel)
    packages = {name.rpartition("/")[0].replace("/", ".") for name in names if name.endswith(".py")}
    assert packages == set(setuptools["packages"])
    assert "holdfast/py.typed" in names
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}
    assert not [
        name for name in names if not re.match(r"(holdfast(-[0-9.]+\.dist-info)?|pyspark_holdfast(_[a-z]+)?)/", name)
    ]


def test_the_sdist_builds_the_same_wheel(dist: Path, wheel: Path, tmp_path: Path) -> None:
    """Distributions build from it, and have neither the repository nor its tests."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert not (source / "tests").exists()
    build(source, tmp_path / "dist", "--wheel")
    (again,) = (tmp_path / "dist").glob("*.whl")
    assert again.name == wheel.name
    assert files_of(again) == files_of(wheel)


def installed(wheel: Path, environment: Path, dependencies: str) -> Path:
    """Install the wheel into an empty environment; return its Python."""
    run(UV, "venv", "--quiet", "--python", sys.executable, environment, cwd=environment.parent)
    python = environment / "bin" / "python"
    install = (UV, "pip", "install", "--quiet", "--python", python)
    if dependencies == "declared":
        run(*install, f"{wheel}[demo]", cwd=environment.parent)
    else:
        run(*install, "--no-deps", wheel, cwd=environment.parent)
        (site_packages,) = environment.glob("lib/python3*/site-packages")
        # By a .pth file: those of a folder that it names do nothing, so this repository is not linked in.
        (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.spark
@pytest.mark.parametrize("dependencies", ["of this environment", pytest.param("declared", marks=pytest.mark.all)])
def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path, dependencies: str) -> None:
    """As after `pip install holdfast`; the libraries are those here, or those that it declares."""
    python = installed(wheel, tmp_path / "environment", dependencies)
    home = run(python, "-c", "import holdfast; print(holdfast.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(tmp_path)
    demo = (python.parent / "holdfast", "demo", "--no-kill", "--flights", "3000", "--batches", "4")
    shown = run(*demo, "--work-dir", tmp_path / "work", cwd=tmp_path)
    assert "equal: state and plain pandas" in shown
    assert "equal: output and plain pandas" in shown
