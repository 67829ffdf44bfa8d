"""Looking disturbs nobody: look-ups, the page and metrics, without pause, while processes are killed."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import holdfast
from tests.faults.killed_driver import METRICS, OPERATOR, Job
from tests.faults.killings import FILE_ROWS, KEYS, Killings, State, expected, micro_batches
from tests.faults.test_exactly_once import KILLS, check_result
from tests.servers.programs import answer_of, free_ports
from tests.tiers import ALL
from tests.unit.holdfast.ui.places import TOKEN, opened

pytestmark = [pytest.mark.slow(60), pytest.mark.spark, pytest.mark.timeout(3000)]

VIEWS = ("", *(f"0/{OPERATOR}/{view}" for view in ("", "?measure=rows", "shard/0", "rows", "rows?key.key=3")))
_UPKEEP = (f"0/{OPERATOR}/upkeep", f"0/{OPERATOR}/upkeep?check=verify")
#: Executors that one after the other take a port, while those of killed drivers still have theirs.
_PORTS = 8
_PAUSE_S = 0.1


@dataclass
class Watcher:
    """What was seen."""

    job: Job
    chance: random.Random
    #: Micro-batch, key, and the rows that a look-up found.
    looked_up: list[tuple[int, int | None, list[dict[str, int]]]] = field(default_factory=list)
    #: How many were read; of scrapes those that told rows.
    histories: int = 0
    pages: int = 0
    views: int = 0
    scrapes: int = 0
    #: Views that were no page.
    wrong: list[str] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the end of the block, and raise what has gone wrong there."""
        stopped = threading.Event()
        with ThreadPoolExecutor(1, "watcher") as thread:
            watched = thread.submit(self._watch, stopped)
            try:
                yield
            finally:
                stopped.set()
            watched.result()

    def _watch(self, stopped: threading.Event) -> None:
        folder = self.job.path
        with (
            opened(folder / "durable", folder / "query", local_dir=str(folder / "local")) as page,
            holdfast.open_query(folder / "query", folder / "durable") as query,
        ):
            is_linked = False
            while not stopped.is_set():
                answer = page.get(f"/{TOKEN}/")
                self._count_page("", answer.status_code, answer.text)
                # What the page knows is some seconds old: views are there once the overview leads to the operator and
                # awaits its query no more, and stay.
                is_linked = is_linked or (f"/0/{OPERATOR}/" in answer.text and "Waiting for" not in answer.text)
                if (folder / "query/commits/0").exists():
                    self._look_up(query)
                if is_linked:
                    view = self.chance.choice((*VIEWS, *_UPKEEP))
                    answer = page.get(f"/{TOKEN}/{view}")
                    self._count_page(view, answer.status_code, answer.text)
                self._scrape()
                time.sleep(_PAUSE_S)

    def _count_page(self, view: str, status: int, text: str) -> None:
        self.pages += 1
        self.views += view != ""
        if status != 200:
            self.wrong.append(f"{view}: {status} {text}")

    def _look_up(self, query: holdfast.StoredQuery) -> None:
        """Read a key now or, each fifth time, all that it has held."""
        key = self.chance.choice((None, *(key for key in range(KEYS) if key % 10)))
        if self.chance.random() < 0.2:
            versions = list(query.history(OPERATOR, {"key": key}))
            self.histories += 1
            self.looked_up += [(one.batch_id, key, one.tables["state"].to_pylist()) for one in versions]
            return
        batch_id = query.batches()[-1]
        found = query.get(OPERATOR, {"key": key}, table="state", batch_id=batch_id)["state"]
        self.looked_up.append((batch_id, key, found.to_pylist()))

    def _scrape(self) -> None:
        answers = [answer_of(f"http://127.0.0.1:{self.job.metrics_port + n}/metrics") for n in range(_PORTS)]
        self.scrapes += sum(b"holdfast_rows_total{" in answer for answer in answers if answer)


BACKENDS = ["filesystem", "rocksdb"]


@pytest.mark.all
@pytest.mark.parametrize("backend", BACKENDS if ALL else BACKENDS[1:])
def test_looking_changes_nothing(backend: str, spark: SparkSession, tmp_path: Path) -> None:
    """The result is the undisturbed one, each look-up was right for its micro-batch, and each view a page."""
    job = Job(str(tmp_path), backend, metrics_port=free_ports(1)[0])
    run = Killings(job, random.Random(f"watched {backend}"))
    watcher = Watcher(job, random.Random(f"watcher {backend}"))
    with watcher.watching():
        run.run(KILLS)
    check_looks(watcher)
    check_metrics(run)
    check_result(run, spark)
    print(f"\n{watcher.pages} pages, {len(watcher.looked_up)} versions of keys, {watcher.scrapes} scrapes; {run.done}")


def check_looks(watcher: Watcher) -> None:
    """Compare what look-ups found with the state after their micro-batch."""
    states: list[State] = []
    expected(micro_batches(watcher.job.path), lambda _number, state: states.append(dict(state)))
    for batch_id, key, rows in watcher.looked_up:
        held = states[batch_id].get(key)
        wanted = [] if held is None else [{"key": key, **dict(zip(("n", "total", "last"), held, strict=True))}]
        assert rows == wanted, (batch_id, key)
    assert not watcher.wrong, watcher.wrong[:3]
    assert min(len(watcher.looked_up), watcher.histories, watcher.views, watcher.scrapes) > 0, watcher


def check_metrics(run: Killings) -> None:
    """Compare the rows that the last driver's progress told with the input of its micro-batches."""
    batches = micro_batches(run.job.path)
    told = json.loads((run.job.path / METRICS).read_text())
    own = range(run.committed_before, len(batches))
    assert told == {str(number): FILE_ROWS * len(batches[number].files) for number in own}
