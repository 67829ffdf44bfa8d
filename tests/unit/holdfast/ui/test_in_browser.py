"""The page in a real browser: on phone and desktop, in light and dark, with a keyboard, with and without scripts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from holdfast.snapshotter.storage.opening import open_storage
from tests.browser import DESKTOP, PHONE, Shown, accessibility_findings, shown
from tests.tiers import cases
from tests.unit.holdfast.health import in_four_states
from tests.unit.holdfast.ui.places import directory, served

pytestmark = [pytest.mark.browser, pytest.mark.slow(30)]

SCREENS = [(PHONE, "dark"), (DESKTOP, "light")]
VIEWS = {
    "overview": "",
    "operator": "0/totals/",
    "operator by lag": "0/totals/?measure=lag&window=hour",
    "a part of the map": "0/totals/?first=3&last=7",
    "shard": "0/totals/shard/3",
    "rows without the query": "0/totals/rows",
    "gc": "0/totals/upkeep",
    "verify": "0/totals/upkeep?check=verify",
    "damage": "1/totals/upkeep?check=verify",
    "damaged record": "2/totals/",
    "nothing stored": "3/totals/",
    "nothing stored of a shard": "3/totals/shard/0",
    "nothing to clean up": "3/totals/upkeep",
    "no such operator": "0/nope/",
    "wrong number": "0/totals/?first=x",
}


@pytest.fixture(scope="module")
def address(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve four directories: whole, with damage, without a record, and with nothing stored."""
    root = tmp_path_factory.mktemp("damaged")
    for name in ("damage", "record"):
        shutil.copytree(sample, root / name)
    next((root / "damage/totals/shard-0003/commits").iterdir()).write_bytes(b"no commit")
    (root / "record/totals/operator").write_bytes(b"no record")
    directory(root / "empty")
    with served(sample, root / "damage", root / "record", root / "empty") as address:
        yield address


@pytest.mark.parametrize(("view", "width", "scheme"), cases([(view, *screen) for view in VIEWS for screen in SCREENS]))
def test_everybody_can_read_it(browser: Browser, address: str, view: str, width: int, scheme: str) -> None:
    """Nothing for an accessibility checker to find, no sideways scrolling, no request to anybody else, no error."""
    with shown(browser, address + VIEWS[view], width, scheme) as it:
        assert accessibility_findings(it.page) == []
        assert it.page.evaluate("document.documentElement.scrollWidth") == width
        assert [url for url in it.requests if not url.startswith(address)] == []
        refused = [error for error in it.errors if "status of 4" not in error]
        assert refused == []


@pytest.mark.all
def test_the_map_is_walked_with_arrows(browser: Browser, address: str) -> None:
    with shown(browser, f"{address}0/totals/", PHONE) as it:
        it.page.focus(".map a")
        for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp"):
            it.page.keyboard.press(key)
        assert "shard 3" in it.page.evaluate("document.activeElement.title")
        it.page.keyboard.press("Enter")
        it.page.wait_for_url("**/shard/3")


@pytest.mark.all
def test_the_first_tab_skips_to_the_content(browser: Browser, address: str) -> None:
    with shown(browser, f"{address}0/totals/", DESKTOP) as it:
        it.page.keyboard.press("Tab")
        expect(it.page.locator(".skip")).to_be_focused()
        it.page.keyboard.press("Enter")
        expect(it.page.locator("#content")).to_be_focused()


def test_it_follows_a_query_that_runs(browser: Browser, sample: Path, tmp_path: Path) -> None:
    root = shutil.copytree(sample, tmp_path / "state")
    with served(root) as address, shown(browser, f"{address}?follow=1", DESKTOP) as it:
        it.page.focus("main a")
        at = it.page.evaluate("document.activeElement.href")
        directory(root, "newcomer")
        it.page.wait_for_selector("text=newcomer", timeout=20_000)
        assert it.page.evaluate("document.activeElement.href") == at
        assert it.errors == []


@pytest.mark.all
def test_what_is_selected_while_a_newer_page_is_on_its_way_stays(browser: Browser, sample: Path) -> None:
    """A slow server takes seconds for a view: what somebody had begun to type or to select meanwhile was gone."""
    with served(sample) as address, shown(browser, f"{address}0/totals/?follow=1", DESKTOP) as it:
        held: list[Route] = []
        it.page.route(lambda url: "follow=1" in url, lambda route: held.extend([route]))
        with it.page.expect_request(lambda request: "follow=1" in request.url):
            pass
        it.page.evaluate("getSelection().selectAllChildren(document.querySelector('main'))")
        with it.page.expect_response(lambda response: "follow=1" in response.url):
            held[0].continue_()
        it.page.wait_for_timeout(500)
        assert it.page.evaluate("getSelection().toString()")


