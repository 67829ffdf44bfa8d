"""What holds for the clients of every remote storage: beside forks, and when they are opened and closed often."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping
from pathlib import Path

from holdfast.snapshotter.storage.opening import open_storage
from tests.faults.elsewhere import run_python

FORKING = """
import json, os, signal, sys, threading
from holdfast.snapshotter.storage.opening import open_storage
url, options, busy_threads = sys.argv[1:]
storage = open_storage(url, json.loads(options))
storage.put("parent", b"1")
stop = threading.Event()
def busy():
    while not stop.is_set():
        storage.get("parent")
threads = [threading.Thread(target=busy) for _ in range(int(busy_threads))]
for thread in threads: thread.start()
children = []
for number in range(3):
    child = os.fork()
    if not child:
        signal.alarm(60)
        storage.put(f"child-{number}", b"2")
        assert storage.get("parent") == b"1"
        if number == 1: storage.close()
        if number == 2: sys.exit(0)
        os._exit(0)
    children.append(child)
codes = [os.waitpid(child, 0)[1] for child in children]
stop.set()
for thread in threads: thread.join()
print(codes, [info.key for info in storage.list("")])
storage.close()
"""


def require_harmless_forks(url: str, options: Mapping[str, object], folder: Path, busy_threads: int) -> None:
    """A forked child works, whether it closes the storage or not, and leaves the parent alone."""
    done = run_python("-c", FORKING, url, json.dumps(options), busy_threads, folder=folder)
    assert done.stdout == "[0, 0, 0] ['child-0', 'child-1', 'child-2', 'parent']\n", done.stderr
    assert not done.stderr


def require_no_leaks(url: str, options: Mapping[str, object]) -> None:
    """Neither descriptors nor threads stay when a storage is closed; they may need a moment."""

    def cycle() -> None:
        with open_storage(url, options) as storage:
            storage.list("")
        gc.collect()

    def held() -> list[int]:
        return [len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task")]

    cycle()
    before = held()
    for _ in range(5):
        cycle()
    end = time.monotonic() + 10
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < end, (held(), before)
        time.sleep(0.05)
