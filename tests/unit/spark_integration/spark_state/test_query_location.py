"""Spark's checkpoint location, read without Spark: the last committed micro-batch, and no guess where it is damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.spark_state.query_location import QueryLocation

BATCH = '{"batchWatermarkMs":5,"batchTimestampMs":1700000000000,"conf":{"spark.sql.shuffle.partitions":"2"}}'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A location as Spark leaves it after micro-batches 3 to 5, while 6 is under way."""
    files = {
        "metadata": '{"id":"5d1f2c"}',
        **{f"offsets/{n}": f'v1\n{BATCH}\n{{"logOffset":{n}}}\n-' for n in range(3, 7)},
        **{f"commits/{n}": f'v1\n{{"nextBatchWatermarkMs":{n * 1000}}}' for n in range(2, 6)},
        **{f"sources/0/{n}": "v1" for n in (*range(10, 13),)},
        "sources/0/9.compact": "v1",
        **{f"{folder}/{name}": "?" for folder in ("offsets", "commits") for name in ("12.tmp", "07", "x.crc", "-1")},
        "offsets/.7.crc": "?",
        "commits/.8.8c1e.tmp": "?",
        "sources/0/.12.crc": "?",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def location(root: Path) -> Iterator[QueryLocation]:
    with open_storage(str(root)) as storage:
        yield QueryLocation(storage)


def test_the_last_committed_micro_batch(location: QueryLocation) -> None:
    """Not the one under way, nor one of which half was purged."""
    assert location.query_id() == "5d1f2c"
    assert location.committed() == [3, 4, 5]
    batch = location.batch()
    assert (batch.batch_id, batch.offsets_version, batch.batch, batch.next_watermark_ms) == (5, "v1", BATCH, 5000)
    assert batch.sources == (("0", '{"logOffset":5}'), ("1", "-"))
    assert location.batch(3).next_watermark_ms == 3000


@pytest.mark.parametrize("batch_id", [2, 6, 7])
def test_a_micro_batch_that_is_not_there(location: QueryLocation, batch_id: int) -> None:
    with pytest.raises(NotFoundError, match=rf"batch_id={batch_id} first=3 last=5"):
        location.batch(batch_id)


def test_named_sources(root: Path, location: QueryLocation) -> None:
    (root / "offsets/5").write_text(f'v2\n{BATCH}\nleft:{{"pos": 5}}\nright:{{"a:b": 1}}')
    assert location.batch().sources == (("left", '{"pos": 5}'), ("right", '{"a:b": 1}'))


def test_a_source_keeps_files_up_to_its_offset(root: Path, location: QueryLocation) -> None:
    assert location.source_logs("0", '{"logOffset":11}') == ["9.compact", "10", "11"]
    assert location.source_logs("1", "-") == []
    for nonsense in ("[" * 60_000, '{"logOffset":' * 10_000, '{"logOffset":true}'):
        assert set(location.source_logs("0", nonsense)) == {"9.compact", "10", "11", "12"}
    assert bytes(location.source_log("0", "9.compact")) == b"v1"
    (root / "sources/2/_schema_log").mkdir(parents=True)
    for name in ("0", "shards-7", "_schema_log/3", "_schema_log/.3.crc", "1.tmp"):
        (root / "sources/2" / name).write_text("?")
    assert location.source_logs("2", '{"topic":{"0":57}}') == ["0", "_schema_log/3", "shards-7"]


@pytest.mark.parametrize("lost", ["10", "11", "9.compact"])
def test_a_gap_in_the_log_of_files_is_no_log(root: Path, location: QueryLocation, lost: str) -> None:
    """The restored query would read those files again."""
    (root / "sources/0" / lost).unlink()
    with pytest.raises(UnavailableError, match="has a gap"):
        location.source_logs("0", '{"logOffset":11}')


A3, B5, RATE = '{"logOffset":3}', '{"logOffset":5}', '{"offset":3,"timestamp":1}'


def at(*offsets: str) -> list[tuple[str, str]]:
    return [(str(number), offset) for number, offset in enumerate(offsets)]


@pytest.mark.parametrize(
    ("offsets", "newest", "kept"),
    [
        ((A3, A3), [3], {"0": 3}),
        ((A3, A3), [4], {"0": 3}),
        ((A3, A3), [3, 3], None),
        ((A3, B5, A3), [3, 6], {"0": 3, "1": 5}),
        ((A3, A3, B5), [4, 5], {"0": 4, "1": 5}),
        ((B5, B5, A3, A3), [5, 3], {"0": 5, "1": 3}),
        ((RATE, RATE, A3), [-1, 3], {"1": 3}),
        ((A3, RATE, RATE), [3], None),
        ((A3, B5), [3], None),
        ((A3, A3, B5), [3, 4], None),
        ((A3, A3, B5, B5), [3], None),
        ((RATE, RATE), [], None),
    ],
)
def test_a_source_that_is_read_twice_has_one_folder(
    tmp_path: Path, offsets: Sequence[str], newest: Sequence[int], kept: dict[str, int] | None
) -> None:
    """Its lines are equal, and who comes later has a lower number; where that does not explain it, files are lost."""
    for source, last in enumerate(newest):
        for number in range(last + 1):
            path = tmp_path / f"sources/{source}/{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("v1")
    (tmp_path / "metadata").write_text("{}")
    with open_storage(str(tmp_path)) as storage:
        found = QueryLocation(storage).kept_sources(at(*offsets))
        if kept is None:
            assert found == at(*offsets)
        else:
            assert {name: json.loads(offset)["logOffset"] for name, offset in found} == kept
            for name, offset in found:
                assert QueryLocation(storage).source_logs(name, offset) == [str(n) for n in range(kept[name] + 1)]


def test_names_that_only_the_folders_tell(root: Path, location: QueryLocation) -> None:
    """Spark 4.2 by default: nothing says which of them the first position belongs to."""
    (root / "sources/0").rename(root / "sources/left")
    with pytest.raises(InvalidArgumentError, match=r"offsetLog.formatVersion=2"):
        location.source_logs("0", '{"logOffset":11}')


def test_what_others_put_beside_sources_is_no_name(root: Path, location: QueryLocation) -> None:
    """Nor is advice to begin anew with other settings, where files are missing."""
    shutil.rmtree(root / "sources/0")
    for foreign in ("0_$folder$", ".DS_Store", "README", "lost+found/x"):
        (root / "sources" / foreign).parent.mkdir(exist_ok=True)
        (root / "sources" / foreign).write_text("?")
    with pytest.raises(UnavailableError, match="has a gap"):
        location.source_logs("0", '{"logOffset":11}')


def test_a_query_without_a_commit(root: Path, location: QueryLocation) -> None:
    for file in (root / "commits").iterdir():
        file.unlink()
    with pytest.raises(NotFoundError, match="has not committed a micro-batch yet"):
        location.batch()


def test_what_is_no_location(tmp_path: Path) -> None:
    with open_storage(str(tmp_path)) as storage, pytest.raises(InvalidArgumentError, match="lacks the file metadata"):
        QueryLocation(storage).query_id()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metadata", "{"),
        ("metadata", "[]"),
        ("metadata", '{"id":7}'),
        ("offsets/5", ""),
        ("offsets/5", "7\n{}"),
        ("offsets/5", "v1"),
        ("offsets/5", "v1\n[]"),
        ("offsets/5", "v1\n{}"),
        ("offsets/5", f"v2\n{BATCH}\n-"),
        ("commits/5", "v1\n{"),
        ("commits/5", 'v1\n{"nextBatchWatermarkMs":"1"}'),
        ("commits/5", 'v1\n{"nextBatchWatermarkMs":-1}'),
        ("commits/5", "\udcff"),
    ],
)
def test_damage_is_named(root: Path, location: QueryLocation, file: str, text: str) -> None:
    (root / file).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptionError, match=file):
        location.query_id(), location.batch()
