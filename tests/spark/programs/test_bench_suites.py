"""A run of suites that is stopped or killed leaves no process and no file behind, and goes on with what it has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]

# Java, since results say which one it is.
pytestmark = [pytest.mark.spark, pytest.mark.slow(15)]


class Command:
    """The command in a process of its own, with temporary files in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.out, self.temporary = folder / "results", folder / "temporary"
        self.temporary.mkdir()
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        script = Path(__file__).with_name("tiny_bench.py")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), "bench", "run", "--suite", "tiny", "--out", str(self.out)],
                env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def runs(self) -> list[dict[str, object]]:
        try:
            lines = (self.out / "tiny/size.runs.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def is_running_one(self) -> bool:
        """Tell whether a run of an engine has a process now."""
        return any("holdfast.benches.runs.child_process" in part for one in self.below() for part in _command(one))

    def below(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def folders(self) -> list[Path]:
        return list(self.temporary.iterdir())


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def wait_until(reached: Callable[[], object], command: Command, within_s: float = 120) -> None:
    end_s = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < end_s, command.log.read_text()
        time.sleep(0.05)


@pytest.mark.all
def test_a_run_is_stopped_then_killed_and_goes_on(java_home: Path, tmp_path: Path) -> None:
    command = Command(tmp_path)
    command.start()
    wait_until(lambda: len(command.runs()) == 1 and command.is_running_one(), command)
    below = command.below()
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(60) == 130
    assert "The same command goes on from here" in command.log.read_text()
    assert not [one for one in below if one.is_running()]
    assert command.folders() == []
    first = command.runs()

    command.start()
    wait_until(lambda: len(command.runs()) == len(first) + 1 and command.is_running_one(), command)
    below = command.below()
    command.process.kill()
    command.process.wait()
    wait_until(lambda: not [one for one in below if one.is_running()], command)
    second = command.runs()
    assert second[: len(first)] == first

    command.start()
    assert command.process.wait(120) == 0, command.log.read_text()
    found = json.loads((command.out / "tiny/size.json").read_text())
    times = [run["batch_ms"] for engine in found["engines"].values() for run in engine["runs"]]
    assert len(times) == 4
    assert all(line["run"]["batch_ms"] in times for line in second)  # type: ignore[index]
    assert not list((command.out / "tiny").glob("*.jsonl"))
