"""Peers: the files that all read, how far a peer has come, verification, environments, and runs of programs."""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.benches.instruments.measured import Places
from holdfast.benches.peers import job as input_files
from holdfast.benches.peers.engines import ENGINES, ENVIRONMENTS, Environment, PeerEngine, Program
from holdfast.benches.peers.job import FromFiles
from holdfast.benches.peers.progress import READY, Progress, Usage, equality
from holdfast.errors import CorruptionError, InvalidArgumentError, UnavailableError

_PROGRAMS = Path(__file__).parents[3] / "benches/peers/programs"
_JOB = FromFiles(rows=60, keys=20, batches=4, warmup=1, commit_ms=1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_files_hold_the_rows_of_each_micro_batch_and_a_seed_makes_them_again() -> None:
    """Every engine must read the same rows, now and on another day."""
    batches = list(input_files.batches_of(_JOB.folder()))
    assert [[path.name for path in files] for files in batches][:2] == [
        ["batch-0000-0.csv", "batch-0000-1.csv"],
        ["batch-0001-0.csv", "batch-0001-1.csv"],
    ]
    assert len(batches) == _JOB.batches
    lines = [path.read_text().splitlines() for path in batches[0]]
    assert [len(of) for of in lines] == [31, 31], "half of the rows each, below a header"
    assert lines[0][0] == "#key,v"
    before = [path.read_bytes() for files in batches for path in files]
    _JOB.folder().rename(_JOB.folder().with_name("elsewhere"))
    assert [path.read_bytes() for files in input_files.batches_of(_JOB.folder()) for path in files] == before
    assert replace(_JOB, seed=_JOB.seed + 1).folder() != _JOB.folder()


def test_files_are_in_the_order_of_their_times() -> None:
    """Spark reads a folder in this order."""
    times = [path.stat().st_mtime for files in input_files.batches_of(_JOB.folder()) for path in files]
    assert times == sorted(set(times))


def _by_hand(folder: Path) -> tuple[Counter[int], Counter[int]]:
    counts: Counter[int] = Counter()
    sums: Counter[int] = Counter()
    for path in folder.glob("*.csv"):
        for line in path.read_text().splitlines()[1:]:
            key, v = map(int, line.split(","))
            counts[key] += 1
            sums[key] += v
    return counts, sums


@pytest.mark.parametrize("every", [1, 5])
def test_totals_are_those_of_the_rows(every: int) -> None:
    counts, sums = _by_hand(_JOB.folder())
    keys = [key for key in sorted(counts) if key % every == 0]
    expected = {"key": keys, "n": [counts[key] for key in keys], "s": [sums[key] for key in keys]}
    assert input_files.totals(_JOB.folder(), every).to_pydict() == expected
    assert input_files.sampled_rows_so_far(_JOB.folder(), every)[-1] == sum(expected["n"])


def _told(progress: Progress, *lines: tuple[float, str]) -> Progress:
    for at_s, line in lines:
        assert progress.take(line.encode() + b"\n", at_s)
    return progress


def test_a_result_of_a_key_takes_the_place_of_the_one_before_it() -> None:
    """Flink writes what it takes back, and which of its tasks speaks."""
    progress = _told(
        Progress([3]), (1, "+I[5, 1, 7]"), (2, "1> -U[5, 1, 7]"), (3, "1> +U[5, 2, 9]"), (4, "+I[6, 1, 1]")
    )
    assert progress.done(1)
    assert progress.totals().to_pydict() == {"key": [5, 6], "n": [2, 1], "s": [9, 1]}
    assert not progress.take(b"WARNING: something else\n", 5)


def test_rows_of_a_burst_were_done_since_the_burst_before_it() -> None:
    """A peer that writes its results all at once has not done its rows in that moment."""
    progress = _told(Progress([2, 4, 8]), (10, READY.decode().strip()), (14, "+I[1, 4, 0]"), (18, "+U[1, 8, 0]"))
    assert progress.ends_s() == [12, 14, 18]


def test_a_peer_that_takes_all_rows_as_one_piece_is_given_the_whole_time() -> None:
    """Its results may take longer to print than a burst: what comes last was not done in that moment."""
    lines = [(10, READY.decode().strip()), (16, "+I[1, 4, 0]"), (16.2, "+I[2, 8, 0]")]
    progress = _told(Progress([4, 8, 12]), *lines)
    assert progress.ends_s()[1:] == pytest.approx([16.1, 16.2])
    assert progress.ends_s(in_pieces=False) == pytest.approx([10 + 6.2 / 3, 10 + 12.4 / 3, 16.2])


def test_a_wrong_result_is_refused() -> None:
    """No time may be reported for it."""
    right = pa.table({"key": [1, 2], "n": [3, 4], "s": [5, 6]})
    assert equality("all keys", right, right) == {"what": "all keys", "rows": 2, "equal": True}
    for wrong in (right.slice(1), pa.table({"key": [1, 2], "n": [3, 4], "s": [5, 7]})):
        with pytest.raises(CorruptionError, match="do not match the rows that it read"):
            equality("all keys", wrong, right)


def test_usage_between_looks_is_taken_to_be_even() -> None:
    """A micro-batch of a peer ends at a moment that is known afterwards only."""
    sums = iter([{"jvm": 1.0}, {"jvm": 3.0, "python": 8.0}, {"jvm": 3.0, "python": 8.0}])
    usage = Usage(lambda: next(sums), iter([10.0, 20.0, 40.0]).__next__)
    for _ in range(3):
        usage.look()
    assert usage.between(15, 30) == {"jvm": 1.0, "python": 4.0}


@dataclass(frozen=True)
class Here(Environment):
    """This very environment: for programs that need no peer."""

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    def install(self, tell: Any = None) -> None:
        """Nothing is missing."""

    def version(self) -> str:
        return "plain Python"


# Adds up the rows in plain Python, and goes on from what it has kept after each file.
_PLAIN = """
import json, pathlib, sys, time
order = json.loads(pathlib.Path(sys.argv[1]).read_text())
kept = pathlib.Path(order["durable"] or order["local"]) / "kept.json"
kept.parent.mkdir(exist_ok=True)
totals, done = json.loads(kept.read_text()) if kept.exists() else ({}, 0)
print("ready", flush=True)
files = [path for batch in order["batches"] for path in batch]
for path in files[done:]:
    for line in pathlib.Path(path).read_text().splitlines()[1:]:
        key, v = map(int, line.split(","))
        n, s = totals.get(str(key), (0, 0))
        totals[str(key)] = n + 1, s + v + order["wrong"]
        if key % order["every"] == 0:
            print(f"+U[{key}, {n + 1}, {s + v + order['wrong']}]", flush=True)
    done += 1
    new = kept.with_suffix(".new")
    new.write_text(json.dumps([totals, done] if order["keeps"] else [{}, 0]))
    new.rename(kept)
    time.sleep(order["sleep_s"])
if order["fails"]:
    sys.exit("a mistake of the program")
"""


def _plain(tmp_path: Path, **options: Any) -> PeerEngine:
    script = tmp_path / "plain.py"
    script.write_text(_PLAIN)
    common = {"wrong": 0, "sleep_s": 0.05, "keeps": True, "fails": False}
    return PeerEngine("plain", Program(Here("plain", 0, ((3, 0), (4, 0))), str(script), common | options), durable=True)


def _places(tmp_path: Path) -> Places:
    (tmp_path / "disk").mkdir()
    return Places(tmp_path / "disk", tmp_path / "memory")


@pytest.mark.slow(2)
def test_a_run_yields_the_time_of_each_micro_batch_and_what_was_equal(tmp_path: Path) -> None:
    measured = _plain(tmp_path, sleep_s=0.3).run(_JOB, _places(tmp_path))
    assert len(measured.batch_ms) == _JOB.batches
    # In all: whoever looks for results may come late to one, and then two are there at once.
    assert sum(measured.batch_ms) > 250 * _JOB.batches
    assert measured.equality == {"what": "sampled keys", "rows": 20, "equal": True}
    assert measured.start_ms is not None
    assert measured.start_ms > 0
    assert measured.written["durable"] > 0
    assert measured.memory["python"]["rss"] > 0 if sys.platform == "linux" else True
    assert measured.settings["survives a kill"] == "True"
    json.dumps(measured.__dict__)


@pytest.mark.slow(1)
def test_a_run_with_a_wrong_result_yields_no_time(tmp_path: Path) -> None:
    with pytest.raises(CorruptionError, match="do not match the rows"):
        _plain(tmp_path, wrong=1).run(_JOB, _places(tmp_path))


@pytest.mark.slow(1)
def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="a mistake of the program"):
        _plain(tmp_path, fails=True).run(_JOB, _places(tmp_path))


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda one: one.peer)
def test_every_version_of_an_environment_is_locked(environment: Environment) -> None:
    name, _, version = environment.version().partition(" ")
    assert f"{name}=={version}" in environment.requirements.with_suffix(".in").read_text()
    text = environment.requirements.read_text()
    assert text.count("==") <= text.count("--hash=sha256:")
    assert "://" not in text
    assert environment.folder.name.startswith(f"{environment.peer}-")


def test_an_environment_without_wheels_for_this_python_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no wheels for this Python"):
        Environment("bytewax", 0, ((3, 8), (3, 9))).install()


def test_an_environment_that_is_there_is_not_made_again() -> None:
    environment = ENVIRONMENTS[0]
    environment.folder.mkdir(parents=True)
    (environment.folder / ".ready").touch()
    environment.install(pytest.fail)


@pytest.mark.parametrize("program", sorted(_PROGRAMS.glob("*_totals.py")), ids=lambda path: path.stem)
def test_programs_of_peers_import_nothing_of_holdfast(program: Path) -> None:
    """It is not installed where they run."""
    names = [n.module or "" for n in ast.walk(ast.parse(program.read_text())) if isinstance(n, ast.ImportFrom)]
    names += [a.name for n in ast.walk(ast.parse(program.read_text())) if isinstance(n, ast.Import) for a in n.names]
    assert not [name for name in names if name.split(".")[0] in ("holdfast", "benches")]
    assert any(engine.program.script == program.name for engine in ENGINES.values())
