"""What the views show: answers, the map, charts, rows and cells; of damaged, empty and huge directories, too."""

from __future__ import annotations

import datetime as dt
import html
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from flask.testing import FlaskClient

from holdfast.backends.base import Pointer
from holdfast.backends.run import TableSchema
from holdfast.commands.target import CELL_MAX
from holdfast.errors import UnavailableError
from holdfast.health import OperatorSigns
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.upkeep.catalogue import StateSizes
from holdfast.spark_integration.lookup.query_pointers import Page, StoredOperator
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.testing.state_rows import COUNTS
from holdfast.ui.inquiry import SHOWN_MS, Inquiry
from holdfast.ui.rows import ROWS_MAX, SEARCHED_MAX, RowsRequest, RowsView, rows_view, shown_table, texts
from holdfast.ui.shards import CELLS_MAX, LEVELS, MEASURES, HeatMap, heat_map, measured
from holdfast.ui.survey import OperatorSurvey, StoredObjects, Survey, survey
from holdfast.ui.upkeep import VERIFY_MS, upkeep
from tests.source_tree import ROOT
from tests.unit.holdfast.commands.conftest import put_record
from tests.unit.holdfast.ui import sample_state
from tests.unit.holdfast.ui.places import TOKEN, directory

OpenPage = Callable[..., FlaskClient]


def text(page: FlaskClient, path: str = "", status: int = 200) -> str:
    """Return the page as a reader sees it: without markup, with single spaces."""
    answer = page.get(f"/{TOKEN}/{path}")
    assert answer.status_code == status, answer.text
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", answer.text)).split())


def test_one_look_answers_the_questions(page: FlaskClient) -> None:
    """Which operator is largest, which shard is hot, is the upload behind, does anything fail."""
    shown = text(page)
    assert "Which operator is largest? totals" in shown
    assert "Which shard is hot? totals 3" in shown
    assert "Are snapshots behind? No" in shown
    assert "Is anything failing? Yes 1 report" in shown


@pytest.mark.slow(1)
def test_sinks_are_shown_with_their_newest_decision(open_page: OpenPage, sample: Path, tmp_path: Path) -> None:
    assert re.search(r"invoices micro-batch 9 1,000 2 .* 2 [\d.]+ k?B", text(open_page(sample)))
    root = shutil.copytree(sample, tmp_path / "state")
    (root / "_sinks/invoices/00000000000000000002").write_bytes(b"?")
    assert "not a whole holdfast file" in text(open_page(root))


def test_an_upload_that_is_behind_is_told(open_page: OpenPage, tmp_path: Path) -> None:
    from tests.model.shard_history import ShardHistory

    with open_storage(str(tmp_path)) as storage:
        put_record(storage)
        ShardHistory(storage).grow(None, 50)
    page = open_page(tmp_path)
    assert "Are snapshots behind? Yes, 1 shard At most 50 commits" in text(page)
    assert f"/{TOKEN}/0/totals/shard/3" in page.get(f"/{TOKEN}/").text


@pytest.mark.parametrize("measure", ["size", "written", "lag", "age"])
def test_each_measure_has_a_map(page: FlaskClient, measure: str) -> None:
    shown = page.get(f"/{TOKEN}/0/totals/?measure={measure}").text
    assert len(re.findall(r'<li><a class="heat-\d"', shown)) == 24
    assert 'class="heat-9"' in shown


def test_the_hot_shard_stands_out(page: FlaskClient) -> None:
    shown = text(page, "0/totals/?measure=written")
    assert re.search(r"relative to median 3 [\d.]+ kB", shown)
    assert re.search(r"The largest has [\d.]+ kB, and most have none", shown)


def test_a_part_of_the_map_is_shown_alone(page: FlaskClient) -> None:
    shown = page.get(f"/{TOKEN}/0/totals/?first=20&last=999999").text
    assert len(re.findall(r'<li><a class="heat-\d"', shown)) == 4
    assert "Shards 20 to 23" in shown


@pytest.mark.slow(0.5)
def test_time_and_growth_are_drawn(page: FlaskClient) -> None:
    shown = text(page, "0/totals/")
    assert "Versions 1 to 60" in shown
    assert "Committed 1" in shown
    assert re.search(r"From [\d.]+ kB to [\d.]+ kB, according to stored snapshots", shown)


