"""A directory of results: what is kept, read and refused; and what the repository says of its newest full run."""

from __future__ import annotations

import copy
import errno
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.benches.report import published
from holdfast.benches.report.answers import answers_of
from holdfast.benches.report.directory import RUN, read
from holdfast.benches.running.directory import FAILED, ResultsDirectory
from holdfast.benches.running.execution import Execution
from holdfast.benches.runs.paired import Entry
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from tests.unit.benches import sample_results
from tests.unit.benches.conftest import FACTS, JOB, MACHINE, TWO, Engines, prepared

JOB_A = {("jobs", "job-a"): sample_results.job_a(1)}
Change = Callable[[Any], object]


def changed(folder: Path, file: str, change: Change) -> Path:
    sample_results.write(folder, copy.deepcopy(JOB_A))
    found = json.loads((folder / file).read_text())
    change(found)
    (folder / file).write_text(json.dumps(found))
    return folder


def test_what_was_measured_and_what_not(tmp_path: Path) -> None:
    """Failed, left out and unfinished measurements are gaps with a reason; what there is can still be read."""
    documents = sample_results.full()
    folder = sample_results.write(tmp_path, documents)
    (folder / "growth" / "executors.runs.jsonl").write_text('{"turn": 0}\n{"turn": 1}\n')
    (folder / "jobs" / "by-key-pandas.json").unlink()
    results = read(folder)
    assert [(q.suite, q.name) for q, _ in results.measured] == [key for key in documents if key[1] != "by-key-pandas"]
    assert {(q.name, q.state, q.reason) for q in results.missing} == {
        ("by-key-pandas", "done", "its results are not in jobs/by-key-pandas.json"),
        ("q5", "failed", "a run of nexmark-rocksdb failed: no space left"),
        ("quix", "left out", "Quix Streams has no wheels for this Python"),
        ("executors", "to do", "stopped after 2 runs"),
    }


def test_a_measurement_that_failed_in_part_is_shown_and_said(tmp_path: Path) -> None:
    def fail(run: Any) -> None:
        run["plan"][0] |= {"state": "failed", "reason": "a run of floor failed"}

    results = read(changed(tmp_path, "run.json", fail))
    assert [q.name for q, _ in results.measured] == ["job-a"]
    assert "a run of floor failed; measured in part" in {q.reason for q in results.missing}


