"""What the views say of a directory: the answers, the map, the charts, upkeep; and of one that is damaged or empty."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.upkeep.catalogue import StateSizes
from holdfast.ui.survey import survey
from holdfast.ui.views.upkeep import VERIFY_MS, upkeep
from tests.unit.holdfast.commands.state_dir import put_record
from tests.unit.holdfast.ui import sample_state
from tests.unit.holdfast.ui.conftest import TOKEN

OpenPage = Callable[..., FlaskClient]


def text(page: FlaskClient, path: str = "", status: int = 200) -> str:
    """Return the page as a reader sees it: without markup, with single spaces."""
    answer = page.get(f"/{TOKEN}/{path}")
    assert answer.status_code == status, answer.text
    return " ".join(re.sub(r"<[^>]+>", " ", answer.text).split())


def test_one_look_answers_the_questions(page: FlaskClient) -> None:
    """Which operator is big, which shard is hot, is the upload behind, does anything fail."""
    shown = text(page)
    assert "Which operator is big? totals" in shown
    assert "Which shard is hot? totals 3" in shown
    assert "Is the upload behind? No" in shown
    assert "Does anything fail? Yes 1 report" in shown


@pytest.mark.slow(1)
def test_sinks_are_shown_with_their_newest_decision(open_page: OpenPage, sample: Path, tmp_path: Path) -> None:
    """Which micro-batch it shows, how many rows and parts; a damaged decision is told."""
    assert re.search(r"invoices micro-batch 9 1,000 2 .* 2 [\d.]+ k?B", text(open_page(sample)))
    root = shutil.copytree(sample, tmp_path / "state")
    (root / "_sinks/invoices/00000000000000000002").write_bytes(b"?")
    assert "not a whole holdfast file" in text(open_page(root))


def test_an_upload_that_is_behind_is_told(open_page: OpenPage, tmp_path: Path) -> None:
    """More than twice as many commits wait as are wanted: the page says so, and links to the shard."""
    from tests.model.shard_history import ShardHistory

    with open_storage(str(tmp_path)) as storage:
        put_record(storage)
        ShardHistory(storage).grow(None, 50)
    page = open_page(tmp_path)
    assert "Is the upload behind? Yes, 1 shard At most 50 commits" in text(page)
    assert f"/{TOKEN}/0/totals/shard/3" in page.get(f"/{TOKEN}/").text


@pytest.mark.parametrize("measure", ["size", "written", "lag", "age"])
def test_each_measure_has_a_map(page: FlaskClient, measure: str) -> None:
    """A cell for each shard says its value in words, too."""
    shown = page.get(f"/{TOKEN}/0/totals/?measure={measure}").text
    assert len(re.findall(r'<li><a class="heat-\d"', shown)) == 24
    assert 'class="heat-9"' in shown


def test_the_hot_shard_stands_out(page: FlaskClient) -> None:
    """The shard that was written most is first, with how many times the median it has."""
    shown = text(page, "0/totals/?measure=written")
    assert re.search(r"against the median 3 [\d.]+ kB", shown)
    assert re.search(r"The largest has [\d.]+ kB, and most have none", shown)


def test_a_part_of_the_map_is_shown_alone(page: FlaskClient) -> None:
    """Cells may be chosen by number; numbers beyond the operator's shards are cut off."""
    shown = page.get(f"/{TOKEN}/0/totals/?first=20&last=999999").text
    assert len(re.findall(r'<li><a class="heat-\d"', shown)) == 4
    assert "Shards 20 to 23" in shown


@pytest.mark.slow(0.5)
def test_time_and_growth_are_drawn(page: FlaskClient) -> None:
    """Commits, uploads and the size of the state over time, with what they amount to in words."""
    shown = text(page, "0/totals/")
    assert "Versions 1 to 60" in shown
    assert "Committed 1" in shown
    assert re.search(r"From [\d.]+ kB to [\d.]+ kB, according to stored snapshots", shown)


def test_a_shard_lists_its_versions(page: FlaskClient) -> None:
    """The newest first, as holdfast log has them."""
    shown = text(page, "0/totals/shard/3")
    assert "80 stored commits and snapshots" in shown
    assert "snapshot 60-" in shown
    assert "memory, " in shown


def test_what_gc_would_delete_is_told_and_left_alone(page: FlaskClient, sample: Path) -> None:
    """The page says what gc would delete, and deletes and writes nothing."""
    before = sorted(path for path in sample.rglob("*") if path.is_file())
    shown = text(page, "0/totals/upkeep")
    assert "objects, 41 B," in shown or "would be deleted" in shown
    assert "files/0123456789abcdef-0" in shown
    assert sorted(path for path in sample.rglob("*") if path.is_file()) == before


@pytest.mark.slow(1)
def test_what_verify_would_say(open_page: OpenPage, sample: Path, tmp_path: Path) -> None:
    """A damaged object is named with what it costs; the others are counted."""
    root = shutil.copytree(sample, tmp_path / "state")
    victim = next((root / "totals/shard-0003/commits").iterdir())
    victim.write_bytes(b"no commit at all")
    shown = text(open_page(root), "0/totals/upkeep?check=verify")
    assert f"totals/shard-0003/commits/{victim.name}" in shown
    assert "damaged or missing" in shown
    assert "all intact" in text(open_page(sample), "0/sessions/upkeep?check=verify")


