"""What `make dist` builds: a wheel that has everything, and runs the demo where nothing else of the repository is."""

from __future__ import annotations

import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.packaging.building import ROOT, build, installed, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
        name
        for name in names
        if not re.match(r"(holdfast(_spark-[0-9.]+\.dist-info)?|pyspark_holdfast(_[a-z]+)?)/", name)
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


@pytest.mark.all
@pytest.mark.spark
@pytest.mark.parametrize("declared", [False, pytest.param(True, marks=pytest.mark.all)])
def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path, declared: bool) -> None:
    """As after `pip install holdfast-spark`; the libraries are those here, or those that it declares."""
    python = installed(wheel, tmp_path / "environment", declared=declared)
    home = run(python, "-c", "import holdfast; print(holdfast.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(tmp_path)
    demo = (python.parent / "holdfast", "demo", "--no-kill", "--flights", "3000", "--batches", "4")
    shown = run(*demo, "--work-dir", tmp_path / "work", cwd=tmp_path)
    assert "equal: state and plain pandas" in shown
    assert "equal: output and plain pandas" in shown
