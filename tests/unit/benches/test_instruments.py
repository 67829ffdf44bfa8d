"""What is looked at during a run: processes and folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from holdfast import __version__
from holdfast.benches.instruments.machine import holdfast_version
from holdfast.benches.instruments.processes import Processes, spark_kind, store_kind
from holdfast.benches.runs.spark_run import folder_bytes

MIB = 1 << 20


def test_folder_bytes_counts_a_linked_file_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "below").mkdir()
    os.link(tmp_path / "a", tmp_path / "below" / "b")
    (tmp_path / "c").write_bytes(b"123")
    assert folder_bytes(tmp_path) == 8
    assert folder_bytes(tmp_path / "absent") == 0


@pytest.mark.slow(1)
def test_a_process_that_has_ended_still_counts(tmp_path: Path) -> None:
    work = (
        "import os, sys; held = bytearray(os.urandom(48 << 20)); file = open(sys.argv[1], 'wb'); file.write(held)\n"
        "os.fsync(file.fileno()); print('holds', flush=True)\n"
        "input(); del held; print('free', flush=True); input()"
    )
    children: set[int] = set()
    # Not all that is below: other tests of this process have left a Spark there.
    processes = Processes(lambda p: store_kind(p) if p.pid in {os.getpid(), *children} else None)
    command = [sys.executable, "-c", work, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        children.add(child.pid)
        assert child.stdout.readline() == "holds\n"
        processes.look()
        print(file=child.stdin, flush=True)
        assert child.stdout.readline() == "free\n"
        processes.look()
        child.communicate("\n")
    processes.look()
    peak = processes.peak()
    assert 48 * MIB < peak["background"]["anonymous"] <= peak["background"]["pss"] <= peak["background"]["rss"]
    assert processes.written()["background"] >= 48 * MIB
    assert 0 < processes.seconds()["background"] < 60
    assert "store" in peak


def test_results_name_the_commit_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else git knows: an installed copy inside another repository, a hook's environment, new files."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / "holdfast" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    assert holdfast_version(tmp_path) == __version__
    git("init")
    git("commit", "--allow-empty", "--message", "of somebody else")
    assert holdfast_version(tmp_path) == __version__
    git("add", "holdfast")
    git("commit", "--message", "ours")
    commit = f"{__version__}+g{git('rev-parse', 'HEAD')[:12]}"
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    (tmp_path / "results.json").write_text("{}")
    assert holdfast_version(tmp_path) == commit
    package.write_text("changed")
    assert holdfast_version(tmp_path) == f"{commit}.dirty"


def test_an_orphan_stays_below_the_run_that_started_it() -> None:
    work = """
import psutil, subprocess, sys
from holdfast.benches.instruments.processes import adopt_orphans
adopt_orphans()
orphan = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'], stdout=2).pid)"
pid = int(subprocess.run([sys.executable, "-c", orphan], stdout=-1, check=True).stdout)
assert pid in [process.pid for process in psutil.Process().children(recursive=True)]
"""
    assert subprocess.run([sys.executable, "-c", work], input="", text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("command", "kind"),
    [([], "python"), (["-m", "holdfast.spark_integration.server.state_server"], "server")],
)
def test_processes_of_a_query_are_told_apart(command: list[str], kind: str) -> None:
    run = [sys.executable, "-c", "print('up', flush=True); input()", *command]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert spark_kind(psutil.Process(child.pid)) == kind
        child.communicate(b"\n")
    assert spark_kind(psutil.Process()) is None
