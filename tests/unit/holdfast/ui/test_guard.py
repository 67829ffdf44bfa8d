"""Who is answered, and what a browser may do with the answer."""

from __future__ import annotations

import pytest
from flask.testing import FlaskClient

from holdfast.ui.app import trusted_hosts
from tests.unit.holdfast.ui.conftest import TOKEN

PATHS = ("", "0/totals/", "0/totals/shard/3", "0/totals/upkeep", "static/page.css", "nowhere")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", ["x", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "%F0%9F%90%8D"])
def test_without_the_token_there_is_nothing(page: FlaskClient, token: str, path: str) -> None:
    """Whoever guesses learns nothing: neither what there is, nor how near the guess was."""
    answer = page.get(f"/{token}/{path}")
    assert answer.status_code == 404
    assert answer.text == page.get(f"/no/{path}").text
    assert "totals" not in answer.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:4880", "localhost.evil.example", "127.0.0.2", ""])
def test_another_host_is_refused(page: FlaskClient, host: str) -> None:
    """A site whose name is pointed at this machine reads nothing, even with the token."""
    answer = page.get(f"/{TOKEN}/", headers={"Host": host})
    assert answer.status_code == 400
    assert "totals" not in answer.text


def test_the_hosts_are_those_that_it_listens_on() -> None:
    """Its own names are trusted, with those that are given; everywhere means this machine's names, not any."""
    assert trusted_hosts("127.0.0.1") == ["127.0.0.1", "[::1]", "localhost"]
    assert "[fe80::1]" in trusted_hosts("fe80::1")
    assert "state.example" in trusted_hosts("127.0.0.1", ["state.example"])
    assert "0.0.0.0" not in trusted_hosts("0.0.0.0")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "TRACE"])
def test_nothing_but_reading_is_answered(page: FlaskClient, method: str) -> None:
    """No request can change anything."""
    assert page.open(f"/{TOKEN}/", method=method).status_code == 405


@pytest.mark.parametrize("path", PATHS)
def test_a_browser_loads_nothing_from_elsewhere(page: FlaskClient, path: str) -> None:
    """Strict headers stand on every answer, errors too; no script or style is in the page itself."""
    answer = page.get(f"/{TOKEN}/{path}", buffered=True)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "Set-Cookie" not in answer.headers
    if answer.content_type.startswith("text/html"):
        assert " style=" not in answer.text
        assert "<style" not in answer.text
        assert answer.text.count("<script") == 1
        assert " onclick" not in answer.text


def test_no_file_outside_of_its_folder_is_served(page: FlaskClient) -> None:
    """The static folder is all there is."""
    for path in ("../app.py", "..%2fapp.py", "/etc/passwd", "%2e%2e/app.py"):
        assert page.get(f"/{TOKEN}/static/{path}").status_code == 404
