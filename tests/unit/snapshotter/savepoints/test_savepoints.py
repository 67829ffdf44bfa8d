"""Savepoints as stored objects: any Arrow reader opens them, what is damaged is named, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest

from holdfast.backends import stored_file
from holdfast.backends.schema import TableSchema
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from holdfast.snapshotter.savepoints.manifest import KEY, Piece, Savepoint, read_manifest
from holdfast.snapshotter.savepoints.savepoints import (
    begin_savepoint,
    delete_savepoint,
    find_savepoint,
    folder_of,
    list_savepoints,
    read_piece,
    read_savepoint,
    savepoint_folder,
    unnamed_keys,
    verify_savepoint,
)
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.probe import probe_storage
from holdfast.testing.faulty_storage import Action, Fault, FaultyStorage
from tests.damage import flipped
from tests.model.shard_history import TimedStorage
from tests.ram import storage_in_ram
from tests.unit.snapshotter.savepoints.conftest import KEY_OF_MANIFEST, STATE, a_savepoint


@pytest.fixture
def target() -> Iterator[ObjectStorage]:
    with storage_in_ram() as opened:
        yield opened


def test_what_was_stored_is_read(target: ObjectStorage, executor: ThreadPoolExecutor) -> None:
    made = a_savepoint(target)
    found = read_savepoint(target, "one")
    assert found == made
    (operator,) = found.operators
    assert operator.rows == {"state": 200, "v.a/b:c": 200}
    assert len(operator.pieces) > 8
    assert verify_savepoint(target, found, executor) == []
    folder = savepoint_folder(target, "one")
    runs = [read_piece(folder, "totals", piece, STATE) for piece in operator.of_table("state")]
    assert pa.Table.from_batches([run.batch for run in runs]).num_rows == 200
    assert {info.key: info.size_bytes for info in folder.list("") if info.key != KEY} == found.keys


def test_a_misspelt_name_is_told_which_is_meant(target: ObjectStorage) -> None:
    a_savepoint(target, "before-upgrade")
    begin_savepoint(target, "befor-upgrad")
    for act in (read_savepoint, delete_savepoint):
        with pytest.raises(NotFoundError, match=r"; did you mean 'before-upgrade'\?, name=before-upgade"):
            act(target, "before-upgade")
    with pytest.raises(NotFoundError, match="holdfast savepoint list shows all savepoints, name=nightly"):
        read_savepoint(target, "nightly")


def test_any_arrow_reader_opens_a_piece(target: ObjectStorage) -> None:
    """That is what makes a savepoint the user's own: no holdfast is needed to read it."""
    piece = a_savepoint(target).operators[0].pieces[0]
    with ipc.open_stream(savepoint_folder(target, "one").get(piece.key, piece.size_bytes)) as reader:
        table = reader.read_all()
    assert table.column_names == ["hash", "deleted", "key.user", "value.n"]
    assert table["value.n"].to_pylist() == list(range(piece.rows))


def test_a_table_may_have_a_name_that_no_key_may_have(target: ObjectStorage) -> None:
    assert folder_of("totals", "v.a/b:c") == "operators/totals/v.a%2Fb%3Ac"
    assert all(piece.key.count("/") == 3 for piece in a_savepoint(target).operators[0].pieces)


def test_a_savepoint_can_be_copied_and_renamed(target: ObjectStorage, executor: ThreadPoolExecutor) -> None:
    """Nothing in it says where it is."""
    made = a_savepoint(target)
    for info in savepoint_folder(target, "one").list(""):
        target.put(f"two/{info.key}", target.get(f"one/{info.key}", 1 << 20))
    delete_savepoint(target, "one")
    found = read_savepoint(target, "two")
    assert found == replace(made, name="two")
    assert verify_savepoint(target, found, executor) == []


def test_the_list_shows_what_is_unfinished_and_damaged(target: ObjectStorage, executor: ThreadPoolExecutor) -> None:
    made = a_savepoint(target, "whole")
    a_savepoint(target, "cut-off")
    target.delete([f"cut-off/{KEY}"])
    a_savepoint(target, "damaged")
    target.delete([f"damaged/{KEY}"])
    target.put(f"damaged/{KEY}", b"?")
    target.put("totals/shard-0000/commits/1-aaaaaaaaaaaaaaaa", b"of a query")
    found = {one.name: one for one in list_savepoints(target, executor)}
    assert list(found) == ["cut-off", "damaged", "whole"]
    assert found["whole"].savepoint == made
    assert found["cut-off"].savepoint is None
    assert not found["cut-off"].damage
    assert "its end is missing" in found["damaged"].damage
    assert find_savepoint(target, "cut-off") is None
    with pytest.raises(NotFoundError, match="never finished"):
        read_savepoint(target, "cut-off")


