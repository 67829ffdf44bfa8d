"""The demo's parts that need no Spark."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from holdfast.errors import InvalidArgumentError
from holdfast.examples.flights import data, report
from holdfast.examples.flights.command import _how_to_look, demo
from holdfast.examples.flights.query import Job

FLIGHTS = pd.DataFrame(
    {
        "seq": [0, 1, 2, 3],
        "carrier": ["UA", "UA", "AA", "AA"],
        "tailnum": ["N1", None, "N1", None],
        "origin": ["JFK", "JFK", "LGA", "LGA"],
        "dest": ["LAX", "LAX", "ORD", "BOS"],
        "dep_delay": pd.array([5, None, 10, -3], "Int64"),
        "arr_delay": pd.array([1, None, None, -8], "Int64"),
    }
)


def test_totals_by_pandas() -> None:
    totals = data.expected_totals(FLIGHTS).set_index(["kind", "name"])
    n1 = totals.loc[("aircraft", "N1")]
    assert (n1["flights"], n1["mean_dep_delay"], n1["worst_dep_delay"], n1["mean_arr_delay"]) == (2, 7.5, 10, 1.0)
    assert n1["last_airport"] == "LAX"  # the later flight did not arrive
    assert set(totals.loc["route"].index) == {"JFK-LAX", "LGA-ORD", "LGA-BOS"}
    assert len(totals.loc["aircraft"]) == 2, "unknown aircraft are one subject"


def test_equal_totals_do_not_differ() -> None:
    totals = data.expected_totals(FLIGHTS)
    shuffled = totals.sample(frac=1, random_state=1).astype({"name": object}).replace({"name": {float("nan"): None}})
    assert report.differences(shuffled, totals) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("flights", 7),
        ("mean_dep_delay", 7.500001),
        ("worst_arr_delay", None),
        ("last_airport", "SFO"),
        ("last_airport", None),
    ],
)
def test_one_wrong_value_is_found(column: str, value: object) -> None:
    totals = data.expected_totals(FLIGHTS)
    wrong = totals.copy()
    wrong.loc[wrong["name"] == "N1", column] = value
    assert len(report.differences(wrong, totals)) == 1
    assert column in report.differences(wrong, totals)[0]


def test_missing_unexpected_and_repeated_subjects_are_found() -> None:
    totals = data.expected_totals(FLIGHTS)
    assert report.differences(totals.iloc[1:], totals) == ["('aircraft', 'N1'): missing"]
    assert report.differences(totals, totals.iloc[1:]) == ["('aircraft', 'N1'): unexpected"]
    assert report.differences(pd.concat([totals, totals]), totals) == ["a subject stands twice"]


@pytest.mark.slow(1)
def test_flights_come_in_time_order() -> None:
    flights = data.load_flights(1000)
    assert len(flights) == 1000
    assert flights["seq"].tolist() == list(range(1000))


def test_missing_flights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'holdfast-spark\[demo\]'"):
        data.load_flights(1000)


def test_a_setting_without_value_is_refused_and_not_shown() -> None:
    result = CliRunner().invoke(demo, ["--conf", "secret"])
    assert isinstance(result.exception, InvalidArgumentError)
    assert "secret" not in str(result.exception)


@pytest.mark.slow(1)
def test_a_work_dir_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.examples.flights.command.ensure_java", lambda: None)
    (tmp_path / "mine").touch()
    result = CliRunner().invoke(demo, ["--flights", "1000", "--work-dir", str(tmp_path)])
    assert isinstance(result.exception, InvalidArgumentError)
    assert "must be empty" in str(result.exception)
    assert (tmp_path / "mine").exists()


def test_the_command_that_opens_the_page_works_as_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make demo`` calls the program by its path: a shell may not find it by name."""
    job = Job("/work dir", "/work dir/state", {"spark.holdfast.storage.secret": "hunter2"}, 0)
    monkeypatch.setattr("sys.argv", ["/opt/my venv/bin/holdfast", "demo"])
    monkeypatch.setenv("PATH", "/nowhere")
    shown = _how_to_look(job, keep=True)
    assert "'/opt/my venv/bin/holdfast' ui '/work dir/state' '/work dir/query' --option secret=…" in shown
    monkeypatch.setattr("sys.argv", ["/usr/lib/python/pytest"])
    assert ": holdfast ui " in _how_to_look(job, keep=True)
