"""The backend in examples/parquet_backend, as a user has it who installs it beside holdfast."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.application import run_program
from tests.spark.conftest import Lab
from tests.spark.programs.test_demo import require_right_totals, run_demo
from tests.tiers import cases

PROGRAM = Path(__file__).parents[1] / "local_query.py"
MOVED = Path(__file__).parents[1] / "moved_query.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "parquet_backend"

pytestmark = [pytest.mark.slow, pytest.mark.all]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy, in which building leaves what it leaves."""
    folder = tmp_path_factory.mktemp("plug-in") / "source"
    left = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*_cache")
    return shutil.copytree(EXAMPLE, folder, ignore=left)


@pytest.fixture(scope="module")
def environment(source: Path) -> dict[str, str]:
    """Install the distribution, without asking any index, and return variables under which Python finds it."""
    installed = source.parent / "installed"
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    run([sys.executable, "-m", "pip", "install", *options, "--target", str(installed), str(source)], source)
    shutil.rmtree(source / "src")
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_passes_the_contract_that_holdfast_ships(source: Path, environment: dict[str, str]) -> None:
    shown = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], source, environment)
    assert "passed" in shown
    assert "skipped" not in shown


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(600)
def test_a_query_runs_on_it(environment: dict[str, str], tmp_path: Path) -> None:
    """Driver, workers and state server find the plug-in, and its option arrives."""
    lab = Lab(None, tmp_path, tmp_path / "local")  # type: ignore[arg-type]
    for _ in range(2):
        lab.feed([("a", 1), ("b", 2)])
    option = "spark.holdfast.parquet.compression=snappy"
    shown, _ = run_program(PROGRAM, tmp_path, "parquet", option, environment=environment)
    assert json.loads(shown) == [[["a", n, n], ["b", n, 2 * n]] for n in (1, 2)]


PAIRS = [pair for name in ("memory", "filesystem", "rocksdb") for pair in (("parquet", name), (name, "parquet"))]


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("before", "after"), cases([*PAIRS, ("parquet", "parquet")]))
def test_a_savepoint_moves_a_query(environment: dict[str, str], tmp_path: Path, before: str, after: str) -> None:
    """It opens what every backend has saved, into another number of shards, and each opens what it has saved."""
    lab = Lab(None, tmp_path, tmp_path / "local")  # type: ignore[arg-type]
    for number in range(4):
        lab.feed([("a", 1), ("b", number), (None, 3)])
    (tmp_path / "later").mkdir()
    for name in ("002.parquet", "003.parquet"):
        (tmp_path / "input" / name).rename(tmp_path / "later" / name)
    shown, _ = run_program(MOVED, tmp_path, before, after, environment=environment)
    original, again = json.loads(shown)
    assert original == again == [[["a", n, n], ["b", n, sum(range(n))], [None, n, 3 * n]] for n in (3, 4)]


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
def test_it_runs_the_demo(environment: dict[str, str], tmp_path: Path) -> None:
    compression = ["--conf", "spark.holdfast.parquet.compression=snappy"]
    require_right_totals(run_demo(tmp_path, environment, "--backend", "parquet", *compression), "parquet")
