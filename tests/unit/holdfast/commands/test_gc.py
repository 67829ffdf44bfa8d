"""``holdfast gc`` and ``holdfast verify``: what is deleted and kept, which damage is found, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from holdfast.backends import stored_file
from holdfast.commands import target
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.claims import Beside
from holdfast.snapshotter.ownership.queries import QueryOrigin, declare_origin
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.fuzz.forge import put_together, take_apart
from tests.model.shard_history import ShardHistory
from tests.unit.holdfast.commands.conftest import age, document, files, put_record, run
from tests.unit.snapshotter.ownership.conftest import claimant, take


@pytest.mark.parametrize(
    ("in_record", "in_claim", "needed_from"), [(5, None, 10), (100, None, 0), (5, 12, 1), (12, 5, 1), (2, 5, 10)]
)
def test_gc_keeps_what_the_query_may_return_to_without_being_told(
    root: Path, storage: ObjectStorage, in_record: int, in_claim: int | None, needed_from: int
) -> None:
    """The greater of what the record and the claims say: the query may have been started with another number since."""
    put_record(storage, retained=in_record)
    shard = ShardHistory(storage)
    shard.grow(None, 30, snapshot_every=10)
    if in_claim is not None:
        take(storage, claimant("query-1", retained_versions=in_claim))
    age(root)
    found = {s["shard"]: s for s in document("gc", root, "--yes")["shards"]}
    assert found[shard.prefix]["needed_from"] == needed_from
    assert found[shard.prefix]["error"] is None
    assert document("verify", root)["damages"] == []


def test_gc_deletes_nothing_where_it_cannot_know_what_is_retained(root: Path, shard: ShardHistory) -> None:
    """A claim is damaged: that it says a greater number cannot be ruled out. Being told is another way."""
    (root / "totals/claims").mkdir()
    (root / "totals/claims/00000000000000000001").write_bytes(b"?")
    age(root)
    before = files(root)
    done = document("gc", root, "--yes", status=1)
    assert [s["error"] for s in done["shards"] if "claims" in (s["error"] or "")]
    assert files(root) == before
    (damage,) = document("verify", root, status=1)["damages"]
    assert (damage["key"], damage["lost"]) == ("totals/claims/00000000000000000001", [])
    assert "claims/00000000000000000001 is not a whole holdfast file" in damage["problem"]
    assert document("gc", root, "--yes", "--retain", 5)["objects"] == 9


def test_gc_deletes_what_it_said_it_would(root: Path, shard: ShardHistory) -> None:
    """It asks nobody who is not there; the dry run names each object with its reason; the run deletes just those."""
    age(root)
    before = files(root)
    for options in ([], ["--json"]):
        result = run("gc", root, "--retain", 5, *options)
        assert isinstance(result.exception, InvalidArgumentError)
        assert "--yes" in str(result.exception)
    assert files(root) == before
    result = run("gc", root, "--dry-run", "--retain", 5)
    assert "commits/9-" in result.stdout
    assert "older than version 10" in " ".join(result.stdout.split())
    assert "9 objects would be deleted" in result.stdout
    dry = document("gc", root, "--dry-run", "--retain", 5)
    assert files(root) == before
    (found,) = [s for s in dry["shards"] if s["shard"] == shard.prefix]
    going = {f"{shard.prefix}/{key}" for key in found["delete"]}
    assert found["needed_from"] == 10
    assert dry["objects"] == len(going) == 9
    assert all(entry["why"] for entry in found["delete"].values())
    done = document("gc", root, "--retain", 5, "--yes")
    assert done["objects"] == dry["objects"]
    assert files(root) == before - going
    assert document("gc", root, "--retain", 5, "--yes")["objects"] == 0


def test_gc_of_a_checkpoint_location_says_so_before_it_asks(tmp_path: Path) -> None:
    """Whoever passed --yes then would only learn that this is no state directory."""
    (tmp_path / "metadata").write_text('{"id": "a-query"}')
    result = run("gc", tmp_path)
    assert isinstance(result.exception, InvalidArgumentError)
    assert "checkpointLocation of a query" in str(result.exception)


def test_gc_leaves_alone_what_is_young_or_not_its_own(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """T38: other folders, a savepoint, shards that the operator does not have, names that nearly are ours."""
    strangers = [
        "savepoints/s1/part-0",
        "totals/shard-0004/x",
        "totals/shard-00031/commits/1-aa",
        "totals/claims/a",
        "x",
    ]
    for key in strangers:
        storage.put(key, b"?")
    age(root)
    assert document("gc", root, "--retain", 5, "--grace", 72, "--yes")["objects"] == 0
    storage.put(f"{shard.prefix}/files/0123456789abcdef-0", b"an upload under way")
    document("gc", root, "--retain", 5, "--yes")
    assert {*strangers, f"{shard.prefix}/files/0123456789abcdef-0"} <= files(root)


def test_gc_says_which_shard_it_cannot_judge(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    other = ShardHistory(storage, "totals/shard-0001", ids=1000)
    other.grow(None, 30, snapshot_every=10)
    (victim,) = (root / shard.prefix / "snapshots").glob("30-*")
    victim.write_bytes(victim.read_bytes()[:-5])
    age(root)
    kept = {key for key in files(root) if key.startswith(shard.prefix)}
    done = document("gc", root, "--retain", 5, "--yes", status=1)
    errors = {s["shard"]: s["error"] for s in done["shards"]}
    assert victim.name in errors[shard.prefix]
    assert errors[other.prefix] is None
    assert kept <= files(root)
    assert done["objects"] == 9
    result = run("gc", root, "--retain", 5, "--yes")
    assert result.exit_code == 1
    assert "nothing can be deleted" in result.stdout


def test_gc_tells_what_was_not_deleted(root: Path, shard: ShardHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    """T37."""
    age(root)
    fault = Fault("fail", action="delete", key="*/commits/*")
    monkeypatch.setattr(
        "holdfast.commands.target.open_storage", lambda url, options: FaultyStorage(open_storage(url, options), [fault])
    )
    result = run("gc", root, "--retain", 5, "--yes")
    assert fault.hits == 1
    assert result.exit_code == 1
    assert "could not delete everything: injected fault" in result.stdout
    monkeypatch.undo()
    assert document("gc", root, "--retain", 5, "--yes")["objects"] == 9


def test_gc_looks_again_beside_another_gc(root: Path, shard: ShardHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    """T33, T41: what was listed is gone when it is read."""
    age(root)
    gone = Fault("fail", action="get", key="*/commits/*", error=lambda: NotFoundError("gone"))
    storages = []

    def faulty(url: str, options: dict[str, object]) -> ObjectStorage:
        storages.append(FaultyStorage(open_storage(url, options), [gone]))
        return storages[-1]

    monkeypatch.setattr("holdfast.commands.target.open_storage", faulty)
    assert document("gc", root, "--retain", 5, "--yes")["objects"] == 9
    assert gone.hits == 1
    assert [o.keys for o in storages[0].operations if o.action == "list"] == [
        ("",),
        ("totals/probes/",),
        (f"{shard.prefix}/",),
    ]


def test_gc_goes_on_without_a_list_of_uploads(root: Path, shard: ShardHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    """On S3 that is a permission of its own."""

    class Forbidding(FaultyStorage):
        def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
            raise InvalidArgumentError("access denied", action="list uploads", key=prefix)

    age(root)
    monkeypatch.setattr(
        "holdfast.commands.target.open_storage", lambda url, options: Forbidding(open_storage(url, options))
    )
    result = run("gc", root, "--retain", 5, "--yes")
    assert result.exit_code == 1
    assert "9 objects deleted" in result.stdout
    assert "access denied" in result.stdout


def test_gc_removes_probes_and_unfinished_writes(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    storage.put("totals/probes/probe-1", b"?")
    leftover = root / shard.prefix / "commits" / ".tmp-1-1"
    leftover.write_bytes(b"half")
    age(root)
    storage.put("totals/probes/probe-2", b"?")
    done = document("gc", root, "--yes")
    assert done["unfinished_uploads_removed"] == 1
    assert not leftover.exists()
    assert {key for key in files(root) if "probe" in key} == {"totals/probes/probe-2"}


def test_gc_removes_what_runs_beside_others_left(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """They have ended, and nobody has taken the number since, who would."""
    told = [Beside(1, "run 1", "", "", f"{n:016x}") for n in range(3)]
    storage.put(f"totals/claims/{told[0].key}", b"host-1")
    storage.put(f"totals/claims/{told[1].key}x", b"somebody's")
    age(root)
    storage.put(f"totals/claims/{told[2].key}", b"host-1")
    document("gc", root, "--yes")
    assert {key for key in files(root) if "claims" in key} == {
        f"totals/claims/{told[1].key}x",
        f"totals/claims/{told[2].key}",
    }


def test_gc_leaves_alone_a_folder_whose_record_is_none(root: Path, shard: ShardHistory) -> None:
    """Somebody's file is called ``operator``, and their folders as ours are."""
    strangers = {f"deploy/{name}" for name in ("operator", "probes/liveness.yaml", "claims/now.x")}
    for name in (*strangers, "deploy/.tmp-1-1"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"years of work")
    age(root)
    done = document("gc", root, "--retain", 5, "--yes", status=1)
    (told,) = [one for one in done["shards"] if one["shard"] == "deploy"]
    assert "is not a whole holdfast file" in told["error"]
    assert {*strangers, "deploy/.tmp-1-1"} <= files(root)
    assert done["objects"] == 9, "of the operator"


