"""The page of a query: rows as `read_state` shows them, and failing micro-batches, also under a kill."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pytest
from flask.testing import FlaskClient
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import holdfast
from holdfast.errors import NotFoundError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.ui import inquiry
from tests.browser import DESKTOP, PHONE, accessibility_findings, chromium, shown
from tests.faults.executor_process import eventually
from tests.servers import downloads
from tests.servers.programs import wait_until
from tests.spark.conftest import Lab, configured, count_and_sum
from tests.tiers import cases
from tests.unit.holdfast.commands.conftest import document, put_record, run
from tests.unit.holdfast.ui.places import TOKEN, opened, served
from tests.unit.holdfast.ui.test_views import text

pytestmark = [pytest.mark.spark, pytest.mark.slow(20)]


HOSTILE = ["<script>alert(1)</script>", "\x1b[31mred", '=HYPERLINK("http://evil")', "'\"><img src=x>", "\u202eabc", ""]


def ask(page: FlaskClient, status: int = 200, **parameters: object) -> str:
    answer = page.get(f"/{TOKEN}/0/totals/rows?{urlencode(parameters)}")
    assert answer.status_code == status, answer.text
    return answer.text


def cells(shown: str) -> list[list[str]]:
    """Return the cells of all tables of a page, row by row."""
    rows = re.findall(r"<tr>(.*?)</tr>", shown, re.DOTALL)
    found = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return [[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in found]


@pytest.fixture(scope="module")
def ran(spark: SparkSession, local_state: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Run four micro-batches over 130 keys in several shards; one key changes in the first, second and fourth."""
    lab = Lab(spark, tmp_path_factory.mktemp("query"), local_state)
    for n in range(4):
        keys = [(f"key-{i:03d}", 10 * n + i) for i in range(n, 130, 4)]
        lab.feed(keys if n == 2 else [*keys, ("ann", n + 1)])
    with configured(lab):
        lab.run(lab.totals())
    return lab


@pytest.fixture
def query(ran: Lab) -> Iterator[Lab]:
    """Return the one query of this file, which tests only look at."""
    with configured(ran):
        yield ran


@pytest.fixture
def page(query: Lab) -> Iterator[FlaskClient]:
    with opened(query.folder / "durable", query.folder / "query") as page:
        yield page


def every_row(page: FlaskClient, **parameters: object) -> list[list[str]]:
    found, place = [], dict(parameters)
    while True:
        text = ask(page, **place)
        found += [row for row in cells(text)[1:] if len(row) == 3]
        following = re.search(r'rel="next" href="([^"]+)"', text)
        if following is None:
            return found
        place |= dict(
            pair.split("=") for pair in html.unescape(following[1]).partition("?")[2].replace("%2B", "+").split("&")
        )


def test_the_pages_have_each_row_once(query: Lab, page: FlaskClient) -> None:
    """Through all shards, page by page, the rows are those of `read_state`, now and after an earlier micro-batch."""
    for batch in (None, 1):
        expected = holdfast.read_state(query.spark, query.folder / "query", "totals", batchId=batch).to_pylist()
        found = every_row(page, **({} if batch is None else {"batch": batch}))
        assert sorted(found) == sorted([row["key"], str(row["n"]), str(row["total"])] for row in expected)


def test_a_filter_keeps_what_contains_it(page: FlaskClient) -> None:
    """In whatever case, in any column; and it says how many rows it has seen."""
    assert sorted(row[0] for row in every_row(page, text="KEY-12")) == [f"key-{n}" for n in range(120, 130)]
    assert "None of 131 rows contains" in html.unescape(ask(page, text="nowhere"))


def test_a_key_holds_and_held(page: FlaskClient) -> None:
    """The newest first, where it changed, and which micro-batch wrote it; a key that never was holds nothing."""
    found = [row for row in cells(ask(page, **{"key.key": "ann"})) if len(row) == 4]
    assert [(row[0], row[2], row[3]) for row in found[1:]] == [("3", "3", "7"), ("1", "2", "3"), ("0", "1", "1")]
    assert "No table has a row for this key" in ask(page, **{"key.key": "nobody"})