@pytest.mark.all
def test_what_is_no_page_replaces_none(browser: Browser, sample: Path) -> None:
    """The server was started anew and has another token, or failed: what was shown stays, and is said to be old."""
    with served(sample) as address, shown(browser, f"{address}?follow=1", DESKTOP) as it:
        links = it.page.locator("main a").count()
        it.page.route(
            lambda url: "follow=1" in url,
            lambda route: route.fulfill(status=404, content_type="text/plain", body="404"),
        )
        it.page.wait_for_selector("#status:has-text('this page is out of date')", timeout=20_000)
        assert it.page.locator("main a").count() == links > 0


@pytest.mark.all
@pytest.mark.parametrize(("width", "scheme"), cases(SCREENS))
def test_it_waits_for_a_query_by_itself(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    """Whoever opens it too early reads what is awaited, and sees the operator come without a click."""
    with served(tmp_path / "state") as address, shown(browser, address, width, scheme) as it:
        assert "Nothing to show yet" in it.page.inner_text("main")
        assert accessibility_findings(it.page) == []
        assert it.page.evaluate("document.documentElement.scrollWidth") == width
        directory(tmp_path / "state", "newcomer")
        it.page.wait_for_selector("text=newcomer", timeout=20_000)
        assert it.errors == []


@pytest.mark.all
def test_links_lead_somewhere(browser: Browser, address: str) -> None:
    with shown(browser, address, DESKTOP) as it:
        for view in ("", "0/totals/", "0/totals/shard/3"):
            it.page.goto(address + view)
            links = set(it.page.evaluate("[...document.querySelectorAll('a')].map(a => a.href)"))
            assert links
            assert [link for link in links if it.page.request.get(link).status != 200] == []


@pytest.mark.all
def test_it_needs_no_scripts(browser: Browser, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(f"{address}?follow=1")
        assert page.locator("noscript meta[http-equiv=refresh]").count() == 1
        page.goto(address)
        page.click("main a >> text=totals >> nth=0")
        page.click("text=Snapshot lag")
        expect(page.locator(".map a")).to_have_count(24)
    finally:
        context.close()


@pytest.mark.all
def test_the_colours_are_those_of_the_scheme(browser: Browser, address: str) -> None:
    colour = "getComputedStyle(document.querySelector('.map .heat-9')).backgroundColor"
    with shown(browser, f"{address}0/totals/", DESKTOP) as light:
        bright = light.page.evaluate(colour)
    with shown(browser, f"{address}0/totals/", DESKTOP, "dark") as dark:
        assert dark.page.evaluate(colour) != bright


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Serve a query in each state; by state the address of its page."""
    root = tmp_path_factory.mktemp("states")
    with ExitStack() as stack:
        yield {
            state: stack.enter_context(served(in_four_states.make(root / state, state)))
            for state in in_four_states.STATES
        }


@pytest.mark.all
@pytest.mark.parametrize(
    ("state", "width", "scheme"), cases([(state, *screen) for state in in_four_states.STATES for screen in SCREENS])
)
def test_the_first_card_is_how_the_query_is(
    browser: Browser, states: dict[str, str], state: str, width: int, scheme: str
) -> None:
    """In each state, on phone and desktop: above all else, in its own colour, and readable by everybody."""
    with shown(browser, states[state], width, scheme) as it:
        for view in ("", "0/totals/", "0/totals/shard/2", "0/totals/rows", "0/totals/upkeep"):
            it.page.goto(states[state] + view)
            card = it.page.locator(f".health.{state}")
            expect(card).to_have_count(1)
            assert card.locator(".state").inner_text() == state.capitalize()
            assert accessibility_findings(it.page) == []
            assert it.page.evaluate("document.documentElement.scrollWidth") == width
        it.page.goto(states[state])
        first, others = it.page.locator(".health").bounding_box(), it.page.locator(".answers").bounding_box()
        assert first
        assert others
        assert first["y"] + first["height"] <= others["y"]
        assert it.errors == []


@pytest.mark.all
def test_the_states_have_colours_of_their_own(browser: Browser, states: dict[str, str]) -> None:
    colours = set()
    for address in states.values():
        with shown(browser, address, DESKTOP) as it:
            colours.add(it.page.evaluate("getComputedStyle(document.querySelector('.health .state')).color"))
    assert len(colours) == len(states)


def rows_of(it: Shown, region: str) -> list[str]:
    heads = it.page.locator(f"[aria-label='{region}'] tbody tr > :first-child")
    return [text.strip() for text in heads.all_inner_texts()]


@pytest.mark.all
def test_a_table_is_sorted_by_the_head_that_is_pressed(browser: Browser, sample: Path, tmp_path: Path) -> None:
    """Sizes as numbers, first downwards, then upwards; by keyboard too, and a page that follows stays sorted."""
    root = shutil.copytree(sample, tmp_path / "state")
    with served(root) as address, shown(browser, f"{address}0/totals/shard/3?follow=1", DESKTOP) as it:
        region = "Table of objects"
        head = it.page.locator(f"[aria-label='{region}'] th:last-child")
        sizes = (
            f"[...document.querySelectorAll(\"[aria-label='{region}'] tbody td:last-child\")].map(c => +c.dataset.v)"
        )
        head.locator("button").click()
        found = it.page.evaluate(sizes)
        assert found == sorted(found, reverse=True)
        assert len(set(found)) > 1
        assert head.get_attribute("aria-sort") == "descending"
        it.page.keyboard.press("Enter")
        assert it.page.evaluate(sizes) == sorted(found)
        (root / "totals/shard-0003/troubles").mkdir()
        with open_storage(str(root)) as storage:
            storage.put("totals/shard-0003/unknown", b"x")
        it.page.wait_for_selector(f"[aria-label='{region}'] >> text=unknown", timeout=20_000)
        assert it.page.evaluate(sizes) == sorted([*found, 1])
        assert it.page.evaluate("document.activeElement.tagName") == "BUTTON"
        assert it.errors == []
    with served(root) as address, shown(browser, address, DESKTOP) as it:
        region = it.page.locator(".scroll >> nth=0").get_attribute("aria-label") or ""
        assert rows_of(it, region) == ["totals", "sessions"]
        it.page.click("th button >> text=operator")
        it.page.click("th button >> text=operator")
        assert rows_of(it, region) == ["sessions", "totals"]


@pytest.mark.all
def test_a_wide_table_shows_that_it_goes_on(browser: Browser, address: str) -> None:
    """On a phone: a shadow at its edge, drawn over what is there, and none where nothing is hidden."""
    with shown(browser, f"{address}0/totals/shard/3", PHONE) as it:
        table = it.page.locator("[aria-label='Table of versions and snapshots']")
        assert table.evaluate("t => t.scrollWidth > t.clientWidth")
        box = table.bounding_box()
        assert box

        def right_edge() -> bytes:
            return it.page.screenshot(
                clip={"x": box["x"] + box["width"] - 14, "y": box["y"] + 2, "width": 12, "height": 20}
            )

        begun = right_edge()
        table.evaluate("t => { t.scrollLeft = t.scrollWidth }")
        it.page.wait_for_timeout(200)
        assert right_edge() != begun
        assert "local" in table.evaluate("t => getComputedStyle(t).backgroundAttachment")


@pytest.mark.all
def test_no_cell_hides_the_shadow_at_the_edge(browser: Browser, address: str) -> None:
    """The shadow lies behind the cells, and a changed value has a background of its own."""
    for scheme in ("light", "dark"):
        with shown(browser, f"{address}0/totals/shard/3", DESKTOP, scheme) as it:
            cell = it.page.locator(".scroll td >> nth=0")
            colour = cell.evaluate("c => { c.className = 'changed'; return getComputedStyle(c).backgroundColor }")
            assert colour.startswith("rgba("), colour


@pytest.mark.all
@pytest.mark.parametrize("measure", ["size", "written", "lag"])
def test_the_table_beside_the_map_is_whole_on_a_desktop(browser: Browser, address: str, measure: str) -> None:
    with shown(browser, f"{address}0/totals/?measure={measure}", DESKTOP) as it:
        assert it.page.locator(".map-and-top .scroll").evaluate("t => t.scrollWidth <= t.clientWidth")