def test_gc_takes_what_a_killed_rescale_has_left(root: Path, shard: ShardHistory) -> None:
    """Once nobody has written to it for the time of grace, and nothing that is not a savepoint's."""
    killed, at_work = (f"_rescaling/{number}4c8d3a1-6c1e-4a39-9d0f-2f6b1c6a7e10" for number in (1, 2))
    name = "operators/totals/state/0000-0-0123456789abcdef.arrow"
    for key in (f"{killed}/{name}", f"{at_work}/{name}", f"{killed}/thesis.tex", "_rescaling/mine/savepoint"):
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"?")
    age(root)
    (root / f"{at_work}/sources/0").mkdir(parents=True)
    (root / f"{at_work}/sources/0/9-0123456789abcdef").write_bytes(b"?")
    before = files(root)
    assert document("inspect", root)["unknown_objects"] == 2
    document("gc", root, "--operator", "totals", "--retain", 100, "--yes")
    assert f"{killed}/{name}" in files(root)
    document("gc", root, "--retain", 100, "--yes")
    assert before - files(root) == {f"{killed}/{name}"}


def test_gc_leaves_a_savepoint_to_its_rescale(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """Its second phase may take longer than the grace period: then only the new query's state is written."""
    new = "14c8d3a1-6c1e-4a39-9d0f-2f6b1c6a7e10"
    key = f"_rescaling/{new}/operators/totals/state/0000-0-aaaaaaaaaaaaaaaa.arrow"
    storage.put(key, b"a piece")
    declare_origin(storage, QueryOrigin(new, new, "query-1", 7, {f"totals@{new}": new}))
    put_record(storage, f"totals@{new}")
    restored = ShardHistory(storage, f"totals@{new}/shard-0000")
    first = restored.commit(None)
    age(root)
    restored.commit(first)
    document("gc", root, "--yes")
    assert key in files(root)
    age(root)
    document("gc", root, "--yes")
    assert key not in files(root), "killed since"


def test_gc_keeps_the_savepoint_of_an_unread_rescale(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """Which state it writes, and when it last did, nobody can tell. The rest is cleaned, and the error told."""
    damaged, killed = (f"{number}4c8d3a1-6c1e-4a39-9d0f-2f6b1c6a7e10" for number in (1, 2))
    pieces = [f"_rescaling/{new}/operators/totals/state/0000-0-aaaaaaaaaaaaaaaa.arrow" for new in (damaged, killed)]
    for key in (*pieces, f"_queries/{damaged}"):
        storage.put(key, b"?")
    age(root)
    before = files(root)
    done = document("gc", root, "--retain", 5, "--yes", status=1)
    ((found, error),) = [(s, s["error"]) for s in done["shards"] if s["error"]]
    assert (found["shard"], found["delete"]) == (f"_rescaling/{damaged}", {})
    assert f"_queries/{damaged}" in error
    gone = before - files(root)
    assert pieces[1] in gone
    assert not {pieces[0], f"_queries/{damaged}"} & gone
    assert len(gone) == done["objects"] == 10, "nine of the shard, too"
    assert f"_rescaling/{damaged}: nothing can be deleted" in run("gc", root, "--retain", 5, "--yes").stdout


def test_gc_aborts_uploads_of_a_killed_rescale(storage: ObjectStorage, shard: ShardHistory) -> None:
    """No list shows them, but they cost as much as what they hold."""
    asked: list[str] = []

    class Asked(FaultyStorage):
        def abort_unfinished_uploads(self, prefix: str, before_ms: int) -> int:
            asked.append(prefix)
            return super().abort_unfinished_uploads(prefix, before_ms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "open_storage", lambda url, options: Asked(open_storage(url, options)))
        document("gc", storage.url, "--retain", 100, "--yes")
        assert asked == ["totals/", "_rescaling/"]
        document("gc", storage.url, "--operator", "totals", "--retain", 100, "--yes")
    assert asked == ["totals/", "_rescaling/", "totals/"]


def test_gc_leaves_what_a_stopped_query_began_with(root: Path, storage: ObjectStorage, shard: ShardHistory) -> None:
    """However old, and though none of its operators is there: a clone without it would never start again."""
    origin = QueryOrigin("query-9", "query-8", "query-8", 7, {"sessions": "query-8"})
    declare_origin(storage, origin)
    age(root, days=1000)
    document("gc", root, "--yes", "--retain", 5)
    assert {"_queries/query-9", "_queries/query-8.fills"} <= files(root)


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
    assert (damage["key"], damage["lost"]) == ("totals/operator", ["the whole operator"])
    assert damage["problem"] == "is missing, although the operator has shards"


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
