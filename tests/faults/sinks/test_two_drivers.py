"""Two drivers of one query on two machines: readers see each micro-batch once, whoever freezes, wakes or dies.

benches/SINKS.md shows 100 overlaps of each, by HOLDFAST_TEST_OVERLAPS=100; 57:58 is the one case 57.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.sinks.killed_query import YIELDED, Job, newest_commit
from tests.faults.sinks.killing import SinkKillings
from tests.faults.sinks.overlapping import overlap
from tests.faults.sinks.targets import TARGETS
from tests.tiers import LONG

FIRST, _, END = os.environ.get("HOLDFAST_TEST_OVERLAPS", "10" if LONG else "3").rpartition(":")
OVERLAPS = range(int(FIRST or 0), int(END))
# By the sink; by Spark's own log, of commits or of offsets.
LOST = (
    "driver of this query has ",
    "[CONCURRENT_STREAM_LOG_UPDATE]",
    "Multiple streaming queries are concurrently using",
)
ANOTHER_MACHINE = ("unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--uts")

pytestmark = [
    pytest.mark.all,
    pytest.mark.slow(30),
    pytest.mark.timeout(6000),
    pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="namespaces need root on Linux"),
]


@pytest.mark.parametrize("how", ["running", "frozen"])
@pytest.mark.parametrize("target", TARGETS)
def test_two_drivers_show_each_micro_batch_once(target: str, how: str, tmp_path: Path) -> None:
    """Who loses says so by one error; the next start goes on; and nothing is left half-done."""
    stories: list[str] = []
    began_s = time.monotonic()
    with TARGETS[target].served(tmp_path) as place:
        tally = overlap(
            TARGETS[target], target, place, tmp_path, OVERLAPS, freezes=how == "frozen", tell=stories.append
        )
    print(f"\n{tally.row(f'{target}, {how}')} {time.monotonic() - began_s:.0f} s")
    assert not stories, "\n\n".join(stories)


@pytest.mark.spark
@pytest.mark.parametrize("how", ["running", "frozen"])
@pytest.mark.parametrize("target", ["parquet", "delta", "delta upsert", "postgres", "postgres upsert", "kafka"])
def test_two_drivers_of_spark(target: str, how: str, java_home: Path, tmp_path: Path) -> None:
    """The same with whole drivers; where Spark's own log refuses the newer one, too, the next start goes on."""
    chance = random.Random(f"{target} {how}")
    with TARGETS[target].served(tmp_path) as place, ExitStack() as ends:
        job = Job(str(tmp_path), target=target, place=place, names_local_dir=False, yields=True)
        one, other, last = drivers = [SinkKillings(job, chance, within=ANOTHER_MACHINE) for _ in range(3)]
        for driver in drivers:
            ends.enter_context(driver.cleaned_up())
        one.start_driver()
        first = chance.choice((0, 1, 2))
        assert one.reach(lambda: newest_commit(job) >= first), one.describe()
        time.sleep(chance.uniform(0, 1))
        if how == "frozen":
            one.send(signal.SIGSTOP)
        other.start_driver()
        if how == "frozen":
            awaited = newest_commit(job) + 2
            assert other.reach(lambda: newest_commit(job) >= awaited), other.describe()
            one.send(signal.SIGCONT)
        one.reach(lambda: not other.is_running())
        assert not (one.is_running() and other.is_running()), "both go on"
        winner = one if one.is_running() else other
        awaited = newest_commit(job) + 2
        if not winner.reach(lambda: newest_commit(job) >= awaited):
            winner = last
            last.start_driver()
            assert last.reach(lambda: newest_commit(job) >= awaited), last.describe()
        winner.end()
        found = winner.judged()
    losers = [driver.ended_with for driver in (one, other) if driver is not winner]
    print(f"\n{target}, {how}: {len(losers)} lost; {found}")
    assert losers == [YIELDED] * len(losers), winner.describe()
    errors = (tmp_path / "driver.log").read_text()
    assert any(said in errors for said in LOST), f"no error says why:\n{errors[-4000:]}"
    assert found.is_right, f"{found}; {winner.describe()}"
