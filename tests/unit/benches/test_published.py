"""What the repository says of its newest full run: one source for every figure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.benches.report import published
from holdfast.benches.report.answers import answers_of
from holdfast.benches.report.directory import RUN, read
from holdfast.errors import InvalidArgumentError
from tests.unit.benches import sample_results

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
    """The page under docs/ shows the figures that RESULTS.md sums up."""
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
    assert "; rocksdb, 50 million keys **0.83**" in page
    assert not [line for line in page.splitlines() if len(line) > 120 and not line.startswith(("|", "`"))]
    assert "4.5 (`memory`), 4.4 (`filesystem`) and 3.0 (`rocksdb`) times Spark's throughput" in " ".join(readme.split())
    assert "(4.4\N{MULTIPLICATION SIGN})" in picture
    assert readme.count("## Quickstart") == 1


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
    before_text, after_text = (
        "durability, peers, micro begun 2026-11-23, holdfast 0.1.0, a processor (2 cores, 23.5 GB)",
        "growth begun 2026-11-29, holdfast 0.2.0, another processor (2 cores, 23.5 GB)",
    )
    assert f"{before_text}; {after_text}." in page


@pytest.mark.slow(1)
def test_what_cannot_be_published_is_refused(repository: Path, tmp_path: Path) -> None:
    """A quick run is one user's; a run without what README shows would leave its figure without numbers."""
    quick = sample_results.write(tmp_path / "quick", sample_results.quick(), profile="quick")
    with pytest.raises(InvalidArgumentError, match="publish a full one"):
        published.publish(quick, repository)
    part = sample_results.write(tmp_path / "part", {("jobs", "job-a"): sample_results.job_a()})
    with pytest.raises(InvalidArgumentError, match="measurement is missing, suite=jobs name=by-key-pandas"):
        published.publish(part, repository)
    job_a = sample_results.job_a()
    del job_a["engines"]["holdfast-rocksdb"]
    lacking = sample_results.write(tmp_path / "lacking", {**sample_results.full(), ("jobs", "job-a"): job_a})
    with pytest.raises(InvalidArgumentError, match=r"engines without throughput.*holdfast-rocksdb"):
        published.publish(lacking, repository)
    wrong = sample_results.job_a() | {"equality": {"what": "all", "rows": 3, "equal": False}}
    unequal = sample_results.write(tmp_path / "unequal", {**sample_results.full(), ("jobs", "job-a"): wrong})
    with pytest.raises(InvalidArgumentError, match=r"different results.*jobs-job-a"):
        published.publish(unequal, repository)
    assert not (repository / published.RESULTS).exists()


@pytest.mark.slow(1)
def test_a_readme_without_its_place_is_named(repository: Path, run: Path) -> None:
    """Nobody wonders where the paragraph has gone."""
    published.publish(run, repository)
    (repository / published.README).write_text("# holdfast\n")
    with pytest.raises(InvalidArgumentError, match="README lacks the comments"):
        published.texts(repository, report=False)
