"""A query that `holdfast.run` runs: its worker is killed, and the program is asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.servers.programs import wait_until

pytestmark = pytest.mark.spark


@pytest.mark.all
@pytest.mark.slow(25)
def test_a_killed_worker_is_a_restart_and_sigterm_an_end(tmp_path: Path) -> None:
    """Spark ends a query of which a task is lost; it goes on where it was, and on SIGTERM it is stopped."""
    (tmp_path / "input").mkdir()
    pq.write_table(pa.table({"key": ["a"], "v": [1]}), tmp_path / "input/0.parquet")
    log = tmp_path / "log"
    program = [sys.executable, "-m", "tests.spark.restarts.restarted_query", str(tmp_path)]
    with log.open("w") as said, subprocess.Popen(program, stderr=said, stdout=said) as running:
        try:
            wait_until((tmp_path / "shown/0").exists, list)
            (tmp_path / "fails").touch()
            pq.write_table(pa.table({"key": ["a", "b"], "v": [10, 5]}), tmp_path / "input/1.parquet")
            wait_until(lambda: any(tmp_path.glob("worker-*")), list)
            (tmp_path / "fails").unlink()
            (worker,) = tmp_path.glob("worker-*")
            os.kill(int(worker.name.partition("-")[2]), signal.SIGKILL)
            wait_until((tmp_path / "shown/1").exists, list)
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0, log.read_text()[-3000:]
        finally:
            running.kill()
    assert (tmp_path / "restarts").read_text() == "1 0.1\n"
    assert (tmp_path / "shown/1").read_text() == "[('a', 2, 11), ('b', 1, 5)]"
    assert (tmp_path / "ended").read_text() == "0", "no query runs any more"
    assert "the query starts again in 0.1 s" in log.read_text()