def test_a_shard_lists_its_versions(page: FlaskClient) -> None:
    shown = text(page, "0/totals/shard/3")
    assert "80 stored commits and snapshots" in shown
    assert "snapshot 60-" in shown
    assert "memory, " in shown


def test_what_gc_would_delete_is_told_and_left_alone(page: FlaskClient, sample: Path) -> None:
    before = sorted(path for path in sample.rglob("*") if path.is_file())
    shown = text(page, "0/totals/upkeep")
    assert "objects, 41 B," in shown or "would be deleted" in shown
    assert "files/0123456789abcdef-0" in shown
    assert sorted(path for path in sample.rglob("*") if path.is_file()) == before


@pytest.mark.slow(1)
def test_what_verify_would_say(open_page: OpenPage, sample: Path, tmp_path: Path) -> None:
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
        operator = survey(storage, StateSizes(storage, executor), executor).operator("totals")
        view = upkeep(storage, executor, operator, "verify", 0, 0, lambda: next(ticks))
    assert view.is_cut
    assert view.after == view.rows[-1].shard + 1 == len(view.rows)
    is_one_too_slow = object_ms > VERIFY_MS
    assert view.problems == len(view.rows) * is_one_too_slow
    assert bool(view.objects) != is_one_too_slow


def test_a_page_that_read_nothing_says_so(open_page: OpenPage, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.ui.upkeep.VERIFY_MS", 0)
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
    directory(tmp_path)
    page = open_page(tmp_path)
    assert "Which shard is hot? None" in text(page)
    shown = text(page, "0/totals/")
    assert "No commit or snapshot is stored yet" in shown
    assert "No snapshot is stored yet" in shown
    assert "Nothing is stored" in text(page, "0/totals/shard/0")
    assert "No shard has stored anything yet" in text(page, "0/totals/upkeep")


def test_one_directory_of_several_may_be_gone(open_page: OpenPage, sample: Path, tmp_path: Path) -> None:
    shown = text(open_page(sample, tmp_path / "gone"))
    assert "Which operator is largest? totals" in shown
    assert "Empty, or it does not exist" in shown


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((path, 404) for path in ("0/nope/", "7/totals/", "0/totals/shard/24")),
        *((f"0/totals/?{wrong}", 400) for wrong in ("measure=x", "first=-1", f"first={'9' * 20}", "window=<script>")),
        ("0/totals/upkeep?check=delete", 400),
    ],
)
def test_what_is_asked_wrongly_is_answered_clearly(page: FlaskClient, path: str, status: int) -> None:
    """An error is a page that says what is wrong, and leads back."""
    shown = text(page, path, status)
    assert "Cannot show this" in shown
    assert "Back to the overview" in shown


def test_following_is_kept_from_view_to_view(page: FlaskClient) -> None:
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


ZONED = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (None, pa.int64(), None),
        (1, pa.int64(), "1"),
        (True, pa.bool_(), "true"),
        (float("nan"), pa.float64(), "nan"),
        (-0.0, pa.float64(), "-0.0"),
        (Decimal("1.50"), pa.decimal128(10, 2), "1.50"),
        ("a\nb\x00\u202e", pa.large_string(), "a\\nb\\x00\\u202e"),
        (b"\x00\xff", pa.large_binary(), "AP8="),
        (dt.date(2026, 1, 2), pa.date32(), "2026-01-02"),
        (ZONED, pa.timestamp("us", "UTC"), "2026-01-02T03:04:05+00:00"),
        (dt.timedelta(seconds=90), pa.duration("us"), "0:01:30"),
        ([1, None], pa.large_list(pa.int64()), "[1, null]"),
        ({"a": "<b>", "b": b"\x01"}, pa.struct([("a", pa.string()), ("b", pa.binary())]), '{"a": "<b>", "b": "AQ=="}'),
        ([("k", ZONED)], pa.map_(pa.string(), pa.timestamp("us", "UTC")), '[["k", "2026-01-02T03:04:05+00:00"]]'),
    ],
)
def test_each_type_has_a_text(value: Any, kind: pa.DataType, text: str | None) -> None:
    assert texts(pa.chunked_array([pa.array([value], kind)])) == [text]


