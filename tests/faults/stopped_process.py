"""A process that is killed exactly before or after one chosen system call that changes the disk.

The process runs under ptrace, all its threads too, and a seccomp filter stops it at each call that changes a file::

    victim   …  write(a) │ rename(a, b) │ fsync(b)  …         calls on files below `root` are counted by name
    tracer               ▲              ▲
                  before rename 1   after rename 1             SIGKILL here: no handler, no flush, no clean-up

At the way in, a killed call has done nothing; at the way out, all it ever does. So every state is met in which a
SIGKILL can leave the disk, as far as system calls divide it. What the page cache holds stays: this is the death of a
process, not of a machine.

Run this module as a program to kill one workload at many places; see `main`. It forks the workload from a process that
has imported everything, because a new interpreter for each would cost seconds.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import signal
import struct
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# sys/ptrace.h, linux/ptrace.h
_CONT, _SYSCALL, _SEIZE, _INTERRUPT, _GET_SYSCALL_INFO = 7, 24, 0x4206, 0x4207, 0x420E
# Mark stops at system calls; follow fork, vfork and clone; stop where the filter says; die with the tracer.
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x80 | 0x100000
_EVENT_SECCOMP = 7
_INFO = struct.Struct("=B3xIQQ7Q")  # what, architecture, instruction, stack, system call, six arguments
_WALL = 0x40000000
# linux/prctl.h, linux/seccomp.h, linux/filter.h, linux/audit.h
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_TRACE, _ALLOW = 0x7FF00000, 0x7FFF0000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CREATES = os.O_CREAT | os.O_TRUNC


class _Call(NamedTuple):
    """A system call: its numbers, and which argument says which file."""

    x86_64: int | None
    aarch64: int | None
    #: ``fd``: argument 0 is a descriptor; ``path``: argument 0 is a path; ``at``: descriptor of a folder, then a path.
    file: str


_CALLS = {
    "write": _Call(1, 64, "fd"),
    "pwrite64": _Call(18, 68, "fd"),
    "writev": _Call(20, 66, "fd"),
    "pwritev": _Call(296, 70, "fd"),
    "pwritev2": _Call(328, 287, "fd"),
    "sendfile": _Call(40, 71, "fd"),
    "fsync": _Call(74, 82, "fd"),
    "fdatasync": _Call(75, 83, "fd"),
    "ftruncate": _Call(77, 46, "fd"),
    "fallocate": _Call(285, 47, "fd"),
    "truncate": _Call(76, 45, "path"),
    "open": _Call(2, None, "path"),
    "openat": _Call(257, 56, "at"),
    "creat": _Call(85, None, "path"),
    "rename": _Call(82, None, "path"),
    "renameat": _Call(264, 38, "at"),
    "renameat2": _Call(316, 276, "at"),
    "link": _Call(86, None, "path"),
    "linkat": _Call(265, 37, "at"),
    "unlink": _Call(87, None, "path"),
    "unlinkat": _Call(263, 35, "at"),
    "mkdir": _Call(83, None, "path"),
    "mkdirat": _Call(258, 34, "at"),
    "rmdir": _Call(84, None, "path"),
}
_FLAGS_ARGUMENT = {"open": 1, "openat": 2}
_NAMES = {number: name for name, c in _CALLS.items() if (number := getattr(c, platform.machine(), None)) is not None}

_libc = ctypes.CDLL(None, use_errno=True)


class Place(NamedTuple):
    """Where to kill: before or after the `number`-th call named `name`, counted from 1."""

    name: str
    number: int
    after: bool


class DiskCall(NamedTuple):
    """A call that was made, and the file it was about, relative to the root."""

    name: str
    number: int
    path: str


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    #: All that were begun, in order.
    calls: list[DiskCall]
    #: None where the process came to its end.
    killed_at: DiskCall | None
    #: Its exit code; minus the signal where one ended it.
    status: int


def _checked(result: int, what: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> None:
    long, pointer = ctypes.c_long, ctypes.c_void_p
    _checked(_libc.ptrace(long(request), long(thread), pointer(address), pointer(data)), f"ptrace {request:#x}")


def _filter() -> bytes:
    """Return the program that stops a thread at the calls of `_CALLS`, and lets all others pass at full speed."""
    program = [
        (_LOAD, 0, 0, 4),
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()]),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 0),
    ]
    for number, name in _NAMES.items():
        if name in _FLAGS_ARGUMENT:
            flags = [
                (_LOAD, 0, 0, 16 + 8 * _FLAGS_ARGUMENT[name]),
                (_IF_ANY_BIT, 1, 0, _CREATES),
                (_RETURN, 0, 0, _ALLOW),
            ]
        else:
            flags = []
        program += [(_IF_EQUAL, 0, len(flags) + 1, number), *flags, (_RETURN, 0, 0, _TRACE)]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _install_filter() -> None:
    """Put this process under the filter, for ever; without a tracer the calls would fail."""
    program = _filter()
    buffer = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    long = ctypes.c_ulong
    _checked(_libc.prctl(_SET_NO_NEW_PRIVILEGES, long(1), long(0), long(0), long(0)), "no new privileges")
    _checked(_libc.prctl(_SET_SECCOMP, long(_FILTER), header, long(0), long(0)), "seccomp")


class _Tracer:
    """Follows one process from its first stop to its end."""

    def __init__(self, pid: int, root: Path, place: Place | None) -> None:
        self._pid = pid
        self._root = f"{root}{os.sep}"
        self._place = place
        self._counts: Counter[str] = Counter()
        self._at: DiskCall | None = None
        self._info = ctypes.create_string_buffer(_INFO.size)
        self.calls: list[DiskCall] = []
        self.killed_at: DiskCall | None = None

    def follow(self) -> int:
        """Let the process run to its end, or to the place where it is killed; return its status."""
        status = None
        while True:
            try:
                thread, wait_status = os.waitpid(-1, _WALL)
            except ChildProcessError:
                assert status is not None
                return status
            if os.WIFSTOPPED(wait_status):
                self._stopped(thread, os.WSTOPSIG(wait_status), wait_status >> 16)
            elif thread == self._pid:
                status = os.waitstatus_to_exitcode(wait_status)

    def _stopped(self, thread: int, number: int, event: int) -> None:
        resume, deliver = _CONT, 0
        if event == _EVENT_SECCOMP:
            if self._enters(thread):
                resume = _SYSCALL  # stops again at the way out
        elif number == signal.SIGTRAP | 0x80:
            self._kill()
        elif not event:
            deliver = number
        with suppress(ProcessLookupError):  # killed, here or with its process: waitpid tells its end next
            _ptrace(resume, thread, 0, deliver)

    def _enters(self, thread: int) -> bool:
        """Count a call that a thread is about to make; tell whether to kill when it has made it."""
        with suppress(ProcessLookupError):
            _ptrace(_GET_SYSCALL_INFO, thread, _INFO.size, ctypes.addressof(self._info))
            _, _, _, _, number, *arguments = _INFO.unpack(self._info.raw)
            name = _NAMES[number]
            path = self._file_of(thread, _CALLS[name].file, arguments)
            if path.startswith(self._root):
                self._counts[name] += 1
                self.calls.append(DiskCall(name, self._counts[name], path.removeprefix(self._root)))
                if self._place and self._place[:2] == self.calls[-1][:2]:
                    self._at = self.calls[-1]
                    if self._place.after:
                        return True
                    self._kill()
        return False

    def _kill(self) -> None:
        if self.killed_at is None:
            self.killed_at = self._at
            os.kill(self._pid, signal.SIGKILL)

    def _file_of(self, thread: int, kind: str, arguments: Sequence[int]) -> str:
        descriptor = ctypes.c_int(arguments[0]).value
        if kind == "fd":
            return _link(f"/proc/{thread}/fd/{descriptor}")
        path = _text(thread, arguments[0 if kind == "path" else 1])
        if os.path.isabs(path):
            return path
        at_folder = kind == "at" and descriptor >= 0
        return os.path.join(_link(f"/proc/{thread}/{f'fd/{descriptor}' if at_folder else 'cwd'}"), path)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""  # a descriptor that is not open: the call itself will fail


def _text(thread: int, address: int) -> str:
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        try:
            memory.seek(address)
            return os.fsdecode(memory.read(4096).partition(b"\0")[0])
        except (OSError, OverflowError):
            return ""


def run(work: Callable[[], object], root: Path, place: Place | None = None) -> Outcome:
    """Run `work` in a forked process, and kill it at `place`."""
    begin, begun = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_the_victim(work, begin)
    os.close(begin)
    try:
        _ptrace(_SEIZE, pid, 0, _OPTIONS)
        _ptrace(_INTERRUPT, pid)
        tracer = _Tracer(pid, root, place)
        os.write(begun, b"1")
        status = tracer.follow()
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, _WALL)
        raise
    finally:
        os.close(begun)
    return Outcome(tracer.calls, tracer.killed_at, status)


def _be_the_victim(work: Callable[[], object], begin: int) -> None:
    try:
        os.read(begin, 1)
        _install_filter()
        work()
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


def tell_why_not() -> None:
    """Print why processes cannot be traced here; nothing where they can."""
    if not _NAMES or sys.platform != "linux":
        print(f"no table of system calls for {sys.platform} on {platform.machine()}")
        return
    try:
        outcome = run(os.getpid, Path("/nowhere"))
    except OSError as exc:
        print(f"ptrace is not permitted here: {exc}")
    else:
        print(f"a traced process ended with status {outcome.status}" if outcome.status else "")


def even_places(calls: Sequence[DiskCall], how_many: int) -> Iterator[Place]:
    """Yield about `how_many` places, evenly over the calls of each name, by turns before and after."""
    numbers = Counter(call.name for call in calls)
    for name, total in sorted(numbers.items()):
        chosen = min(total, max(2, round(how_many * total / len(calls))))
        for i in range(chosen):
            yield Place(name, 1 + (i * total + total // 2) // chosen, after=i % 2 == 1)


def every_place(calls: Sequence[DiskCall]) -> Iterator[Place]:
    """Yield all places: what stands after one call stands before the next one, so only the last one has both."""
    for call in calls:
        yield Place(call.name, call.number, after=False)
    if calls:
        yield Place(calls[-1].name, calls[-1].number, after=True)


def run_elsewhere(call: str) -> subprocess.Popen[str]:
    """Evaluate a call of this module in a new process, which has one thread; its output is the answer."""
    code = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
    code += f"from tests.faults import stopped_process as s\ns.{call}"
    return subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="session")
def traced() -> None:
    """Skip where processes cannot be traced; fail there if HOLDFAST_TEST_MUST_TRACE is set, as .ci/run does."""
    reason = run_elsewhere("tell_why_not()").communicate()[0].strip()
    if reason and os.environ.get("HOLDFAST_TEST_MUST_TRACE"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def kills(target: str, argument: str, root: Path, how_many: int) -> Iterator[dict[str, Any]]:
    """Run `main` in a process of its own, and yield what it tells of each run."""
    process = run_elsewhere(f"main({target!r}, {argument!r}, {str(root)!r}, {how_many})")
    assert process.stdout is not None
    try:
        yield from map(json.loads, process.stdout)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main(target: str, argument: str, root: str, how_many: int) -> None:
    """Run a workload to its end once, then kill it at many places, each time in a folder of its own."""
    module, _, function = target.partition(":")
    work = getattr(importlib.import_module(module), function)

    def run_in(folder: Path, place: Place | None) -> Outcome:
        folder.mkdir(parents=True)
        return run(lambda: work(argument, folder), folder, place)

    whole = run_in(Path(root, "whole"), None)
    _tell(None, whole, Path(root, "whole"))
    chosen = every_place(whole.calls) if not 0 < how_many < len(whole.calls) else even_places(whole.calls, how_many)
    for place in chosen:
        folder = Path(root, f"{place.name}-{place.number}-{'after' if place.after else 'before'}")
        _tell(place, run_in(folder, place), folder)


def _tell(place: Place | None, outcome: Outcome, folder: Path) -> None:
    record = asdict(outcome) | {"place": place, "folder": str(folder), "calls": len(outcome.calls)}
    print(json.dumps(record), flush=True)