def test_time_travels(page: FlaskClient) -> None:
    """After an earlier micro-batch the key holds what it held then; of one that is not there, the others are named."""
    found = [row for row in cells(ask(page, batch=1, **{"key.key": "ann"})) if len(row) == 4]
    assert found[1][2:] == ["2", "3"]
    shown = ask(page, batch=1)
    assert 'min="0" max="3" value="1"' in shown
    assert "Back to the last micro-batch" in shown
    assert "first=0 last=3" in ask(page, 404, batch=99)


def test_rows_make_a_map(query: Lab, page: FlaskClient) -> None:
    """Shards by rows: their sum is the number of keys."""
    text = page.get(f"/{TOKEN}/0/totals/?measure=rows").text
    numbers = [int(n.replace(",", "")) for n in re.findall(r'title="shard \d+: ([\d,]+) rows"', text)]
    assert sum(numbers) == 131
    assert len(numbers) == int(query.spark.conf.get("spark.sql.shuffle.partitions", "0"))


@pytest.mark.all
def test_rows_of_large_shards_are_estimated(lab: Lab) -> None:
    """Where a thousand of a shard's rows end tells how many it has, to a few percent; few rows are counted."""
    lab.feed([(f"key-{n}", n) for n in range(20_000)])
    lab.run(lab.totals())
    shards = lab.spark.conf.get("spark.sql.shuffle.partitions", "0")
    rows = [
        row.asDict()
        for row in holdfast.state(lab.spark, lab.folder / "query", "totals").groupBy("shard").count().collect()
    ]
    with holdfast.open_query(lab.folder / "query", lab.folder / "durable") as query:
        found = {shard: query.row_count("totals", "state", shard) for shard in range(int(shards or 0))}
        exact = {shard: query.row_count("totals", "state", shard, read=100_000) for shard in found}
    assert exact == {row["shard"]: row["count"] for row in rows}
    assert all(abs(found[shard] / exact[shard] - 1) < 0.15 for shard in exact)


def test_values_are_text_whatever_they_are(lab: Lab) -> None:
    """Markup, control characters, formulas and texts that run backwards are shown, found and looked up."""
    lab.feed([(key, place) for place, key in enumerate(HOSTILE)] + [(None, 9)])
    lab.run(lab.totals())
    with opened(lab.folder / "durable", lab.folder / "query") as page:
        text = ask(page)
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "\x1b" not in text
        assert "\u202e" not in text
        found = {row[0] for row in every_row(page)}
        assert found == {*HOSTILE[:1], "\\x1b[31mred", *HOSTILE[2:4], "\\u202eabc", "", "null"}
        for place, key in enumerate(HOSTILE[:-1]):
            assert f">{place}<" in ask(page, **{"key.key": key})


def test_without_the_query_it_says_what_to_add(query: Lab) -> None:
    """The directory alone does not know what is committed: the page says how to name a query that was moved."""
    state_dir = query.folder / "durable"
    eventually(lambda: list(state_dir.glob("_queries/*.locations/*")))
    with opened(state_dir) as page:
        assert page.get(f"/{TOKEN}/0/totals/?measure=rows").status_code == 200
    moved = (query.folder / "query").rename(query.folder / "moved")
    try:
        with opened(state_dir) as page:
            text = html.unescape(ask(page))
            assert "holdfast ui" in text
            assert "checkpointLocation" in text
            assert page.get(f"/{TOKEN}/0/totals/?measure=rows").status_code == 400
    finally:
        moved.rename(query.folder / "query")


@pytest.mark.all
def test_it_follows_a_running_query(lab: Lab) -> None:
    """What is committed meanwhile is shown at the next request, and results do not change by looking."""
    shown = []
    lab.feed([("ann", 7)])
    lab.run(lab.totals())
    with opened(lab.folder / "durable", lab.folder / "query") as page:
        for _ in range(2):
            shown.append([row for row in cells(ask(page, **{"key.key": "ann"})) if len(row) == 4])
            lab.feed([("ann", 100)])
            lab.run(lab.totals())
    assert [rows[1][2:] for rows in shown] == [["1", "7"], ["2", "107"]]
    assert lab.state()["ann"] == (3, 207)


