"""Figures in the documents are the code's: each text below is made of the constants that it speaks of."""

from __future__ import annotations

import re

import click
import pytest

from holdfast import health
from holdfast.backends.rocksdb import generation
from holdfast.backends.rocksdb import options as rocksdb
from holdfast.cli import group
from holdfast.settings import MOST_SHARDS, Settings
from holdfast.snapshotter import commits, snapshots
from holdfast.snapshotter.ownership import claims
from holdfast.snapshotter.storage import hdfs, s3
from holdfast.spark_integration import copies
from holdfast.spark_integration.executor import local_dirs, takeover
from holdfast.spark_integration.keyed import slabs
from holdfast.spark_integration.plan import session
from holdfast.spark_integration.server import exposition, housekeeping, state_server
from holdfast.spark_integration.shard_call import announcing, call
from holdfast.ui import app, inquiry, overview, rows, shards, time_line, upkeep
from tests.pages import text

WORDS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 8: "eight", 16: "sixteen"}
SETTINGS, ROCKSDB = Settings(), rocksdb.RocksDBOptions()


def seconds(ms: int) -> str:
    return WORDS[whole(ms, 1000)]


def minutes(ms: int) -> str:
    number = whole(ms, 60_000)
    return WORDS.get(number, str(number))


def kib(size_bytes: int) -> int:
    return whole(size_bytes, 1 << 10)


def mib(size_bytes: int) -> int:
    return whole(size_bytes, 1 << 20)


def gib(size_bytes: int) -> int:
    return whole(size_bytes, 1 << 30)


def day(ms: int) -> str:
    return {1: "a day", 7: "a week"}[whole(ms, 24 * 60 * 60_000)]


def whole(number: float, unit: int) -> int:
    """Return how many units it is; a figure that the documents would have to round is none of theirs."""
    units, rest = divmod(number, unit)
    assert not rest, f"{number} is no multiple of {unit}"
    return int(units)


def default(command: str, option: str) -> int:
    found = group.get_command(click.Context(group), command)
    assert found is not None
    (value,) = [each.default for each in found.params if option in each.opts]
    return int(value)


