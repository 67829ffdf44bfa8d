"""Engines, their turns and paired runs; a run of suites goes on where it stopped, and says what it cannot do."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.benches.command import bench
from holdfast.benches.commands import run as run_command
from holdfast.benches.commands import single
from holdfast.benches.commands.run import Room, Stopped, measurements_of, stoppable, with_room
from holdfast.benches.instruments.measured import Places
from holdfast.benches.jobs.by_key import DropIn
from holdfast.benches.jobs.by_name import read_job
from holdfast.benches.jobs.job import SparkJob
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.report.directory import DONE, RUN
from holdfast.benches.running import execution
from holdfast.benches.running.directory import FAILED, ResultsDirectory
from holdfast.benches.running.execution import Execution, TimeLeft, steps_of
from holdfast.benches.runs.by_name import ENGINES, engines_for
from holdfast.benches.runs.child_process import BenchError
from holdfast.benches.runs.engines import SparkEngine
from holdfast.benches.runs.equality import rows_by_batch, verdict
from holdfast.benches.runs.paired import Entry, Run, ratios, run_engine, summarize
from holdfast.benches.suites.measurement import Profile, Shape
from holdfast.benches.suites.suites import SUITES
from holdfast.errors import InvalidArgumentError
from tests.unit.benches.conftest import FACTS, JOB, TWO, Engines, a_run, document, prepared


def test_a_measurement_becomes_a_document_of_all_its_turns(tmp_path: Path, engines: Engines) -> None:
    directory = prepared(tmp_path)
    assert Execution(directory, TWO).run() == DONE
    found = document(tmp_path)
    assert sorted(engines.ran) == ["holdfast-memory"] * 2 + ["spark-agg-rocksdb"] * 2
    assert list(found["engines"]) == ["ours", "theirs"], "in the order of the measurement, whatever that of the turns"
    assert len(found["engines"]["ours"]["runs"]) == 2
    assert (found["suite"], found["name"], found["baseline"]) == ("tiny", "two", "theirs")
    assert found["entries"] == {"ours": "holdfast-memory", "theirs": "spark-agg-rocksdb"}
    assert found["machine"] == FACTS["machine"]
    assert found["seed"] == 1
    assert not (tmp_path / "tiny/two.runs.jsonl").exists()
    (line,) = json.loads((tmp_path / RUN).read_text())["plan"]
    assert (line["state"], line["minutes"], line["question"]) == (DONE, 4, "Which is faster?")


@pytest.mark.parametrize("done", range(5))
def test_a_stopped_run_goes_on_with_what_it_has(tmp_path: Path, engines: Engines, done: int) -> None:
    engines.stops_at = done
    first = Execution(prepared(tmp_path), TWO)
    if done < 4:
        with pytest.raises(KeyboardInterrupt):
            first.run()
    else:
        first.run()
    engines.stops_at = None
    again = Execution(prepared(tmp_path), TWO)
    assert len(again.done) == (done if done < 4 else 0)
    assert again.run() == DONE
    assert len(engines.ran) == 4, "nothing is run twice"
    assert len(document(tmp_path)["engines"]["theirs"]["runs"]) == 2


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path, engines: Engines) -> None:
    engines.stops_at = 2
    with pytest.raises(KeyboardInterrupt):
        Execution(prepared(tmp_path), TWO).run()
    file = tmp_path / "tiny/two.runs.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    engines.stops_at = None
    Execution(prepared(tmp_path), TWO).run()
    assert len(engines.ran) == 5
    assert len(document(tmp_path)["engines"]["ours"]["runs"]) == 2


def test_an_entry_that_fails_leaves_the_others_alone_and_is_tried_again(tmp_path: Path, engines: Engines) -> None:
    engines.fails = {"spark-agg-rocksdb"}
    directory = prepared(tmp_path)
    assert Execution(directory, TWO).run() == FAILED
    assert engines.ran.count("spark-agg-rocksdb") == 1, "not in the second turn"
    assert directory.plan(TWO)["reason"] == "theirs: no room on the disk"
    found = document(tmp_path)
    assert (list(found["engines"]), found["baseline"]) == (["ours"], "")
    engines.fails = set()
    assert Execution(prepared(tmp_path), TWO).run() == DONE
    assert engines.ran.count("holdfast-memory") == 2
    assert list(document(tmp_path)["engines"]) == ["ours", "theirs"]


def test_where_results_differ_nothing_is_timed(tmp_path: Path, engines: Engines) -> None:
    compared = {"what": "all rows", "rows": 7, "equal": False}
    wrong = replace(TWO, check=lambda: compared)
    assert Execution(prepared(tmp_path), wrong).run() == FAILED
    assert engines.ran == []
    compared["equal"] = True
    assert Execution(prepared(tmp_path), wrong).run() == DONE
    assert document(tmp_path)["equality"] == {"compared": "all rows", "what": "all rows", "rows": 7, "equal": True}


def test_whole_turns_count(tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr(execution.time, "monotonic", lambda: float(next(now)))
    three = replace(TWO, repeats=3)
    directory = prepared(tmp_path)
    assert Execution(directory, three, end_s=75).run() == DONE
    assert len(engines.ran) == 4
    assert directory.plan(three)["reason"] == "2 of 3 turns, then time ran out"
    assert len(document(tmp_path)["engines"]["ours"]["runs"]) == 2


def test_an_entry_that_has_no_time_at_all_has_failed(tmp_path: Path, engines: Engines) -> None:
    directory = prepared(tmp_path)
    assert Execution(directory, TWO, end_s=0.0).run() == FAILED
    assert engines.ran == []
    assert directory.plan(TWO)["reason"].count("time ran out") == 2
    assert not (tmp_path / "tiny/two.json").exists()


@pytest.mark.parametrize("error", [KeyError("x"), ZeroDivisionError(), ValueError("no JSON"), OSError("no memory")])
def test_whatever_an_engine_leaves_behind_the_others_go_on(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def run(entry: Entry, **_: Any) -> Run:
        if entry.engine == "holdfast-memory":
            raise error
        return engines.run(entry)

    monkeypatch.setattr(execution, "run_engine", run)
    directory = prepared(tmp_path)
    assert Execution(directory, TWO).run() == FAILED
    assert directory.plan(TWO)["reason"].startswith(f"ours: {type(error).__name__}")
    assert list(document(tmp_path)["engines"]) == ["theirs"]


def test_a_turn_that_time_cuts_off_takes_nothing_from_the_one_before(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry whose second turn found no time has its first one; the document has one turn of each."""
    clock = [0.0]
    monkeypatch.setattr(execution.time, "monotonic", lambda: clock[0])

    def run(entry: Entry, **_: Any) -> Run:
        clock[0] += 10 if len(engines.ran) < 2 else 100
        return engines.run(entry)

    monkeypatch.setattr(execution, "run_engine", run)
    directory = prepared(tmp_path)
    assert Execution(directory, TWO, end_s=60).run() == DONE
    assert len(engines.ran) == 3
    assert [len(of["runs"]) for of in document(tmp_path)["engines"].values()] == [1, 1]
    assert directory.plan(TWO)["reason"] == "1 of 2 turns, then time ran out"


