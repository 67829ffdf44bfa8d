"""Whether an executor lives, told from real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from holdfast.spark_integration.executor import processes
from holdfast.spark_integration.executor.processes import ProcessId, executor_process, kept_per_process, lives, place_of

WAIT_FOR_INPUT = "import sys; sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", WAIT_FOR_INPUT], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_is_alive_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    executor = ProcessId.of(child.pid)
    assert executor.is_alive()
    child.kill()
    child.wait()
    assert not executor.is_alive()
    executor.wait()


def test_one_that_ended_but_was_not_waited_for_is_dead(child: subprocess.Popen[bytes]) -> None:
    executor = ProcessId.of(child.pid)
    child.kill()
    executor.wait()  # the child is a zombie now, since nobody has called its wait
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    assert not executor.is_alive()


def test_wait_lasts_until_the_end(child: subprocess.Popen[bytes]) -> None:
    waiter = threading.Thread(target=ProcessId.of(child.pid).wait)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    child.kill()
    waiter.join(5)
    assert not waiter.is_alive()


def test_a_number_that_is_used_again_is_another_process(child: subprocess.Popen[bytes]) -> None:
    """Else a server would wait for ever, and what a dead executor left would stay."""
    earlier = replace(ProcessId.of(child.pid), started=1)
    assert not earlier.is_alive()
    earlier.wait()


def test_a_process_before_a_restart_of_the_machine_is_another_one(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container number and tick may be the same again: what a power cut has damaged would be read unverified."""
    earlier = ProcessId.of(child.pid)
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("f5b7a8c0-5a49-4f53-8d3e-2b2b9d0f3a11\n")
    monkeypatch.setattr(processes, "_BOOT", boot_id)
    assert ProcessId.of(child.pid) != earlier
    assert not earlier.is_alive()


def test_identity_does_not_hang_on_the_clock(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the clock is set, workers that start later must not take their executor for another one."""
    executor = ProcessId.of(child.pid)
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: psutil.boot_time() + 5.0)
    assert ProcessId.of(child.pid) == executor
    assert executor.is_alive()


def test_no_such_process() -> None:
    with pytest.raises(psutil.NoSuchProcess):
        ProcessId.of(2**22 + 1)
    assert not ProcessId(2**22 + 1, 1).is_alive()
    ProcessId(2**22 + 1, 1).wait()


def test_text_comes_back_and_other_text_is_refused() -> None:
    executor = ProcessId(17, 123456)
    assert ProcessId.parse(str(executor)) == executor
    for text in ("", "17", "17-", "-1", "a-b", "17-1x", "17-1-2", "٣-٤", "017-1", " 17-1"):
        assert ProcessId.parse(text) is None


@pytest.mark.slow(0.5)
def test_a_worker_serves_the_process_above_pysparks_daemons(tmp_path: Path) -> None:
    """executor → daemon → worker, and executor → worker without a daemon."""
    ask = tmp_path / "ask.py"
    ask.write_text(
        "from holdfast.spark_integration.executor.processes import executor_process\n"
        "print(executor_process().pid, flush=True)\n"
    )
    start = tmp_path / "start.py"
    # Starts its second argument's script; further arguments only make its command line look like PySpark's.
    start.write_text(
        "import os, subprocess, sys\nprint(os.getpid(), flush=True)\n"
        "sys.exit(subprocess.run([sys.executable, *sys.argv[1].split()]).returncode)\n"
    )
    daemon = f"{start} {ask} pyspark.daemon"
    for command in ([start, daemon], [start, f"{ask} pyspark.worker"], [start, ask]):
        done = subprocess.run(
            [sys.executable, *map(str, command)], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        pids = done.stdout.split()
        assert pids[-1] == pids[0], f"{command}: {pids}"


def test_the_executor_is_found_anew_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is forked from the daemon: what that has cached is not the worker's."""
    mine = executor_process()
    assert mine == ProcessId.of(psutil.Process().ppid())
    monkeypatch.setattr(os, "getpid", lambda: 999_999_999)
    with pytest.raises(psutil.NoSuchProcess):  # it was looked for
        executor_process()


def test_a_process_is_told_by_its_place(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is ending is given a moment; nothing is known of one of another machine, or of what is none."""
    place = place_of(ProcessId.of(child.pid))

    def forbidden(*_: int) -> None:
        raise PermissionError

    assert lives(place, 0.01)
    threading.Timer(0.2, child.kill).start()
    assert lives(place, 60) is False
    assert lives(place_of(ProcessId(999999999, 1))) is False
    elsewhere, number = place.split(".")
    for other in ("", "x", "1-1", f"{'0' * 16}.{number}", f"{place}-1", f"{elsewhere}.{'1' * 30}-1"):
        assert lives(other) is None
    monkeypatch.setattr(os, "kill", forbidden)
    assert lives(place) is None, "a process that this user cannot see may be it"
    monkeypatch.undo()
    monkeypatch.setattr(processes, "machine", lambda: "another")
    assert lives(place) is None


def test_a_machine_is_the_same_for_processes_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another container has another process namespace, where the same number is another process."""
    script = "from holdfast.spark_integration.executor.processes import machine; print(machine())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == processes.machine()
    monkeypatch.setattr(os, "getpid", lambda: 4711)  # what was asked before is not asked again in one process
    monkeypatch.setattr(os, "readlink", lambda _: "pid:[7]")
    assert processes.machine() != done.stdout.strip()


def test_results_are_kept_by_their_arguments_in_one_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, str]] = []

    @kept_per_process()
    def opened(number: int, *, name: str) -> object:
        calls.append((number, name))
        return object()

    first = opened(1, name="a")
    assert opened(1, name="a") is first
    assert opened(2, name="a") is not first
    assert calls == [(1, "a"), (2, "a")]
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    assert opened(1, name="a") is not first


def test_no_more_results_are_kept_than_asked_for() -> None:
    @kept_per_process(1)
    def opened(number: int) -> object:
        return object()

    first = opened(1)
    opened(2)
    assert opened(1) is not first
