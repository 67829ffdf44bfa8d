"""Looking disturbs nobody: the page is read without pause while the demo's query runs, is killed and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.holdfast.ui.serving import TOKEN, opened

VIEWS = (
    "",
    "0/flight_totals/",
    "0/flight_totals/?measure=rows",
    "0/flight_totals/rows",
    "0/flight_totals/rows?key.kind=carrier&key.name=UA",
    "0/flight_totals/upkeep",
    "0/flight_totals/upkeep?check=verify",
)
_BEGINS_WITHIN_S = 120.0


@pytest.mark.spark
@pytest.mark.all
@pytest.mark.slow(120)
@pytest.mark.timeout(400)
def test_no_result_changes_and_no_view_fails(tmp_path: Path) -> None:
    """The demo finds what plain pandas computes, and every view is shown at every moment."""
    main = "from holdfast.cli import main; main()"
    work = tmp_path / "work"
    demo = [sys.executable, "-c", main, "demo", "--keep", "--work-dir", str(work), "--backend", "rocksdb"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    with subprocess.Popen([*demo, "--batches", "8", "--flights", "40000"], env=environment) as query:
        try:
            until = time.monotonic() + _BEGINS_WITHIN_S
            while not (work / "query/commits/0").exists():
                assert query.poll() is None
                assert time.monotonic() < until
                time.sleep(0.2)
            shown = 0
            with opened(work / "state", work / "query", local_dir=str(work / "local")) as page:
                while query.poll() is None:
                    for view in VIEWS:
                        answer = page.get(f"/{TOKEN}/{view}")
                        assert answer.status_code == 200, (view, answer.text)
                        shown += 1
        finally:
            query.kill()
    assert query.returncode == 0
    assert shown >= 5 * len(VIEWS)