def test_turns_are_in_an_order_by_the_seed() -> None:
    wide = replace(TWO, entries={f"e{i}": Entry("floor", JOB) for i in range(6)}, repeats=4)
    orders = [[step.label for step in steps_of(wide, 1) if step.turn == turn] for turn in range(4)]
    assert all(sorted(order) == sorted(wide.entries) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert [step.key for step in steps_of(wide, 1)] == [step.key for step in steps_of(wide, 1)]
    assert [step.key for step in steps_of(wide, 1)] != [step.key for step in steps_of(wide, 2)]


def test_time_left_believes_what_was_measured() -> None:
    """Four runs of a minute each at a guess; in truth each takes ten."""
    steps = steps_of(TWO, 1)
    left = TimeLeft(steps)
    assert left.left_s == 240
    left.done(steps[0], 600)
    assert left.left_s > 600 + 2 * 60
    left.done(steps[1], None)
    for step in steps[2:]:
        left.done(step, 600)
    assert left.left_s == 0


def test_a_machine_without_room_leaves_a_measurement_out_or_says_so() -> None:
    large = replace(TWO, name="large", memory_gb=64.0, disk_gb=50.0)
    fit, lacking = with_room([TWO, large], Room(memory_gb=16, disk_gb=20))
    assert fit == [TWO]
    assert lacking == [
        (large, "needs 64.0 GiB of memory, and 16.0 are free; needs 50.0 GiB of disk, and 20.0 are free")
    ]
    with pytest.raises(InvalidArgumentError, match="no room for any"):
        with_room([large], Room(16, 20))


def test_every_measurement_can_be_run() -> None:
    """A plan that fails after an hour of measuring is found here."""
    for profile in (Profile(), Profile(quick=True), Profile(quick=True, shape=Shape(5000, 1000, store_latency_ms=20))):
        found = [one for of in SUITES.values() for one in of(profile)]
        assert len({(one.suite, one.name) for one in found}) == len(found)
        for one in found:
            assert one.question.endswith("?")
            assert bool(one.entries) != bool(one.micro)
            labels = {*one.entries, *(entry.engine for entry in one.entries.values())}
            assert one.baseline in {"", *labels}
            assert one.minutes > 0
            for entry in one.entries.values():
                assert isinstance(entry.job, ENGINES[entry.engine].runs)
                assert read_job(json.loads(json.dumps(entry.job.stored()))) == entry.job
            if one.along:
                places = Counter((entry.engine, getattr(entry.job, one.along)) for entry in one.entries.values())
                assert max(places.values()) == 1, one.name
                assert max(Counter(engine for engine, _ in places).values()) > 1
    assert sum(one.minutes for one in measurements_of(Profile(quick=True))) < 9
    for suites, minutes in ((["jobs", "micro"], 56), *(([one], 20) for one in ("durability", "growth", "peers"))):
        assert sum(one.minutes for one in measurements_of(Profile(), suites)) <= minutes


def test_peers_are_verified_and_measured_in_full_runs_only() -> None:
    """Their results are compared, and a quick run has no time for them."""
    assert all(one.check is not None for one in measurements_of(Profile(), ["peers"]))
    assert SUITES["peers"](Profile(quick=True)) == []


SHAPES = [
    *(Shape(), Shape(keys=1_000, rows=1_000), Shape(keys=50_000_000), Shape(shards=200), Shape(rows=1_000, shards=200)),
    *(Shape(value_bytes=2_000, keys=2_000_000), Shape(value_bytes=32, rows=1_000_000), Shape(store_latency_ms=20.0)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_quick_run_fits_or_says_what_it_leaves_out(shape: Shape) -> None:
    (found,) = measurements_of(Profile(True, shape))
    assert found.minutes <= 9
    job = found.entries["holdfast-rocksdb"].job
    assert (job.rows, len(job.counted) >= 2, job.warmup >= 1) == (shape.rows, True, True)
    assert job.stored()["value_bytes"] == shape.value_bytes
    assert job.stored()["partitions"] == shape.shards
    assert job.keys <= shape.keys
    assert (job.keys < shape.keys) == ("Measured with" in found.note)
    assert "counted" in found.note
    assert found.entries["holdfast-memory"].engine == f"holdfast-memory{'-s3' if shape.store_latency_ms else ''}"
    assert job.stored().get("latency_ms", 0.0) == shape.store_latency_ms


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (Shape(shards=2_000), "give fewer shards"),
        (Shape(value_bytes=100_000), "larger than a quick run measures"),
        (Shape(value_bytes=8), "job B needs"),
    ],
)
def test_a_load_beyond_ten_minutes_is_refused(shape: Shape, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        measurements_of(Profile(True, shape))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--quick", "--full", "--out", "x"], "not both"),
        (["--keys", "5", "--out", "x"], "add --quick"),
        (["--quick", "--turns", "5", "--out", "x"], "leave --turns out"),
        (["--suite", "sagas", "--out", "x"], "no such suite"),
        (["--quick", "--suite", "micro", "--out", "x"], "no quick measurement"),
        (["--suite", "own-load", "--out", "x"], "need --quick"),
        ([], "--out DIR"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(options: list[str], named: str) -> None:
    result = CliRunner().invoke(bench, ["run", *options])
    assert isinstance(result.exception, InvalidArgumentError)
    assert named in str(result.exception)


@pytest.fixture
def tiny_suite(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    needs_nothing = replace(TWO, memory_gb=0.0, disk_gb=0.0)
    monkeypatch.setitem(SUITES, "tiny", lambda _: [needs_nothing])  # type: ignore[arg-type]
    monkeypatch.setattr(run_command, "facts_of", lambda profile, seed, disk: FACTS | {"seed": seed, "disk": disk})
    return lambda out, *more: CliRunner().invoke(bench, ["run", "--suite", "tiny", "--out", str(out), *more])


def test_the_command_shows_what_is_left(tmp_path: Path, engines: Engines, tiny_suite: Callable[..., Any]) -> None:
    result = tiny_suite(tmp_path)
    assert result.exit_code == 0
    assert result.output.count("left") == 4
    assert "tiny/two: ours, turn 2 of 2: 10" in result.output
    assert tiny_suite(tmp_path).exit_code == 0
    assert len(engines.ran) == 4, "all was done"


def test_the_exit_status_tells_failures(tmp_path: Path, engines: Engines, tiny_suite: Callable[..., Any]) -> None:
    engines.fails = {"holdfast-memory"}
    result = tiny_suite(tmp_path)
    assert result.exit_code == 1
    assert "tiny/two failed: ours: no room on the disk" in result.output


def test_the_listing_runs_nothing(engines: Engines, tiny_suite: Callable[..., Any], tmp_path: Path) -> None:
    result = tiny_suite(tmp_path / "not-made", "--list")
    assert "Which is faster?" in result.output
    assert not (tmp_path / "not-made").exists()
    assert engines.ran == []


def test_whole_runs_are_listed_before_single_benches() -> None:
    shown = CliRunner().invoke(bench, ["--help"]).output
    assert shown.index("  run ") < shown.index("  compare ") < shown.index("  table ") < shown.index("  job-a ")


def test_the_first_signal_stops_and_the_second_one_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    before = signal.getsignal(signal.SIGTERM)

    def stopped_twice() -> None:
        with stoppable():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped) as stopped:
        stopped_twice()
    assert stopped.value.exit_status == 143
    assert ended == [130]
    assert signal.getsignal(signal.SIGTERM) == before


def test_summary_leaves_the_warm_up_and_batches_beyond_the_last_out() -> None:
    job = JobA(rows=100, batches=4, warmup=2)
    assert summarize([9000, 9000, 100, 300, 7], job) == {"rows_per_second": 500.0, "median_batch_ms": 200}


def test_summary_leaves_out_what_fills_the_state() -> None:
    job = JobB(rows=100, keys=250, fill_rows=100, batches=2, warmup=1)
    assert (job.fill_batches, job.all_batches, list(job.counted)) == (3, 5, [4])
    assert summarize([9000, 9000, 9000, 9000, 100], job)["median_batch_ms"] == 100


def test_ratios() -> None:
    """Each is the median of the pairs, not the ratio of medians; an engine is compared with all that follow it."""
    runs = {"a": [{"rows_per_second": r} for r in (10, 40, 30)], "b": [{"rows_per_second": r} for r in (10, 10, 20)]}
    assert ratios(runs) == {"ratios": {"a/b": 1.5}, "ratios_by_pair": {"a/b": [1.0, 4.0, 1.5]}}
    runs = {label: [{"rows_per_second": r}] for label, r in (("a", 8), ("b", 4), ("c", 1))}
    assert ratios(runs)["ratios"] == {"a/b": 2.0, "a/c": 8.0, "b/c": 4.0}


def test_engines_share_their_base_settings() -> None:
    for job in (JobA(), JobB(), DropIn()):
        for name in engines_for(type(job)):
            settings = settings_of(name, job)
            assert job.settings().items() <= settings.items()
            assert settings["spark.local.dir"] == "/disk/spark"


def settings_of(engine: str, job: SparkJob) -> dict[str, str]:
    found = ENGINES[engine]
    assert isinstance(found, SparkEngine)
    return found.settings(job, Places(Path("/disk"), Path("/memory")))


@pytest.mark.parametrize(("backend", "place"), [("memory", "/memory"), ("filesystem", "/disk"), ("rocksdb", "/disk")])
def test_local_state_lies_where_its_backend_keeps_it(backend: str, place: str) -> None:
    settings = settings_of(f"holdfast-{backend}", JobA())
    assert settings["spark.holdfast.backend"] == backend
    assert settings["spark.holdfast.local.dir"].startswith(place)


def test_both_kinds_of_rocksdb_get_the_same_budget() -> None:
    spark = settings_of("spark-agg-rocksdb", JobB(memory_mb=300))
    assert spark["spark.sql.streaming.stateStore.rocksdb.boundedMemoryUsage"] == "true"
    assert spark["spark.sql.streaming.stateStore.rocksdb.maxMemoryUsageMB"] == "300"
    assert settings_of("holdfast-rocksdb", JobB(memory_mb=300))["spark.holdfast.rocksdb.memory"] == "300m"
    assert not [key for key in settings_of("spark-agg-rocksdb", JobA()) if "emory" in key and "rocksdb" in key]


@pytest.mark.parametrize(
    ("option", "given"),
    [
        *(("--engines", engines) for engines in ("nothing", "floor,floor", "", "store-memory")),
        *(("--vary", vary) for vary in ("speed=1,2", "slots", "slots=")),
    ],
)
def test_engines_and_variants_that_cannot_be_are_refused(option: str, given: str) -> None:
    assert isinstance(CliRunner().invoke(bench, ["job-a", option, given]).exception, InvalidArgumentError)


@pytest.mark.slow(1)
def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(BenchError, match="KeyError: 'no such engine'"):
        run_engine(Entry("no such engine", JobA()))


def test_plain_files_are_a_choice_of_any_engine() -> None:
    """Whether Spark forks for its checkpoint files must be the only difference between the runs compared."""
    usual = settings_of("spark-agg-rocksdb", JobA())
    plain = settings_of("spark-agg-rocksdb", JobA(plain_files=True))
    assert {key.rpartition(".")[2] for key in plain.keys() - usual.keys()} == {"checkpointFileManagerClass"}
    assert usual.items() <= plain.items()


def test_a_job_varies_in_one_field_by_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether a setting costs anything is a pair of runs, whatever the setting is."""
    ran: list[Entry] = []

    def run(entry: Entry, **_: object) -> dict[str, object]:
        ran.append(entry)
        return a_run(100.0)

    monkeypatch.setattr(single, "run_engine", run)
    size = ["--rows", "10", "--batches", "3", "--warmup", "1", "--repeats", "1", "--json", str(tmp_path / "found")]
    given = ["job-a", "--engines", "holdfast-memory", "--vary", "plain-files=true,false", *size]
    assert CliRunner().invoke(bench, given, catch_exceptions=False).exit_code == 0
    assert [entry.job.plain_files for entry in ran] == [True, False]  # type: ignore[attr-defined]
    found = json.loads((tmp_path / "found").read_text())
    assert list(found["engines"]) == ["holdfast-memory, plain-files true", "holdfast-memory, plain-files false"]
    assert "--vary plain-files=true,false" in found["command"]


def test_turns_are_those_of_every_measurement_and_minutes_grow_with_them() -> None:
    plain, more = measurements_of(Profile()), measurements_of(Profile(), turns=5)
    for before, after in zip(plain, more, strict=True):
        if before.micro:
            assert after == before
        else:
            assert after.repeats == 5
            assert after.minutes / 5 == pytest.approx(before.minutes / before.repeats)


def test_a_directory_belongs_to_one_number_of_turns(tmp_path: Path) -> None:
    """Another number is another run; directories from before there was a choice go on."""
    with ResultsDirectory.opened(tmp_path, FACTS | {"turns": 5}):
        pass
    with pytest.raises(InvalidArgumentError, match="turns"), ResultsDirectory.opened(tmp_path, FACTS | {"turns": 2}):
        pass
    stored = json.loads((tmp_path / "run.json").read_text())
    del stored["turns"]
    (tmp_path / "run.json").write_text(json.dumps(stored))
    with ResultsDirectory.opened(tmp_path, FACTS | {"turns": None}) as directory:
        assert "turns" not in directory.facts


def test_only_the_same_rows_in_the_same_micro_batches_are_equal() -> None:
    """Their order within a micro-batch is free; how often each occurs is not."""
    a, b, c = ({"key": name} for name in "abc")
    right = rows_by_batch([[a, b, b], [c]])
    assert verdict(right, {"spark": rows_by_batch([[b, a, b], [c]])}) == {"rows": 3, "equal": True}
    for other, differing in (([[a, b], [c]], 1), ([[a, b, b, c], []], 2), ([[a, b, b], []], 1)):
        found = verdict(right, {"spark": rows_by_batch(other)})
        assert not found["equal"]
        assert found["differences"]["spark"]["results"] == differing
    assert verdict({}, {"spark": {}}) == {"rows": 0, "equal": False}
