"""Tiers and parts leave nothing out and draw nothing by chance."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import importing, parts, tiers


@pytest.mark.slow(0.5)
def test_each_test_is_in_one_part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole files; what a part says of itself is the same in each process of a run."""
    items = request.session.items
    found: Counter[str] = Counter()
    for number in range(1, 4):
        monkeypatch.setattr(parts, "PART", f"{number}/3")
        others = parts.of_other_parts(items)
        mine = [item for item in items if item not in others]
        assert not {item.path for item in mine} & {item.path for item in others}
        found.update(item.nodeid for item in mine)
    assert found == Counter(item.nodeid for item in items)


@pytest.mark.parametrize("part", ["0/3", "4/3"])
def test_a_part_that_there_is_not_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", part)
    with pytest.raises(pytest.UsageError, match="the first part is 1/3, the last one 3/3"):
        parts.of_other_parts([])


def test_processes_share_the_modules_that_they_begin_with() -> None:
    """Each has some of its own, and all have them all but the ignored ones; one process alone has none."""
    root = Path(__file__).parent

    def share(number: int | None, *args: Path) -> list[str]:
        process = {} if number is None else {"workerinput": {"workerid": f"gw{number}", "workercount": 3}}
        config: Any = SimpleNamespace(args=args or [root], getoption=lambda _: [str(root / "spark")], **process)
        return importing.share(config, root)

    shares = [share(number) for number in range(3)]
    assert all(len(one) > 50 for one in shares)
    wanted = [path.stem for path in root.rglob("test_*.py") if not path.is_relative_to(root / "spark")]
    assert Counter(name.rpartition(".")[2] for one in shares for name in one) == Counter(wanted)
    assert share(None) == share(1, Path(__file__)) == []


def test_make_test_takes_the_same_cases_and_the_longer_tiers_all(monkeypatch: pytest.MonkeyPatch) -> None:
    every = list("abcdefg")
    monkeypatch.setattr(tiers, "ALL", False)
    assert [tiers.cases(every), tiers.cases(every, quick=3), tiers.cases(every, quick=9)] == [
        ["a"],
        ["a", "c", "e"],
        every,
    ]
    monkeypatch.setattr(tiers, "ALL", True)
    assert tiers.cases(every, quick=3) == every


def test_what_takes_longest_begins_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its marks say: the session of Spark, begun late, would keep one process alone at the end."""
    files = ["unit/test_it.py", "faults/test_exactly_once.py", "spark/queries/test_it.py"]
    items: list[Any] = [
        SimpleNamespace(nodeid=f"tests/{file}::test", get_closest_marker=lambda _: None, iter_markers=lambda: ())
        for file in files
    ]
    monkeypatch.setattr(parts, "ALL", False)
    parts.longest_first(items)
    assert [parts.together(item.nodeid) for item in items] == ["session", "beside", "tests/unit/test_it.py"]


def test_two_processes_have_sessions_of_spark_and_one_each_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the longer tiers these tests would keep one process for hours: there, files are given out."""
    parity = "tests/spark/parity/test_calls.py"
    demo, query = "tests/spark/programs/test_demo.py", "tests/spark/queries/test_totals.py"
    stream, sink = "tests/spark/sinks/test_kafka_stream.py", "tests/sinks/kafka/test_sink.py"
    monkeypatch.setattr(parts, "ALL", False)
    together = [parts.together(f"{file}::test_it[a::b]") for file in (demo, parity, query, stream, sink)]
    assert together == [demo, "beside", "session", "session", "kafka"]
    monkeypatch.setattr(parts, "ALL", True)
    assert [parts.together(f"{file}::test_it") for file in (query, sink)] == [query, sink]
