"""The commands on a checkpoint directory: what they show and delete, how they end, and what they never do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from holdfast.backends import stored_file
from holdfast.cli import group
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.ownership.claim_listing import Claimant, claim_name
from holdfast.snapshotter.ownership.claims import Claims
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, read_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage, open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.troubles import Troubles
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.testing.state_rows import COUNTS
from tests.model.shard_history import ShardHistory
from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, Moto, S3Server, Versitygw

DAY_S = 24 * 60 * 60


def put_record(storage: ObjectStorage, operator: str = "totals", shards: int = 4, retained: int = 100) -> None:
    record = OperatorRecord.of(operator, "query-1", "definition-1", "run-1", shards, {"counts": COUNTS}, retained)
    storage.put(f"{operator}/operator", stored_file.encode("operator", asdict(record))[0])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "durable"


@pytest.fixture
def storage(root: Path) -> Iterator[ObjectStorage]:
    with open_storage(str(root)) as opened:
        yield opened


@pytest.fixture
def shard(storage: ObjectStorage) -> ShardHistory:
    """Return a shard of 30 versions with a snapshot after each 10."""
    put_record(storage)
    history = ShardHistory(storage)
    history.grow(None, 30, snapshot_every=10)
    return history


def age(root: Path, days: float = 2) -> None:
    """Make everything below a folder so much older."""
    for path in root.rglob("*"):
        then_ns = path.stat().st_mtime_ns - int(days * DAY_S * 1e9)
        os.utime(path, ns=(then_ns, then_ns))


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(group, [str(a) for a in arguments], env=environment)


def document(*arguments: object, status: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_gc_deletes_what_it_said_it_would(root: Path, shard: ShardHistory) -> None:
    """The dry run names each object with its reason, and changes nothing; the run deletes exactly those."""
    age(root)
    before = files(root)
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
        me = Claimant("query-1", "run-2", None, "app", "host", "machine", "1-1", 30, in_claim)
        Claims(storage, "totals", me, lambda _: ()).take(read_operator(storage, "totals"))
    age(root)
    found = {s["shard"]: s for s in document("gc", root, "--yes")["shards"]}
    assert found[shard.prefix]["needed_from"] == needed_from
    assert found[shard.prefix]["error"] is None
    assert document("verify", root)["damages"] == []


def test_gc_deletes_nothing_where_it_cannot_know_what_is_retained(root: Path, shard: ShardHistory) -> None:
    """A claim is damaged: that it says a greater number cannot be ruled out. Being told is another way."""
    (root / "totals/claims").mkdir()
    me = Claimant("query-1", "run-2", None, "app", "host", "machine", "1-1", 30, 100)
    (root / f"totals/claims/{claim_name(me, 1, 1)}.1").write_bytes(b"?")
    (root / "totals/claims/now.1").write_bytes(b"")
    age(root)
    before = files(root)
    done = document("gc", root, "--yes", status=1)
    assert [s["error"] for s in done["shards"] if "claims" in (s["error"] or "")]
    assert files(root) == before - {"totals/claims/now.1"}, "a look at the clock that was left behind"
    (damage,) = document("verify", root, status=1)["damages"]
    assert (damage["key"], damage["lost"]) == ("totals/claims", [])
    assert document("gc", root, "--yes", "--retain", 5)["objects"] == 9
    assert shard


def test_gc_shows_people_what_goes_and_why(root: Path, shard: ShardHistory) -> None:
    age(root)
    result = run("gc", root, "--dry-run", "--retain", 5)
    assert "commits/9-" in result.stdout
    assert "older than version 10" in " ".join(result.stdout.split())
    assert "9 objects would go" in result.stdout
    assert shard


def test_gc_asks_nobody_who_is_not_there(root: Path, shard: ShardHistory) -> None:
    """In a script it must be told: it neither waits for an answer nor takes silence for one."""
    age(root)
    before = files(root)
    for options in ([], ["--json"]):
        result = run("gc", root, "--retain", 5, *options)
        assert isinstance(result.exception, InvalidArgumentError)
        assert "--yes" in str(result.exception)
    assert files(root) == before
    assert shard


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


def test_gc_says_which_shard_it_cannot_judge_and_cleans_the_others(
    root: Path, shard: ShardHistory, storage: ObjectStorage
) -> None:
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
    assert "nothing of it can go" in result.stdout


def test_gc_tells_of_objects_that_could_not_be_deleted(
    root: Path, shard: ShardHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T37."""
    age(root)
    fault = Fault("fail", action="delete", key="*/commits/*")
    monkeypatch.setattr(
        "holdfast.commands.target.open_storage", lambda url, options: FaultyStorage(open_storage(url, options), [fault])
    )
    result = run("gc", root, "--retain", 5, "--yes")
    assert fault.hits == 1
    assert result.exit_code == 1
    assert "not everything could be deleted: injected fault" in result.stdout
    monkeypatch.undo()
    assert document("gc", root, "--retain", 5, "--yes")["objects"] == 9
    assert shard


