"""The report in a real browser: on a phone and a desktop, in light and dark, on paper; for everybody, and alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from holdfast.benches.report.directory import read
from holdfast.benches.report.html import render
from tests.browser import DESKTOP, PHONE, accessibility_findings, chromium, shown
from tests.servers import downloads
from tests.unit.benches import sample_results

pytestmark = [pytest.mark.browser, pytest.mark.all, pytest.mark.slow(15)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with downloads.skipped_where_missing():
        downloads.chromium()
    with chromium() as browser:
        yield browser


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


@pytest.mark.parametrize(
    ("profile", "width", "scheme"),
    [
        ("full", PHONE, "light"),
        ("full", DESKTOP, "dark"),
        ("quick", PHONE, "dark"),
        ("quick", DESKTOP, "light"),
        whole(PHONE, "dark"),
        whole(DESKTOP, "light"),
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


def test_links_lead_to_something(browser: Browser, report: Path) -> None:
    """A sentence of the summary leads to its chart."""
    with shown(browser, report.as_uri(), DESKTOP) as it:
        targets = it.page.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
        assert targets
        assert [t for t in set(targets) if not it.page.query_selector(f"[id='{t.removeprefix('#')}']")] == []


def test_bars_take_the_colours_of_the_scheme(browser: Browser, report: Path) -> None:
    """In the dark, bars are light."""
    fill = "getComputedStyle(document.querySelector('.bar [style*=\"var(--memory)\"]')).backgroundColor"
    with (
        shown(browser, report.as_uri(), DESKTOP, "light") as light,
        shown(browser, report.as_uri(), DESKTOP, "dark") as dark,
    ):
        colours = {it.page.evaluate(fill) for it in (light, dark)}
    assert len(colours) == 2
    assert all(colour.startswith("rgb(") and colour != "rgb(0, 0, 0)" for colour in colours)


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
