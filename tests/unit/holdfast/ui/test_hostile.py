"""The page of directories that are damaged or half deleted: each view shows what it can, or says what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from holdfast.errors import HoldfastError
from holdfast.snapshotter.storage.opening import open_storage
from tests.model.shard_history import ShardHistory
from tests.unit.holdfast.commands.state_dir import put_record
from tests.unit.holdfast.ui.conftest import TOKEN
from tests.unit.holdfast.ui.serving import TOKEN as SERVED_TOKEN
from tests.unit.holdfast.ui.serving import opened

VIEWS = ("", "0/totals/", "0/totals/?measure=lag", "0/totals/shard/3", "0/totals/rows", "0/totals/upkeep")
VERIFY = "0/totals/upkeep?check=verify"

Damage = Callable[[Path], object]


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def change_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with one shard: four versions and two snapshots."""
    root = tmp_path_factory.mktemp("hostile") / "state"
    with open_storage(str(root)) as storage:
        put_record(storage)
        ShardHistory(storage).grow(None, 4, snapshot_every=2)
    return root


def files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())


def require_answers(page: FlaskClient, what: object) -> None:
    """Open all views: each is a page, and where it is an error, one that says so."""
    for view in (*VIEWS, VERIFY):
        answer = page.get(f"/{TOKEN}/{view}")
        assert answer.content_type.startswith("text/html"), (what, view, answer.text)
        assert answer.status_code == 200 or "Cannot show this" in answer.text, (what, view)


@pytest.mark.all
@pytest.mark.slow(8)
@pytest.mark.parametrize("damage", [Path.unlink, cut_off, change_a_byte, empty, make_a_folder])
def test_each_object_may_be_damaged(
    open_page: Callable[..., FlaskClient], whole: Path, tmp_path: Path, damage: Damage
) -> None:
    """Whatever is missing or damaged, the page answers."""
    for place, victim in enumerate(files(whole)):
        root = shutil.copytree(whole, tmp_path / str(place))
        damage(root / victim.relative_to(whole))
        require_answers(open_page(root), (damage, victim.name))


@pytest.mark.slow(1)
def test_what_a_view_names_may_be_deleted_while_it_is_shown(
    open_page: Callable[..., FlaskClient], whole: Path, tmp_path: Path
) -> None:
    """The listing that is shown is older than the directory: links lead to less than it says, and to no failure."""
    root = shutil.copytree(whole, tmp_path / "state")
    page = open_page(root)
    assert page.get(f"/{TOKEN}/").status_code == 200
    for victim in reversed(list(files(root))):
        victim.unlink()
        require_answers(page, victim.name)


def test_a_directory_of_foreign_files(open_page: Callable[..., FlaskClient], tmp_path: Path) -> None:
    """Names that look like ours, and are not, are no state."""
    for name in (
        "totals/shard-0003/commits/17-xyz",
        "totals/shard-00003/commits/1-aa",
        "operator",
        "a/b/operator",
        "-",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\x00" * 100)
    answer = open_page(tmp_path).get(f"/{TOKEN}/")
    assert answer.status_code == 200
    assert "holds no holdfast state" in answer.text
    with pytest.raises(HoldfastError), opened(tmp_path):
        pass


@pytest.mark.parametrize("text", [b"[" * 60_000, b'{"id":' * 10_000, b'{"id": ' + b"9" * 5_000 + b"}", b"\x00", b"[]"])
def test_a_file_that_looks_like_a_querys_makes_no_directory_one(whole: Path, tmp_path: Path, text: bytes) -> None:
    """Whatever stands under the name by which queries are told apart, the page starts, and shows the directory."""
    root = shutil.copytree(whole, tmp_path / "state")
    (root / "metadata").write_bytes(text)
    with opened(root) as page:
        assert "totals" in page.get(f"/{SERVED_TOKEN}/").text