def test_gc_looks_again_where_somebody_else_cleans_up(
    root: Path, shard: ShardHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_gc_cleans_up_though_unfinished_uploads_may_not_be_listed(
    root: Path, shard: ShardHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert "9 objects went" in result.stdout
    assert "access denied" in result.stdout
    assert shard


def test_gc_removes_what_tests_of_the_storage_and_unfinished_writes_left(
    root: Path, shard: ShardHistory, storage: ObjectStorage
) -> None:
    storage.put("totals/probes/probe-1", b"?")
    leftover = root / shard.prefix / "commits" / ".tmp-1-1"
    leftover.write_bytes(b"half")
    age(root)
    storage.put("totals/probes/probe-2", b"?")
    done = document("gc", root, "--yes")
    assert done["unfinished_uploads_removed"] == 1
    assert not leftover.exists()
    assert {key for key in files(root) if "probe" in key} == {"totals/probes/probe-2"}


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
    assert "all of them whole" in run("verify", root).stdout
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


def test_log_lists_versions_and_snapshots_newest_first(root: Path, shard: ShardHistory) -> None:
    made = shard.commit(shard.grow(None, 30)[-1], carried=True)
    shard.snapshot(made)
    shard.commit(made)
    (found,) = document("log", root, "--limit", 4)["shards"]
    assert [(r["kind"], r["version"].partition("-")[0]) for r in found["newest"]][:2] == [
        ("commit", "32"),
        ("snapshot", "31"),
    ]
    newest, snapshot = found["newest"][:2]
    assert [p.partition("-")[0] for p in newest["covers"]] == ["31", "32"]
    assert newest["begins"].startswith("snapshots/31-")
    assert snapshot["files"] >= 2
    assert snapshot["stored_bytes"] >= snapshot["new_bytes"] > 0
    assert len(found["newest"]) == 4
    assert found["commits"] == 61
    shown = run("log", root, "--limit", 2).stdout
    assert "2 versions" in shown
    assert "snapshot" in shown


def test_log_shows_a_damaged_object_as_such(root: Path, shard: ShardHistory) -> None:
    (victim,) = (root / shard.prefix / "commits").glob("30-*")
    victim.write_bytes(b"")
    row = next(
        r for r in document("log", root)["shards"][0]["newest"] if r["version"] == victim.name and r["kind"] == "commit"
    )
    assert "not a whole holdfast file" in row["error"]
    assert document("log", root, "--shard", 2)["shards"] == []


def test_inspect_shows_operators_tables_shards_and_sizes(
    root: Path, shard: ShardHistory, storage: ObjectStorage
) -> None:
    storage.put("mine.txt", b"?")
    found = document("inspect", root)
    (operator,) = found["operators"]
    assert operator["operator"] == "totals"
    assert operator["query_id"] == "query-1"
    assert operator["shard_count"] == 4
    assert operator["tables"]["counts"]["key"][0].keys() == {"name", "type"}
    (facts,) = operator["shards"]
    assert facts["shard"] == shard.prefix
    assert facts["objects"]["commit"] == 30
    assert facts["objects"]["snapshot"] == 3
    assert sum(facts["bytes"].values()) == sum((root / key).stat().st_size for key in files(root) if "shard" in key)
    assert facts["newest_version"].startswith("30-")
    assert found["unknown_objects"] == 1
    shown = run("inspect", root, "--shards").stdout
    assert "1 of 4 shards hold state" in shown
    assert shard.prefix in shown


def test_inspect_shows_what_fails_in_the_background(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """How far behind snapshots are, and why; nothing that is over."""
    troubles = Troubles(PrefixedStorage(storage, shard.prefix))
    troubles.tell("snapshot", UnavailableError("over [red]long[/] ago"), 3, "host-1", 0)
    age(root)
    last = shard.grow(None, 3)[-1]
    shard.snapshot(last)
    (operator,) = document("inspect", root)["operators"]
    assert operator["troubles"] == [], "a newer snapshot was stored"
    assert operator["shards"][0]["commits_since_snapshot"] == 0
    time.sleep(0.01)  # the store's clock has milliseconds
    shard.grow(last, 7)
    for n in (1, 2):
        troubles.tell("snapshot", UnavailableError("the disk of [red]moon[/] is full"), n, "host-2", 0)
    troubles.tell("clean-up", CorruptionError("commits/7-aa is missing"), 9, "host-3", 0)
    (operator,) = document("inspect", root)["operators"]
    assert operator["shards"][0]["commits_since_snapshot"] == 7
    told = {t["what"]: (t["in_a_row"], t["host"], t["error"]) for t in operator["troubles"]}
    assert told == {
        "snapshot": (2, "host-2", "the disk of [red]moon[/] is full"),
        "clean-up": (9, "host-3", "commits/7-aa is missing"),
    }
    shown = run("inspect", root, "--shards").stdout
    assert f"{shard.prefix}: snapshot fails, 2 times in a row, last at" in shown
    assert "the disk of [red]moon[/] is full" in shown
    assert "at most 7 commits since a shard's newest snapshot" in shown
    storage.put(f"{shard.prefix}/troubles/snapshot-00000000", b"no stored file")
    (operator,) = document("inspect", root)["operators"]
    assert any("not a whole holdfast file" in t["error"] for t in operator["troubles"])


def test_one_operator_of_several(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """Also where the name of one begins another's."""
    put_record(storage, "totals2")
    names = [o["operator"] for o in document("inspect", root)["operators"]]
    assert names == ["totals", "totals2"]
    (only,) = document("inspect", root, "--operator", "totals")["operators"]
    assert only["operator"] == "totals"
    refused = run("inspect", root, "--operator", "total").exception
    assert isinstance(refused, NotFoundError)
    assert "no operator of this name" in str(refused)
    assert shard


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], "empty or does not exist"),
        (["notes.txt"], "holds no state of holdfast; check"),
        (["operator", "shard-0001/commits/1-aa"], "this is the directory of one operator"),
        (["a/b/totals/operator"], "give .*/a/b"),
    ],
)
@pytest.mark.parametrize("command", ["gc", "verify", "log", "inspect"])
def test_a_directory_that_is_none_of_ours_is_refused_with_a_hint(
    root: Path, storage: ObjectStorage, command: str, keys: list[str], said: str
) -> None:
    for key in keys:
        storage.put(key, b"?")
    before = files(root)
    result = run(command, root, *(["--dry-run"] if command == "gc" else []))
    assert isinstance(result.exception, NotFoundError)
    with pytest.raises(NotFoundError, match=said):
        raise result.exception
    assert files(root) == before