def test_deleting_leaves_everything_else_alone(target: ObjectStorage) -> None:
    """Above all a query's state, if somebody names its directory."""
    a_savepoint(target, "one")
    a_savepoint(target, "one-more")
    others = ["one/notes.txt", "one/shard-0000/commits/1-aaaaaaaaaaaaaaaa", "totals/operator"]
    for key in others:
        target.put(key, b"?")
    with pytest.raises(NotFoundError):
        delete_savepoint(target, "totals")
    delete_savepoint(target, "one")
    kept = [info.key for info in target.list("") if not info.key.startswith("one-more/")]
    assert kept == sorted(others)
    assert find_savepoint(target, "one-more") is not None


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a" * 101, "ä", "a b"])
def test_a_name_that_leads_elsewhere_is_refused(target: ObjectStorage, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot name a savepoint: use letters from a to z"):
        savepoint_folder(target, name)


def test_a_manifest_is_deleted_first(target: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a deletion stops, nobody takes what is left for a savepoint."""
    a_savepoint(target)
    deleted: list[list[str]] = []
    monkeypatch.setattr(target, "delete", lambda keys: deleted.append(list(keys)))
    with pytest.raises(ConflictError, match="start again"):  # as if somebody finished it again and again
        delete_savepoint(target, "one")
    assert deleted[0] == [f"one/{KEY}"]


@pytest.mark.parametrize("of_log", [False, True])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (None, "is missing"),
        (lambda data: flipped(data, 0), "checksum does not match"),
        (lambda data: data[:-1], "missing|checksum"),
    ],
)
def test_damage_is_found_in_each_part(
    target: ObjectStorage,
    executor: ThreadPoolExecutor,
    damage: Callable[[bytes], bytes] | None,
    said: str,
    of_log: bool,
) -> None:
    made = a_savepoint(target)
    key = "sources/0/3-0123456789abcdef" if of_log else made.operators[0].pieces[3].key
    data = bytes(target.get(f"one/{key}", 1 << 20))
    target.delete([f"one/{key}"])
    if damage:
        target.put(f"one/{key}", damage(data))
    (problem,) = verify_savepoint(target, made, executor)
    assert key in problem
    assert any(words in problem for words in said.split("|"))


def test_a_piece_of_another_table_or_shard_is_refused(target: ObjectStorage) -> None:
    """Its checksum is right, and the manifest that somebody made for it too."""
    made = a_savepoint(target)
    folder, (first, *_, last) = savepoint_folder(target, "one"), made.operators[0].pieces
    with pytest.raises(CorruptionError, match="belongs elsewhere"):
        read_piece(folder, "totals", replace(last, table="state", shard=0), STATE)
    with pytest.raises(CorruptionError, match="different rows than the savepoint declares"):
        read_piece(folder, "totals", replace(first, rows=first.rows + 1), STATE)
    with pytest.raises(CorruptionError, match="not the object that the savepoint names"):
        read_piece(folder, "totals", replace(first, digest="0" * 32), STATE)


def test_what_a_savepoint_does_not_name_goes_at_its_end(target: ObjectStorage, executor: ThreadPoolExecutor) -> None:
    """Tasks that Spark repeats leave pieces: somebody who reads the folder must not count them twice."""
    new, made = begin_savepoint(target, "one"), a_savepoint(target)
    folder = savepoint_folder(target, "one")
    key = f"operators/totals/state/0000-0-{new.id}{'f' * 8}.arrow"
    folder.put(key, b"a piece of a task that was repeated")
    folder.put("notes.txt", b"mine")
    assert verify_savepoint(target, made, executor) == [], "it can be restored whole"
    assert unnamed_keys(folder.list(""), made) == [key]
    folder.delete([KEY])
    new.finish(made)
    assert verify_savepoint(target, made, executor) == []
    assert {info.key for info in folder.list("")} == {KEY, "notes.txt", *made.keys}


def test_a_savepoint_of_which_parts_were_deleted_is_not_finished(target: ObjectStorage) -> None:
    """Somebody took it for an unfinished one."""
    made = a_savepoint(target)
    savepoint_folder(target, "one").delete([KEY, made.operators[0].pieces[2].key])
    with pytest.raises(ConflictError, match=r"another process.*0000-2-"):
        begin_savepoint(target, "one").finish(made)
    assert find_savepoint(target, "one") is None


def test_unfinished_uploads_go_with_a_savepoint(tmp_path: Path) -> None:
    """Those of its parts, even where nothing else is left; never those of a query that has the name."""
    others = [tmp_path / "one/shard-0000/commits/.tmp-1-1", tmp_path / "two/operators/totals/state/.tmp-1-1"]
    mine = [tmp_path / "one/operators/totals/state/.tmp-1-1", tmp_path / "one/sources/0/.tmp-1-2"]
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target)
        for count in (len(list(target.list("one/"))), 0):
            for path in (*mine, *others):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"half of a piece")
            assert delete_savepoint(target, "one") == count
            assert [path.exists() for path in (*mine, *others)] == [False, False, True, True]
        with pytest.raises(NotFoundError):
            delete_savepoint(target, "one")


def test_a_savepoint_is_deleted_where_nobody_may_look_for_uploads(
    target: ObjectStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: object) -> int:
        raise InvalidArgumentError("access denied")

    a_savepoint(target)
    monkeypatch.setattr(target, "abort_unfinished_uploads", denied)
    delete_savepoint(target, "one")
    assert not list(target.list(""))
    assert "unfinished uploads of a savepoint may remain: access denied" in caplog.text


def test_what_a_check_of_the_directory_has_left_is_known(target: ObjectStorage, executor: ThreadPoolExecutor) -> None:
    """It was not allowed to delete its object; who may deletes it with the folder."""
    denied = Fault("fail", "delete", times=None, error=lambda: InvalidArgumentError("access denied"))
    with pytest.raises(InvalidArgumentError, match="access denied"):
        probe_storage(FaultyStorage(target, [denied]), "one")
    assert [(one.name, one.objects) for one in list_savepoints(target, executor)] == [("one", 1)]
    assert delete_savepoint(target, "one") == 1
    assert not list(target.list(""))


def test_a_foreign_file_is_not_deleted(target: ObjectStorage) -> None:
    target.put("mine/savepoint", b"for my holidays")
    with pytest.raises(InvalidArgumentError, match="is not a savepoint"):
        delete_savepoint(target, "mine")
    assert bytes(target.get("mine/savepoint")) == b"for my holidays"


@pytest.mark.parametrize("table", ["v." + "é" * 100, "m." + "状" * 250])
def test_a_long_name_of_a_variable_fits_into_a_key(target: ObjectStorage, table: str) -> None:
    made = a_savepoint(target, tables=(TableSchema.of(table, STATE.key, STATE.value),))
    assert read_savepoint(target, "one") == made
    assert folder_of("totals", table) != folder_of("totals", table[:-1])


Change = Callable[[dict[str, Any]], object]


OPERATOR, SOURCE = ("operators", 0), ("query", "sources", 0)
#: Where in a manifest, and fields that cannot stand there.
WRONG: list[tuple[tuple[str | int, ...], list[dict[str, Any]]]] = [
    ((), [{"name": "../x"}, {"more": 1}, {"created_ms": -1}, {"left_out": "dedupe"}, {"left_out": [1]}]),
    (("query",), [{"batch_id": "7"}, {"query_id": "a/b"}, {"offsets_version": "7"}]),
    (("query",), [{"batch": batch} for batch in ("{}", '{"conf":\n{}}', '{"conf":{"a":1}}')]),
    (SOURCE, [{"name": "../0"}, {"offset": "1\n2"}]),
    ((*SOURCE, "logs", 0), [{"key": "../../etc/passwd"}, {"key": "/etc/passwd"}, {"name": "../3"}]),
    (OPERATOR, [{"shards": 0}, {"shards": 1}, {"has_timeout": 1}, {"is_continuous": None}]),
    (OPERATOR, [{"declared": {"state": ["?", "?"]}}, {"schemas": {"state": ["?", "?"]}}]),
    ((*OPERATOR, "times", 0), [{"shard": 2}, {"earliest_timer_ms": "now"}, {"batch_ms": None}]),
    ((*OPERATOR, "pieces", 0), [{"key": KEY}, {"key": "totals/../../x"}, {"rows": 0}, {"size_bytes": 1 << 40}]),
    ((*OPERATOR, "pieces", 0), [{"plain_bytes": 1 << 50}, {"digest": "no"}]),
    ((*OPERATOR, "pieces", 0), [{"first_hash": hashed} for hashed in ("0" * 15, "f" * 16)]),
]


def put(path: tuple[str | int, ...], fields: dict[str, Any], header: dict[str, Any]) -> None:
    found: Any = header
    for name in path:
        found = found[name]
    found.update(fields)


@pytest.mark.parametrize(
    "change",
    [
        *(partial(put, path, fields) for path, every in WRONG for fields in every),
        lambda h: h.pop("comment"),
        lambda h: h["query"]["sources"][0]["logs"].append(h["query"]["sources"][0]["logs"][0]),
        lambda h: h["operators"].append(h["operators"][0]),
        lambda h: h["operators"][0]["times"].pop(),
        lambda h: h["operators"][0]["times"].append(h["operators"][0]["times"][0]),
        lambda h: h["operators"][0]["pieces"].reverse(),
        lambda h: h["operators"][0]["pieces"].append(h["operators"][0]["pieces"][0] | {"key": "x"}),
        lambda h: h["operators"][0]["declared"].update(other=h["operators"][0]["declared"]["state"]),
        lambda h: h["operators"][0]["schemas"].pop("state"),
    ],
)
def test_a_hostile_manifest_is_refused(target: ObjectStorage, change: Change) -> None:
    """Its checksum is right: nothing it says is used before it is checked, and no key leads outside its folder."""
    header = dict(stored_file.decode(a_savepoint(target).encode(), source="x", kind=Savepoint.KIND).header)
    change(header)
    with pytest.raises(CorruptionError, match="the manifest"):
        read_manifest(stored_file.encode(Savepoint.KIND, header)[0], "one", "the manifest")


def test_pieces_that_are_read_survive_json() -> None:
    """A hash has more bits than a JSON number is sure of."""
    piece = Piece("t/state/0000-0-a.arrow", "state", 0, 1, 10, 10, "0" * 32, 2**64 - 1, 2**64 - 1)
    assert piece.to_json()["first_hash"] == "f" * 16


@pytest.fixture
def timed() -> TimedStorage:
    return TimedStorage()


def stored(timed: TimedStorage, comment: str, maker: str = "") -> Savepoint:
    made = replace(a_savepoint(timed, maker=maker), comment=comment)
    timed.delete([f"one/{KEY_OF_MANIFEST}"])
    return made


@pytest.mark.parametrize(
    ("action", "key", "nth"), [("list", "*", 1), ("put", f"one/{KEY_OF_MANIFEST}", 1), ("list", "*", 2)]
)
def test_a_savepoint_that_is_deleted_meanwhile_is_not_finished(
    timed: TimedStorage, action: Action, key: str, nth: int
) -> None:
    """Before a look at its pieces, before its manifest lands, or before the last look: its maker is told so."""
    storage = FaultyStorage(timed)
    new = begin_savepoint(storage, "one")
    made = stored(timed, "mine")
    storage.faults.append(Fault("delay", action, key, nth, wait=lambda: delete_savepoint(timed, "one")))
    with pytest.raises(ConflictError, match="another process has deleted"):
        new.finish(made)
    storage.assert_all_hit()
    assert (find_savepoint(timed, "one") is None) == (action == "list"), "a manifest that lands later stands alone"


@pytest.mark.parametrize("error", [InvalidArgumentError("access denied"), UnavailableError("the storage is away")])
def test_what_cannot_be_deleted_is_no_failure(
    timed: TimedStorage, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, error: HoldfastError
) -> None:
    """The manifest stands: who is told of a failure would make it again, and hear that the name is taken."""
    never = Fault("fail", "delete", times=None, error=lambda: error)
    new = begin_savepoint(FaultyStorage(timed, [never]), "one")
    made = stored(timed, "mine")
    left = f"operators/totals/state/0000-0-{new.id}{'f' * 8}.arrow"
    timed.put(f"one/{left}", b"a piece")
    new.finish(made)
    found = read_savepoint(timed, "one")
    assert found == made
    assert verify_savepoint(timed, found, executor) == []
    assert unnamed_keys(savepoint_folder(timed, "one").list(""), found) == [left]
    (warning,) = caplog.messages
    assert all(words in warning for words in ("timed://test/one is complete, but", left, str(error)))


@pytest.mark.parametrize(("before", "nth"), [(False, 1), (True, 2)])
def test_one_that_is_finished_while_the_name_is_deleted_goes_too(timed: TimedStorage, before: bool, nth: int) -> None:
    """The deletion has listed its pieces, alone or beside a finished one: no manifest may stand without them."""
    new = begin_savepoint(timed, "one")
    made = stored(timed, "mine")
    if before:
        a_savepoint(timed)
    between = Fault("delay", "delete", nth=nth, wait=lambda: new.finish(made))
    delete_savepoint(FaultyStorage(timed, [between]), "one")
    assert between.hits == 1
    assert find_savepoint(timed, "one") is None


@pytest.mark.parametrize(
    "fault",
    [Fault("lose_reply", "put", f"one/{KEY_OF_MANIFEST}"), Fault("fail", "list", "one/", nth=2)],
    ids=["stored", "listed"],
)
def test_a_manifest_of_which_nobody_knows_is_to_be_looked_for(timed: TimedStorage, fault: Fault) -> None:
    """It stands: who made it again would hear that the name is taken."""
    storage = FaultyStorage(timed, [fault])
    new = begin_savepoint(storage, "one")
    made = stored(timed, "mine")
    with pytest.raises(UnavailableError, match=r"may or may not be complete.*verify.*injected fault"):
        new.finish(made)
    storage.assert_all_hit()
    assert read_savepoint(timed, "one") == made
