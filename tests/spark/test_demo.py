"""The demo in its smallest form, on the Java from PyPI, as a user of a machine without Java would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from holdfast.cli import main; main()", "demo"]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_survives_its_kill(environment_without_java: dict[str, str], tmp_path: Path) -> None:
    small = ["--flights", "3000", "--batches", "4", "--checkpoint", str(tmp_path / "durable")]
    done = subprocess.run(
        [*COMMAND, *small, "--work-dir", str(tmp_path / "work")],
        env=environment_without_java | {"COLUMNS": "100"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed the driver" in done.stdout
    assert "equal: state and plain pandas" in done.stdout
    assert "equal: output and plain pandas" in done.stdout
    assert done.stderr == ""
    assert not (tmp_path / "work").exists()
    assert not [path for path in (tmp_path / "durable").rglob("*") if path.is_file()]
