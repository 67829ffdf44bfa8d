"""The report as a file: whole, alone, escaped, with bars in its tables."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.benches.command import report
from holdfast.benches.report.directory import read
from holdfast.benches.report.html import render
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


@pytest.mark.slow(0.5)
def test_it_has_figures_for_each_question_with_bars_and_a_command(full: str) -> None:
    """Entries side by side, as long a bar as the figure says; what only one question has is a column there alone."""
    for card, column in (
        ("jobs-job-a", "peak memory"),
        ("growth-keys", "micro-batch, median"),
        ("durability-restore", "by a plain download"),
        ("durability-requests", "requests a micro-batch"),
        ("peers-same-file", "by the baseline"),
    ):
        shown = full.partition(f'id="q-{card}"')[2].partition("</article>")[0]
        assert f'<th scope="col">{column}</th>' in shown, card
        assert "width: 100.0%" in shown, card
        assert "<code>holdfast bench run --full" in shown, card
    assert "requests a micro-batch" not in full.partition('id="q-jobs-job-a"')[2].partition("</article>")[0]
    assert "Operations of the store, ms" in full.partition('id="q-micro-micro"')[2].partition("</article>")[0]


@pytest.mark.slow(0.5)
def test_ids_are_unique_and_links_lead_to_them(full: str) -> None:
    """A sentence of the summary leads to its figures."""
    elements = Elements(full)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {(link["href"] or "").removeprefix("#") for link in elements.of("a")} <= set(ids)


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
    assert "For this load: 1 million keys, 100,000 rows a micro-batch, 92 bytes of state a key, 2 shards" in page
    assert page.index("How sure:") < page.index("Where holdfast wins")


@pytest.mark.slow(1)
def test_equal_figures_make_equal_pages(tmp_path: Path) -> None:
    """A page in the repository changes when its figures do, not when it is made again."""
    results = read(sample_results.write(tmp_path, sample_results.quick(), profile="quick"))
    assert render(results) == render(results)


@pytest.mark.slow(0.5)
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
