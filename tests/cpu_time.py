"""A plug-in of pytest that tells what CPU time tests take: ``make test ARGS='-p tests.cpu_time'``.

On a machine where other work runs, CPU time says more than time. Each test process enters a control group of its own
(Linux, as root), which also counts the JVMs and servers that it starts, and what they leave behind.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

_V1, _V2 = Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup")
_FOLDER = (_V1 if _V1.is_dir() else _V2) / f"tests-{os.getpid()}"
_by_file: Counter[str] = Counter()
_by_test: Counter[str] = Counter()


class _Meter:
    """What this process and its descendants have used since the last reading."""

    def __init__(self) -> None:
        self.seen_s = 0.0

    def read(self) -> float:
        before, self.seen_s = self.seen_s, self._used_s()
        return self.seen_s - before

    @staticmethod
    def _used_s() -> float:
        if _FOLDER.parent == _V1:
            return int((_FOLDER / "cpuacct.usage").read_text()) / 1e9
        return int((_FOLDER / "cpu.stat").read_text().split()[1]) / 1e6


_meter = _Meter()


def pytest_configure() -> None:
    _FOLDER.mkdir(exist_ok=True)
    (_FOLDER / "cgroup.procs").write_text(str(os.getpid()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.user_properties.append(("cpu_s", _meter.read()))
    return report


def pytest_collection_finish() -> None:
    _meter.read()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    cpu_s = sum(s for name, s in report.user_properties if name == "cpu_s")
    _by_file[report.nodeid.partition("::")[0]] += cpu_s
    _by_test[report.nodeid] += cpu_s


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("CPU time")
    for test, cpu_s in _by_test.most_common(300):
        terminalreporter.write_line(f"{cpu_s:8.1f} s  {test}")
    terminalreporter.write_line("By file:")
    for file, cpu_s in [*_by_file.most_common(), ("in all, without collecting", _by_file.total())]:
        terminalreporter.write_line(f"{cpu_s:8.1f} s  {file}")
    by_part: Counter[str] = Counter()
    for file, cpu_s in _by_file.items():
        by_part[_part(file)] += cpu_s
    terminalreporter.write_line("By part:")
    for part, cpu_s in by_part.most_common():
        terminalreporter.write_line(f"{cpu_s:8.1f} s  {part}")


def _part(file: str) -> str:
    """Return the folder by which CONTRIBUTING.md tells parts apart."""
    folders = file.split("/")[:-1]
    return "/".join(folders[: 3 if folders[1:2] == ["spark"] else 2])
