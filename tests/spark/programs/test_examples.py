"""The programs of `examples/` run as a newcomer runs them, and print what README shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks, text

#: The rows of all micro-batches.
PRINTED = {
    "sessions": [["ann", "2", "2026-03-02 09:20:00"], ["bob", "1", "2026-03-02 09:05:00"]],
    "top_n": [
        ["tea", "1", "30"],
        ["tea", "2", "20"],
        ["tea", "3", "10"],
        ["salt", "1", "5"],
        ["salt", "1", "7"],
        ["salt", "2", "5"],
    ],
    "deduplication": [["17", "tea"], ["18", "rice"], ["19", "salt"]],
}


def printed(example: str, java_home: Path, folder: Path) -> str:
    """Run an example by a Python whose environment is not activated: `python3` is one without PySpark."""
    (folder / "python3").symlink_to(Path(sys._base_executable))  # type: ignore[attr-defined]
    kept = {name: value for name, value in os.environ.items() if name not in {"PYSPARK_PYTHON", "VIRTUAL_ENV"}}
    here = {"PATH": f"{folder}:/usr/bin:/bin", "JAVA_HOME": str(java_home), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{example}.py"],
        env=kept | here | {"SPARK_LOCAL_IP": "127.0.0.1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(shown: str) -> list[list[str]]:
    """Return the rows of the tables that Spark's console prints."""
    lines = [line.strip("|").split("|") for line in shown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


def test_the_readme_shows_the_quickstart_as_it_is() -> None:
    """What a newcomer copies is what the next test runs."""
    assert blocks("README.md", "python") == [text("examples/quickstart.py")]


@pytest.mark.spark
@pytest.mark.slow(60)
def test_the_quickstart_prints_what_the_readme_shows(java_home: Path, tmp_path: Path) -> None:
    """The first thing that somebody tries: whole, with its output, from an environment that is not activated."""
    shown, *_ = blocks("README.md", "text")
    assert printed("quickstart", java_home, tmp_path).rstrip() == shown.rstrip()


@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.all
@pytest.mark.parametrize("example", PRINTED)
def test_each_example_prints_its_result(example: str, java_home: Path, tmp_path: Path) -> None:
    """Each is whole: one file, its own data, no setting that it does not make."""
    rows = rows_of(printed(example, java_home, tmp_path))
    assert sorted(row for row in rows if row[0] not in {"user", "auction", "id"}) == sorted(PRINTED[example])
