"""How the query is, first on each page; and what pages say of shards without a snapshot, failures, sizes and types."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from holdfast import clock
from holdfast.backends.schema import TableSchema
from holdfast.errors import UnavailableError
from holdfast.snapshotter.ownership.claims import Claim, ClaimingRun
from holdfast.snapshotter.ownership.queries import QueryOrigin, declare_origin
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.troubles import of_batch, report_trouble
from holdfast.spark_integration.spark_state.query_location import QueryLocation
from holdfast.ui.overview import overview
from tests.model.shard_history import ShardHistory
from tests.unit.holdfast.commands.conftest import document, put_record, run
from tests.unit.holdfast.health import in_four_states
from tests.unit.holdfast.health.in_four_states import claim, put_claim
from tests.unit.holdfast.ui.places import TOKEN, SiteOf, Stored, location
from tests.unit.holdfast.ui.test_views import text

OpenPage = Callable[..., FlaskClient]
WHY = {
    "running": "Last active 4\\d s ago, according to its claim in the state directory.",
    "stopped": "and its processes on this machine have ended.",
    "stale": "Last active 67 d ago, according to its claim in the state directory, which is renewed every two",
    "failing": "Micro-batch 42 failed and is not known to have been committed since.",
}


def page_of(open_page: OpenPage, root: Path) -> dict[str, tuple[str, str]]:
    """Return each question's verdict, by which it has its colour, and its answer."""
    shown = open_page(root).get(f"/{TOKEN}/").text
    found = re.findall(r'<li class="(\w+)">\s*<h2>(.*?)</h2>\s*<p class="answer">(.*?)</p>', shown)
    return {question: (verdict, re.sub(r"<[^>]+>", "", answer)) for verdict, question, answer in found}


UPLOAD, FAILS = "Are snapshots behind?", "Is anything failing?"
PAST = ("plain", "No, as of the last activity")


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("state", "upload", "fails"),
    [
        ("running", ("good", "No"), ("good", "No")),
        ("stopped", PAST, PAST),
        ("stale", PAST, PAST),
        ("failing", PAST, ("bad", "Yes")),
    ],
)
def test_nothing_is_green_where_no_query_runs(
    open_page: OpenPage, tmp_path: Path, state: str, upload: tuple[str, str], fails: tuple[str, str]
) -> None:
    """That all was well 67 days ago assures of nothing."""
    told = page_of(open_page, in_four_states.make(tmp_path, state))
    assert (told[UPLOAD], told[FAILS]) == (upload, fails)


def test_what_fails_without_a_report_fails(open_page: OpenPage, tmp_path: Path) -> None:
    """A query that was started three times in vain: the card said that it fails, the answer below that none does."""
    root = in_four_states.make(tmp_path, "running")
    shutil.rmtree(root / "totals/claims")
    now_ms = clock.now_ms()
    runs = tuple(ClaimingRun(f"run-{n}", now_ms - 60_000 * n, now_ms - 60_000 * n, 42, 100, "", "") for n in (3, 2, 1))
    put_claim(root, Claim("totals", 1, "query-1", None, "app-1", "host-1", runs), now_ms)
    assert "3 starts have reached micro-batch 42" in text(open_page(root))
    told = page_of(open_page, root)
    assert (told[UPLOAD], told[FAILS]) == (PAST, ("bad", "Yes"))


@pytest.mark.slow(1)
@pytest.mark.parametrize("state", in_four_states.STATES)
def test_each_page_begins_with_how_the_query_is(open_page: OpenPage, tmp_path: Path, state: str) -> None:
    """State, since when and why; the command says the same, and ends with 1 if the query is failing."""
    root = in_four_states.make(tmp_path, state)
    page = open_page(root)
    for view in ("", "0/totals/", "0/totals/shard/2", "0/totals/rows", "0/totals/upkeep"):
        shown = text(page, view)
        assert state.capitalize() in shown
        assert (f"{state.capitalize()} since 20" in shown) == (view in ("", "0/totals/"))
        assert re.search(WHY[state], shown)
        assert len(re.findall(rf'class="health (line )?{state}"', page.get(f"/{TOKEN}/{view}").text)) == 1
    told, status = run("inspect", root), int(state == "failing")
    assert re.search(f"query query-1 is {state} since", told.stdout)
    assert told.exit_code == status
    (query,) = document("inspect", root, status=status)["queries"]
    assert (query["query_id"], query["state"]) == ("query-1", state)
    assert re.search(WHY[state], query["why"])


def test_figures_that_are_unknown_for_one_reason_take_one_line(open_page: OpenPage, tmp_path: Path) -> None:
    """Four times "unknown" in large letters filled the card of each query whose location was not given."""
    root = in_four_states.make(tmp_path, "running")
    shown = text(open_page(root))
    assert "Micro-batches per minute, micro-batch duration: unknown; pass" in shown
    assert "<dl>" not in open_page(root).get(f"/{TOKEN}/").text.partition("Which operator is largest?")[0]