def test_a_directory_without_results_is_none(tmp_path: Path) -> None:
    """The message names what is missing, and what to give."""
    with pytest.raises(NotFoundError, match=r"holdfast bench run wrote, missing=.*run\.json"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("", "Expecting value"),
        ('{"format": 1', "delimiter"),
        ("[" * 100_000, "nest|recursion|depth"),
        ("[]", "no JSON object"),
        ('{"format": NaN}', "finite numbers, found=NaN"),
        ("\udcff", "decode|utf"),
    ],
)
def test_a_file_that_is_no_json_of_ours_is_named(tmp_path: Path, text: str, because: str) -> None:
    (tmp_path / "run.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptionError, match=r"(?s)run\.json.*" + f"({because})"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda run: run.update(format=2), r"\$\.format"),
        (lambda run: run.pop("plan"), "'plan' is a required property"),
        (lambda run: run["plan"][0].update(suite="../../etc"), r"\$\.plan\[0\]\.suite"),
        (lambda run: run["plan"][0].update(name="a/b"), r"\$\.plan\[0\]\.name"),
        (lambda run: run["plan"][0].update(name=".."), r"\$\.plan\[0\]\.name"),
        (lambda run: run["plan"][0].update(state="lost"), r"\$\.plan\[0\]\.state"),
        (lambda run: run["plan"][0].update(question="a\nb"), r"\$\.plan\[0\]\.question"),
        (lambda run: run.update(machine={"cpu": {"deep": 1}}), r"\$\.machine\.cpu"),
        (lambda run: run["plan"].append(run["plan"][0]), "a question twice"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, change: Change, place: str) -> None:
    """A name is no way out of the directory, and each place that is wrong is named."""
    with pytest.raises(CorruptionError, match=place):
        read(changed(tmp_path, "run.json", change))


def runs(document: Any) -> Any:
    return document["engines"]["floor"]["runs"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda d: d.pop("engines"), "'engines' is a required property"),
        (lambda d: d.update(engines={}), r"\$\.engines"),
        (lambda d: runs(d).clear(), r"\$\.engines\.floor\.runs"),
        (lambda d: runs(d)[0].update(batch_ms=["1"]), r"batch_ms\[0\]"),
        (lambda d: runs(d)[0]["batch_ms"].__setitem__(3, -1), r"batch_ms\[3\]"),
        (lambda d: runs(d)[0]["batch_ms"].__setitem__(3, 1e300), r"batch_ms\[3\]"),
        (lambda d: runs(d)[0]["batch_ms"].pop(), "fewer micro-batches than its job"),
        (lambda d: runs(d)[0].update(batch_ms=[0] * 8), "took no time"),
        (lambda d: runs(d)[0].update(rows_per_second=0), "rows_per_second"),
        (lambda d: d["settings"]["jobs"]["floor"].update(rows=""), r"\$\.settings\.jobs\.floor\.rows"),
        (lambda d: runs(d)[0].update(cpu={"jvm": 1}), "'wall' is a required property"),
        (lambda d: runs(d)[0].update(memory={"jvm": {"rss": 1}}), "'pss' is a required property"),
        (lambda d: d["settings"]["jobs"].pop("floor"), "'floor' has no settings"),
        (lambda d: d["settings"]["jobs"]["floor"].update(name="job-z"), "KeyError"),
        (lambda d: d["settings"]["jobs"]["floor"].update(turbo=True), "turbo"),
        (lambda d: d["settings"]["jobs"]["floor"].update(warmup=99), "above --warmup"),
        (lambda d: d["state_bytes"].pop("floor"), "'floor' has no settings or no state_bytes"),
        (lambda d: d["machine"].update(cores=0), r"\$\.machine\.cores"),
        (lambda d: d.update(targets=[{"what": "x"}]), r"\$\.targets\[0\]"),
        (lambda d: d.update(equality={"rows": 1, "equal": "yes"}), r"\$\.equality"),
        (lambda d: d["engines"].update({"a\u0000b": d["engines"]["floor"]}), r"\$\.engines"),
    ],
)
def test_a_document_that_cannot_be_is_refused(tmp_path: Path, change: Change, place: str) -> None:
    """Nothing is drawn of figures that contradict themselves: file and place are named."""
    with pytest.raises(CorruptionError, match=rf"(?s)job-a\.json.*{place}"):
        read(changed(tmp_path, "jobs/job-a.json", change))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"machine": MACHINE | {"cores": 8}}, "machine cores: 2, 8"),
        ({"versions": {"holdfast": "0.2.0"}}, "versions holdfast: 0.1.0, 0.2.0"),
        ({"profile": "quick"}, "profile: full, quick"),
        ({"seed": 2}, "seed: 1, 2"),
        ({"disk": "/other"}, "disk: None, /other"),
    ],
)
def test_other_results_are_not_mixed_in(tmp_path: Path, engines: Engines, change: dict[str, Any], named: str) -> None:
    Execution(prepared(tmp_path), TWO).run()
    with pytest.raises(InvalidArgumentError, match=named) as refused:
        prepared(tmp_path, **change)
    assert "--fresh" in str(refused.value)
    assert prepared(tmp_path, fresh=True, **change).facts["plan"] == []
    assert not (tmp_path / "tiny/two.json").exists()


def test_runs_of_another_job_are_not_mixed_in(tmp_path: Path, engines: Engines) -> None:
    engines.stops_at = 1
    with pytest.raises(KeyboardInterrupt):
        Execution(prepared(tmp_path), TWO).run()
    larger = replace(TWO, entries={name: Entry(of.engine, replace(JOB, rows=20)) for name, of in TWO.entries.items()})
    with pytest.raises(InvalidArgumentError, match="job rows: 10, 20"):
        Execution(prepared(tmp_path), larger)


def test_a_directory_of_other_things_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidArgumentError, match=r"thesis\.tex"):
        prepared(tmp_path, fresh=True)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_two_commands_do_not_work_on_one_directory(tmp_path: Path, fresh: bool) -> None:
    """Nor does --fresh delete what another command is at."""
    line = {"turn": 0, "label": "ours", "engine": "holdfast-memory", "job": {}, "seconds": 1.5, "run": {}}
    with ResultsDirectory.opened(tmp_path, FACTS) as directory:
        directory.add_run(TWO, line)
        with pytest.raises(InvalidArgumentError, match="another bench run"):
            prepared(tmp_path, fresh=fresh)
        assert directory.runs(TWO) == [line]