S3, HDFS = s3._OURS, hdfs._OURS
FIGURES = {
    "docs/backends.md": [
        f"`spark.holdfast.rocksdb.memory` | `{mib(ROCKSDB.memory_bytes)}m` |",
        f"`spark.holdfast.rocksdb.compression` | `{ROCKSDB.compression}` |",
        f"like a commit, is at most {gib(commits.COMMIT_BYTES_MAX)} GiB",
        f"{mib(rocksdb.MEMORY_BYTES_MIN)}m at least |",
        f"the {generation.MOST_OPEN} databases used last stay open",
    ],
    "docs/configuration.md": [
        f"`spark.holdfast.backend` | `{SETTINGS.backend}` |",
        f"if it has {mib(local_dirs.SHARED_MEMORY_MIN_BYTES)} MB free",
        f"`spark.holdfast.timeouts` | `{SETTINGS.timeouts}` |",
        f"shards per operator, at most {MOST_SHARDS:,};",
        f"`spark.holdfast.commit.carriedBytes` | `{kib(SETTINGS.carried_bytes)}k` |",
        f"or cover more than {commits._VERSIONS_CARRIED} versions",
        f"`spark.holdfast.snapshot.maxCommits` | {SETTINGS.snapshot_max_commits} |",
        f"At {WORDS[snapshots._OVERDUE]} times as many, each micro-batch waits for a snapshot",
        f"up to {announcing.SNAPSHOT_TIMEOUT_SECONDS:g} s; at {WORDS[snapshots._FULL]} times, the query fails",
        f"size of the last snapshot, at least {mib(snapshots.MIN_BYTES)} MiB",
        f"at least {WORDS[snapshots._OVERDUE]} commits, micro-batches wait",
        f"at {WORDS[snapshots._FULL]} times and {WORDS[snapshots._FULL]} commits, the query fails",
        f"first free one of {exposition.PORTS} ports",
        f"`spark.holdfast.metrics.address` | `{SETTINGS.metrics_address}` |",
        f"renews the claim every {minutes(claims.RENEW_EVERY_MS)} minutes",
        f"{minutes(claims.ALIVE_MS)} minutes after the query is gone",
        f"`config_kwargs.retries.total_max_attempts` | {s3.TOTAL_MAX_ATTEMPTS} |",
        f"`operation_timeout_seconds` | {S3['operation_timeout_seconds']:g} | limit for one operation",
        f"`part_size_bytes`, `max_concurrency` | {mib(int(S3['part_size_bytes']))} MiB, {S3['max_concurrency']} |",
        f"`operation_timeout_seconds` | {HDFS['operation_timeout_seconds']:g} | limit for one attempt",
        f"`retry_seconds` | {HDFS['retry_seconds']:g} |",
        f"more than {WORDS[session._FAR_MORE]} shuffle partitions per task slot",
        f"`disk` is kept for {day(takeover.KEPT_MS)} for the machine's next executor",
        f"kept for {day(local_dirs.LOG_KEPT_MS)}",
    ],
    "docs/deploy.md": [
        f"the state of up to {slabs.SLAB_KEYS:,} of a shard's keys",
        f"keys, about {mib(slabs.SLAB_BYTES)} MiB, held twice",
        f"if it has {mib(local_dirs.SHARED_MEMORY_MIN_BYTES)} MB free when the executor starts",
        f"server ends within {state_server.END_WITHIN_SECONDS:g} s of its executor",
    ],
    "docs/metrics.md": [
        f"first free one of {exposition.PORTS} ports",
        f"wait once {snapshots._OVERDUE * SETTINGS.snapshot_max_commits} commits",
        f"more than {kib(SETTINGS.carried_bytes)} KB in each micro-batch",
    ],
    "docs/operations.md": [
        f"reports the newest {health.SHOWN_MAX} failures",
        f"({SETTINGS.retained_versions} by default)",
        f"`--grace HOURS` | {default('gc', '--grace')} |",
        f"at most two files of {mib(state_server.LOG_BYTES_MAX)} MB",
        f"the newest `--limit` ({default('log', '--limit')}) commits",
        f"after {housekeeping.IDLE_ROUNDS} rounds of calls",
        f"after {minutes(housekeeping.SILENT_MS)} minutes (RAM) or {day(takeover.KEPT_MS)} (disk)",
    ],
    "docs/operators.md": [
        f"rows beyond {mib(call.MEMORY_BYTES)} MiB spill",
        f"Output beyond {mib(call.HELD_BACK_BYTES)} MiB leaves as it is produced",
    ],
    "docs/savepoints.md": [
        f"one commit of at most {gib(commits.COMMIT_BYTES_MAX)} GiB",
        f"up to {mib(copies.AT_ONCE_BYTES)} MiB together",
    ],
    "docs/ui.md": [
        f"*Yes* if more than {overview._LAG_BEHIND} commits of a shard wait",
        f"*Auto-refresh* updates the page every {WORDS[app.FOLLOW_S]} seconds",
        f"refreshes every {WORDS[app.FOLLOW_S]} seconds",
        f"more than {shards.CELLS_MAX} shards, a cell stands for several",
        f"shown for at least {seconds(inquiry.SHOWN_MS)} seconds",
        f"waits {seconds(int(1000 * inquiry.PATIENCE_S))} seconds for all its stores",
        f"at most {time_line.SHARDS_MAX} evenly spaced shards, at most {time_line.SNAPSHOTS_MAX} each",
        f"{shards.SHARDS_MAX} shards, evenly spaced, or {seconds(shards._PATIENCE_MS)} seconds",
        f"{rows.ROWS_MAX} to a page, {rows.HISTORY_MAX} versions of a key",
        f"with a filter, {rows.SEARCHED_MAX:,} rows or {seconds(rows._PATIENCE_MS)} seconds",
        f"{upkeep.SHARDS_MAX} shards to a page",
        f"reads at most {mib(upkeep.READ_BYTES_MAX)} MB in at most about {seconds(upkeep.VERIFY_MS)} seconds",
    ],
}


@pytest.mark.parametrize(
    ("page", "sentence"), [(page, sentence) for page, sentences in FIGURES.items() for sentence in sentences]
)
def test_a_figure_is_the_codes(page: str, sentence: str) -> None:
    """Who changes a constant finds the sentences that speak of it."""
    # As whole words: "50 to a page" does not stand in "150 to a page".
    assert re.search(rf"(?<!\S){re.escape(sentence)}(?!\w)", " ".join(text(page).split()))
