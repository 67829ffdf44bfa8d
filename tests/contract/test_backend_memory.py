"""The memory backend keeps what every backend promises, and its limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import clock
from holdfast.backends.run_files import backend as run_files
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.testing import BackendContract, MakeBackend
from holdfast.testing.state_rows import P1, P2, P3, TABLES, contents, counts


class TestMemoryBackend(BackendContract):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return lambda directory, tables: MemoryBackend(directory, tables, clock.new_id)


# The limit of what the shards of one executor hold


def shard_of(executor: Path, number: int, limit: str | None) -> MemoryBackend:
    """Open a shard of an executor."""
    directory = executor / "memory" / "query" / "totals" / f"shard-{number:04d}"
    return MemoryBackend(directory, TABLES, clock.new_id, {"limit": limit} if limit else {}, executor)


MANY = counts(*((f"user {i}", i) for i in range(20_000)))


@pytest.mark.slow(0.5)
@pytest.mark.parametrize("how", ["commit", "restore"])
def test_what_would_pass_the_limit_is_refused_whole_and_goes_on_when_it_is_raised(tmp_path: Path, how: str) -> None:
    """All shards of the executor count together; nothing is half-written."""
    one, other = (shard_of(tmp_path, number, "1m") for number in (0, 1))
    one.apply(None, P1, MANY, {})
    other.apply(None, P1, counts(("ann", 1)), {})
    before = other.statistics()
    with pytest.raises(UnavailableError, match=r"spark\.holdfast\.memory\.limit.*raise the limit") as caught:
        other.apply(P1, P2, MANY, {}) if how == "commit" else other.load(P2, MANY, {})
    facts = caught.value.facts
    assert facts["limit_bytes"] == 1 << 20 < facts["held_bytes"] + facts["wanted_bytes"]
    assert facts["held_bytes"] > 600_000
    assert other.statistics() == before
    assert other.remove_leftovers(2**63) == 0
    other.apply(P1, P3, counts(("bob", 2)), {})
    raised = shard_of(tmp_path, 1, "4m")
    raised.apply(P1, P2, MANY, {})
    with raised.view(P2) as view:
        assert len(contents(view, "counts")) == 20_001


def test_a_background_merge_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not worth an error: the state is the same without it."""
    monkeypatch.setattr(run_files, "COMMIT_MERGE_LIMIT_BYTES", 0)
    full = shard_of(tmp_path, 0, "2m")
    full.apply(None, P1, MANY, {})
    full.apply(P1, P2, MANY, {})
    assert full.maintain(P2) == 0
    assert shard_of(tmp_path, 0, "9m").maintain(P2) == 1


def test_state_on_disk_does_not_count(tmp_path: Path) -> None:
    """Another query of the executor may keep its state there."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "file").write_bytes(b"x" * (2 << 20))
    shard_of(tmp_path, 0, "1m").apply(None, P1, counts(("ann", 1)), {})


def test_an_embedded_shard_has_the_limit_for_itself(tmp_path: Path) -> None:
    alone = MemoryBackend(tmp_path / "shard", TABLES, clock.new_id, {"limit": "100k"})
    alone.apply(None, P1, counts(("ann", 1)), {})
    with pytest.raises(UnavailableError, match="limit"):
        alone.apply(P1, P2, MANY, {})


@pytest.mark.parametrize("text", ["", "0", "-1g", "lots", "1.5g"])
def test_a_limit_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"spark\.holdfast\.memory\.limit cannot be"):
        MemoryBackend.parse_options("memory", {"limit": text})