@pytest.mark.parametrize("object_ms", [200, 3 * VERIFY_MS])
def test_verify_ends_in_time(object_ms: int, sample: Path) -> None:
    """A page that has no time left names the shards that it has read, and the next page begins behind them."""
    ticks = itertools.count(0, object_ms)
    with open_storage(str(sample)) as storage, ThreadPoolExecutor(2) as executor:
        operator = survey(storage, StateSizes(storage, executor)).operator("totals")
        view = upkeep(storage, executor, operator, "verify", 0, 0, lambda: next(ticks))
    assert view.is_cut
    assert view.after == view.rows[-1].shard + 1 == len(view.rows)
    is_one_too_slow = object_ms > VERIFY_MS
    assert view.problems == len(view.rows) * is_one_too_slow
    assert bool(view.objects) != is_one_too_slow


def test_a_page_that_read_nothing_says_so(open_page: OpenPage, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was read is not all intact."""
    monkeypatch.setattr("holdfast.ui.views.upkeep.VERIFY_MS", 0)
    shown = text(open_page(sample), "0/totals/upkeep?check=verify")
    assert "Nothing in shard 0 was read." in shown
    assert "intact" not in shown
    assert "holdfast verify reads it" in shown


def test_state_that_holds_markup_is_text(page: FlaskClient) -> None:
    """A script in an error that somebody else wrote is shown, not run; control characters are escapes."""
    shown = page.get(f"/{TOKEN}/0/totals/").text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[31m" in shown
    assert sample_state.HOSTILE not in shown


def test_an_operator_of_any_name_is_shown(open_page: OpenPage, tmp_path: Path) -> None:
    """A name that is markup, a path or a query string is a name."""
    with open_storage(str(tmp_path)) as storage:
        for name in ('"><img src=x onerror=alert(1)>', "a?b#c%2f..", "..."):
            put_record(storage, name)
    page = open_page(tmp_path)
    shown = page.get(f"/{TOKEN}/").text
    assert "<img" not in shown
    for link in re.findall(rf'href="(/{TOKEN}/0/[^"]+)"', shown):
        assert page.get(link.replace("&amp;", "&")).status_code == 200


@pytest.mark.slow(0.5)
def test_an_operator_without_state_is_no_error(open_page: OpenPage, tmp_path: Path) -> None:
    """A query that has just begun: each view says that nothing is stored yet."""
    with open_storage(str(tmp_path)) as storage:
        put_record(storage)
    page = open_page(tmp_path)
    assert "Which shard is hot? None" in text(page)
    shown = text(page, "0/totals/")
    assert "No commit or snapshot is stored yet" in shown
    assert "No snapshot is stored yet" in shown
    assert "Nothing is stored" in text(page, "0/totals/shard/0")
    assert "No shard has stored anything yet" in text(page, "0/totals/upkeep")


@pytest.mark.slow(0.5)
def test_a_damaged_record_is_told(open_page: OpenPage, sample: Path, tmp_path: Path) -> None:
    """What can be listed is shown all the same."""
    root = shutil.copytree(sample, tmp_path / "state")
    (root / "totals/operator").write_bytes(b"no record")
    page = open_page(root)
    assert "Does anything fail? Yes The record of totals cannot be read" in text(page)
    assert "record cannot be read" in text(page, "0/totals/")
    text(page, "0/totals/upkeep", 500)


def test_one_directory_of_several_may_be_gone(open_page: OpenPage, sample: Path, tmp_path: Path) -> None:
    """The others are shown, and the error says what is wrong with it."""
    shown = text(open_page(sample, tmp_path / "gone"))
    assert "Which operator is big? totals" in shown
    assert "Empty, or it does not exist" in shown


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("0/nope/", 404),
        ("7/totals/", 404),
        ("0/totals/shard/24", 404),
        ("0/totals/?measure=x", 400),
        ("0/totals/?first=-1", 400),
        ("0/totals/?first=99999999999999999999", 400),
        ("0/totals/?window=<script>", 400),
        ("0/totals/upkeep?check=delete", 400),
    ],
)
def test_what_is_asked_wrongly_is_answered_clearly(page: FlaskClient, path: str, status: int) -> None:
    """An error is a page that says what is wrong, and leads back."""
    shown = text(page, path, status)
    assert "Cannot show this" in shown
    assert "Back to the overview" in shown


def test_following_is_kept_from_view_to_view(page: FlaskClient) -> None:
    """Links of a page that follows lead to pages that follow."""
    shown = page.get(f"/{TOKEN}/?follow=1").text
    assert 'data-follow="5"' in shown
    assert f'href="/{TOKEN}/0/totals/?follow=1"' in shown
    assert 'data-follow="0"' in page.get(f"/{TOKEN}/").text


@pytest.mark.parametrize(
    "given", ["endpoint=x", "_method=POST", "_external=1&_scheme=javascript", "place=7", "token=x"]
)
def test_parameters_that_are_none_of_the_page_change_no_link(page: FlaskClient, given: str) -> None:
    """What stands behind the question mark reaches links as a value or not at all."""
    answer = page.get(f"/{TOKEN}/0/totals/?measure=lag&{given}")
    assert answer.status_code == 200
    assert f"/{TOKEN}/0/totals/?measure=lag&amp;follow=1" in answer.text
    assert "javascript:" not in answer.text


@pytest.mark.parametrize("digits", ["9" * 13, "0" * 13 + "9" * 40, "0" * 13 + "9" * 5_000])
def test_a_number_of_any_length_is_refused_with_words(page: FlaskClient, digits: str) -> None:
    """Neither numpy nor Python's limit of digits meets it."""
    answer = page.get(f"/{TOKEN}/0/totals/?first={digits}")
    assert answer.status_code == 400
    assert "first must be a whole number" in answer.text