def test_bytes_that_are_no_text_are_shown() -> None:
    bad = pa.array([b"\xff\xfea"], pa.large_binary()).view(pa.large_string())
    assert texts(bad) == ["\\\\xff\\\\xfea".replace("\\\\", "\\")]
    nested = pa.LargeListArray.from_arrays(pa.array([0, 1]), bad)
    assert texts(nested) == ['["\\\\xff\\\\xfea"]']


def test_times_beyond_the_calendar_are_numbers() -> None:
    found = texts(pa.array([2**62, 0], pa.int64()).cast(pa.timestamp("us", "UTC")))
    assert found == [f"{2**62} timestamp[us, tz=UTC]", "1970-01-01T00:00:00+00:00"]


def test_long_values_are_cut() -> None:
    (cell,) = texts(pa.array(["x" * 1_000_000]))
    assert cell is not None
    assert len(cell) < CELL_MAX + 40
    assert cell.endswith("(1,000,000 characters)")
    (binary,) = texts(pa.array([b"x" * 1_000_000]))
    assert binary is not None
    assert len(binary) < CELL_MAX + 40


def test_a_table_without_rows_has_its_columns() -> None:
    shown = shown_table("t", pa.table({"a": pa.array([], pa.int64()), "b": pa.array([], pa.string())}))
    assert (shown.columns, shown.rows) == ([("a", True), ("b", False)], [])


STATE = TableSchema.of("state", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64())]))
USERS = 5_000


class Query:
    """A query with users in two shards, half of whom are called ann."""

    def operator(self, *_: object) -> StoredOperator:
        rows = tuple(PointerRow("q", "op", shard, 2, Pointer(1, "a" * 16), None, None, 0) for shard in (0, 1))
        return StoredOperator("op", 3, 0, "host", 2, {"state": STATE}, {"op": rows})

    def batches(self) -> list[int]:
        return [3]

    def page(self, _: str, __: str, shard: int, *, after: str | None, limit: int, **___: object) -> Page:
        first = int(after or 0)
        users = range(first, min(first + limit, USERS))
        names = [f"{'ann' if user % 2 else 'bob'}-{shard}-{user}" for user in users]
        rows = pa.table({"user": names, "n": pa.array(users, pa.int64())})
        return Page(rows, str(first + limit) if first + limit < USERS else None)


def view(**asked: Any) -> RowsView:
    query: Any = Query()
    return rows_view(query, "op", RowsRequest(**asked), lambda: 0)


@pytest.mark.slow(1)
@pytest.mark.parametrize(("text", "rows"), [("", 2 * USERS), ("ANN-", USERS), ("-1-7", 111)])
def test_each_row_stands_on_one_page(text: str, rows: int) -> None:
    found: list[str | None] = []
    place: tuple[int | None, str | None] | None = (None, None)
    searched = 0
    while place is not None:
        page = view(contains=text, shard=place[0], after=place[1])
        assert page.rows is not None
        assert len(page.rows.rows) <= ROWS_MAX
        assert page.searched < SEARCHED_MAX + 2_000
        found += [row[0] for row in page.rows.rows]
        searched += page.searched
        place = page.next
    assert len(set(found)) == len(found) == rows
    assert searched == 2 * USERS


