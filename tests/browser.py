"""A headless Chromium, and what tests ask of a page in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from tests.servers import downloads

PHONE, DESKTOP = 360, 1280


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser; it ends with the context."""
    folder = downloads.chromium()
    environment = {
        **os.environ,
        # Behind the system's own, which come first where they are.
        "LD_LIBRARY_PATH": f"{os.environ.get('LD_LIBRARY_PATH', '')}:{folder / 'lib'}",
        "FONTCONFIG_FILE": str(folder / "fonts.conf"),
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=folder / "chromium",
            # The first: in containers Chromium has no user namespace to lock itself in; the page is our own.
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            env=environment,
        )
        try:
            yield browser
        finally:
            browser.close()


@dataclass(frozen=True)
class Shown:
    """A page in the browser, and what it asked for."""

    page: Page
    requests: list[str]
    errors: list[str]


@contextmanager
def shown(browser: Browser, url: str, width: int, scheme: Any = "light") -> Iterator[Shown]:
    """Open a page at some width, in light or dark."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    found = Shown(page, [], [])
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("console", lambda message: found.errors.append(message.text))
    try:
        page.goto(url)
        yield found
    finally:
        context.close()


def accessibility_findings(page: Page) -> list[str]:
    """Return what axe-core finds wrong, by all its rules and best practices."""
    page.evaluate((downloads.chromium() / "node_modules/axe-core/axe.min.js").read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert found["passes"], "axe-core ran no rule"
    return [
        f"{rule['id']}: {rule['help']}: {rule['nodes'][0]['html'][:200]} ({len(rule['nodes'])} in all)"
        for rule in found["violations"]
    ]