def test_nothing_is_asked_of_the_program_of_a_stopped_query(open_page: OpenPage, tmp_path: Path) -> None:
    """ "Pending input: unknown; only the program knows" of a program that is no more; its pace is in Spark's log."""
    shown = text(open_page(in_four_states.make(tmp_path, "stopped")))
    assert "Micro-batches per minute, micro-batch duration: unknown; pass" in shown
    assert "Pending input" not in shown
    assert "Rows per second" not in shown


@pytest.mark.slow(0.5)
def test_a_failed_micro_batch_is_told_in_words(open_page: OpenPage, tmp_path: Path) -> None:
    root = in_four_states.make(tmp_path, "failing")
    page = open_page(root)
    told = "totals/shard-0002: micro-batch 42 failed"
    error = "ValueError: could not convert string to float: 'n/a'"
    for view in ("", "0/totals/", "0/totals/shard/2"):
        shown = text(page, view)
        assert shown.count(told) == 1
        assert error in shown
    assert "Failures" in text(page, "0/totals/shard/2")
    assert "Failures" not in text(page, "0/totals/shard/1")
    assert told in run("inspect", root).stdout


def test_a_failure_that_was_got_over_is_gone(open_page: OpenPage, tmp_path: Path) -> None:
    root = in_four_states.make(tmp_path, "failing")
    claim(root, clock.now_ms() - 1_000, batch_id=43)
    page = open_page(root)
    assert "Running since" in text(page)
    assert "Is anything failing? No" in text(page)
    for view in ("0/totals/", "0/totals/shard/2"):
        assert "micro-batch 42 failed" not in text(page, view)
    assert "micro-batch 42 failed" not in run("inspect", root).stdout
    assert document("inspect", root)["operators"][0]["troubles"] == []


def test_a_shards_page_shows_its_own_failure(page: FlaskClient) -> None:
    assert "totals/shard-0007: snapshot failed 3 times in a row" in text(page, "0/totals/shard/7")
    assert text(page, "0/totals/shard/7").count("snapshot failed") == 1


def test_where_there_is_no_snapshot_none_is_spoken_of(open_page: OpenPage, tmp_path: Path) -> None:
    """ "8 commits since the snapshot of totals 3" was said of a shard that has none."""
    with open_storage(str(tmp_path)) as storage:
        put_record(storage)
        ShardHistory(storage).grow(None, 8)
    page = open_page(tmp_path)
    shown = text(page)
    assert re.search(r"At most 8 commits in \d+ m?s and no snapshot yet: totals 3", shown)
    assert "8 commits, no snapshot yet" in shown
    assert "since the newest snapshot" not in shown
    assert "8 commits, and no snapshot yet" in text(page, "0/totals/shard/3")
    shown = run("inspect", tmp_path, "--shards").stdout
    assert "at most 8 commits and no snapshot yet: totals/shard-0003" in shown
    assert "8, no snapshot yet" in shown


def test_one_commit_after_a_snapshot_is_one(open_page: OpenPage, tmp_path: Path) -> None:
    with open_storage(str(tmp_path)) as storage:
        put_record(storage)
        made = ShardHistory(storage).grow(None, 6, 6)
    for path in tmp_path.rglob("*"):
        os.utime(path, (1_790_000_000, 1_790_000_000))
    with open_storage(str(tmp_path)) as storage:
        ShardHistory(storage, ids=99).commit(made[-1])
    page = open_page(tmp_path)
    assert "1 commit since the newest snapshot" in text(page, "0/totals/shard/3")
    assert "since the newest snapshot: totals 3" in text(page)


@pytest.mark.slow(0.5)
def test_size_is_that_of_the_state(page: FlaskClient, sample: Path) -> None:
    """Not of all objects, which older versions need; both are told, and the command has the same figure."""
    (operator,) = [one for one in document("inspect", sample)["operators"] if one["operator"] == "totals"]
    stored = sum(sum(shard["bytes"].values()) for shard in operator["shards"])
    assert 0 < operator["state_bytes"] < stored / 2
    assert operator["shards_estimated"] == 0
    shown = text(page, "0/totals/")
    kilobytes = operator["state_bytes"] / 1000
    assert f"{kilobytes:.1f} kB of state in 24 of 24 shards" in shown
    assert f"Which operator is largest? totals {kilobytes:.1f} kB in 24 shards" in text(page)
    assert f"{kilobytes:.1f} kB of state" in run("inspect", sample).stdout


def test_types_are_sparks(open_page: OpenPage, tmp_path: Path) -> None:
    import pyarrow as pa

    from tests.unit.holdfast.commands import conftest

    wide = TableSchema.of(
        "counts",
        pa.schema([("user", pa.string()), ("day", pa.date32())]),
        pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("x", pa.float32())]),
    )
    with pytest.MonkeyPatch.context() as patch, open_storage(str(tmp_path)) as storage:
        patch.setattr(conftest, "COUNTS", wide)
        put_record(storage)
    shown = text(open_page(tmp_path), "0/totals/")
    for column in ("user string", "day date", "n bigint", "at timestamp", "x float"):
        assert column in shown
    (operator,) = document("inspect", tmp_path)["operators"]
    assert [one["type"] for one in operator["tables"]["counts"]["value"]] == ["bigint", "timestamp", "float"]


