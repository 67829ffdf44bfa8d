"""``holdfast verify``: which damage it finds, and which versions it says are lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from holdfast.backends import stored_file
from holdfast.errors import CorruptionError
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from tests.fuzz.forge import put_together, take_apart
from tests.model.shard_history import ShardHistory
from tests.unit.holdfast.commands.state_dir import age, document, files, put_record, run

Harm = Callable[[Path], object]


HARMS: dict[str, tuple[str, str, Harm]] = {
    "cut": ("is not a whole holdfast file", "commits/25-*", lambda p: p.write_bytes(p.read_bytes()[:-1])),
    "flipped": ("checksum", "commits/25-*", lambda p: p.write_bytes(b"?" + p.read_bytes()[1:])),
    "gone": ("is missing", "commits/25-*", lambda p: p.unlink()),
    "empty": ("is not a whole holdfast file", "snapshots/20-*", lambda p: p.write_bytes(b"")),
    "part": ("checksum", "files/*", lambda p: p.write_bytes(b"?" + p.read_bytes()[1:])),
    "part gone": ("is missing", "files/*", lambda p: p.unlink()),
}


def test_verify_reads_everything_and_finds_nothing_wrong(root: Path, shard: ShardHistory) -> None:
    found = document("verify", root)
    assert found["objects"] == len(files(root)) - 1
    assert found["versions"] == 30
    assert found["damages"] == []
    assert "all intact" in run("verify", root).stdout
    assert shard


@pytest.mark.parametrize("harm", HARMS)
def test_verify_names_the_object_and_what_it_costs(root: Path, shard: ShardHistory, harm: str) -> None:
    """A commit costs all that build on it; a snapshot and its parts nothing, while there is a way around."""
    problem, pattern, do = HARMS[harm]
    # Of snapshot 20, whose manifest was stored last of its objects: the parts before it.
    victims = sorted((root / shard.prefix).glob(pattern), key=lambda p: p.stat().st_mtime_ns)
    victim = victims[0] if "files" not in pattern else victims[2]
    do(victim)
    found = document("verify", root, status=1)
    (damage,) = found["damages"]
    assert damage["key"] == f"{shard.prefix}/{victim.relative_to(root / shard.prefix)}"
    assert problem in damage["problem"]
    lost, around = ([int(p.partition("-")[0]) for p in damage[side]] for side in ("lost", "around"))
    if "commits" in pattern:
        assert (lost, around) == ([25, 26, 27, 28, 29, 30], [])
    else:
        assert (lost, around) == ([], list(range(21, 31)))
    shown = run("verify", root)
    assert shown.exit_code == 1
    assert damage["key"] in shown.stdout
    assert ("25 to 30" if lost else "21 to 30") in shown.stdout


def test_verify_counts_a_version_lost_when_both_ways_are_gone(root: Path, shard: ShardHistory) -> None:
    for pattern in ("snapshots/20-*", "snapshots/10-*"):
        next((root / shard.prefix).glob(pattern)).unlink()
    next((root / shard.prefix).glob("commits/5-*")).unlink()
    found = document("verify", root, status=1)
    lost = {d["key"].split("/")[-1].partition("-")[0]: len(d["lost"]) for d in found["damages"]}
    assert lost == {"5": 6, "10": 10, "20": 10}
    assert found["versions"] == 4


def test_verify_does_not_call_missing_what_was_cleaned_up(root: Path, shard: ShardHistory) -> None:
    """T46, the other side: what lies below the retained versions may be gone, also half of it."""
    age(root)
    document("gc", root, "--retain", 5, "--yes")
    assert document("verify", root, "--retain", 5)["damages"] == []
    assert document("verify", root)["damages"] == []
    assert shard


def test_verify_does_not_call_missing_what_a_killed_clean_up_has_taken(root: Path, shard: ShardHistory) -> None:
    """The oldest is still there, others are not, and an old snapshot has lost a part."""
    shard.grow(shard.committed[max(shard.committed, key=lambda e: e.version)], 30, 10)
    first = next(manifest for manifest in shard.manifests.values())
    for key in [*[f"commits/{n}-" for n in (3, 14, 22)], first.files[0].parts[0].key]:
        next((root / shard.prefix).glob(f"{key}*")).unlink()
    assert document("verify", root, "--retain", 5)["damages"] == []
    assert len(document("verify", root, status=1)["damages"]) == 4


def test_verify_follows_what_only_a_snapshot_names(root: Path, storage: ObjectStorage) -> None:
    """The newest commit object, after which all is carried."""
    put_record(storage)
    shard = ShardHistory(storage)
    made = shard.grow(None, 3)
    shard.snapshot(shard.commit(made[-1], carried=True))
    assert document("verify", root)["damages"] == []
    next((root / shard.prefix).glob("commits/3-*")).unlink()
    (damage,) = document("verify", root, status=1)["damages"]
    assert damage["lost"] == [str(made[-1].pointer)]


def test_verify_knows_that_a_first_commit_holds_all(root: Path, storage: ObjectStorage) -> None:
    """What was carried before it is in it, so the snapshot between is not needed."""
    put_record(storage)
    shard = ShardHistory(storage)
    carried = shard.commit(shard.commit(None, carried=True), carried=True)
    snapshot = shard.snapshot(carried)
    made = shard.commit(carried)
    (root / shard.prefix / snapshot.key).write_bytes(b"")
    (damage,) = document("verify", root, status=1)["damages"]
    assert (damage["lost"], damage["around"]) == ([], [str(made.pointer)])


def test_verify_finds_objects_that_were_exchanged(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """Each is whole in itself: a commit of another lineage under this name, a part of another file."""
    folder = root / shard.prefix
    one, other = sorted((folder / "files").iterdir(), key=lambda p: p.stat().st_mtime_ns)[2:4]
    one.write_bytes(other.read_bytes())
    pointer = next((folder / "commits").glob("28-*")).name
    lineage = {"chain": [], "since": [pointer], "last": None}
    header = {"pointer": pointer, "shard": shard.prefix, "rows": {}, "plain_bytes": {}, **lineage}
    storage.put(f"{shard.prefix}/commits/{pointer}", stored_file.encode("commit", header)[0])
    damages = document("verify", root, status=1)["damages"]
    assert [d["key"].split("/")[-1] for d in damages] == [pointer, one.name]
    assert all("replaced" in d["problem"] for d in damages)


def test_verify_misses_a_record_that_is_gone(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """The folder is no operator any more, and nothing else would say so: others are intact."""
    put_record(storage, "others")
    storage.put("notes/shard-0001/readme", b"nothing of ours")
    assert document("verify", root)["damages"] == []
    (root / "totals/operator").unlink()
    (damage,) = document("verify", root, status=1)["damages"]
    assert (damage["key"], damage["lost"]) == ("totals/operator", ["all of the operator"])
    assert damage["problem"] == "is missing, although there are shards"
    assert shard


def lie_about_the_first(path: Path, lie: str) -> None:
    """Let a commit say another size of the first object of its chain than that has."""
    body, footer = take_apart(path.read_bytes())
    header = footer["header"]
    for entry in (header["chain"][0], header["last"]):
        entry[lie] += entry["pointer"] == header["chain"][0]["pointer"] and entry["kind"] == header["chain"][0]["kind"]
    path.write_bytes(put_together(body, footer))


@pytest.mark.parametrize("lie", ["content_bytes", "size_bytes"])
@pytest.mark.parametrize("costs", ["lost", "around"])
def test_verify_names_what_a_restore_would_refuse(
    root: Path, storage: ObjectStorage, tmp_path: Path, costs: str, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit or a snapshot is whole in itself, but a chain says another size of it: a restore does not use it."""
    put_record(storage)
    shard = ShardHistory(storage)
    first = shard.commit(None, rows=0)
    victim = first.chain[0] if costs == "lost" else shard.snapshot(first)
    liar = shard.commit(first, rows=0)
    lie_about_the_first(root / shard.prefix / liar.chain[-1].key, lie)
    expectation = pytest.raises(CorruptionError, match=victim.key) if costs == "lost" else nullcontext()
    with ThreadPoolExecutor(1) as threads:
        log = ObjectCommitLog(storage, shard.prefix, {}, threads, tmp_path / "here")
        with expectation, log.restore(liar.pointer):
            assert victim.key in caplog.text
    damages = {d["key"]: d for d in document("verify", root, status=1)["damages"]}
    found = damages[f"{shard.prefix}/{victim.key}"]
    assert "replaced" in found["problem"]
    assert str(liar.pointer) in found[costs]