def mapped(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> HeatMap:
    """Return the map by size of an operator whose shards have these sizes."""
    shards = np.arange(len(values), dtype=np.int64)
    zeros = np.zeros(len(values), np.int64)
    objects = StoredObjects(zeros.astype(np.int8), shards, zeros, values, zeros, shards)
    record = OperatorRecord("totals", "query-1", "definition-1", "run-1", len(values), {"counts": COUNTS}, 100)
    operator = OperatorSurvey(OperatorSigns("totals", record), objects, values, 0, 0)
    return heat_map(operator, measured(operator, MEASURES["size"]))


@pytest.mark.parametrize("shards", [1, 16, 240, 241, 500, 2_000, 10_000])
def test_equal_shards_look_equal(shards: int) -> None:
    """2,000 shards were a checkerboard: cells of 8 shards beside cells of 9, and their sums differ."""
    found = mapped(np.full(shards, 1_000, np.int64))
    assert {cell.level for cell in found.cells} == {LEVELS}
    assert len(found.cells) <= CELLS_MAX
    covered = [number for cell in found.cells for number in range(cell.first, cell.last + 1)]
    assert covered == list(range(shards))


def test_a_hot_shard_among_many_shows() -> None:
    values = np.full(2_000, 1_000, np.int64)
    values[1_234] = 9_000
    found = mapped(values)
    (hot,) = [cell for cell in found.cells if cell.level == LEVELS]
    assert hot.first <= 1_234 <= hot.last
    assert hot.text == "9.0 kB at most, 17.0 kB in all"
    assert {cell.level for cell in found.cells if cell is not hot} == {1}


def test_the_legend_has_figures() -> None:
    found = mapped(np.array([0, 4_500, 9_000], np.int64))
    assert (found.legend[0], found.legend[3], found.legend[LEVELS]) == ("0 B", "3.0 kB", "9.0 kB")
    assert [cell.level for cell in found.cells] == [0, 5, 9]


# 14 commits a shard, measured: 7.7 s, 150 MB, then 0.2 s and 85 kB. Here it has 4; and machines differ, and are busy.
LISTED_S, PEAK_MB, SHOWN_S, PAGE_BYTES = 60, 200, 5, 150_000


@pytest.mark.all
@pytest.mark.slow(20)
def test_ten_thousand_shards() -> None:
    command = [sys.executable, "-m", "tests.unit.holdfast.ui.measure_page", "10000", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed, *views = map(json.loads, done.stdout.splitlines())
    assert listed["listed"] == 70_000
    assert listed["seconds"] < LISTED_S
    assert max(one["peak_mb"] for one in views) < PEAK_MB
    assert max(one["seconds"] for one in views) < SHOWN_S
    assert max(one["bytes"] for one in views) < PAGE_BYTES


class Listings:
    """Takes surveys that take time, or fail."""

    def __init__(self) -> None:
        self.now_ms, self.took_ms, self.taken = 0, 0, 0
        self.error: Exception | None = None
        self.executor = ThreadPoolExecutor(1)

    def take(self) -> Survey:
        self.now_ms += self.took_ms
        self.taken += 1
        if self.error:
            raise self.error
        return Survey({}, (), self.taken, ())

    def surveyor(self) -> Inquiry[Survey]:
        return Inquiry(self.take, self.executor, "memory://state", lambda: self.now_ms, lambda: self.now_ms)


def test_all_who_ask_at_once_see_one_listing() -> None:
    """A page costs the store nothing while the last listing is young."""
    listings = Listings()
    surveyor = listings.surveyor()
    for _ in range(10):
        assert surveyor.latest().found.unknown == 1
    listings.now_ms += SHOWN_MS
    assert surveyor.latest().found.unknown == 2


def test_a_long_listing_is_shown_longer() -> None:
    """Of a large directory, listings take a tenth of the time at most."""
    listings = Listings()
    listings.took_ms = 10_000
    surveyor = listings.surveyor()
    surveyor.latest()
    listings.now_ms += 99_000
    assert surveyor.latest().took_ms == 10_000
    assert listings.taken == 1
    listings.now_ms += 1_000
    surveyor.latest()
    assert listings.taken == 2


def test_a_failed_listing_leaves_the_last_one() -> None:
    """What was listed stays, with the error and its age; when the store answers again the error is over."""
    listings = Listings()
    surveyor = listings.surveyor()
    surveyor.latest()
    listings.now_ms += SHOWN_MS
    listings.error = UnavailableError("the storage did not answer")
    stale = surveyor.latest()
    assert (stale.found.unknown, stale.taken_ms, stale.error) == (1, 0, listings.error)
    listings.now_ms += SHOWN_MS
    listings.error = None
    assert surveyor.latest().error is None


@pytest.mark.parametrize("error", [UnavailableError("the storage did not answer"), ZeroDivisionError("a mistake")])
def test_a_first_listing_that_fails_is_an_error(error: Exception) -> None:
    """A mistake of the program, too: it reaches the log, and no page looks whole."""
    listings = Listings()
    listings.error = error
    with pytest.raises(type(error), match=str(error)):
        listings.surveyor().latest()
