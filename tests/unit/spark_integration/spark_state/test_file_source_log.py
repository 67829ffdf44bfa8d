"""The log of a source of files as it was, after Spark has compacted it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.errors import CorruptionError, UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.spark_state.query_location import QueryLocation


def lines(first: int, last: int) -> list[str]:
    """Return what the log says of the files that were found from one time to another: two each."""
    return [
        json.dumps({"path": f"file:///input/{number}-{part}", "timestamp": 7, "batchId": number})
        for number in range(first, last + 1)
        for part in "ab"
    ]


def stored(root: Path, *names: str) -> Path:
    """Store a log of which these files are left."""
    folder = root / "sources/0"
    folder.mkdir(parents=True)
    for name in names:
        number = int(name.removesuffix(".compact"))
        first = 0 if name.endswith(".compact") else number
        (folder / name).write_text("\n".join(["v1", *lines(first, number)]))
    return folder


def read(root: Path, end: int) -> dict[str, list[str]]:
    with open_storage(str(root)) as storage:
        location = QueryLocation(storage)
        names = location.source_logs("0", f'{{"logOffset":{end}}}')
        return {name: bytes(location.source_log("0", name)).decode().split("\n") for name in names}


@pytest.mark.parametrize(
    ("left", "end", "made"),
    [
        (["19.compact", "20"], 15, {"15.compact": (0, 15)}),
        (["10", "11", "14", "19.compact", "29.compact"], 12, {"12.compact": (0, 12)}),
        (["19.compact", "29.compact"], 9, {"9.compact": (0, 9)}),
        (["19.compact", "29.compact"], 1, {"0": (0, 0), "1": (1, 1)}),
        (["19.compact"], 1, {"1.compact": (0, 1)}),
    ],
    ids=["between", "some are there", "compacted then", "before the first", "nobody knows how often"],
)
def test_the_log_is_cut_from_a_later_file(
    tmp_path: Path, left: list[str], end: int, made: dict[str, tuple[int, int]]
) -> None:
    """No file too many, or the restored query would never read it; none too few, or it would read it twice."""
    stored(tmp_path, *left)
    assert read(tmp_path, end) == {name: ["v1", *lines(*of)] for name, of in made.items()}


@pytest.mark.parametrize("damage", ["lost", "cut", "strange"])
def test_a_later_file_that_is_damaged_is_no_log(tmp_path: Path, damage: str) -> None:
    folder = stored(tmp_path, "19.compact")
    kept = {"lost": lines(0, 4) + lines(6, 19), "cut": ["{", *lines(0, 19)], "strange": ['{"batchId":"5"}']}[damage]
    (folder / "19.compact").write_text("\n".join(["v1", *kept]))
    with pytest.raises(CorruptionError, match=r"19\.compact (lacks|has a line)"):
        read(tmp_path, 5)


def test_a_compacted_log_that_is_no_log_is_damaged(tmp_path: Path) -> None:
    """A line that is taken for the version is a file that a restored query would read again."""
    file = stored(tmp_path, "3.compact") / "3.compact"
    for data, match in (
        ("\n".join(lines(0, 3)).encode(), "does not begin with a version"),
        (b"v1\n" + "\n".join(lines(0, 3)).encode().replace(b"input", b"\xff"), "is not text"),
    ):
        file.write_bytes(data)
        with pytest.raises(CorruptionError, match=match):
            read(tmp_path, 1)


def test_a_number_that_no_log_has_reached_costs_nothing(tmp_path: Path) -> None:
    """Positions and names of files are what stands in storage: they are compared, not counted up to."""
    stored(tmp_path, "0", "3.compact")
    with pytest.raises(UnavailableError, match="missing=4"):
        read(tmp_path, 10**16)
    (tmp_path / f"sources/0/{10**17}.compact").write_text("\n".join(["v1", *lines(0, 3)]))
    with pytest.raises(CorruptionError, match="number=4"):
        read(tmp_path, 10**16)
