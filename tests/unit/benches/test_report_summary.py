"""The report: a bench's document, the summary of its figures, the page, and the page in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser

from holdfast.benches.command import report as report_command
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.report import tables
from holdfast.benches.report.answers import Ratio, answers_of
from holdfast.benches.report.directory import Results, read
from holdfast.benches.report.html import render
from holdfast.benches.report.results import Target, document, usage, written
from holdfast.benches.report.summary import Sentence, Summary, choose, summarize
from holdfast.benches.report.words import name_of
from holdfast.benches.runs.paired import Entry
from holdfast.errors import InvalidArgumentError, NotFoundError
from tests.browser import DESKTOP, PHONE, accessibility_findings, shown
from tests.unit.benches import sample_results
from tests.unit.benches.conftest import RUN_FACTS
from tests.unit.benches.conftest import a_run as tiny_run

Documents = Mapping[tuple[str, str], Mapping[str, Any]]


def results_of(folder: Path, documents: Documents, profile: str = "full") -> Results:
    return read(sample_results.write(folder, documents, profile=profile))


def summary_of(folder: Path, documents: Documents) -> Summary:
    results = results_of(folder, documents)
    return summarize(results, answers_of(results))


def texts(sentences: list[Sentence]) -> str:
    return "\n".join(f"{sentence.question} {sentence.text}" for sentence in sentences)


def ratios(found: Summary) -> str:
    return "\n".join(f"{of.question} by {baseline}: {of.text}" for baseline, of in found.ratios)


@pytest.mark.slow(0.5)
def test_a_full_run_is_summed_up(tmp_path: Path) -> None:
    """Ratios stand by question and baseline, losses in bold; one sentence is for somebody who reads no more."""
    found = summary_of(tmp_path, sample_results.full())
    shown = ratios(found)
    assert re.search(r"by Spark's aggregation on RocksDB: memory 4\.5 \(.*filesystem 4\.4 .*rocksdb 3\.0 ", shown)
    assert re.search(r"by Spark's applyInPandasWithState.*by key on rocksdb 0\.99 ", shown)
    assert re.search(r"; 50 million keys: [^:]*rocksdb \*\*0\.83\*\* ", shown)
    assert "**0.99**" not in shown, "the turns do not tell it from 1"
    assert re.search(r"by Flink SQL on RocksDB: .*memory 5\.5 .*Pathway ", shown)
    speed, backend = found.headline
    assert speed == (
        "holdfast on filesystem has 4.4 times the throughput of Spark's aggregation on RocksDB, "
        "and takes 1.4 times as long as the floor, the same query without state"
    )
    assert backend == "use filesystem at 50 million keys"
    assert "holdfast's store alone on filesystem: 2.86 s, 2.2 times a plain download" in texts(found.costs)
    assert "requests of a micro-batch: 1.1 at 8, 2.1 at 64 and 4.3 at 200 partitions" in texts(found.costs)


def test_a_suite_that_compares_ways_advises_no_backend(tmp_path: Path) -> None:
    """Else the one sentence says thrice which backend to use at 200,000 rows."""
    document = sample_results.growth()
    document["suite"] = "operators"
    documents = {("jobs", "job-a"): sample_results.job_a(), ("operators", "keys"): document}
    found = summary_of(tmp_path, documents)
    assert len(found.headline) == 1
    assert not [advice for advice in found.choices if "keys" in advice.sentence.text]


def test_times_of_different_results_do_not_count(tmp_path: Path) -> None:
    peers = sample_results.peers()
    peers["equality"]["equal"] = False
    found = summary_of(tmp_path, {("peers", "same-file"): peers})
    assert (found.ratios, found.headline) == ([], [])
    assert "none of their times counts" in texts(found.doubts)


def test_a_busy_machine_and_gaps_are_said(tmp_path: Path) -> None:
    document = sample_results.job_a()
    document["engines"]["floor"]["runs"][0]["busy_before_cores"] = 1.3
    found = summary_of(tmp_path, {("jobs", "job-a"): document})
    assert "Other work was running: up to 1.3 cores were busy before a run of job-a." in texts(found.doubts)
    assert "Not measured: q5 (failed), quix (left out) and executors (to do)." in texts(found.doubts)


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
    choice = own_load(tmp_path)
    assert choice.backend == "filesystem"
    assert "filesystem and memory are equally fast" in choice.reason
    assert "takes the least memory: 1.9 GiB at its peak, 2.5 GiB otherwise" in choice.reason
    assert "The turns disagree on the order" in choice.certainty


def test_a_faster_backend_is_chosen_whatever_it_takes(tmp_path: Path) -> None:
    choice = own_load(tmp_path, memory=(2.0, 9000))
    assert choice.backend == "memory"
    assert "it has the highest throughput: 2.1 times filesystem and 3.1 times rocksdb" in choice.reason
    assert "of RAM at its peak" in choice.reason
    assert choice.certainty.startswith("All turns agree")


def test_one_turn_is_called_one_turn(tmp_path: Path) -> None:
    assert own_load(tmp_path, turns=1).certainty.startswith("One turn only, 6 micro-batches counted")


def test_growth_says_at_which_sizes_which_backend_is_the_better_one(tmp_path: Path) -> None:
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
    name = name_of(engine, label)
    assert (name.text, name.hue, name.ours) == (text, hue, ours)


FACTS = RUN_FACTS | {"command": "holdfast bench job-a"}
MIB = 1 << 20
TARGETS = (Target("holdfast-memory/floor", at_least=0.85), Target("state_bytes holdfast-memory", at_most=3.0))


def a_run(rows_per_second: float, ratio: float | None = None) -> dict[str, Any]:
    held = {"rss": 100 * MIB, "pss": 90 * MIB, "anonymous": 80 * MIB}
    run = tiny_run(rows_per_second) | {"batch_ms": [5000, 1000, 1200], "median_batch_ms": 1100}
    run["state_bytes"] |= {"live_arrow": ratio and 100, "local_peak": int(100 * (ratio or 1)), "ratio": ratio}
    run["state_bytes"]["local_final"] = 200
    return run | {
        "phases_ms": [{"triggerExecution": 1000, "addBatch": 800}] * 3,
        "cpu": {"wall": 2.0, "jvm": 1.5, "python": 1.0, "server": 0.5},
        "memory": {"server": held},
        "written": {"python": 4 * MIB, "server": 2 * MIB, "durable": 1 * MIB},
        "settings": {"spark.master": "local[2]"},
    }


def a_document(
    labels: tuple[str, str] = ("holdfast-memory", "floor"), targets: Sequence[Target] = TARGETS
) -> dict[str, Any]:
    first, second = labels
    entries = {label: Entry(first, JobA(rows=10, keys=50, batches=3, warmup=1)) for label in labels}
    runs = {first: [a_run(90.0, 2.5), a_run(60.0, 3.5)], second: [a_run(100.0), a_run(100.0)]}
    return document("job-a", entries, runs, FACTS, targets)


@pytest.mark.parametrize(
    ("target", "measured", "met"),
    [
        (Target("x", at_least=4.5), 4.5, True),
        (Target("x", at_least=4.5), 4.4, False),
        (Target("x", at_most=3.0), 3.0, True),
        (Target("x", at_most=3.0), 3.1, False),
    ],
)
def test_targets_include_their_bound(target: Target, measured: float, met: bool) -> None:
    assert target.check(measured)["met"] is met


def test_document_has_all_that_a_reader_needs_to_check_it() -> None:
    found = json.loads(json.dumps(a_document()))
    assert set(found) == {
        *FACTS, "bench", "settings", "engines", "ratios", "ratios_by_pair", "state_bytes", "targets"
    }  # fmt: skip
    assert found["ratios"] == {"holdfast-memory/floor": 0.75}
    assert found["engines"]["floor"]["runs"][0]["batch_ms"] == [5000, 1000, 1200]
    assert found["settings"]["jobs"]["floor"]["rows"] == 10
    assert found["state_bytes"]["holdfast-memory"]["ratio"] == 3.5, "the worst run counts"
    assert [(t["what"], t["met"]) for t in found["targets"]] == [
        ("holdfast-memory/floor", False),
        ("state_bytes holdfast-memory", False),
    ]


@pytest.mark.parametrize(("held_mib", "met"), [(300 + 512, True), (300 + 513, False)])
def test_memory_is_held_against_its_budget_at_its_peak_in_any_run(held_mib: int, met: bool) -> None:
    """Of workers and state server together, beyond what workers hold without state."""
    job = JobB(batches=3, warmup=1, keys=16, fill_rows=16, rows=16)
    budget = Target("budget holdfast-rocksdb", at_most=1.0)

    def run(**pss_mib: int) -> dict[str, Any]:
        held = {kind: dict.fromkeys(("rss", "pss", "anonymous"), mib * MIB) for kind, mib in pss_mib.items()}
        return a_run(1.0) | {"memory": held, "batch_ms": [1] * 4, "phases_ms": [{}] * 4}

    few = run(jvm=9000, python=350, server=90)
    runs = {
        "holdfast-rocksdb": [few, run(jvm=9000, python=held_mib - 100, server=100), few],
        "floor": [run(jvm=9000, python=300)] * 3,
    }
    found = document("job-b", {label: Entry(label, job) for label in runs}, runs, FACTS, [budget])
    assert [(t["what"], t["met"]) for t in found["targets"]] == [("budget holdfast-rocksdb", met)]


def test_usage_is_by_counted_batch() -> None:
    found = usage(a_document(), "floor")
    assert found["wall_s"] == 1.0
    assert found["cpu_s"] == 1.5
    assert found["cores"] == 1.5
    assert found["outside_ms"] == 200.0
    assert written(a_document(), "floor") == {"python": 2 * MIB, "server": 1 * MIB, "durable": MIB / 2}


def test_markdown_shows_every_table() -> None:
    text = tables.markdown(a_document())
    for part in (
        "## job-a",
        "a cpu, 2 cores",
        "| holdfast-memory/floor | 0.75 | 0.90 0.60 |",
        "| NO |",
        "| holdfast-memory | state server 90 | 90 | 80 | 0.00 | 4 | 3.50 | - |",
        "| holdfast-memory | 4 | 1,100 | 1,200 | 1,200 | 1,200 | 1.1 | 1,000 |",
        "| 3.00 | 0.50 |",
    ):
        assert part in text


def test_markdown_says_how_long_filling_took() -> None:
    job = JobB(batches=3, warmup=1, keys=32, fill_rows=16, rows=16)
    run = a_run(1.0) | {"batch_ms": [1500, 2500, 700, 7, 7], "phases_ms": [{"get": 3, "commit": 4}] * 5}
    text = tables.markdown(document("job-b", {"x": Entry("x", job)}, {"x": [run]}, FACTS))
    assert "| 4.0 |\n" in text
    assert "| x: commit | 2 | 4.0 |" in text


def test_latencies_are_percentiles_of_all_counted_batches() -> None:
    job = JobA(batches=102, warmup=1)
    run = a_run(1.0) | {"batch_ms": [9999, *range(101)], "phases_ms": [{}] * 102}
    text = tables.markdown(document("job-a", {"x": Entry("x", job)}, {"x": [run]}, FACTS))
    assert "| x | 101 | 50.0 | 95.0 | 99.0 | 100 | 2.0 | 0.0 |" in text


HOSTILE = "<script>alert(1)</script>\"'&$\\frac{x}$ \U0001f4a9 \u202e"


class Elements(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render(read(sample_results.write(tmp_path_factory.mktemp("full"), sample_results.full())))


@pytest.mark.slow(0.5)
def test_it_has_figures_for_each_question_with_bars_and_a_command(full: str) -> None:
    """Entries side by side, as long a bar as the figure says; what only one question has is a column there alone."""
    for card, column in (
        ("jobs-job-a", "peak memory"),
        ("growth-keys", "micro-batch, median"),
        ("durability-restore", "vs. plain download"),
        ("durability-requests", "requests/micro-batch"),
        ("peers-same-file", "vs. baseline"),
    ):
        shown = full.partition(f'id="q-{card}"')[2].partition("</article>")[0]
        assert f'<th scope="col">{column}</th>' in shown, card
        assert "width: 100.0%" in shown, card
        assert "<code>holdfast bench run --full" in shown, card
    assert "requests/micro-batch" not in full.partition('id="q-jobs-job-a"')[2].partition("</article>")[0]
    assert "Operations of the store, ms" in full.partition('id="q-micro-micro"')[2].partition("</article>")[0]


@pytest.mark.slow(0.5)
def test_links_lead_to_ids_and_nothing_is_loaded(full: str) -> None:
    """One file, which a policy in its head forbids to load or to run anything."""
    elements = Elements(full)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {(link["href"] or "").removeprefix("#") for link in elements.of("a")} <= set(ids)
    (policy,) = [m["content"] for m in elements.of("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert not [tag for tag, _ in elements.found if tag in {"script", "iframe", "object", "embed", "img"}]
    outside = {f"{a[n]}" for _, a in elements.found for n in ("src", "href", "xlink:href") if a.get(n)}
    assert not [link for link in outside if not link.startswith(("#", "data:,"))]
    assert not re.search(r"url\((?!#)|@import", full)


@pytest.mark.slow(1)
def test_text_of_documents_is_escaped_everywhere(tmp_path: Path) -> None:
    """Labels, questions, reasons, commands, settings and versions come from files: they are text, whatever they say."""
    document = sample_results.job_a(1)
    text = json.dumps(document).replace("holdfast-memory", json.dumps(HOSTILE)[1:-1])
    document = json.loads(text) | {"command": HOSTILE}
    folder = sample_results.write(tmp_path, {("jobs", "job-a"): document}, versions={HOSTILE: HOSTILE})
    run = json.loads((folder / "run.json").read_text())
    for line in run["plan"]:
        line |= {"question": HOSTILE, "reason": HOSTILE, "note": HOSTILE}
    (folder / "run.json").write_text(json.dumps(run))
    page = render(read(folder))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not [tag for tag, _ in Elements(page).found if tag == "script"]


def test_a_run_in_which_nothing_was_measured_is_shown(tmp_path: Path) -> None:
    """A run that was stopped at once has a report too: what was not measured, and why."""
    page = render(read(sample_results.write(tmp_path, {})))
    assert "Nothing was measured." in page
    assert "Quix Streams has no wheels for this Python" in page


@pytest.mark.slow(0.5)
def test_a_quick_run_answers_which_backend(tmp_path: Path) -> None:
    """The answer comes first, for the load that was asked for."""
    page = render(read(sample_results.write(tmp_path, sample_results.quick(), profile="quick")))
    assert "<h1>Which backend for me?</h1>" in page
    assert "For this load: 1 million keys, 100,000 rows/micro-batch, 92 bytes of state/key, 2 shards" in page
    assert page.index("How sure:") < page.index("<h3>Ratios</h3>")


@pytest.mark.slow(0.5)
def test_the_command_writes_the_page(tmp_path: Path) -> None:
    folder = sample_results.write(tmp_path / "results", sample_results.quick(), profile="quick")
    page = tmp_path / "page.html"
    done = CliRunner().invoke(report_command, [str(folder), "-o", str(page)])
    assert done.output == f"{page}: 1 questions measured, 3 missing\n"
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    folder = sample_results.write(tmp_path / "results", sample_results.quick())
    nowhere = CliRunner().invoke(report_command, [str(folder), "-o", str(tmp_path / "absent" / "page.html")])
    assert isinstance(nowhere.exception, InvalidArgumentError)
    nothing = CliRunner().invoke(report_command, [str(tmp_path), "-o", str(tmp_path / "page.html")])
    assert isinstance(nothing.exception, NotFoundError)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    pages = {}
    for profile, documents in (("full", sample_results.full()), ("quick", sample_results.quick())):
        pages[profile] = folder / f"{profile}.html"
        results = read(sample_results.write(folder / profile, documents, profile=profile))
        pages[profile].write_text(render(results))
    return pages


@pytest.fixture
def report(reports: dict[str, Path]) -> Path:
    return reports["full"]


def whole(width: int, scheme: str) -> object:
    """Return the other half of the combinations, whose width and whose scheme a quick test has each."""
    return pytest.param("full", width, scheme, marks=pytest.mark.all)


@pytest.mark.browser
@pytest.mark.all
@pytest.mark.slow(15)
@pytest.mark.parametrize(
    ("profile", "width", "scheme"),
    [
        *(("full", PHONE, "light"), ("full", DESKTOP, "dark"), ("quick", PHONE, "dark"), ("quick", DESKTOP, "light")),
        *(whole(PHONE, "dark"), whole(DESKTOP, "light")),
    ],
)
def test_everybody_can_read_it(
    browser: Browser, reports: dict[str, Path], profile: str, width: int, scheme: str
) -> None:
    """No findings of an accessibility checker, no sideways scrolling, no request: at each width, in each scheme."""
    report = reports[profile]
    with shown(browser, report.as_uri(), width, scheme) as it:
        assert accessibility_findings(it.page) == []
        assert it.page.evaluate("document.documentElement.scrollWidth") == width
        assert it.requests == [report.as_uri()]
        assert it.errors == []


@pytest.mark.browser
@pytest.mark.all
@pytest.mark.slow(15)
def test_tables_fold_and_scroll_inside_themselves(browser: Browser, report: Path) -> None:
    """Where a table is wider than a phone, its own box scrolls; a reader with a keyboard can open and reach it."""
    with shown(browser, report.as_uri(), PHONE) as it:
        it.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        boxes = it.page.evaluate(
            "[...document.querySelectorAll('.scroll')].map(b => [b.scrollWidth > b.clientWidth, b.tabIndex])"
        )
        assert any(scrolls for scrolls, _ in boxes)
        assert all(tab_index == 0 for _, tab_index in boxes)
        assert it.page.evaluate("document.documentElement.scrollWidth") == PHONE


@pytest.mark.browser
@pytest.mark.all
@pytest.mark.slow(15)
def test_it_prints_with_its_tables(browser: Browser, report: Path) -> None:
    """On paper nothing can be unfolded: what is folded on the screen is printed, in the colours for white."""
    with shown(browser, report.as_uri(), DESKTOP, "dark") as it:
        it.page.emulate_media(media="print")
        heights = it.page.evaluate(
            "[...document.querySelectorAll('.card details')]"
            ".map(d => d.querySelector('table').getBoundingClientRect().height)"
        )
        assert heights
        assert min(heights) > 10
        assert it.page.evaluate("getComputedStyle(document.body).color") == "rgb(29, 36, 48)"
        assert it.page.pdf(format="A4").startswith(b"%PDF")