@pytest.mark.all
def test_a_running_query_is_seen_live(lab: Lab) -> None:
    """State servers on this machine tell of the last micro-batches; without their directory nothing is shown."""
    for rows in (34, 33):
        lab.feed([(f"key-{n}", n) for n in range(rows)])
    lab.run(lab.totals())
    places = lab.folder / "durable", lab.folder / "query"
    with opened(*places, local_dir=str(lab.local)) as page:
        text = page.get(f"/{TOKEN}/0/totals/").text
        found = [row for row in cells(text) if len(row) == 13]
        assert [row[0] for row in found[1:]] == ["1", "0"]
        assert [int(row[2]) for row in found[1:]] == [33, 34]
    with opened(*places, local_dir=str(lab.folder)) as page:
        assert "The last micro-batches" not in page.get(f"/{TOKEN}/0/totals/").text


def test_the_overview_says_where_the_query_is(page: FlaskClient) -> None:
    """Its location, its last micro-batch, and how many it could return to."""
    text = page.get(f"/{TOKEN}/").text
    found = [row for row in cells(text) if len(row) == 5]
    assert [row[1] for row in found] == ["last committed micro-batch", "3"]
    assert found[1][3:] == ["4 micro-batches", "totals"]


@pytest.mark.all
def test_it_is_opened_before_the_query_begins(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither place is there yet; once the query has committed, its rows are."""
    monkeypatch.setattr(inquiry, "SHOWN_MS", 0)
    monkeypatch.setattr(inquiry, "_REST", 0)
    with opened(lab.folder / "query", lab.folder / "durable") as page:
        assert "Nothing to show yet" in page.get(f"/{TOKEN}/").text
        lab.feed([("ann", 7)])
        lab.run(lab.totals())
        text = page.get(f"/{TOKEN}/").text
        assert "awaited" not in text
        assert ">1 micro-batch<" in text
        assert [row[:2] for row in cells(page.get(f"/{TOKEN}/1/totals/rows").text)[1:]] == [["ann", "1"]]


@pytest.mark.all
def test_a_query_of_another_directory(query: Lab, tmp_path: Path) -> None:
    """The wrong directory is refused, even with an operator of this name; with the right one it is shown."""
    with open_storage(str(tmp_path / "other")) as storage:
        put_record(storage, "totals")
    with (
        pytest.raises(NotFoundError, match="none of the given state directories has this query's state"),
        opened(tmp_path / "other", query.folder / "query"),
    ):
        pass
    with opened(tmp_path / "other", query.folder / "query", query.folder / "durable") as page:
        assert page.get(f"/{TOKEN}/2/totals/?measure=rows").status_code == 200
        assert page.get(f"/{TOKEN}/0/totals/?measure=rows").status_code == 400


def test_what_is_lost_is_an_error(query: Lab, tmp_path: Path) -> None:
    """State that somebody has deleted: the page names it, and the other views still work."""
    places = [shutil.copytree(query.folder / name, tmp_path / name) for name in ("durable", "query")]
    with opened(*places) as page:
        assert page.get(f"/{TOKEN}/0/totals/rows").status_code == 200
        (tmp_path / "durable/totals/operator").unlink()
        # What was read of an operator counts for three seconds.
        wait_until(lambda: page.get(f"/{TOKEN}/0/totals/rows").status_code == 404, list)
        assert page.get(f"/{TOKEN}/").status_code == 200


@pytest.mark.all
@pytest.mark.browser
def test_in_a_browser(query: Lab) -> None:
    with downloads.skipped_where_missing():
        downloads.chromium()
    places = query.folder / "durable", query.folder / "query"
    with served(*places, local_dir=str(query.local)) as address, chromium() as browser:
        rows = f"{address}0/totals/rows"
        asked = ("key.key=ann", "key.key=nobody", "text=12", "text=nowhere", "batch=99", "table=x")
        for view in ("", *(f"?{one}" for one in asked), "/../", "/../../../", "/../?measure=rows"):
            for width, scheme in cases(((PHONE, "dark"), (DESKTOP, "light"))):
                with shown(browser, rows + view, width, scheme) as it:
                    assert accessibility_findings(it.page) == []
                    assert it.page.evaluate("document.documentElement.scrollWidth") == width
                    assert [url for url in it.requests if not url.startswith(address)] == []
        with shown(browser, rows, DESKTOP) as it:
            it.page.keyboard.press("/")
            it.page.keyboard.type("ann")
            it.page.keyboard.press("Enter")
            it.page.wait_for_selector("text=The key's values")
            it.page.wait_for_load_state()  # with its script
            assert "batch=" not in it.page.url
            it.page.focus("input[type=range]")
            it.page.keyboard.press("ArrowLeft")
            it.page.wait_for_url("**batch=2**")
            assert it.page.inner_text("td.value >> nth=0") == "2"
            assert it.errors == []


def refuse_large(batch: holdfast.ShardBatch) -> pa.Table:
    if 13 in batch.rows.column("v").to_pylist():
        raise ValueError("13 is no amount")
    return count_and_sum(batch)


def inspected(lab: Lab, status: int = 0) -> dict[str, Any]:
    """Return what the command says of the one query, by its location, and end with as exit status."""
    location = lab.folder / "query"
    (found,) = document("inspect", lab.folder / "durable", "--checkpoint-location", location, status=status)["queries"]
    return found


def seen(lab: Lab, view: str = "") -> str:
    with opened(lab.folder / "durable", lab.folder / "query", local_dir=str(lab.local)) as page:
        return text(page, view)


def test_a_failed_micro_batch_is_seen_until_it_is_committed(lab: Lab) -> None:
    """Its error in words, its shard, and since when; the run that commits it ends that."""
    for rows in ([("ann", 1), ("bob", 2)], [("ann", 13)], [("ann", 5)]):
        lab.feed(rows)
    with pytest.raises(StreamingQueryException):
        lab.run(lab.totals(func=refuse_large))
    failing = inspected(lab, status=1)
    assert (failing["state"], failing["why"]) == ("failing", "Micro-batch 1 failed and has not been committed since.")
    assert failing["failure"]["error"] == "ValueError: 13 is no amount"
    assert failing["failure"]["what"] == "micro-batch 1"
    shown = seen(lab)
    assert "Failing since" in shown
    assert "micro-batch 1 failed" in shown
    assert "ValueError: 13 is no amount" in shown
    shard = int(failing["failure"]["shard"][-4:])
    assert "ValueError: 13 is no amount" in seen(lab, f"0/totals/shard/{shard}")
    lab.run(lab.totals())
    going = inspected(lab)
    assert (going["state"], going["committed"], going["failure"]) == ("running", 2, None)
    assert going["why"].startswith("Micro-batch 2 was committed")
    shown = seen(lab)
    assert "Running since" in shown
    assert "13 is no amount" not in shown
    assert "Rows per second: unknown" not in shown
    shown = run("inspect", lab.folder / "durable", "--checkpoint-location", lab.folder / "query").stdout
    assert "is running since" in shown
    assert "13 is no amount" not in shown


@pytest.mark.all
def test_only_failures_cost_requests(lab: Lab) -> None:
    """A query without failures stores nothing of them, and one that fails again and again one object a shard."""
    lab.feed([("ann", 1)])
    lab.run(lab.totals())
    assert not list((lab.folder / "durable").rglob("troubles"))
    lab.feed([("ann", 13)])
    for _ in range(2):
        with pytest.raises(StreamingQueryException):
            lab.run(lab.totals(func=refuse_large))
    assert len(list((lab.folder / "durable").rglob("troubles/*"))) == 1
