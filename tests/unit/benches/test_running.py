"""A run of suites goes on where it was stopped, keeps what it measured, and says what it cannot do."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.benches.command import bench
from holdfast.benches.commands import run as run_command
from holdfast.benches.commands.run import Stopped, stoppable
from holdfast.benches.report.directory import DONE, RUN
from holdfast.benches.running import carrying_out
from holdfast.benches.running.carrying_out import CarryingOut, Step, TimeLeft, steps_of
from holdfast.benches.running.directory import FAILED
from holdfast.benches.running.plan import Room, measurements_of, with_room
from holdfast.benches.runs.paired import Entry, Run
from holdfast.benches.suites.measurement import Profile, Shape
from holdfast.benches.suites.suites import SUITES
from holdfast.errors import InvalidArgumentError
from tests.unit.benches.tiny_run import FACTS, JOB, TWO, Engines, document, prepared


def test_a_measurement_becomes_a_document_of_all_its_turns(tmp_path: Path, engines: Engines) -> None:
    directory = prepared(tmp_path)
    assert CarryingOut(directory, TWO).run() == DONE
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
    first = CarryingOut(prepared(tmp_path), TWO)
    if done < 4:
        with pytest.raises(KeyboardInterrupt):
            first.run()
    else:
        first.run()
    engines.stops_at = None
    again = CarryingOut(prepared(tmp_path), TWO)
    assert len(again.done) == (done if done < 4 else 0)
    assert again.run() == DONE
    assert len(engines.ran) == 4, "nothing is run twice"
    assert len(document(tmp_path)["engines"]["theirs"]["runs"]) == 2


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path, engines: Engines) -> None:
    engines.stops_at = 2
    with pytest.raises(KeyboardInterrupt):
        CarryingOut(prepared(tmp_path), TWO).run()
    file = tmp_path / "tiny/two.runs.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    engines.stops_at = None
    CarryingOut(prepared(tmp_path), TWO).run()
    assert len(engines.ran) == 5
    assert len(document(tmp_path)["engines"]["ours"]["runs"]) == 2


def test_an_entry_that_fails_leaves_the_others_alone_and_is_tried_again(tmp_path: Path, engines: Engines) -> None:
    engines.fails = {"spark-agg-rocksdb"}
    directory = prepared(tmp_path)
    assert CarryingOut(directory, TWO).run() == FAILED
    assert engines.ran.count("spark-agg-rocksdb") == 1, "not in the second turn"
    assert directory.plan(TWO)["reason"] == "theirs: no room on the disk"
    found = document(tmp_path)
    assert (list(found["engines"]), found["baseline"]) == (["ours"], "")
    engines.fails = set()
    assert CarryingOut(prepared(tmp_path), TWO).run() == DONE
    assert engines.ran.count("holdfast-memory") == 2
    assert list(document(tmp_path)["engines"]) == ["ours", "theirs"]


def test_where_results_differ_nothing_is_timed(tmp_path: Path, engines: Engines) -> None:
    compared = {"what": "all rows", "rows": 7, "equal": False}
    wrong = replace(TWO, check=lambda: compared)
    assert CarryingOut(prepared(tmp_path), wrong).run() == FAILED
    assert engines.ran == []
    compared["equal"] = True
    assert CarryingOut(prepared(tmp_path), wrong).run() == DONE
    assert document(tmp_path)["equality"] == {"compared": "all rows", "what": "all rows", "rows": 7, "equal": True}


def test_when_the_time_is_up_whole_turns_count(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr(carrying_out.time, "monotonic", lambda: float(next(now)))
    three = replace(TWO, repeats=3)
    directory = prepared(tmp_path)
    assert CarryingOut(directory, three, end_s=75).run() == DONE
    assert len(engines.ran) == 4
    assert directory.plan(three)["reason"] == "2 of 3 turns, then the time was up"
    assert len(document(tmp_path)["engines"]["ours"]["runs"]) == 2


def test_an_entry_that_has_no_time_at_all_has_failed(tmp_path: Path, engines: Engines) -> None:
    directory = prepared(tmp_path)
    assert CarryingOut(directory, TWO, end_s=0.0).run() == FAILED
    assert engines.ran == []
    assert directory.plan(TWO)["reason"].count("the time was up") == 2
    assert not (tmp_path / "tiny/two.json").exists()


@pytest.mark.parametrize("error", [KeyError("x"), ZeroDivisionError(), ValueError("no JSON"), OSError("no memory")])
def test_whatever_an_engine_leaves_behind_the_others_go_on(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def run(entry: Entry, **_: Any) -> Run:
        if entry.engine == "holdfast-memory":
            raise error
        return engines.run(entry)

    monkeypatch.setattr(carrying_out, "run_engine", run)
    directory = prepared(tmp_path)
    assert CarryingOut(directory, TWO).run() == FAILED
    assert directory.plan(TWO)["reason"].startswith(f"ours: {type(error).__name__}")
    assert list(document(tmp_path)["engines"]) == ["theirs"]


def test_a_turn_that_time_cuts_off_takes_nothing_from_the_one_before(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry whose second turn found no time has its first one; the document has one turn of each."""
    clock = [0.0]
    monkeypatch.setattr(carrying_out.time, "monotonic", lambda: clock[0])

    def run(entry: Entry, **_: Any) -> Run:
        clock[0] += 10 if len(engines.ran) < 2 else 100
        return engines.run(entry)

    monkeypatch.setattr(carrying_out, "run_engine", run)
    directory = prepared(tmp_path)
    assert CarryingOut(directory, TWO, end_s=60).run() == DONE
    assert len(engines.ran) == 3
    assert [len(of["runs"]) for of in document(tmp_path)["engines"].values()] == [1, 1]
    assert directory.plan(TWO)["reason"] == "1 of 2 turns, then the time was up"


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


