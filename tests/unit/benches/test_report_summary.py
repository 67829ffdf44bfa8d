"""What the summary says of figures: wins, losses, ties, growth, and which backend to choose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.benches.report.answers import Ratio, answers_of
from holdfast.benches.report.directory import Results, read
from holdfast.benches.report.names import name_of
from holdfast.benches.report.summary import Sentence, Summary, choose, summarize
from tests.unit.benches import sample_results

Documents = Mapping[tuple[str, str], Mapping[str, Any]]


def results_of(folder: Path, documents: Documents, profile: str = "full") -> Results:
    return read(sample_results.write(folder, documents, profile=profile))


def summary_of(folder: Path, documents: Documents) -> Summary:
    results = results_of(folder, documents)
    return summarize(results, answers_of(results))


def texts(sentences: list[Sentence]) -> str:
    return "\n".join(f"{sentence.question} {sentence.text}" for sentence in sentences)


@pytest.mark.slow(0.5)
def test_wins_losses_and_ties_are_told_apart(tmp_path: Path) -> None:
    """Where holdfast loses, the summary says so; where turns show no difference, it claims none."""
    found = summary_of(tmp_path, sample_results.full())
    assert (
        "4.5 (memory), 4.4 (filesystem) and 3.0 (rocksdb) times the throughput of Spark's aggregation on RocksDB"
        in texts(found.wins)
    )
    assert "0.99 (by key on rocksdb) times the throughput of Spark's applyInPandasWithState" in texts(found.level)
    assert "holdfast on rocksdb: only 0.83 at 50 million keys" in texts(found.losses)
    assert "0.83" not in texts(found.wins)
    assert "5.5 (memory) times the throughput of Flink SQL on RocksDB" in texts(found.wins)
    assert "1.8 (memory) times the throughput of Pathway" in texts(found.wins)


def test_a_slower_engine_of_ours_is_a_loss(tmp_path: Path) -> None:
    """The plain word is there: only."""
    found = summary_of(tmp_path, {("jobs", "job-a"): sample_results.job_a(rocksdb_ms=9000)})
    assert "Only 0.70 (rocksdb) times the throughput of Spark's aggregation on RocksDB" in texts(found.losses)
    assert "rocksdb" not in texts(found.wins)


@pytest.mark.slow(0.5)
def test_the_headline_has_the_floor_and_the_backend_for_large_states(tmp_path: Path) -> None:
    """The one sentence for somebody who reads no more."""
    found = summary_of(tmp_path, sample_results.full())
    speed, backend = found.headline
    assert speed == (
        "holdfast on filesystem has 4.4 times the throughput of Spark's aggregation on RocksDB, "
        "and takes 1.4 times as long as the floor, the same query without state"
    )
    assert backend == "use filesystem at 50 million keys"


def test_missed_targets_are_losses(tmp_path: Path) -> None:
    """A target is a promise."""
    found = summary_of(tmp_path, {("jobs", "job-a"): sample_results.job_a()})
    assert "A target is missed: holdfast-memory/floor, wanted at least 0.8, measured 0.71" in texts(found.losses)


def test_times_of_different_results_do_not_count(tmp_path: Path) -> None:
    """An engine that computes something else is not fast."""
    peers = sample_results.peers()
    peers["equality"]["equal"] = False
    found = summary_of(tmp_path, {("peers", "same-file"): peers})
    assert (found.wins, found.headline) == ([], [])
    assert "none of their times counts" in texts(found.losses)


def test_a_busy_machine_and_gaps_are_said(tmp_path: Path) -> None:
    """Whoever decides by these figures knows what they lack."""
    document = sample_results.job_a()
    document["engines"]["floor"]["runs"][0]["busy_before_cores"] = 1.3
    found = summary_of(tmp_path, {("jobs", "job-a"): document})
    assert "Other work was running: up to 1.3 cores were busy before a run of job-a." in texts(found.doubts)
    assert "Not measured: q5 (failed), quix (left out) and executors (to do)." in texts(found.doubts)


def test_restores_and_requests_are_costs(tmp_path: Path) -> None:
    """What is measured against nothing of others is neither a win nor a loss."""
    found = summary_of(tmp_path, sample_results.full())
    assert "holdfast's store alone on filesystem: 2.86 s, 2.2 times a plain download" in texts(found.costs)
    assert "requests of a micro-batch: 1.1 at 8, 2.1 at 64 and 4.3 at 200 partitions" in texts(found.costs)


@pytest.mark.parametrize(
    ("by_turn", "verdict"),
    [
        ([2.0, 2.1, 1.9], "faster"),
        ([0.8, 0.7, 0.9], "slower"),
        ([1.2, 0.9, 1.3], "same"),  # the turns disagree
        ([1.03, 1.04, 1.04], "same"),
        ([1.08], "same"),  # one turn alone
        ([1.08, 1.09], "faster"),
    ],
)
def test_noise_is_no_difference(by_turn: list[float], verdict: str) -> None:
    """A ratio counts if all turns agree and it is larger than what lies between two turns of one engine."""
    ratio = Ratio.of(by_turn)
    assert {"faster": ratio.faster, "slower": ratio.slower, "same": ratio.same}[verdict]
    assert sum((ratio.faster, ratio.slower, ratio.same)) == 1


def own_load(folder: Path, turns: int = 3, **sizes: tuple[float, float]) -> Any:
    documents = sample_results.quick(turns)
    if sizes:
        document = documents["own-load", "own-load"]
        for backend, (factor, mib) in sizes.items():
            for run in document["engines"][f"holdfast-{backend}"]["runs"]:
                run["rows_per_second"] *= factor
                run["batch_ms"] = [ms / factor for ms in run["batch_ms"]]
                run["memory"] = {"jvm": dict.fromkeys(("rss", "pss", "anonymous"), int(mib * sample_results.MIB))}
            document["engines"][f"holdfast-{backend}"]["rows_per_second"] *= factor
    (answer,) = answers_of(results_of(folder, documents, "quick"))
    choice = choose(answer)
    assert choice is not None
    return choice


def test_of_equally_fast_backends_the_leaner_one_is_chosen(tmp_path: Path) -> None:
    """Speed that the turns cannot tell apart does not buy memory."""
    choice = own_load(tmp_path)
    assert choice.backend == "filesystem"
    assert "filesystem and memory are equally fast" in choice.reason
    assert "takes the least memory: 1.9 GiB at its peak, 2.5 GiB otherwise" in choice.reason
    assert "The turns disagree on the order" in choice.certainty


def test_a_faster_backend_is_chosen_whatever_it_takes(tmp_path: Path) -> None:
    """Throughput comes first, and RAM that the state takes is said."""
    choice = own_load(tmp_path, memory=(2.0, 9000))
    assert choice.backend == "memory"
    assert "it has the highest throughput: 2.1 times filesystem and 3.1 times rocksdb" in choice.reason
    assert "of RAM at its peak" in choice.reason
    assert choice.certainty.startswith("All turns agree")


def test_one_turn_is_called_one_turn(tmp_path: Path) -> None:
    """How sure the figure is stands beside it."""
    assert own_load(tmp_path, turns=1).certainty.startswith("One turn only, 6 micro-batches counted")


def test_growth_says_at_which_sizes_which_backend_is_the_better_one(tmp_path: Path) -> None:
    """The advice of the sentence at the top, with its reason."""
    found = summary_of(tmp_path, {("growth", "keys"): sample_results.growth()})
    assert [(advice.choice.backend, advice.sentence.text) for advice in found.choices] == [
        ("memory", "At 100,000 to 1 million keys."),
        ("filesystem", "At 10 million to 50 million keys."),
    ]
    assert "No figure of memory at 50 million keys" in texts(found.doubts)


@pytest.mark.parametrize(
    ("engine", "label", "text", "hue", "ours"),
    [
        ("holdfast-memory", None, "holdfast on memory", "memory", True),
        ("pandas-rocksdb", "pandas-rocksdb x10", "holdfast by key on rocksdb x10", "rocksdb", True),
        ("holdfast-filesystem-row", None, "holdfast on filesystem, by Row", "filesystem", True),
        ("nexmark-memory-by-key", None, "holdfast on memory, by key", "memory", True),
        ("nexmark-spark-by-key", None, "Spark, by key", "spark", False),
        ("spark-agg-hdfs", None, "Spark's aggregation on HDFSBacked", "spark", False),
        ("spark-pandas-rocksdb", None, "Spark's applyInPandasWithState on RocksDB", "spark", False),
        ("floor", None, "the floor: no state", "floor", False),
        ("flink-sql-rocksdb", None, "Flink SQL on RocksDB", "flink", False),
        ("holdfast-rocksdb", "with snapshots", "with snapshots", "rocksdb", True),
        ("flink-sql-rocksdb-mini-batch", None, "Flink SQL on RocksDB, mini batch", "flink", False),
        ("holdfast-memory", "holdfast-memory, 1,000 keys", "holdfast on memory, 1,000 keys", "memory", True),
        ("holdfast-memory-s3", "S3, 20 ms", "S3, 20 ms", "memory", True),
        ("quixstreams-volatile", None, "Quix Streams, not surviving a kill", "quix", False),
        ("<b>", None, "<b>", "other", False),
    ],
)
def test_engines_have_names_and_one_hue(engine: str, label: str | None, text: str, hue: str, ours: bool) -> None:
    """A backend keeps its colour whatever runs on it."""
    name = name_of(engine, label)
    assert (name.text, name.hue, name.ours) == (text, hue, ours)