def test_errors_end_the_program_without_a_traceback(root: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli"]
    script = "from holdfast.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", str(root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("holdfast: the checkpoint directory is empty")
    assert "Traceback" not in done.stderr
    assert command


def test_an_option_that_is_none_is_refused_without_being_shown(root: Path, shard: ShardHistory) -> None:
    result = run("log", root, "--option", "hush-hush")
    assert isinstance(result.exception, InvalidArgumentError)
    assert "hush" not in str(result.exception)
    assert shard


def test_ten_thousand_objects_take_seconds(root: Path, shard: ShardHistory, storage: ObjectStorage) -> None:
    """Attempts of a shard that was restarted over and over; nothing is read but what decides."""
    name = next(key for key in files(root) if "commits/5-" in key)
    folder = (root / name).parent
    for number in range(10_000):
        os.link(root / name, folder / f"{number % 9 + 1}-{number:016x}")
    age(root)
    began = time.monotonic()
    for command in (["inspect"], ["log"], ["gc", "--dry-run", "--retain", 5]):
        document(command[0], root, *command[1:])
    assert time.monotonic() - began < 20
    assert shard
    assert storage


@pytest.fixture(
    params=[
        pytest.param("moto", marks=pytest.mark.s3),
        pytest.param("versitygw", marks=[pytest.mark.s3, pytest.mark.slow]),
    ]
)
def server(request: pytest.FixtureRequest) -> S3Server:
    found: Moto | Versitygw = request.getfixturevalue(request.param)
    return found


def test_on_s3_with_options_from_the_environment(server: S3Server) -> None:
    """All four commands; credentials come from the environment and are in no output."""
    url = f"s3://{BUCKET}/commands"
    with open_storage(url, server.options()) as storage:
        put_record(storage)
        history = ShardHistory(storage)
        made = history.grow(None, 29, snapshot_every=10)
        time.sleep(1.1)  # time stamps are in whole seconds
        history.grow(made[-1], 1)
    options = (
        f"key={ACCESS_KEY} secret={SECRET_KEY} client_kwargs.endpoint_url={server.url} "
        "client_kwargs.region_name=us-east-1"
    )
    outputs = []
    for command in (["inspect"], ["log"], ["verify"], ["gc", "--retain", "5", "--grace", "0", "--yes"], ["verify"]):
        for as_json in ([], ["--json"]):
            result = run(command[0], url, *command[1:], *as_json, HOLDFAST_STORAGE_OPTIONS=options)
            assert result.exit_code == 0, (command, result.output, result.exception)
            outputs.append(result.output)
    assert "9 objects went" in outputs[6]
    assert not [o for o in outputs if SECRET_KEY in o or ACCESS_KEY in o]
    with open_storage(url, server.options()) as storage:
        left = {info.key for info in storage.list("")}
        storage.delete(left)
    assert not [key for key in left if "probes" in key]
    assert len([key for key in left if "/commits/" in key]) == 21