def test_every_measurement_is_complete() -> None:
    for profile in (Profile(), Profile(quick=True)):
        found = [one for of in SUITES.values() for one in of(profile)]
        assert len({(one.suite, one.name) for one in found}) == len(found)
        for one in found:
            assert one.question.endswith("?")
            assert bool(one.entries) != bool(one.micro)
            labels = {*one.entries, *(entry.engine for entry in one.entries.values())}
            assert one.baseline in {"", *labels}
            assert one.minutes > 0
    assert sum(one.minutes for one in measurements_of(Profile(quick=True))) < 9
    assert sum(one.minutes for one in measurements_of(Profile(), ["jobs", "micro"])) <= 56


SHAPES = [
    Shape(),
    Shape(keys=1_000, rows=1_000),
    Shape(keys=50_000_000),
    Shape(shards=200),
    Shape(rows=1_000, shards=200),
    Shape(value_bytes=2_000, keys=2_000_000),
    Shape(value_bytes=32, rows=1_000_000),
    Shape(store_latency_ms=20.0),
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
        (["--quick", "--suite", "micro", "--out", "x"], "nothing that is quick"),
        (["--suite", "own-load", "--out", "x"], "quick alone; add --quick"),
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


def test_the_command_shows_lines_and_how_long_the_rest_takes(
    tmp_path: Path, engines: Engines, tiny_suite: Callable[..., Any]
) -> None:
    result = tiny_suite(tmp_path)
    assert result.exit_code == 0
    assert result.output.count("left") == 4
    assert "tiny/two: ours, turn 2 of 2: 10" in result.output
    assert tiny_suite(tmp_path).exit_code == 0
    assert len(engines.ran) == 4, "all was done"


def test_the_exit_status_says_that_something_failed(
    tmp_path: Path, engines: Engines, tiny_suite: Callable[..., Any]
) -> None:
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


def test_a_step_knows_its_share() -> None:
    assert Step(TWO, 0, "ours").expected_s == 60


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
