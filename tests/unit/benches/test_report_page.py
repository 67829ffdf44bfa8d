"""The report as a file: whole, alone, escaped, with names and tables for its charts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.benches.commands.report import report
from holdfast.benches.report.charts.bars import Bar, draw_bars
from holdfast.benches.report.directory import read
from holdfast.benches.report.page.html import render
from holdfast.errors import InvalidArgumentError, NotFoundError
from tests.unit.benches import sample_results

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


@pytest.mark.all
@pytest.mark.slow
def test_it_has_a_chart_for_each_question_with_its_table_and_command(full: str) -> None:
    """Throughput, batch times, growth, memory, bytes, requests, restore, peers, single operations."""
    for chart in (
        "throughput-jobs-job-a",
        "throughput-peers-same-file",
        "batch-times-jobs-by-key-pandas",
        "growth-growth-keys-0",
        "memory-jobs-job-a",
        "bytes-jobs-job-a",
        "growth-durability-requests-3",
        "restore-durability-restore",
        "operation-micro-0",
    ):
        card = full.partition(f'id="card-{chart}"')[2].partition("</article>")[0]
        assert f'aria-labelledby="{chart}-title {chart}-desc"' in card, chart
        assert "<table>" in card, chart
        assert chart.startswith("operation") or "<code>holdfast bench run --full" in card, chart


@pytest.mark.all
@pytest.mark.slow
def test_ids_are_unique_and_charts_have_names(full: str) -> None:
    """Dozens of drawings on one page refer to parts of their own, and each is read aloud as what it shows."""
    elements = Elements(full)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    charts = elements.of("svg")
    assert len(charts) > 20
    for chart in charts:
        assert chart["role"] == "img"
        assert {*(chart["aria-labelledby"] or "").split()} <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", full)) | set(re.findall(r'xlink:href="#([^"]+)"', full)) <= set(ids)
    assert "font-family: 'DejaVu" not in full


@pytest.mark.all
@pytest.mark.slow
def test_it_loads_nothing(full: str) -> None:
    """One file, which a policy in its head forbids to load or to run anything."""
    elements = Elements(full)
    (policy,) = [m["content"] for m in elements.of("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert not [tag for tag, _ in elements.found if tag in {"script", "iframe", "object", "embed", "img"}]
    outside = {f"{a[n]}" for _, a in elements.found for n in ("src", "href", "xlink:href") if a.get(n)}
    assert not [link for link in outside if not link.startswith(("#", "data:,"))]
    assert not re.search(r"url\((?!#)|@import", full)


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


def test_a_quick_run_answers_which_backend(tmp_path: Path) -> None:
    """The answer comes first, for the load that was asked for."""
    page = render(read(sample_results.write(tmp_path, sample_results.quick(), profile="quick")))
    assert "<h1>Which backend for me?</h1>" in page
    assert "For this load: 1 million keys, 100,000 rows a micro-batch, 92 bytes of state a key, 2 shards" in page
    assert page.index("How sure:") < page.index('class="tiles"')


def test_equal_figures_make_equal_pages(tmp_path: Path) -> None:
    """A page in the repository changes when its figures do, not when it is made again."""
    results = read(sample_results.write(tmp_path, sample_results.quick(), profile="quick"))
    assert render(results) == render(results)


def test_a_chart_takes_any_figures() -> None:
    """Nothing at all, a single bar, one much longer than the other."""
    for values in ((0.0,), (1e-9, 1e15), (5.0, 5.0)):
        bars = [Bar("a", "b", "memory", (value,), value, value) for value in values]
        assert draw_bars("c", "title", "description", bars).startswith("<svg")


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    """And says how much of the plan it shows."""
    folder = sample_results.write(tmp_path / "results", sample_results.quick(), profile="quick")
    page = tmp_path / "page.html"
    done = CliRunner().invoke(report, [str(folder), "-o", str(page)])
    assert done.output == f"{page}: 1 questions measured, 3 not\n"
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    """Nowhere to write to, nothing to read."""
    folder = sample_results.write(tmp_path / "results", sample_results.quick())
    nowhere = CliRunner().invoke(report, [str(folder), "-o", str(tmp_path / "absent" / "page.html")])
    assert isinstance(nowhere.exception, InvalidArgumentError)
    nothing = CliRunner().invoke(report, [str(tmp_path), "-o", str(tmp_path / "page.html")])
    assert isinstance(nothing.exception, NotFoundError)