@pytest.mark.parametrize("line", ["{", "[]", '{"turn": 0}', '{"turn": "0", "label": 1}'])
def test_a_damaged_line_of_a_run_is_named_and_kept(tmp_path: Path, engines: Engines, line: str) -> None:
    """Hours of runs stand beside it: whoever sees the message decides."""
    engines.stops_at = 2
    with pytest.raises(KeyboardInterrupt):
        Execution(prepared(tmp_path), TWO).run()
    file = tmp_path / "tiny/two.runs.jsonl"
    damaged = f"{line}\n{file.read_text()}"
    file.write_text(damaged)
    with pytest.raises(CorruptionError, match=r"delete its line.*two\.runs\.jsonl"):
        Execution(prepared(tmp_path), TWO)
    assert file.read_text() == damaged


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "no JSON object"),
        ("{}", "required property"),
        ('{"format": 1, "plan": [{"suite": "x"}]}', "required property"),
    ],
)
def test_a_damaged_plan_is_named_and_kept(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / RUN).write_text(content)
    with pytest.raises(HoldfastError, match=said):
        prepared(tmp_path)
    assert (tmp_path / RUN).read_text() == content


def test_a_command_that_was_killed_before_its_plan_stood_leaves_no_stranger(tmp_path: Path) -> None:
    (tmp_path / f".{RUN}.new").write_text('{"form')
    assert prepared(tmp_path).facts["plan"] == []


