"""The demo in its smallest form, killed half-way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from holdfast.cli import main; main()", "demo"]
# Half of what such a short run takes is Java's second compiler, which pays off later only.
SMALL = ["--flights", "3000", "--batches", "4", "--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"]


def run_demo(folder: Path, environment: dict[str, str], *arguments: str) -> str:
    """Run the demo with its files and its durable state below `folder`; return what it shows."""
    places = ["--checkpoint", str(folder / "durable"), "--work-dir", str(folder / "work")]
    done = subprocess.run(
        [*COMMAND, *SMALL, *places, *arguments],
        env=environment | {"COLUMNS": "100"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert not (folder / "work").exists()
    assert not [path for path in (folder / "durable").rglob("*") if path.is_file()]
    return done.stdout


def require_right_totals(shown: str, backend: str) -> None:
    assert f"backend {backend}," in shown
    assert "killed the driver" in shown
    assert "equal: state and plain pandas" in shown
    assert "equal: output and plain pandas" in shown


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_survives_its_kill(environment_without_java: dict[str, str], tmp_path: Path) -> None:
    """On the Java from PyPI, as a user of a machine without Java would run it."""
    shown = run_demo(tmp_path, environment_without_java)
    require_right_totals(shown, "memory")
    assert "from durable storage" in shown


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["filesystem", "rocksdb"])
def test_every_backend_gives_the_same_totals(backend: str, tmp_path: Path) -> None:
    """Where state lives changes no result; what is on disk is used again after the kill."""
    shown = run_demo(tmp_path, dict(os.environ), "--backend", backend)
    require_right_totals(shown, backend)
    assert "from local files" in shown
