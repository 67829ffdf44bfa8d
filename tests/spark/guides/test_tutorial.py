"""docs/tutorial.md, typed from top to bottom."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.pages import blocks

PAGE = "docs/tutorial.md"
LIMIT_S = 180


@contextmanager
def running(program: str, folder: Path, ends_by: signal.Signals) -> Iterator[Path]:
    """Run `counts.py` until it has served; give the file with what it prints."""
    (folder / "counts.py").write_text(program)
    printed = folder / "printed.txt"
    with printed.open("w") as out, (folder / "log.txt").open("a") as log:
        process = subprocess.Popen([sys.executable, "counts.py"], cwd=folder, stdout=out, stderr=log)
        try:
            yield printed
            assert process.poll() is None, (folder / "log.txt").read_text()[-5000:]
        finally:
            process.send_signal(ends_by)
            process.wait(timeout=60)


def newest_of_user_0(printed: Path, at_least: int = 1) -> list[int]:
    """Return user 0's newest row, once its count has come so far."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        rows = re.findall(r"^\| +0\|([ \d|]+)\|$", printed.read_text(), re.MULTILINE)
        if rows and int(rows[-1].split("|")[0]) >= at_least:
            return [int(cell) for cell in rows[-1].split("|")]
        time.sleep(0.2)
    raise AssertionError(printed.read_text())


@pytest.mark.spark
@pytest.mark.all
@pytest.mark.slow(120)
@pytest.mark.timeout(900)
def test_the_tutorial_is_true(java_home: Path, tmp_path: Path) -> None:
    """No number is lost or counted twice by a kill, an upgrade and a restore, and each command does what it says."""
    program, upgrade = (block.replace("/tmp/tutorial", str(tmp_path)) for block in blocks(PAGE, "python"))
    shown = "\n".join(blocks(PAGE, "sh")).replace("\\\n", " ").replace("/tmp/tutorial", str(tmp_path))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def type_in(beginning: str) -> str:
        (command,) = [line for line in shown.splitlines() if re.sub(" +", " ", line).startswith(beginning)]
        done = subprocess.run(
            ["bash", "-c", command], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    with running(program, tmp_path, signal.SIGKILL) as printed:
        (before,) = newest_of_user_0(printed, 5)
        assert "counts" in type_in("holdfast inspect")
        assert "state:" in type_in("holdfast get")
        assert type_in("holdfast history")
    with running(program, tmp_path, signal.SIGINT) as printed:
        newest_of_user_0(printed, before + 1)
        type_in("holdfast savepoint create")
        assert "counts" in type_in("holdfast savepoint show")
    old_line = re.search(r"^counts = .*\n", program, re.MULTILINE)
    assert old_line
    with running(program.replace(old_line[0], upgrade), tmp_path, signal.SIGINT) as printed:
        upgraded, newest = newest_of_user_0(printed, before + 2)
        assert upgraded == newest // 3 + 1
    told = type_in("holdfast savepoint restore")
    restored = program.replace(f"{tmp_path}/app", f"{tmp_path}/app-2").replace(
        f"{tmp_path}/spark", f"{tmp_path}/spark-2"
    )
    assert f"{tmp_path}/app-2" in told
    assert f"{tmp_path}/spark-2" in told
    with running(restored, tmp_path, signal.SIGINT) as printed:
        (again,) = newest_of_user_0(printed, before + 1)
        assert again > before