def test_a_full_disk_loses_nothing(tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that was there stays whole, and the runs before it count."""
    directory = prepared(tmp_path)
    engines.stops_at = 2
    with pytest.raises(KeyboardInterrupt):
        Execution(directory, TWO).run()
    before = (tmp_path / RUN).read_text()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(Path, "write_text", full)
        with pytest.raises(UnavailableError, match="the same command continues"):
            directory.set_state(TWO, FAILED)
    assert (tmp_path / RUN).read_text() == before
    engines.stops_at = None
    Execution(prepared(tmp_path), TWO).run()
    assert len(engines.ran) == 4


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("{")])
def test_what_is_done_has_a_document(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """A document that was deleted or cut off is measured again."""
    directory = prepared(tmp_path)
    directory.set_state(TWO, "done")
    directory.write_document(TWO, {}, whole=True)
    assert directory.is_done(TWO)
    damage(directory.document_file(TWO))
    assert not directory.is_done(TWO)


ROOT = Path(__file__).parents[3]
is_published = pytest.mark.skipif(
    not (ROOT / published.RESULTS / RUN).exists(), reason="no full run is published yet: make results RUN=DIR"
)


@pytest.mark.slow(1)
@is_published
def test_the_repository_says_what_its_results_say() -> None:
    """RESULTS.md, README and its figure are of one run: after a change of either, make results."""
    for path, text in published.texts(ROOT, report=False).items():
        assert (ROOT / path).read_text() == text, path


@is_published
@pytest.mark.all  # the quick one covers the same figures in fewer charts
def test_the_report_in_the_repository_is_of_the_same_results() -> None:
    assert (ROOT / published.REPORT).read_text() == published.texts(ROOT)[published.REPORT]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for folder in ("benches", "docs"):
        (root / folder).mkdir(parents=True)
    (root / published.README).write_text((ROOT / published.README).read_text())
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return sample_results.write(tmp_path / "run", sample_results.full())


@pytest.mark.slow
def test_one_command_publishes_a_run(repository: Path, run: Path) -> None:
    """All files at once; made again of the compact results they are the same, and so is what these say."""
    published.main([str(run)], repository)
    pages = (published.PAGE, published.REPORT, published.PICTURE, published.README)
    files = {path: (repository / path).read_text() for path in pages}
    again = published.texts(repository, report=False)
    assert again == {path: text for path, text in files.items() if path != published.REPORT}
    assert files[published.REPORT].startswith("<!DOCTYPE html>")
    whole, compact = (answers_of(read(folder)) for folder in (run, repository / published.RESULTS))
    assert [a.question for a in whole] == [a.question for a in compact]
    assert [a.batch_ms(label) for a in whole for label in a.labels] == [
        a.batch_ms(label) for a in compact for label in a.labels
    ]
    page, readme, picture = (files[path] for path in (published.PAGE, published.README, published.PICTURE))
    assert page.count("\n") <= 150
    assert "**holdfast on filesystem has 4.4 times the throughput of Spark's aggregation on RocksDB, and takes" in page
    assert f"Profile full, begun 2026-11-23, holdfast {sample_results.VERSIONS['holdfast']}, " in page
    assert "| holdfast-memory/floor | at least 0.8 | 0.716 |" in page
    assert re.search(r"; 50 million keys: [^:]*rocksdb \*\*0\.83\*\*", page)
    assert not [line for line in page.splitlines() if len(line) > 120 and not line.startswith(("|", "`"))]
    assert "4.5 (`memory`), 4.4 (`filesystem`) and 3.0 (`rocksdb`) times Spark's throughput" in " ".join(readme.split())
    assert "(4.4\N{MULTIPLICATION SIGN})" in picture
    assert readme.count("## Quickstart") == 1


@pytest.mark.slow(1)
def test_a_missed_target_stands_beside_its_ratio(repository: Path, tmp_path: Path) -> None:
    """Once: a list of targets apart from their ratios said every question again."""
    documents = {**sample_results.full(), ("jobs", "job-a"): sample_results.job_a(rocksdb_ms=9000.0)}
    published.main([str(sample_results.write(tmp_path / "slow", documents))], repository)
    page = (repository / published.PAGE).read_text()
    assert re.search(r"rocksdb \*\*0\.\d+\*\* \([^)]*\), wanted 1\.5;", page)
    assert "holdfast-rocksdb/" not in page
    assert "Besides those among the ratios, these are not:" in page


@pytest.mark.slow(1)
def test_a_figure_that_is_in_readme_is_in_its_results(repository: Path, run: Path) -> None:
    """Another run, another figure: nothing is left over."""
    numbers = []
    for rocksdb_ms in (2132.0, 4000.0):
        document = sample_results.job_a(rocksdb_ms=rocksdb_ms)
        sample_results.write(run, {**sample_results.full(), ("jobs", "job-a"): document})
        published.publish(run, repository)
        text = " ".join(published.texts(repository, report=False)[published.README].split())
        found = re.search(r"([\d.]+) \(`rocksdb`\) times Spark's throughput", text)
        assert found
        numbers.append(found[1])
    assert numbers == ["3.0", "1.6"]


@pytest.mark.slow(1)
def test_a_run_of_one_suite_leaves_the_others(repository: Path, run: Path, tmp_path: Path) -> None:
    """Two hours of an idle machine need not be had at once; each suite says when and where it was measured."""
    published.publish(run, repository)
    newer = {
        "started": "2026-11-29T12:00:00+00:00",
        "versions": sample_results.VERSIONS | {"holdfast": "0.2.0"},
        "machine": sample_results.MACHINE | {"cpu": "another processor"},
    }
    document = sample_results.growth() | newer
    later = sample_results.write(tmp_path / "later", {("growth", "keys"): document}, **newer)
    before = read(repository / published.RESULTS)
    published.publish(later, repository)
    results = read(repository / published.RESULTS)
    assert [q.id for q, _ in results.measured] == [q.id for q, _ in before.measured]
    assert {q.id: d.get("started") for q, d in results.measured} == {
        q.id: newer["started"] if q.suite == "growth" else d.get("started") for q, d in before.measured
    }
    assert {q.id for q in results.missing} == {q.id for q in before.missing}
    page = " ".join(published.texts(repository, report=False)[published.PAGE].split())
    first = "durability, peers, micro begun 2026-11-23, holdfast 0.1.0, a processor (2 cores, 23.5 GB)"
    assert f"{first}; growth begun 2026-11-29, holdfast 0.2.0, another processor (2 cores, 23.5 GB)." in page


@pytest.mark.slow(1)
def test_what_cannot_be_published_is_refused(repository: Path, tmp_path: Path) -> None:
    """A quick run is one user's; a run without what README shows would leave its figure without numbers."""
    quick = sample_results.write(tmp_path / "quick", sample_results.quick(), profile="quick")
    with pytest.raises(InvalidArgumentError, match="publish a full one"):
        published.publish(quick, repository)
    part = sample_results.write(tmp_path / "part", {("jobs", "job-a"): sample_results.job_a()})
    with pytest.raises(
        InvalidArgumentError, match="measurement is missing; run its suite, suite=jobs name=by-key-pandas"
    ):
        published.publish(part, repository)
    job_a = sample_results.job_a()
    del job_a["engines"]["holdfast-rocksdb"]
    lacking = sample_results.write(tmp_path / "lacking", {**sample_results.full(), ("jobs", "job-a"): job_a})
    with pytest.raises(InvalidArgumentError, match=r"no throughput was measured.*holdfast-rocksdb"):
        published.publish(lacking, repository)
    wrong = sample_results.job_a() | {"equality": {"what": "all", "rows": 3, "equal": False}}
    unequal = sample_results.write(tmp_path / "unequal", {**sample_results.full(), ("jobs", "job-a"): wrong})
    with pytest.raises(InvalidArgumentError, match=r"different results.*jobs-job-a"):
        published.publish(unequal, repository)
    assert not (repository / published.RESULTS).exists()


@pytest.mark.slow(1)
def test_a_readme_without_its_place_is_named(repository: Path, run: Path) -> None:
    published.publish(run, repository)
    (repository / published.README).write_text("# holdfast\n")
    with pytest.raises(InvalidArgumentError, match="README lacks the comments"):
        published.texts(repository, report=False)