def test_a_damaged_record_is_a_failing_query(open_page: OpenPage, tmp_path: Path) -> None:
    root = in_four_states.make(tmp_path / "state", "running")
    (root / "totals/operator").write_bytes(b"no record")
    page = open_page(root)
    shown = text(page)
    assert "Failing The record of totals cannot be read." in shown
    assert "Is anything failing? Yes The record of totals cannot be read" in shown
    assert "record cannot be read" in text(page, "0/totals/")
    text(page, "0/totals/upkeep", 500)
    (query,) = document("inspect", root, status=1)["queries"]
    assert query["state"] == "failing"


def test_operators_of_one_query_share_a_card(open_page: OpenPage, sample: Path, tmp_path: Path) -> None:
    root = shutil.copytree(sample, tmp_path / "state")
    shutil.rmtree(root / "totals/shard-0007/troubles")
    with open_storage(str(root)) as storage:
        folder = PrefixedStorage(storage, "sessions/shard-0001")
        report_trouble(folder, of_batch(7), UnavailableError("x"), 1, "host-1", 0)
    claim(root, clock.now_ms() - 1_000, operator="totals")
    shown = open_page(root).get(f"/{TOKEN}/").text
    assert shown.count('<div class="health') == 1
    assert 'class="health running"' in shown


def write_log(location: Path, query_id: str, planned_s: Sequence[float]) -> None:
    """Write the logs of a query whose micro-batches were planned at these times, and took two seconds."""
    for folder in ("offsets", "commits"):
        (location / folder).mkdir(parents=True)
    (location / "metadata").write_text(json.dumps({"id": query_id}))
    for number, at_s in enumerate(planned_s):
        for folder, after_s in (("offsets", 0), ("commits", 2)):
            path = location / folder / str(number)
            path.write_text("v1\n{}")
            os.utime(path, (at_s + after_s,) * 2)


@pytest.mark.parametrize(
    ("origin", "before"),
    [
        (QueryOrigin("query-1", "query-1", "query-0", 7, {"totals": "query-1"}), [-60]),
        (QueryOrigin("query-2", "query-1", "query-1", 3, {"totals": "query-1"}), [-3, -3, -3, -3]),
    ],
    ids=["restored", "cloned"],
)
def test_what_a_restore_or_a_clone_wrote_is_no_part_of_the_pace(
    tmp_path: Path, site_of: SiteOf, origin: QueryOrigin, before: list[float]
) -> None:
    """A restore writes one micro-batch, a minute before the first that runs; a clone copies several at once."""
    root, now_s = in_four_states.make(tmp_path / "state", "running"), clock.now_ms() / 1000
    with open_storage(str(root)) as storage:
        declare_origin(storage, origin)
    own = [now_s - 50 + 10 * n for n in range(5)]
    write_log(tmp_path / "query", origin.query_id, [*(own[0] + after_s for after_s in before), *own])
    (query,) = document("inspect", root, "--checkpoint-location", tmp_path / "query")["queries"]
    assert {one["name"]: one["value"] for one in query["figures"]}["Micro-batches per minute"] == "6.0"

    with open_storage(str(tmp_path / "query")) as at:
        stored = Stored(query_id=origin.query_id, log=QueryLocation(at).times())
    places = [location(tmp_path / "query", origin.query_id), open_storage(str(root))]
    site = site_of(places, lambda _query, _home: stored)
    (card,) = overview(site, clock.now_ms()).cards
    assert {one.name: one.value for one in card.health.figures}["Micro-batches per minute"] == "6.0"


def test_the_command_reads_the_pace_in_sparks_log(tmp_path: Path) -> None:
    """Of the query's location, which may be none, or another query's."""
    root = in_four_states.make(tmp_path / "state", "running")
    place = tmp_path / "query"
    write_log(place, "query-1", [clock.now_ms() / 1000 - 60 + 10 * number for number in range(6)])
    (query,) = document("inspect", root, "--checkpoint-location", place)["queries"]
    figures = {one["name"]: one["value"] for one in query["figures"]}
    assert query["state"] == "running"
    assert figures["Micro-batches per minute"] == "6.0"
    assert figures["Micro-batch duration"] in (
        *("2 s of every 10 s", "2 s of every 9 s"),
        *("1 s of every 10 s", "1 s of every 9 s"),
    )
    assert "checkpointLocation as well" in run("inspect", root).stdout
    (place / "metadata").write_text('{"id": "query-2"}')
    refused = run("inspect", root, "--checkpoint-location", place)
    assert "none of the operators shown belongs to that query" in str(refused.exception)
    refused = run("inspect", root, "--checkpoint-location", tmp_path)
    assert "is not the checkpoint location of a query" in str(refused.exception)
